"""The front page is short, and the site builds without a warning."""

import importlib.util
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

README_BYTES = 12_288


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= README_BYTES, "README.md is a front page: the rest goes to docs/"


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the docs extra")
def test_the_site_builds_strictly(tmp_path):
    """A page that is not in the menu, a link without a target and an argument without a type are warnings, too."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "index.html").exists()
