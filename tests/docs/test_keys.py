"""The tables of configuration keys on the site: whole, and made from the code and the presets, not kept by hand."""

from __future__ import annotations  # types are read as they are written, as in the modules that declare keys

from dataclasses import dataclass
from html import unescape
from itertools import pairwise

import pytest
import yaml

from docs.hooks import keys as hook
from syncer.benchmark.config import BENCHMARK, DECIDED_HERE
from syncer.config import rules
from syncer.config.compose import CONF, PRESETS
from syncer.config.keys import SYNCER, Keys, SyncerConfig, key

HEADINGS = ("## Presets\n", "## python -m syncer\n", "## python -m syncer.benchmark\n")


@pytest.fixture(scope="module")
def parts(root):
    """The three parts of the page as it is on the site: presets, the syncer's keys, the benchmark's."""
    text = hook.on_page_markdown((root / "docs/syncer-keys.md").read_text())
    starts = [*(text.index(heading) for heading in HEADINGS), len(text)]
    return [text[start:end] for start, end in pairwise(starts)]


def rows(text, name):
    """The cells behind the key ``name``, of every row that is its."""
    lines = [unescape(line).strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [cells[1:] for cells in lines if cells[0] == f"`{name}`"]


@pytest.mark.parametrize("name", SYNCER.rules)
def test_every_key_of_the_syncer_has_its_row(parts, name):
    rule = SYNCER.rules[name]
    assert [row[2:] for row in rows(parts[1], name)] == [[rule.legal, rule.meaning]]


@pytest.mark.parametrize("name", BENCHMARK.rules)
def test_every_key_of_the_benchmark_is_told(parts, name):
    tables, _, refused = parts[2].partition("Refused")
    told = len(rows(tables, name)), refused.count(f"`{name}`")
    own = name not in SYNCER.rules or name == "listen.port"
    assert told == ((0, 1) if name in DECIDED_HERE else (1, 0) if own else (0, 0))


def test_what_has_no_default_and_what_the_default_preset_sets(parts):
    assert [rows(parts[1], name)[0][1] for name in ("learners", "total_steps")] == ["**required**"] * 2
    assert rows(parts[1], "outer.momentum")[0][1] == "`0.5`"
    assert rows(parts[2], "listen.port")[0][1] == "`0`"


def test_a_changed_declaration_changes_the_page_and_nothing_else(parts, monkeypatch):
    @dataclass
    class Changed(SyncerConfig):
        total_steps: int = key(77, rules.whole(1, 99), "a new meaning")

    monkeypatch.setattr(hook, "SYNCER", Keys(Changed, "config"))
    changed = set(hook.tables("syncer").splitlines()) - set(parts[1].splitlines())
    assert changed == {"| `total_steps` | `int` | `77` | an integer from 1 to 99 | a new meaning |"}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_s_column_holds_what_its_file_sets_and_else_the_default(parts, preset):
    file = yaml.safe_load((CONF / "preset" / f"{preset}.yaml").read_text())
    sets = {f"{group}.{name}": value for group, values in file.items() for name, value in values.items()}
    for name, default in SYNCER.defaults.items():
        for row in rows(parts[0], name):
            assert row[PRESETS.index(preset)] == f"`{rules.shown(sets.pop(name, default))}`"
    assert all(SYNCER.defaults[name] == value for name, value in sets.items()), "a key without a row is not changed"


def test_an_unknown_command_ends_the_build():
    with pytest.raises(ValueError, match="no command"):
        hook.on_page_markdown("<!-- keys: yeto_torch -->")
