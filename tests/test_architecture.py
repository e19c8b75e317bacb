"""The walls of the house, held against the tree; the rules themselves: ``tests/support/walls.py``.

First every rule against the sources, then every rule against a small tree in which one wall is broken.
"""

import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support import walls
from tests.support.walls import Reserve

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for package in ("yeto_torch", "syncer")
    for path in sorted((ROOT / package).rglob("*.py"))
}

PURE = [  # what decides outside of syncer/core/: their marks cannot go unnoticed
    *(f"yeto_torch/learner/{name}.py" for name in ("session", "cut", "effects")),
    *(f"yeto_torch/wire/{name}.py" for name in ("constants", "errors", "profile", "layout", "limits")),
    *(f"yeto_torch/wire/{name}.py" for name in ("messages", "frames", "chunks", "buffers", "marker")),
    "yeto_torch/wire/transport/outbox.py",
    "syncer/svd/ledger.py",
    "syncer/checkpoint/format.py",
    "syncer/checkpoint/resume.py",
    "syncer/benchmark/verdict.py",
]

RESERVES = {
    "clocks": Reserve(
        frozenset({"time", "datetime"}),
        (
            "yeto_torch/wire/transport/sockets.py",
            "yeto_torch/wire/transport/tls.py",
            "yeto_torch/learner/link.py",
            "yeto_torch/offline/local.py",  # how long a merge took
            "syncer/actor.py",
            "syncer/server.py",  # deadlines of handshakes
            "syncer/merger.py",  # how long a merge took
            "syncer/svd/pool.py",
            "syncer/tape.py",  # the time of a line
            # The commands around the two programs: they name folders after the time and wait for children.
            "yeto_torch/launcher/folder.py",
            "yeto_torch/launcher/fleet.py",
            "yeto_torch/launcher/processes.py",
            "yeto_torch/demos/",
            "syncer/progress.py",
            "syncer/benchmark/",
        ),
        "a clock is read in a few named places, so that all else can be tested without waiting",
        "Take `now` as an argument; if this is a new shell around a machine, name it in tests/test_architecture.py.",
    ),
    "secrets": Reserve(
        frozenset({"secrets"}),
        (
            "yeto_torch/learner/link.py",
            "yeto_torch/doctor/meter.py",
            "yeto_torch/launcher/folder.py",
            "syncer/benchmark/__main__.py",
        ),
        "identities of processes and runs are drawn in a few named places, so that all else can be repeated",
        "Take the number as an argument.",
    ),
    "hydra": Reserve(
        frozenset({"hydra", "omegaconf"}),
        ("syncer/config/compose.py", "syncer/config/keys.py", "yeto_torch/config.py"),
        "configuration is read once, at the door; behind it there are frozen policies",
        "Take the policy, or the value, as an argument.",
    ),
}

WHOLE = {"benchmarks", "contract", "crash", "docs", "e2e", "examples", "experiments", "fuzz", "gpu", "notebooks", "sim"}
WHOLE |= {"support", "transcripts", "vectors"}


def held(complaints: list[str]) -> None:
    if complaints:
        pytest.fail("\n".join(["", *complaints]), pytrace=False)


def test_what_decides_is_pure():
    held(walls.impurities(SOURCES))


def test_what_has_to_be_pure_says_so():
    held(walls.lost_marks(SOURCES, PURE))


def test_imports_go_round_in_no_circle():
    held(walls.circles(SOURCES))


def test_no_room_looks_where_it_must_not():
    held(walls.breaches(SOURCES))


def test_the_wire_needs_the_standard_library_only():
    held(walls.foreign_to_the_wire(SOURCES))


def test_the_wire_opens_no_file():
    held(walls.files_in_the_wire(SOURCES))


@pytest.mark.parametrize("name", RESERVES)
def test_each_of_these_is_used_in_a_few_places(name):
    held(walls.trespasses(SOURCES, RESERVES[name]))


def test_the_tree_in_the_readme_equals_the_disk():
    held(walls.missing_in_the_tree((ROOT / "README.md").read_text(encoding="utf-8"), SOURCES))


def test_every_room_has_its_tests():
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    in_examples = {"integrations"}  # what a Trainer does with them takes a whole run
    held(walls.rooms_without_tests(SOURCES, folders | in_examples, WHOLE))


def test_the_package_imports_nothing_before_it_is_asked():
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
    assert listed == on_disk | {"syncer.conf"}, "pyproject.toml, [tool.setuptools] packages: name every package there"


# ------------------------------------------------------------------------------------ every rule notices what it is for


def test_the_reader_of_imports_sees_every_form():
    source = (
        "import os.path\nfrom a.b import c as d\ndef f():\n    import torch.nn as nn\nif x:\n    from time import t\n"
        "if TYPE_CHECKING:\n    from pathlib import Path\nelse:\n    import q"
    )
    assert walls.imported(source) == {"os.path", "a.b.c", "torch.nn", "time.t", "pathlib.Path", "q"}
    assert walls.imported(source, for_types=False) == {"os.path", "a.b.c", "torch.nn", "time.t", "q"}


def planted(path: str, line: str) -> dict[str, str]:
    """A module with one more line, and a shell beside it."""
    return {path: f"{SOURCES[path]}\n{line}\n", "syncer/merger.py": ""}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("import logging, torch", "torch"),
        ("def f():\n    import time", "time"),
        ("from os import path", "os"),
        ("def f():\n    return open('x')", "open()"),
        ("if TYPE_CHECKING:\n    import torch", "torch"),
        ("def f():\n    from syncer.merger import Merger", "syncer/merger.py"),
    ],
    ids=["torch", "a clock", "files", "open", "torch as a type", "a shell"],
)
def test_an_impurity_is_named_in_each_pure_module(line, named):
    for path in (path for path, source in SOURCES.items() if walls.pure_by(path, source)):
        complaints = walls.impurities(planted(path, line))
        assert any(path in complaint and f" {named}" in complaint for complaint in complaints), path


