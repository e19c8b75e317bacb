"""The walls of the house, as functions over sources: which module may know what, read from the text alone.

``Sources`` maps the path of a module to its text. Every rule returns complaints, one sentence each, that name the
place, the rule and the cure; none means that the wall holds. ``tests/test_architecture.py`` applies them to the tree,
and to small trees in which one wall is broken. Nothing is imported here to be looked at.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

Sources = dict[str, str]

PURE_LIBRARY = {
    *("__future__", "abc", "bisect", "collections", "contextlib", "dataclasses", "enum", "fractions", "functools"),
    *("hashlib", "heapq", "hmac", "itertools", "json", "math", "operator", "re", "statistics", "string", "struct"),
    *("textwrap", "types", "typing"),
}
"""What neither computes tensors nor reads a clock nor touches the world. Pure modules import nothing else."""

MEMORY = {"ctypes", "mmap", "weakref"}
"""What buffers are made of: memory, but nothing outside the process."""

PROJECT = {"yeto_torch", "syncer"}

WORLDLY = {"open", "print", "input", "exec", "eval", "__import__"}
"""Builtins that reach out of a pure module without an import."""

FILES = {"pathlib", "os", "io", "shutil", "tempfile", "glob", "fileinput"}
FILE_METHODS = {
    "read_text",
    "write_text",
    "read_bytes",
    "write_bytes",
    "is_file",
    "is_dir",
    "exists",
    "unlink",
    "mkdir",
}


# ------------------------------------------------------------------------------------------------------------- imports


@cache
def imported(source: str, *, for_types: bool = True) -> frozenset[str]:
    """Dotted names a module imports anywhere in it; ``from a import b`` counts as ``a.b``, which may be a module.

    Args:
        for_types: also what stands under ``if TYPE_CHECKING``, which never runs.
    """
    names: set[str] = set()
    for node in _nodes(ast.parse(source), for_types):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom: write the whole name"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def _nodes(tree: ast.AST, for_types: bool) -> Iterator[ast.AST]:
    yield tree
    children: Iterable[ast.AST] = ast.iter_child_nodes(tree)
    if not for_types and isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
        children = tree.orelse
    for child in children:
        yield from _nodes(child, for_types)


def within(name: str, packages: Iterable[str]) -> bool:
    """Is it one of these, or something inside one?"""
    return any(name == package or name.startswith(package + ".") for package in packages)


def root(name: str) -> str:
    return name.partition(".")[0]


def module_of(path: str) -> str:
    """``a/b.py`` is ``a.b``; ``a/__init__.py`` is ``a``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def links(sources: Sources) -> dict[str, set[str]]:
    """Paths, and the paths of the modules each imports, lazily or not."""
    paths = {module_of(path): path for path in sources}

    def home(name: str) -> str | None:
        if name.endswith("._kernels"):  # compiled: it imports nothing
            return None
        while name and name not in paths:
            name = name.rpartition(".")[0]
        return paths.get(name)

    found = {path: {home(name) for name in imported(source)} for path, source in sources.items()}
    return {path: {there for there in theirs if there not in (None, path)} for path, theirs in found.items()}


def circles(sources: Sources) -> list[str]:
    """At most one: the first that is found."""
    try:
        TopologicalSorter(links(sources)).prepare()
    except CycleError as error:
        way = " -> ".join(reversed(error.args[1]))
        why = "a module is read after what it imports, and here there is no first one; lazy imports count"
        cure = "Move what they share into a module below them, or hand it in as an argument"
        return [f"a circle of imports, {way}: {why}. {cure}."]
    return []


# -------------------------------------------------------------------------------------------------------------- purity


def pure_by(path: str, source: str) -> str:
    """Why this module has to be pure; empty if it need not."""
    if path.startswith("syncer/core/"):
        return "whatever lies in core/ is pure"
    return "its docstring says `* pure`" if "* pure" in _docstring(source) else ""


@cache
def _docstring(source: str) -> str:
    return ast.get_docstring(ast.parse(source)) or ""


