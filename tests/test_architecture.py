"""The import rules of the house, read from the source text alone.

1. ``yeto_torch.wire`` imports the standard library only; ``codec`` alone may import torch or numpy.
2. ``syncer`` imports ``yeto_torch.wire`` and ``yeto_torch.wire.transport`` and nothing else of ``yeto_torch``;
   ``yeto_torch`` never imports ``syncer``; ``yeto_torch/__init__.py`` imports nothing before it is asked.
3. Machines import nothing that computes tensors, reads a clock or touches the world.
4. ``syncer.merge`` and ``syncer.core`` do not know each other.
5. Clocks, secrets and Hydra are each used in a few named places.
"""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for package in ("yeto_torch", "syncer")
    for path in sorted((ROOT / package).rglob("*.py"))
}

PROTOCOL = [name for name in SOURCES if name.startswith("yeto_torch/wire/") and "/transport/" not in name]
MACHINES = [
    "yeto_torch/learner/session.py",
    "yeto_torch/wire/frames.py",
    "yeto_torch/wire/chunks.py",
    "yeto_torch/wire/buffers.py",
    "yeto_torch/wire/transport/outbox.py",
    "syncer/checkpoint/format.py",
    "syncer/checkpoint/resume.py",
    "syncer/svd/ledger.py",
    "syncer/benchmark/verdict.py",
    "syncer/benchmark/report.py",
    *(name for name in SOURCES if name.startswith("syncer/core/")),
]
WORLD = {"torch", "numpy", "socket", "threading", "queue", "subprocess", "time", "random", "os", "pathlib", "logging"}
WORLD |= {"hydra", "omegaconf", "asyncio", "selectors", "multiprocessing", "secrets", "datetime"}

# The commands around the two programs: they start processes, name folders after the time and wait for children.
COMMANDS = {
    "yeto_torch/launcher/folder.py",
    "yeto_torch/launcher/fleet.py",
    "yeto_torch/launcher/processes.py",
    "syncer/progress.py",
}
COMMANDS |= {name for name in SOURCES if name.startswith(("yeto_torch/demos/", "syncer/benchmark/"))}
CLOCKS = {
    "yeto_torch/wire/transport/sockets.py",
    "yeto_torch/wire/transport/tls.py",
    "yeto_torch/learner/link.py",
    "yeto_torch/offline/local.py",  # how long a merge took
    "syncer/actor.py",
    "syncer/server.py",  # deadlines of handshakes
    "syncer/merger.py",  # how long a merge took
    "syncer/svd/pool.py",
    "syncer/tape.py",  # the time of a line
    *COMMANDS,
}
SECRETS = {
    "yeto_torch/learner/link.py",
    "yeto_torch/doctor/meter.py",
    "yeto_torch/launcher/folder.py",
    "syncer/benchmark/__main__.py",
}
HYDRA = {"syncer/config/compose.py", "syncer/config/keys.py", "yeto_torch/config.py"}


def imported(source: str) -> set[str]:
    """Dotted names a module imports anywhere in it; ``from a import b`` counts as ``a.b``, which may be a module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def roots(source: str) -> set[str]:
    return {name.partition(".")[0] for name in imported(source)}


def test_the_reader_of_imports_sees_every_form():
    source = (
        "import os.path\nfrom a.b import c as d\ndef f():\n    import torch.nn as nn\nif x:\n    from time import t"
    )
    assert imported(source) == {"os.path", "a.b.c", "torch.nn", "time.t"}
    assert roots(source) == {"os", "a", "torch", "time"}


@pytest.mark.parametrize("name", PROTOCOL)
def test_the_treaty_imports_the_standard_library_only(name):
    allowed = sys.stdlib_module_names | ({"torch", "numpy"} if "/codec/" in name else set())
    foreign = {item for item in imported(SOURCES[name]) if not within(item, *allowed, "yeto_torch.wire")}
    assert not foreign


@pytest.mark.parametrize("name", [name for name in SOURCES if name.startswith("yeto_torch/wire/transport/")])
def test_the_shared_transport_knows_the_treaty_only(name):
    assert not {
        item
        for item in imported(SOURCES[name])
        if within(item, "yeto_torch", "syncer") and not within(item, "yeto_torch.wire", "yeto_torch.wire.transport")
    }


@pytest.mark.parametrize("name", [name for name in SOURCES if name.startswith("syncer/")])
def test_the_syncer_imports_of_the_learner_only_what_both_share(name):
    learner = {item for item in imported(SOURCES[name]) if within(item, "yeto_torch")}
    assert all(
        within(item, "yeto_torch.wire", "yeto_torch.wire.transport", "yeto_torch.__version__") for item in learner
    )


@pytest.mark.parametrize("name", [name for name in SOURCES if name.startswith("yeto_torch/")])
def test_the_learner_never_imports_the_syncer(name):
    """But for the mode without a syncer, which is the same mathematics in process."""
    syncer = {item for item in imported(SOURCES[name]) if within(item, "syncer")}
    assert all(name == "yeto_torch/offline/local.py" and within(item, "syncer.merge") for item in syncer)


@pytest.mark.parametrize("name", MACHINES)
def test_machines_touch_nothing(name):
    assert name in SOURCES, "a machine was moved: mend the list"
    assert not roots(SOURCES[name]) & WORLD


def test_core_and_merge_do_not_know_each_other():
    core = [name for name in SOURCES if name.startswith("syncer/core/")]
    merge = [name for name in SOURCES if name.startswith("syncer/merge/")]
    assert core
    assert merge
    for name in (*core, *merge):
        others = ("syncer.core",) if name in merge else ("syncer.merge",)
        assert not {item for item in imported(SOURCES[name]) if within(item, *others, "syncer.actor", "syncer.state")}


@pytest.mark.parametrize(
    ("modules", "places"),
    [({"time", "datetime"}, CLOCKS), ({"secrets"}, SECRETS), ({"hydra", "omegaconf"}, HYDRA)],
    ids=["clocks", "secrets", "hydra"],
)
def test_each_of_these_is_used_in_a_few_places(modules, places):
    users = {name for name, source in SOURCES.items() if roots(source) & modules}
    assert users <= places


def test_the_package_imports_nothing_before_it_is_asked():
    tree = ast.parse(SOURCES["yeto_torch/__init__.py"])
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert roots(ast.unparse(node)) <= sys.stdlib_module_names
    code = (
        "import sys, yeto_torch, yeto_torch.wire.messages, yeto_torch.wire.chunks, syncer\n"
        "heavy = {'torch', 'numpy', 'hydra', 'omegaconf', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'loaded at import: {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there():
    import yeto_torch

    for name in yeto_torch.__all__:
        assert getattr(yeto_torch, name) is not None
        assert name in dir(yeto_torch)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = yeto_torch.no_such_name


def test_the_wheel_carries_every_package_of_the_tree():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"])
    on_disk = {Path(name).parent.as_posix().replace("/", ".") for name in SOURCES}
    assert listed == on_disk | {"syncer.conf"}
