"""``python -m syncer.report`` as a user types it, and the page in a real browser."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from importlib.util import find_spec

import pytest

import syncer.report.__main__ as report
from tests.support.invented_tapes import START, answer, event, merge, start, written
from tests.support.processes import ROOT, child_environment

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURES = ["pace", "latency", "participation", "contributions", "staleness", "norms", "drive", "trouble", "events"]
WAIT_S = 120.0  # for what takes seconds on a free machine


def driven(step):
    return {"drive": 1 + step / 100, "agreement": 0.9 - step / 200, "lag_cosine": None if step < 3 else 0.5 - step / 60}


def a_run(rounds=50, learners=3, reason="another run"):
    """A run in which everything happens that a picture can show."""
    yield start(total_steps=rounds)
    for learner in range(learners):
        yield event("join", 0.1, id=learner, generation=100 + learner)
    yield event("reject", 0.5, what="hello", id=0, reason=reason)
    for step in range(1, rounds + 1):
        late = [learners - 1] if step % 5 == 0 else []
        answers = [answer(i, 1.0 + i, staleness=2 * (step % 7 == 0)) for i in range(learners) if i not in late]
        rejected = {"out_of_round": 1} if step % 10 == 0 else {}
        yield merge(
            step,
            answers,
            late,
            attempt=1 + (step == 20),
            rejected=rejected,
            gnorm=5 / step,
            ms=100.0 + step,
            **driven(step),
        )
    yield event("end", rounds + 1.0, step=rounds, code=0)


def command(*argv):
    return subprocess.run(
        [sys.executable, "-m", "syncer.report", *map(str, argv)],
        cwd=ROOT,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def test_the_command_writes_one_page(tmp_path):
    tape, page = written(tmp_path / "tape.jsonl", a_run()), tmp_path / "report.html"
    done = command(tape, "-o", page)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{page}: the report of {tape}\n"
    text = page.read_text()
    assert [name for name in PICTURES if f'aria-labelledby="{name}-title"' in text] == PICTURES
    assert "50 rounds in 51" in text
    assert "50\N{NARROW NO-BREAK SPACE}% of the merges were driven beyond the limit." in text
    assert "5 answers did not count; one round was launched again before its quorum had answered." in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "tape.jsonl"]
    before = page.read_bytes()
    assert report.main([str(tape), "-o", str(page)]) == 0
    assert page.read_bytes() == before  # the same tape, the same page


def broken(tape):
    lines = tape.read_text().splitlines()
    tape.write_text("\n".join([*lines[:10], '{"step": 7, "fragm', *lines[10:]]) + "\n")


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda tape: tape.unlink(), "No such file or directory"),
        (lambda tape: (tape.unlink(), tape.mkdir()), "Is a directory"),
        (lambda tape: tape.write_text(""), r"no merged round, so there is nothing to show \(no line\)"),
        (lambda tape: written(tape, [start(), event("join", id=0)]), r"no merged round.*\(1 start, 1 join\)"),
        (broken, "not a tape: line 11 is not a JSON object"),
        (lambda tape: tape.write_bytes(b"\x89PNG\r\n\x1a\n" * 99), "not a tape: line 1 is not a JSON object"),
        (lambda tape: written(tape, [start(), merge(1, [answer(0)], ms="soon")]), "line 2: ms is 'soon', must be"),
        (lambda tape: written(tape, [start(), merge(1, [])]), "names no learner"),
        (lambda tape: written(tape, [event("\x1b[2J\x07hi")]), r"\(1 \ufffd\[2J\ufffdhi\)"),
    ],
    ids=[
        "missing",
        "directory",
        "empty",
        "events only",
        "a broken line",
        "another kind of file",
        "a wrong value",
        "nobody",
        "text that steers a terminal",
    ],
)
def test_a_tape_that_shows_nothing_is_one_sentence_and_exit_code_1(tmp_path, capsys, spoil, sentence):
    tape, page = written(tmp_path / "tape", a_run()), tmp_path / "page.html"
    spoil(tape)
    assert report.main([str(tape), "-o", str(page)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(rf"tape {re.escape(str(tape))}: .*{sentence}.*\n", said.err), said.err
    assert not page.exists()


def test_a_line_nested_deeper_than_anybody_reads_is_a_page_or_one_sentence(tmp_path, capsys):
    for depth in (500, 900, 990, 50_000):
        tape, page = written(tmp_path / "tape", a_run(rounds=1)), tmp_path / "page.html"
        with tape.open("a") as file:
            file.write('{"time": 1, "event": "deep", "x": ' + "[" * depth + "]" * depth + "}\n")
        code = report.main([str(tape), "-o", str(page)])
        said = capsys.readouterr()
        assert code == 0 or re.fullmatch(r"tape .*: not a tape: .*\n", said.err), said.err


def test_a_torn_last_line_is_left_out(tmp_path):
    tape, page = written(tmp_path / "tape", a_run(rounds=3)), tmp_path / "page.html"
    with tape.open("a") as file:
        file.write('{"step": 4, "fra')
    assert report.main([str(tape), "-o", str(page)]) == 0
    assert page.exists()


def test_only_a_regular_file_is_replaced(tmp_path, capsys):
    tape, pipe = written(tmp_path / "tape", a_run(rounds=1)), tmp_path / "pipe"
    os.mkfifo(pipe)
    assert report.main([str(tape), "-o", str(pipe)]) == 1
    assert capsys.readouterr().err == f"report {pipe}: not a regular file, name another\n"
    assert pipe.is_fifo()


@pytest.mark.parametrize("argv", [[], ["a", "b"], ["a", "--plot"], ["TAPE", "-o", "TAPE"]], ids=str)
def test_wrong_arguments_are_exit_code_2_and_touch_nothing(tmp_path, capsys, argv):
    tape = written(tmp_path / "tape", a_run(rounds=1))
    before = tape.read_bytes()
    with pytest.raises(SystemExit) as caught:
        report.main([str(tape) if word == "TAPE" else word for word in argv])
    assert caught.value.code == 2
    assert "usage: python -m syncer.report" in capsys.readouterr().err
    assert tape.read_bytes() == before


def test_a_place_that_cannot_be_written_leaves_what_was_there(tmp_path, capsys):
    tape = written(tmp_path / "tape", a_run(rounds=1))
    target = tmp_path / "folder"
    target.mkdir()
    assert report.main([str(tape), "-o", str(target)]) == 1
    assert f"report {target}: cannot be written" in capsys.readouterr().err
    assert report.main([str(tape), "-o", str(tmp_path / "no" / "page.html")]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "tape"]


def test_without_its_libraries_the_command_to_get_them_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda name: None if name == "jinja2" else find_spec(name))
    tape = written(tmp_path / "tape", a_run(rounds=1))
    assert report.main([str(tape), "-o", str(tmp_path / "page")]) == 1
    assert capsys.readouterr().err == "the report needs jinja2: pip install 'yeto-torch[report]'\n"


@pytest.mark.parametrize(
    "lines",
    [
        [merge(1, [answer(0)])],
        [merge(1, [answer(0)], drive=None, gain=None, agreement=None)],
        [merge(step, [answer(0)], drive=(-10.0) ** step, lag_cosine=-1.0, momentum=0.0) for step in range(1, 90)],
        [merge(1, [answer(0, 0.0)], ms=0.0, gnorm=0.0, sync_ms=None, quorum_ms=None)],
        [merge(1, [], missed=[0, 1])],
        [merge(step, [answer(step % 70)], fragments=70, ms=10.0**step) for step in range(1, 90)],
        [merge(10**12, [answer(2**32 - 1)], gnorm=1e100, ms=1e100, time=2.5e11), event("end", -START)],
        [merge(step, [answer(0)], time=START - step) for step in range(1, 30)],  # a clock that runs backwards
        [start(), event("\ud800 \0 \x1b[31m", why="\udfff"), merge(1, [answer(0)], rejected={"\ud800": 1})],
        [start(), *[event(f"strange {n}", n, **{"<b>": "$x_{1"}) for n in range(900)], merge(1, [answer(0)])],
    ],
    ids=[
        "one round",
        "no drive",
        "wildly driven",
        "zeros",
        "nobody",
        "many",
        "the largest numbers",
        "backwards",
        "no text",
        "strange events",
    ],
)
def test_extreme_tapes_have_a_page_too(tmp_path, lines, recwarn):
    page = tmp_path / "page.html"
    assert report.main([str(written(tmp_path / "tape", lines)), "-o", str(page)]) == 0
    assert len(page.read_bytes()) < 1_000_000
    assert [str(warning.message) for warning in recwarn] == []


def test_a_hundred_thousand_rounds_are_a_small_page_in_seconds(tmp_path):
    """The budget is seconds of this process: others may have the machine."""
    tape, page = tmp_path / "tape", tmp_path / "page.html"
    line = json.dumps(merge(777777, [answer(0), answer(1)], missed=[2], time=1_700_888_888)) + "\n"
    with tape.open("w") as file:
        for step in range(1, 100_001):
            file.write(line.replace("777777", str(step)).replace("1700888888", str(1_700_000_000 + step)))
    started = time.process_time()
    assert report.main([str(tape), "-o", str(page)]) == 0
    assert time.process_time() - started < 25
    assert len(page.read_bytes()) < 3_000_000
    assert "100\N{NARROW NO-BREAK SPACE}000 rounds" in page.read_text()


# ------------------------------------------------------------------ in a browser


class Listener:
    """Counts who connects."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self.visits = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.visits += 1
            sock.close()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(WAIT_S)


