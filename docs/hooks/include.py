"""What a page of the site takes from elsewhere in the repository, so that nothing is written twice.

A line ``--8<-- "path"`` stands for that file, path from the root. Links are written as they work in the repository.
Here those to a file that is a page lead to the page, and those to any other file lose their link and keep their words.
A file that is not there ends the build.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parent.parent.parent
INCLUDE = re.compile(r'^--8<-- "([^"]+)"$', re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
FRAGMENT = re.compile(r"^(\s*```\w+) fragment$", re.MULTILINE)  # a word for the tests, not for the reader


def on_page_markdown(markdown, page, **_):
    source = f"docs/{page.file.src_uri}"
    whole = INCLUDE.sub(lambda found: _file(found[1], source), relinked(markdown, source, source))
    return FRAGMENT.sub(r"\1", whole)


def _file(path, page):
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    return relinked(text, path, page) if path.endswith(".md") else text


def relinked(text, source, page):
    """``text`` of the file ``source``, its links as ``page`` needs them."""

    def link(found):
        words, target, anchor = found[1], found[2], found[3] or ""
        path = normpath(PurePosixPath(source).parent / target)
        path = pages().get(path, path)
        if path.startswith("docs/"):
            return f"[{words}]({relpath(path, PurePosixPath(page).parent)}{anchor})"  # mkdocs looks whether it is there
        if not (ROOT / path).exists():
            raise PluginError(f"{source}: a link to {target}, which is not there")
        return words

    return LINK.sub(link, text)


def pages():
    """File of the repository -> the page that is nothing but that file."""
    found = {}
    for page in (ROOT / "docs").glob("*.md"):
        match = INCLUDE.fullmatch(page.read_text(encoding="utf-8").strip())
        if match:
            found[match[1]] = f"docs/{page.name}"
    return found
