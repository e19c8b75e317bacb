"""What one configuration key may hold: small builders of rules, and the one form of a configuration error.

Decides: the legal range of a kind of value, in code and in the words people read. Must not know which keys there are
(``keys.py``), whether paths are usable (``files.py``), Hydra.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import SupportsFloat, get_args

from yeto_torch.wire.constants import U64_MAX

_SHOWN_CHARS = 120
_DEVICE = r"auto|cpu|cuda(:[0-9]{1,4})?"


@dataclass(frozen=True, slots=True)
class Rule:
    """``parse`` gives the policy's value or raises ValueError, TypeError or OverflowError; ``legal`` says the range."""

    legal: str
    parse: Callable[[object], object]
    meaning: str = ""


def wrong(key: str, value: object, legal: str) -> ValueError:
    """A configuration error: one line with the key, the value and the legal range."""
    return ValueError(f"{key}={shown(value)}: must be {legal}")


def shown(value: object) -> str:
    """A value as people type it, on one line and not too long."""
    text = {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def whole(low: int, high: int) -> Rule:
    """An integer, both ends included."""

    def parse(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError
        return value

    return Rule(f"an integer from {low} to {high}", parse)


def real(low: float, high: float, *, above: bool = False) -> Rule:
    """A finite number, both ends included, or ``above`` the lower one."""

    def parse(value: object) -> float:
        number = _finite(value)
        if not low <= number <= high or (above and number == low):
            raise ValueError
        return number

    return Rule(f"a number above {low:g}, at most {high:g}" if above else f"a number from {low:g} to {high:g}", parse)


def word(choice: object) -> Rule:
    """One of a Literal's words. YAML reads a bare ``off`` or ``true`` as a boolean; it is the word it was typed as."""

    words = get_args(choice)

    def parse(value: object) -> str:
        if isinstance(value, bool):
            value = "true" if value else "off" if "off" in words else "false"
        if value not in words:
            raise ValueError
        return str(value)

    return Rule("one of " + ", ".join(words), parse)


def flag() -> Rule:
    """True or false."""

    def parse(value: object) -> bool:
        if not isinstance(value, bool):
            raise TypeError
        return value

    return Rule("true or false", parse)


def host() -> Rule:
    """A host name or address; whether it exists is for the listener to find out."""
    return _pattern("a host name or address", r"[^\s\0]+", str)


def contract() -> Rule:
    """A session contract: 32 bytes, given as hex."""
    return _pattern("64 hex digits", r"[0-9a-fA-F]{64}", bytes.fromhex)


def path(use: str) -> Rule:
    """A file's path; ``~`` is the home directory, because shells do not expand it behind a ``key=``."""

    def convert(text: str) -> Path:
        try:
            return Path(text).expanduser()
        except RuntimeError as error:
            raise ValueError("no home directory") from error

    return _pattern(f"a path {use}", r"[^\0]+", convert)


def device() -> Rule:
    """A torch device, not yet looked for."""
    return _pattern("one of auto, cpu, cuda, cuda:N", _DEVICE, str)


def devices() -> Rule:
    """A list of at least one device."""
    one = device()

    def parse(value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or not value:
            raise ValueError
        return tuple(str(one.parse(item)) for item in value)

    return Rule("a list of at least one of auto, cpu, cuda, cuda:N", parse)


def learning_rate() -> Rule:
    """The outer learning rate as (first step, value) pairs: a constant is one pair, a schedule several."""

    def parse(value: object) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, list):
            return ((1, _rate(value)),)
        pairs = tuple((step, _rate(rate)) for step, rate in value)
        steps = [step for step, _ in pairs]
        if not all(type(step) is int and step <= U64_MAX for step in steps):
            raise TypeError
        if steps[:1] != [1] or any(later <= earlier for earlier, later in pairwise(steps)):
            raise ValueError
        return pairs

    return Rule(
        "a number above 0 within f32, or a schedule [[1, number], [step, number], ...] of ascending steps", parse
    )


def momentum() -> Rule:
    """Below 1 as the f32 the outer step computes with: 1 - 1e-12 is not."""

    def parse(value: object) -> float:
        number = _finite(value)
        if number < 0.0 or _f32(number) >= 1.0:
            raise ValueError
        return number

    return Rule("a number from 0 to below 1 (as f32)", parse)


def _pattern(legal: str, pattern: str, convert: Callable[[str], object]) -> Rule:
    def parse(value: object) -> object:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise ValueError
        return convert(value)

    return Rule(legal, parse)


def _finite(value: object) -> float:
    """``value`` as a float; a string may be a number, because an interpolated environment variable is one."""
    if isinstance(value, bool) or not isinstance(value, (str, SupportsFloat)):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number + 0.0  # no negative zero: the profile record hashes the bits


def _f32(number: float) -> float:
    """The nearest f32. Raises OverflowError beyond its range."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def _rate(value: object) -> float:
    number = _finite(value)
    if _f32(number) <= 0.0:  # a positive number below f32's smallest becomes zero
        raise ValueError
    return number
