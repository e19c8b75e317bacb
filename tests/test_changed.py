"""What ``make check`` and the commit hook promise: the right tests, and the same commands as ``make lint``."""

import re

import pytest
import yaml

from tests.changed import guard_of, selected


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("syncer/merge/rda.py", "tests/merge"),
        ("yeto_torch/wire/transport/tls.py", "tests/wire/transport"),
        ("yeto_torch/wire/codec/q4.py", "tests/wire"),
        ("syncer/server.py", "tests/syncer"),
        ("yeto_torch/optimizer.py", "tests/yeto_torch"),
        ("tests/svd/test_pool.py", "tests/svd/test_pool.py"),
        ("tests/svd/test_that_was_deleted.py", "tests/svd"),
        ("tests/svd/world.py", "tests/svd"),
        ("docs/scaling.md", "tests/docs"),
        ("README.md", "tests/docs"),
        ("tests/conftest.py", None),
        ("tests/vectors/wire.json", None),
        ("pyproject.toml", None),
    ],
)
def test_a_changed_file_has_the_tests_of_its_room(path, tests):
    assert guard_of(path) == tests


def test_every_room_has_tests(root):
    """A new room is not left out by being named otherwise: its folder, or its package's, holds tests."""
    rooms = {path.parent.relative_to(root) for top in ("yeto_torch", "syncer") for path in (root / top).rglob("*.py")}
    assert not [room for room in rooms if guard_of(f"{room.as_posix()}/some.py") is None]


def test_changed_tests_come_first_and_nothing_twice():
    changed = ["syncer/merge/rda.py", "syncer/svd/pool.py", "tests/svd/test_pool.py", "tests/wire/test_frames.py"]
    assert selected(changed) == ["tests/wire/test_frames.py", "tests/merge", "tests/svd"]


def test_the_commit_hook_runs_what_make_lint_runs(root):
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (root / "Makefile").read_text(), re.MULTILINE)
    commands = [line.removeprefix("\t@").replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    hooks = yaml.safe_load((root / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"] for repo in hooks for hook in repo["hooks"]] == commands
    assert {repo["repo"] for repo in hooks} == {"local"}, "a hook must not need a network"
