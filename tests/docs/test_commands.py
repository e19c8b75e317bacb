"""Every command that the pages show is understood: targets of make exist, and our programs' own parsers take the words.

Nothing is run, and no file is asked for. Other programs, and scripts of the reader's, are taken as they are.
"""

import argparse
import importlib
import re
import tomllib

import pytest

from syncer.benchmark.config import BENCHMARK
from syncer.config import arguments
from syncer.config.keys import SYNCER
from tests.docs.pages import ROOT, blocks, commands

KEYED = {"syncer": SYNCER, "syncer.benchmark": BENCHMARK}
ARGPARSED = ("yeto_torch.run", "yeto_torch.demo", "yeto_torch.doctor", "syncer.report", "experiments", "benchmarks")
KEY_VALUES = {  # function, and what it calls once its words are understood
    "syncer.plan": ("command", "plan"),
    "syncer.export": ("export", "read_checkpoint"),
    "syncer.migrate": ("migrate", "read_checkpoint"),
}
COMMANDS = [
    pytest.param(list(words), id=f"{block} {' '.join(words[:3])}")
    for block in blocks("sh")
    if block.whole
    for words in commands(block.text)
]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
SOURCES = [file.read_text(encoding="utf-8") for file in (ROOT / "yeto_torch").rglob("*.py")]
VARIABLES = {name for source in SOURCES for name in re.findall(r"\bYETO_\w+", source)}


class UnderstoodError(Exception):
    """The words were understood; what follows would be the work itself."""


def understood(*_):
    raise UnderstoodError


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_of_the_pages_is_understood(words, monkeypatch):
    check(words, monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        "make tset",
        "YETO_SYNCR=a:1 python train.py",
        "python examples/plane.py",
        "python -m yeto_torch.run --learners 2 total_stepz=400 -- train.py",
        "python -m yeto_torch.run --learner 2 total_steps=400 -- train.py",
        "python -m yeto_torch.doctor --parameters many",
        "python -m syncer learners=2 total_steps=0",
        "python -m syncer.benchmark learners=2 budget_steps=720 learner.tusk=text",
        "python -m syncer.plan model=100M learners=4 step=0.5s link=100mbits",
        "python -m syncer.no_such_command",
        "pip install 'yeto-torch[reports]'",
    ],
)
def test_a_wrong_one_is_not(line, monkeypatch):
    (words,) = commands(line)
    with pytest.raises((AssertionError, ValueError, KeyError, SystemExit, pytest.fail.Exception)):
        check(list(words), monkeypatch)


def check(words, monkeypatch):
    """Raises for a command that its own program would refuse."""
    while given := re.match(r"(YETO_\w+)=", words[0]):
        assert given[1] in VARIABLES, f"nothing reads {given[1]}"
        words = words[1:]
    assert all((ROOT / word).is_file() for word in words if word.startswith("examples/"))
    match words:
        case ["make", *rest]:
            assert {word for word in rest if "=" not in word} <= TARGETS
        case ["python", "-m", module, *rest] if module in KEYED:
            _check_keys(KEYED[module], rest)
        case ["python", "-m", module, *rest]:
            _check_command(module, rest, monkeypatch)
        case ["python", "-c", source]:
            compile(source, "-c", "exec")
        case ["pip", "install", *rest]:
            named = ",".join(re.findall(r"\[(.*?)\]", " ".join(rest)))
            assert set(named.split(",")) - {""} <= set(EXTRAS)


def _check_keys(keys, words):
    """Every word is a key whose value is legal by itself; whether its files are good is not looked at."""
    ours = words[: words.index("--")] if "--" in words else words
    config = arguments.configured([word for word in ours if word != "--baseline"], "", "", keys)
    if config is not None:  # else it was only to be shown
        keys.parsed(config)


def _check_command(module, words, monkeypatch):
    if module in ARGPARSED:
        found = _parsed(_code(module), words, monkeypatch)
        if module == "yeto_torch.run":  # the rest is for the syncer
            _check_keys(SYNCER, [f"learners={found.learners}", *found.overrides])
        return
    function, work = KEY_VALUES[module]  # a KeyError: a command that this test has to learn about
    code = _code(module)
    monkeypatch.setattr(code, work, understood)
    with pytest.raises(UnderstoodError):
        getattr(code, function)(words)


def _code(module):
    """What ``python -m module`` runs."""
    package = (ROOT / module.replace(".", "/") / "__main__.py").is_file()
    return importlib.import_module(f"{module}.__main__" if package else module)


def _parsed(code, words, monkeypatch):
    """What the program's own parser, one of argparse, makes of ``words``."""
    found = []

    def stopping(parse):
        def parse_and_stop(self, argv):
            found.append(parse(self, argv))
            raise UnderstoodError

        return parse_and_stop

    with monkeypatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, name, stopping(getattr(argparse.ArgumentParser, name)))
        with pytest.raises(UnderstoodError):
            code.main(words)
    return found[0]
