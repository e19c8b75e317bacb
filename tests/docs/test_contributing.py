"""The pages that lead through the code name files, functions and tests: all of them are there."""

import pytest

from tests.docs.pages import ROOT, named

PAGES = ("CONTRIBUTING.md", "docs/contributing.md", "docs/how-it-works.md", "docs/protocol.md")
NAMED = sorted({reference for page in PAGES for reference in named((ROOT / page).read_text(encoding="utf-8"))}, key=str)


@pytest.mark.parametrize("reference", NAMED, ids=str)
def test_what_is_named_is_there(reference):
    assert reference.is_there, f"{reference} is not there: the page that names it must follow the code"
