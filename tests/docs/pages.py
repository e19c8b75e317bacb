"""The Markdown of the repository as data: fenced blocks, the commands in them, headings, links, and names in the code.

A block whose info string holds the word ``fragment`` cannot run as it stands. ``--8<-- "path"`` on a page of the site
stands for that file (``docs/hooks/include.py``).
"""

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("docs", "yeto_torch", "syncer", "benchmarks", "experiments", "examples", "tests")
_BLOCK = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} (.+?) *$", re.MULTILINE)
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
_REFERENCE = re.compile(r"`((?:yeto_torch|syncer|tests|conf|docs)/[\w./]*)(?:::(\w+(?:\.\w+)?))?`")
_INCLUDE = re.compile(r'^--8<-- "([^"]+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line of its first fence, the info string's words, the text without indentation."""

    page: str
    line: int
    info: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def whole(self) -> bool:
        return "fragment" not in self.info


@dataclass(frozen=True)
class Link:
    page: str
    target: str

    def __str__(self) -> str:
        return f"{self.page}: {self.target}"


def pages() -> list[str]:
    """Every Markdown file, relative to the root."""
    files = [*ROOT.glob("*.md"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.md"))]
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


def blocks(language: str) -> list[Block]:
    """Every block of a language, of every page."""
    found = []
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            info = tuple(match[2].split())
            if info[:1] == (language,):
                line = text.count("\n", 0, match.start()) + 1
                found.append(Block(page, line, info, textwrap.dedent(match[3])))
    return found


def commands(text: str) -> Iterator[tuple[str, ...]]:
    """The words of each command of a shell block: comments dropped, lines joined that a backslash or a quote joins."""
    rest = ""
    for line in text.replace("\\\n", " ").splitlines():
        rest += line + "\n"
        try:
            words = shlex.split(rest, comments=True)
        except ValueError:  # a quote that a later line closes
            continue
        rest = ""
        if words:
            yield tuple(words)
    assert not rest, f"a quote is not closed: {rest}"


def links() -> list[Link]:
    """Every link and picture that does not lead out of the repository."""
    found = []
    for page in pages():
        prose = re.sub(r"`[^`\n]*`", "``", _BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8")))
        targets = [match[1] for match in _LINK.finditer(prose)]
        found += [Link(page, target) for target in targets if not re.match(r"[a-z]+:", target)]
    return found


def anchors(page: str) -> set[str]:
    """What may stand behind ``#``: the headings of a page, as GitHub names them, and of the files it includes."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = _INCLUDE.sub(lambda found: (ROOT / found[1]).read_text(encoding="utf-8"), text)
    names: list[str] = []
    for match in _HEADING.finditer(_BLOCK.sub("", text)):
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1])).lower().replace(" ", "-")
        earlier = sum(name == other for other in names)
        names += [name] if not earlier else [f"{name}-{earlier}"]
    return set(names)


@dataclass(frozen=True)
class Reference:
    """What a page names: a file or folder of ours, or as ``path::name`` what one defines, a name or Class.name."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}::{self.name}" if self.name else self.path

    @property
    def is_there(self) -> bool:
        return (ROOT / self.path).exists() and (not self.name or self.name in _defined(self.path))


def named(text: str) -> set[Reference]:
    """What ``text`` names."""
    return {Reference(path, name) for path, name in _REFERENCE.findall(text)}


@cache
def _defined(path: str) -> set[str]:
    """Functions, classes and values of a module, and those of its classes."""

    def names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for part in body:
            match part:
                case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                    yield prefix + name
                case ast.ClassDef(name, body=inner):
                    yield prefix + name
                    yield from names(inner, f"{prefix}{name}.")
                case ast.Assign(targets=targets):
                    yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))
                case ast.AnnAssign(target=ast.Name(name)):
                    yield prefix + name

    return set(names(ast.parse((ROOT / path).read_text(encoding="utf-8")).body))