def test_a_complaint_names_the_place_the_rule_and_the_cure():
    (complaint,) = walls.impurities({"syncer/core/x.py": "import time"})
    assert complaint == (
        "syncer/core/x.py imports time: whatever lies in core/ is pure (values in, values out, time as an argument). "
        "Take what it gives as an argument, or move the code to a shell such as syncer/actor.py or "
        "yeto_torch/learner/link.py."
    )


@pytest.mark.parametrize("path", PURE)
def test_a_lost_mark_is_named(path):
    (complaint,) = walls.lost_marks({**SOURCES, path: SOURCES[path].replace("* pure", "")}, PURE)
    assert complaint.startswith(f"{path} bears no mark")
    assert walls.lost_marks({name: text for name, text in SOURCES.items() if name != path}, PURE) == [complaint]


def test_a_circle_is_printed_whole():
    lazy = {
        "syncer/a.py": "from syncer.b import f",
        "syncer/b.py": "def f():\n    import syncer.c",
        "syncer/c.py": "from syncer import a",
        "syncer/d.py": "import syncer.a",
    }
    (complaint,) = walls.circles(lazy)
    way = complaint.partition(", ")[2].partition(":")[0].split(" -> ")
    assert way[0] == way[-1]
    assert set(pairwise(way)) == {
        ("syncer/a.py", "syncer/b.py"),
        ("syncer/b.py", "syncer/c.py"),
        ("syncer/c.py", "syncer/a.py"),
    }
    assert not walls.circles({**lazy, "syncer/c.py": "import os"})


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("yeto_torch/wire/frames.py", "from yeto_torch.config import LearnerConfig"),
        ("yeto_torch/wire/transport/group.py", "def f():\n    import syncer.actor"),
        ("syncer/actor.py", "from yeto_torch.learner.session import Session"),
        ("syncer/report/page.py", "import yeto_torch.launcher.folder"),
        ("yeto_torch/optimizer.py", "from syncer.merge import average"),
        ("yeto_torch/launcher/fleet.py", "from syncer.config.policy import SyncerPolicy"),
        ("yeto_torch/offline/local.py", "from syncer.config.policy import SyncerPolicy"),
        ("syncer/merge/merge.py", "from syncer.config.policy import OuterPolicy"),
        ("syncer/merge/merge.py", "import syncer.core.rounds"),
        ("syncer/core/rounds.py", "import syncer.merge.average"),
        ("syncer/core/rounds.py", "from syncer.state import GlobalState"),
        ("yeto_torch/learner/link.py", "def f():\n    from yeto_torch.ranks import leader"),
        ("yeto_torch/learner/link.py", "from yeto_torch.launcher.folder import RunFolder"),
        ("yeto_torch/learner/link.py", "from yeto_torch.demos import task"),
        ("yeto_torch/learner/link.py", "import yeto_torch.doctor.probe"),
    ],
)
def test_a_look_through_a_wall_is_named(path, line):
    imported = walls.imported(line)
    assert any(
        f"{path} imports {name}" in complaint for complaint in walls.breaches(planted(path, line)) for name in imported
    )


@pytest.mark.parametrize("line", ["import numpy", "def f():\n    import torch", "import msgpack"])
def test_a_foreign_package_in_the_wire_is_named(line):
    (complaint,) = walls.foreign_to_the_wire(planted("yeto_torch/wire/frames.py", line))
    assert "yeto_torch/wire/frames.py" in complaint


@pytest.mark.parametrize("line", ["open('x')", "def f(path):\n    path.read_text()", "import pathlib"])
def test_a_file_opened_in_the_wire_is_named(line):
    (complaint,) = walls.files_in_the_wire(planted("yeto_torch/wire/profile.py", line))
    assert "yeto_torch/wire/profile.py" in complaint


@pytest.mark.parametrize(
    ("name", "line"), [("clocks", "import time"), ("secrets", "import secrets"), ("hydra", "import hydra")]
)
def test_a_trespass_is_named(name, line):
    (complaint,) = walls.trespasses(planted("syncer/reception.py", line), RESERVES[name])
    assert complaint.startswith(f"syncer/reception.py {line.replace('import', 'imports')}: ")


def test_what_the_readme_leaves_out_or_invents_is_named():
    readme = "# x\n```\nyeto_torch/      what a user imports\n  wire/          both\n    frames.py    deeper\n```\n"
    sources = {
        "yeto_torch/__init__.py": "",
        "yeto_torch/wire/frames.py": "",
        "yeto_torch/run.py": "",
        "syncer/run.py": "",
    }
    assert [each.split(":")[0] for each in walls.missing_in_the_tree(readme, sources)] == [
        "syncer/run.py is not in the README's tree",
        "yeto_torch/run.py is not in the README's tree",
    ]
    invented = readme.replace("  wire/", "  wire/  both\n  wire/  again\n  wir/  none\n  wire/")
    del sources["yeto_torch/run.py"], sources["syncer/run.py"]
    assert [each.split(":")[0] for each in walls.missing_in_the_tree(invented, sources)] == [
        "yeto_torch/wir/ is in the README's tree and not on the disk",
        "yeto_torch/wire/ is in the README's tree 3 times",
    ]


def test_a_room_without_tests_and_tests_without_a_room_are_named():
    complaints = walls.rooms_without_tests({"syncer/core/rounds.py": ""}, {"syncer", "cores", "e2e"}, {"e2e"})
    assert [each.split(" ")[0] for each in complaints] == ["tests/core/", "tests/cores/"]
