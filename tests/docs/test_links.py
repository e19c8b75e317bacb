"""Every link between the pages leads to a file that is there, and to a heading that it has."""

from posixpath import dirname, normpath

import pytest

from tests.docs.pages import ROOT, anchors, links


@pytest.mark.parametrize("link", links(), ids=str)
def test_a_link_leads_somewhere(link):
    path, _, anchor = link.target.partition("#")
    path = normpath(f"{dirname(link.page) or '.'}/{path}") if path else link.page
    assert (ROOT / path).exists()
    if anchor:
        assert anchor in anchors(path)