def impurities(sources: Sources) -> list[str]:
    """What pure modules import or call that is not."""
    complaints = []
    pure = {path for path, source in sources.items() if pure_by(path, source)}
    theirs = links(sources)
    for path in sorted(pure):
        source = sources[path]
        why = f"{pure_by(path, source)} (values in, values out, time as an argument)"
        allowed = PURE_LIBRARY | (MEMORY if path == "yeto_torch/wire/buffers.py" else set())
        foreign = {root(name) for name in imported(source, for_types=False)}
        foreign |= {root(name) for name in imported(source)} - sys.stdlib_module_names  # torch, even as a type alone
        complaints += [
            f"{path} imports {name}: {why}. Take what it gives as an argument, or move the code to a shell such as "
            "syncer/actor.py or yeto_torch/learner/link.py."
            for name in sorted(foreign - allowed - PROJECT)
        ]
        complaints += [
            f"{path} imports {other}, which is not marked: {why}, and so is all it knows. Write `* pure` into that "
            "docstring if it is true, or take what it gives as an argument."
            for other in sorted(theirs[path] - pure)
        ]
        complaints += [
            f"{path} calls {name}(): {why}. Return what is to be said or done, and let the caller do it."
            for name in sorted(_called(source) & WORLDLY)
        ]
    return complaints


@cache
def _called(source: str) -> set[str]:
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {call.id for call in calls if isinstance(call, ast.Name)}


def lost_marks(sources: Sources, paths: Iterable[str]) -> list[str]:
    """Which of these modules are not pure by their own word any more."""
    return [
        f"{path} bears no mark: it decides, so it stays pure. Write `* pure` into its docstring; if it was moved, "
        "mend the list in tests/test_architecture.py."
        for path in paths
        if not pure_by(path, sources.get(path, ""))
    ]


# --------------------------------------------------------------------------------------------------------------- rooms


@dataclass(frozen=True)
class Wall:
    """What a room must not know of the project.

    Attributes:
        room: where the wall stands: paths begin with it.
        unknown: modules that are not imported there, with all they contain.
        but: what of them is.
        because: the reason.
        cure: what to do instead.
    """

    room: str
    unknown: tuple[str, ...]
    because: str
    cure: str
    but: tuple[str, ...] = ()


WALLS = (
    Wall(
        "yeto_torch/wire/",
        ("yeto_torch", "syncer"),
        "wire/ is what two peers share and knows neither of them",
        "Hand it in as an argument.",
        but=("yeto_torch.wire",),
    ),
    Wall(
        "syncer/",
        ("yeto_torch",),
        "the syncer shares the wire with a learner, and its benchmark the launcher's child processes; nothing else",
        "Move what both need to yeto_torch/wire/.",
        but=("yeto_torch.wire", "yeto_torch.launcher.processes", "yeto_torch.__version__"),
    ),
    Wall(
        "yeto_torch/",
        ("syncer",),
        "a learner starts a syncer as a process and never imports it; offline/ alone takes its mathematics",
        "Move what both need to yeto_torch/wire/.",
        but=("syncer.merge", "syncer.merge_words"),
    ),
    *(
        Wall(
            f"yeto_torch/{room}",
            ("syncer.merge",),
            "offline/ alone computes merges in the learner's process",
            "Ask yeto_torch/offline/ for it.",
        )
        for room in (
            "learner/",
            "ranks/",
            "launcher/",
            "demos/",
            "doctor/",
            "integrations/",
            "optimizer.py",
            "wrapper.py",
        )
    ),
    Wall(
        "syncer/merge/",
        ("syncer",),
        "merge/ is mathematics on tensors: a learner without a syncer takes it too",
        "Take numbers and tensors as arguments, not policies or machines.",
        but=("syncer.merge",),
    ),
    Wall(
        "syncer/core/",
        ("syncer",),
        "core/ decides from events and frozen policies, and whoever carries out its effects knows it, not the reverse",
        "Say it as an event or an effect (core/events.py, core/effects.py).",
        but=("syncer.core", "syncer.config.policy"),
    ),
    Wall(
        "yeto_torch/learner/",
        ("yeto_torch",),
        "one learner knows itself, its arguments and the wire; groups, commands and the optimizer are built on it",
        "Hand it in as an argument, or let the caller do it.",
        but=(
            "yeto_torch.learner",
            "yeto_torch.wire",
            "yeto_torch.config",
            "yeto_torch.fragments",
            "yeto_torch.security",
        ),
    ),
)


def breaches(sources: Sources, walls: Iterable[Wall] = WALLS) -> list[str]:
    """Imports that go through a wall."""
    return [
        f"{path} imports {name}: {wall.because}. {wall.cure}"
        for wall in walls
        for path, source in sorted(sources.items())
        if path.startswith(wall.room)
        for name in sorted(imported(source))
        if within(name, wall.unknown) and not within(name, wall.but)
    ]


def foreign_to_the_wire(sources: Sources) -> list[str]:
    """Third-party imports in ``wire/``; ``codec`` may have torch and numpy."""
    return [
        f"{path} imports {name}: wire/ is read without anything installed; codec/ alone turns bytes into tensors. Keep "
        "payloads as bytes here, and convert them in codec/."
        for path, source in sorted(sources.items())
        if path.startswith("yeto_torch/wire/")
        for name in sorted({root(name) for name in imported(source)} - sys.stdlib_module_names - PROJECT)
        if not ("/codec/" in path and name in {"torch", "numpy"})
    ]