@pytest.fixture
def listener():
    listener = Listener()
    yield listener
    listener.close()


def browse(page, folder, *what):
    """What a headless Chromium prints on stdout."""
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
    options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    options += [f"--user-data-dir={folder / 'browser'}", "--window-size=1240,3800", "--virtual-time-budget=3000"]
    done = subprocess.run(
        [CHROMIUM, *options, *what, page.as_uri()], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    return done.stdout


class Elements(HTMLParser):
    """Every element's name and attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_a_browser_draws_every_picture_and_asks_nobody_for_anything(tmp_path, listener):
    bait = f'<img src="http://{listener.address}/x"><script src="http://{listener.address}/y"></script>'
    tape, page = written(tmp_path / "tape", a_run(reason=bait)), tmp_path / "page.html"
    assert report.main([str(tape), "-o", str(page)]) == 0
    dom = browse(page, tmp_path, "--dump-dom")
    elements = Elements(dom).found
    svgs = [attributes for tag, attributes in elements if tag == "svg"]
    assert [svg["aria-labelledby"] for svg in svgs] == [f"{name}-title" for name in PICTURES]
    assert sum(tag == "path" for tag, _ in elements) > 100
    assert "learner 2" in dom
    assert not {tag for tag, _ in elements} & {"img", "script", "iframe", "object", "embed", "base", "form", "link"}
    addresses = [a[key] for _, a in elements for key in ("src", "href", "xlink:href", "action") if a.get(key)]
    assert all(address.startswith("#") for address in addresses)
    assert "&lt;img src=" in dom  # the bait is shown as the text it is
    identifiers = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    assert listener.visits == 0

    page.write_text(f"<!doctype html><p>{bait}")  # the listener would have noticed
    browse(page, tmp_path, "--dump-dom")
    assert listener.visits > 0


def test_what_the_browser_paints_has_the_colours_of_the_pictures(tmp_path):
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    from syncer.report.style import BLUE, LEARNERS, ORANGE, TEAL

    tape, page, shot = written(tmp_path / "tape", a_run()), tmp_path / "page.html", tmp_path / "shot.png"
    assert report.main([str(tape), "-o", str(page)]) == 0
    browse(page, tmp_path, f"--screenshot={shot}")
    pixels = imread(shot)[:, :, :3]
    assert pixels.shape[1] == 1240
    for colour in (BLUE, ORANGE, TEAL, LEARNERS[2]):
        near = (abs(pixels - to_rgb(colour)) < 0.02).all(axis=2).sum()
        assert near > 1000, colour
