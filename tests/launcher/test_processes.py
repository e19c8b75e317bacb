"""Children and their lines: nothing lost, nothing torn, nobody left."""

import os
import select
import signal
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yeto_torch.launcher.processes import MAX_LINE_BYTES, Children, Exited, Line, LineSplitter, Signalled

DEADLINE_S = 30.0


@pytest.fixture
def children():
    children = Children()
    yield children
    children.kill()


def python(children, code, name="child", env=None):
    return children.start(name, [sys.executable, "-u", "-c", code], {**os.environ, **(env or {})})


def until_exit(children, child):
    """The child's lines and its exit code."""
    lines = []
    while True:
        match children.next_event(DEADLINE_S):
            case Line(who, text) if who is child:
                lines.append(text)
            case Exited(who, code) if who is child:
                return lines, code
            case None:
                pytest.fail(f"{child.name} did not end; so far: {lines}")


def next_line(children, child):
    event = children.next_event(DEADLINE_S)
    assert isinstance(event, Line), event
    assert event.child is child
    return event.text


def ends(pid):
    """Does the process end, within the deadline?"""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], DEADLINE_S)[0])
    finally:
        os.close(watched)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"))), st.data())
def test_lines_do_not_depend_on_how_the_bytes_arrive(lines, data):
    raw = "".join(line + data.draw(st.sampled_from(["\n", "\r\n"])) for line in lines).encode()
    splitter, out, start = LineSplitter(), [], 0
    while start < len(raw):
        size = data.draw(st.integers(1, max(1, len(raw) // 3)))
        out += splitter.feed(raw[start : start + size], 0.0)
        start += size
    assert out + splitter.close() == lines


def test_a_last_line_without_a_break_is_a_line():
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntwo", 0.0) == ["one"]
    assert splitter.close() == ["two"]
    assert splitter.close() == []


def test_a_progress_bar_becomes_a_line_a_second_and_its_last_state_is_kept():
    splitter = LineSplitter()
    out = []
    for tenth in range(21):
        out += splitter.feed(f"\r{tenth:3d}".encode(), tenth / 10)
    out += splitter.feed(b"\n", 2.1)
    assert out == ["  0", " 10", " 20"]


def test_a_line_without_end_is_passed_on_in_pieces():
    splitter = LineSplitter()
    out = []
    for _ in range(40):
        out += splitter.feed(b"x" * 65536, 0.0)
    out += splitter.close()
    assert sum(map(len, out)) == 40 * 65536
    assert max(map(len, out)) <= MAX_LINE_BYTES + 65536


def test_output_is_complete_and_in_order_before_the_end_is_told(children):
    child = python(children, "for i in range(20000): print(i)\nimport sys; sys.exit(3)")
    lines, code = until_exit(children, child)
    assert code == 3
    assert lines == [str(i) for i in range(20000)]
    assert list(child.tail) == lines[-len(child.tail) :]
    assert children.alive == []


def test_two_children_never_share_a_line(children):
    code = "import sys\nfor i in range(2000):\n  for c in f'{name}{i}\\n': sys.stdout.write(c)"
    expected = {python(children, f"name={name!r}\n" + code, name): name for name in "ab"}
    seen = {child: [] for child in expected}
    while children.alive:
        event = children.next_event(DEADLINE_S)
        assert event is not None
        if isinstance(event, Line):
            seen[event.child].append(event.text)
    for child, name in expected.items():
        assert seen[child] == [f"{name}{i}" for i in range(2000)]


def test_a_signal_death_is_128_and_the_signal(children):
    child = python(children, "import signal; print('up'); signal.pause()")
    assert next_line(children, child) == "up"
    child.signal(signal.SIGKILL)
    assert until_exit(children, child) == ([], 137)
    child.signal(signal.SIGKILL)  # to an ended child: nothing


def test_what_a_child_leaves_behind_is_killed(children):
    child = python(
        children,
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\nprint(p.pid)",
    )
    lines, code = until_exit(children, child)  # the grandchild held the pipe: without its death this would not end
    assert code == 0
    assert ends(int(lines[0]))


def test_a_grandchild_that_escaped_its_group_does_not_hold_us_up(children):
    code = (
        "import subprocess, sys\n"
        "sleeper = [sys.executable, '-c', 'import signal; signal.pause()']\n"
        "print(subprocess.Popen(sleeper, start_new_session=True).pid)"
    )
    lines, exit_code = until_exit(children, python(children, code))
    os.kill(int(lines[0]), signal.SIGKILL)
    assert exit_code == 0


def test_children_do_not_read_our_terminal(children):
    assert until_exit(children, python(children, "import sys; print(repr(sys.stdin.read()))")) == (["''"], 0)


def test_signals_become_events_and_handlers_come_back(children):
    before = signal.getsignal(signal.SIGTERM)
    with children.signals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert children.next_event(DEADLINE_S) == Signalled(signal.SIGTERM)
        assert children.next_event(DEADLINE_S) == Signalled(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_program_that_is_not_there_is_an_os_error(children):
    with pytest.raises(OSError, match="No such file"):
        children.start("nobody", ["/no/such/program"], {})
    assert children.alive == []
