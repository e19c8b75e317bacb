"""docs/tape.md lists every key of a merge line, and nothing else as one."""

import re

from syncer.core.record import LeftOutEntry, MeasuredLine, ResponderEntry
from tests.docs.pages import ROOT


def test_every_key_has_its_place_on_the_page():
    text = (ROOT / "docs/tape.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    listed = [key for cell in cells for key in re.findall(r"`(\w+)`", cell)]
    keys = [*MeasuredLine.__annotations__, *ResponderEntry.__annotations__, *LeftOutEntry.__annotations__]
    assert sorted(listed) == sorted(set(keys))
