"""The walks through the house name files, functions and tests: all of them are there."""

import re

import pytest

from tests.docs.pages import ROOT

TOPS = ("yeto_torch/", "syncer/", "tests/", "conf/", "docs/")
TEXT = "".join((ROOT / page).read_text(encoding="utf-8") for page in ("CONTRIBUTING.md", "docs/contributing.md"))
NAMED = sorted({name for name in re.findall(r"`([\w./]+(?:::\w+)?)`", TEXT) if name.startswith(TOPS)})


@pytest.mark.parametrize("named", NAMED)
def test_what_is_named_is_there(named):
    path, _, name = named.partition("::")
    assert (ROOT / path).exists()
    if name:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {name}\b|^{name}\b.* = ", source, re.MULTILINE)
