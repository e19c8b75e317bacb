"""``Source:`` lines and docs/protocol.md: every section and number that one cites stands there, and leads to files."""

import re
from dataclasses import dataclass

import pytest

from tests.docs.pages import ROOT, named

PAGE = "docs/protocol.md"
ROOMS = ("yeto_torch", "syncer", "tests")
_SOURCE = re.compile(r"^Source: (.*?)(?=\n\n|\n?\"\"\")", re.DOTALL | re.MULTILINE)
_CITED_RULINGS = re.compile(r"§(\d+(?:\.\d+)?)(?: to §(\d+\.\d+))?")


@dataclass(frozen=True)
class Page:
    """The page as data.

    Attributes:
        sections: name under "Protocol v4" -> text.
        rulings: number of a chapter under "Rulings" -> text.
        numbers: what may follow ``rulings §``.
    """

    sections: dict[str, str]
    rulings: dict[str, str]
    numbers: frozenset[str]


def read(text):
    """The page's parts; ``### Name`` begins one."""
    law, _, rulings = text.partition("\n## Rulings\n")
    law = law.partition("\n## Protocol v4\n")[2]
    chapters = {name.partition(" ")[0]: body for name, body in _parts(rulings)}
    items = re.findall(r"^\* \*\*(\d+\.\d+)\*\* ", rulings, re.MULTILINE)
    return Page(dict(_parts(law)), chapters, frozenset(items) | frozenset(chapters))


def _parts(text):
    for part in text.split("\n### ")[1:]:
        name, _, body = part.partition("\n")
        yield name.strip(), body


def sources(text):
    """The ``Source:`` paragraphs of a module."""
    return _SOURCE.findall(text)


def complaints(source, page):
    """What a ``Source:`` paragraph cites that does not stand on the page, one sentence each."""
    names = re.findall(r"v4 §([^,;.()\n]+)", source)
    found = [
        f"v4 §{name.strip()} is no heading under Protocol v4: name one of {', '.join(page.sections)}, and do not "
        f"break it over two lines"
        for name in names
        if name.strip() not in page.sections
    ]
    numbers = [n for first, last in _CITED_RULINGS.findall(source) for n in _between(first, last or first)]
    return found + [
        f"rulings §{number} does not stand under Rulings: add it, or cite the number that is meant"
        for number in numbers
        if number not in page.numbers
    ]


def _between(first, last):
    """The numbers from N.A to N.B; a chapter by itself."""
    chapter, _, start = first.partition(".")
    return [f"{chapter}.{n}" for n in range(int(start), int(last.partition(".")[2]) + 1)] if start else [first]


TEXT = (ROOT / PAGE).read_text(encoding="utf-8")
HERE = read(TEXT)
CITED = [
    pytest.param(path.relative_to(ROOT).as_posix(), source, id=path.relative_to(ROOT).as_posix())
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
    for source in sources(path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("path", "source"), CITED)
def test_a_source_leads_to_the_page(path, source):
    found = complaints(source, HERE)
    assert not found, f"{path}: " + f"; {PAGE}: ".join(found)


@pytest.mark.parametrize("name", [*HERE.sections, *HERE.rulings])
def test_a_section_names_files_that_are_there(name):
    text = HERE.sections.get(name) or HERE.rulings[name]
    assert any(reference.is_there for reference in named(text)), f"{PAGE}, {name}: name a file that implements it"


@pytest.mark.parametrize("name", HERE.sections)
def test_a_section_is_cited_by_a_file_that_it_names(name):
    """Or grep would not find from the page's word what the page promises."""
    paths = {reference.path for reference in named(HERE.sections[name])}
    citing = {param.values[0] for param in CITED if f"v4 §{name}" in param.values[1]}
    assert paths & citing, f"{PAGE}, {name}: none of {sorted(paths)} has v4 §{name} in its Source line"


def test_what_is_not_there_is_told():
    law, rulings = "### Deltas and staleness\nx\n", "### 1 Frames\n* **1.1** a\n* **1.2** b\n"
    page = read(f"\n## Protocol v4\n\n{law}\n## Rulings\n\n{rulings}")
    assert not complaints("v4 §Deltas and staleness (once), PEP 8; rulings §1, §1.1 to §1.2.", page)
    assert len(complaints("v4 §Deltas and\nstaleness; rulings §1.1 to §1.4, §2.", page)) == 4
