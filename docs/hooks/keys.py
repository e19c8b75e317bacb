"""The tables of configuration keys, made from the dataclasses that declare them whenever the site is built.

On a page, ``<!-- keys: syncer -->`` and ``<!-- keys: syncer.benchmark -->`` stand for every key of that command, and
``<!-- presets -->`` for what each preset sets. A default here is what composing gives where nothing is said: the
dataclass, then ``conf/``, then the default preset. No page holds a default of its own.
"""

import re
from dataclasses import fields, is_dataclass
from html import escape

from omegaconf import OmegaConf

from syncer.benchmark.config import BENCHMARK, DECIDED_HERE
from syncer.config.compose import PRESETS, compose
from syncer.config.keys import SYNCER
from syncer.config.rules import shown

MARK = re.compile(r"^<!-- (keys|presets)(?:: ([\w.]+))? -->$", re.MULTILINE)
REQUIRED = "???"


def on_page_markdown(markdown, **_):
    return MARK.sub(lambda mark: presets() if mark[1] == "presets" else tables(mark[2]), markdown)


def tables(command):
    """One table a group of keys; of the benchmark its own keys, those with another default, and what it refuses."""
    if command == "syncer":
        return _tables(SYNCER, rows(SYNCER))
    if command == "syncer.benchmark":
        known = rows(SYNCER)
        own = [row for row in rows(BENCHMARK) if row not in known and row[0] not in DECIDED_HERE]
        refused = ", ".join(f"`{name}`" for name in DECIDED_HERE)
        return f"{_tables(BENCHMARK, own)}\n\nRefused, because the benchmark decides them: {refused}."
    raise ValueError(f"no command {command} has keys")


def rows(keys):
    """(key, types, default, legal range, meaning) of every key of ``keys``, in the order of declaration."""
    default, types = _composed(keys), _types(keys.schema())
    return [(name, types[name], default[name], rule.legal, rule.meaning) for name, rule in keys.rules.items()]


def presets():
    """The keys that presets set, one column a preset."""
    of = {name: _composed(SYNCER, f"preset={name}") for name in PRESETS}
    some = [key for key, value in SYNCER.defaults.items() if any(composed[key] != value for composed in of.values())]
    lines = [_line("key", *(f"`{name}`" for name in PRESETS)), _line(*["---"] * (1 + len(PRESETS)))]
    lines += [_line(f"`{key}`", *(_code(composed[key]) for composed in of.values())) for key in some]
    return "\n".join(lines)


def _tables(keys, some):
    parts = []
    for group in ("", *keys.sections):
        lines = [_row(*row) for row in some if _group(row[0]) == group]
        if lines:
            head = [_line("key", "type", "default", "legal", "meaning"), _line(*["---"] * 5)]
            parts += [f"### {group or 'without a group'}", "", *head, *lines, ""]
    return "\n".join(parts).rstrip()


def _row(name, types, default, legal, meaning):
    told = "**required**" if default == REQUIRED else _code(default)
    words = [escape(text, quote=False) for text in (legal, meaning)]
    return _line(f"`{name}`", " or ".join(f"`{kind}`" for kind in types), told, *words)


def _group(name):
    return name.rpartition(".")[0]


def _types(schema, prefix=""):
    """Dotted key -> the types Hydra holds a value to."""
    found = {}
    for entry in fields(schema):
        value = getattr(schema, entry.name)
        if is_dataclass(value):
            found |= _types(value, f"{entry.name}.")
        else:
            found[prefix + entry.name] = str(entry.type).replace("None", "null").split(" | ")
    return found


def _composed(keys, *words):
    """Dotted key -> value where nothing but ``words`` is said; interpolations as they are written."""
    content = OmegaConf.to_container(compose(list(words), keys=keys), resolve=False)
    return {name: _at(content, name) for name in keys.rules}


def _at(content, name):
    for part in name.split("."):
        content = content[part]
    return content


def _code(value):
    return f"`{shown(value)}`"


def _line(*cells):
    return "| " + " | ".join(cells) + " |"
