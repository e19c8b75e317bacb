"""Every Python block of the pages runs as it stands; one that is called a fragment is Python at least."""

import ast
import socket

import pytest

from tests.docs.pages import blocks

BLOCKS = blocks("python")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder, and no network."""

    def refuse(*_):
        raise AssertionError("an example needs a network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.whole], ids=str)
def test_a_block_runs_as_it_stands(block):
    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", [block for block in BLOCKS if not block.whole], ids=str)
def test_a_fragment_is_python(block):
    ast.parse(block.text)