OPENED_BY_BOTH = {
    "yeto_torch/wire/model_layout.py",  # Layout.save and Layout.load
    "yeto_torch/wire/transport/tls.py",  # certificates, which ssl takes by their paths
}


def files_in_the_wire(sources: Sources) -> list[str]:
    """Files opened in ``wire/``, but for the ones that both peers have to open."""
    complaints = []
    for path, source in sorted(sources.items()):
        if not path.startswith("yeto_torch/wire/") or path in OPENED_BY_BOTH:
            continue
        calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        found = {f"imports {root(name)}" for name in imported(source, for_types=False) if root(name) in FILES}
        found |= {f"calls {call.id}()" for call in calls if isinstance(call, ast.Name) and call.id == "open"}
        found |= {
            f"calls {call.attr}()" for call in calls if isinstance(call, ast.Attribute) and call.attr in FILE_METHODS
        }
        complaints += [
            f"{path} {what}: wire/ opens no file, it turns bytes into values and back. Read or write the file in the "
            "room that knows its path, and hand over its content."
            for what in sorted(found)
        ]
    return complaints


@dataclass(frozen=True)
class Reserve:
    """Modules that are used in a few named places, so that all their uses can be known.

    Attributes:
        places: paths, or rooms that end with a slash.
    """

    modules: frozenset[str]
    places: Collection[str]
    because: str
    cure: str


def trespasses(sources: Sources, reserve: Reserve) -> list[str]:
    """Uses of a reserve's modules outside of its places."""
    return [
        f"{path} imports {name}: {reserve.because}. {reserve.cure}"
        for path, source in sorted(sources.items())
        if not any(path == place or (place.endswith("/") and path.startswith(place)) for place in reserve.places)
        for name in sorted({root(name) for name in imported(source)} & reserve.modules)
    ]


# ----------------------------------------------------------------------------------------------------------- the trees


def tree_of(readme: str) -> list[str]:
    """Paths of depth 0 and 1 in the README's tree: the block of code that opens with ``yeto_torch/``."""
    block = re.search(r"^```\w*\n(yeto_torch/.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert block, (
        "the README has no block of code whose first line is `yeto_torch/`: the tree of the house belongs there"
    )
    paths, top = [], ""
    for line in block[1].splitlines():
        indent, name = len(line) - len(line.lstrip()), (line.split() or [""])[0]
        if name and indent == 0:
            top = name
            paths.append(name)
        elif name and indent == 2:
            paths.append(top + name)
    return paths


def on_disk(sources: Sources) -> set[str]:
    """What the README's tree has to show of the two packages: their files and, with a slash, their rooms."""
    shown = set()
    for path in sources:
        package, name, *rest = PurePosixPath(path).parts
        if name != "__init__.py":
            shown.add(f"{package}/{name}{'/' if rest else ''}")
    return shown


def missing_in_the_tree(readme: str, sources: Sources) -> list[str]:
    """Where the README's tree and the disk differ."""
    shown = Counter(path for path in tree_of(readme) if path.startswith(("yeto_torch/", "syncer/")))
    del shown["yeto_torch/"], shown["syncer/"]
    disk = on_disk(sources)
    return [
        *(
            f"{path} is not in the README's tree: whoever looks for something starts there. Add a line for it."
            for path in sorted(disk - set(shown))
        ),
        *(
            f"{path} is in the README's tree and not on the disk: take its line out."
            for path in sorted(set(shown) - disk)
        ),
        *(
            f"{path} is in the README's tree {count} times: one line is enough."
            for path, count in sorted(shown.items())
            if count > 1
        ),
    ]


def rooms_without_tests(sources: Sources, folders: Collection[str], whole: Collection[str]) -> list[str]:
    """Where ``tests/`` does not mirror the rooms.

    Args:
        folders: the names of the folders in ``tests/``.
        whole: those that test several rooms together.
    """
    rooms = {PurePosixPath(path).parts[1] for path in sources if len(PurePosixPath(path).parts) > 2}
    known = rooms | PROJECT | set(whole)
    return [
        *(
            f"tests/{room}/ is not there: every room is tested in a folder of its name. Make it."
            for room in sorted(rooms - set(folders))
        ),
        *(
            f"tests/{folder}/ bears no room's name: tests lie where what they test lies. Move them, or name the folder "
            "among those that test several rooms together."
            for folder in sorted(set(folders) - known)
        ),
    ]
