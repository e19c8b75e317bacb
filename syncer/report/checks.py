"""Values of a tape, checked by the column: as fast as numpy where they are right, one sentence where one is not.

It decides which numbers are legal anywhere on a tape. It must not know what a key means.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from yeto_torch.wire.errors import StateError

Numbers = NDArray[np.float64]
Whole = NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float64)

LARGEST_ID = 2**32 - 1
_LARGEST_WHOLE = 10**12  # rounds, steps or bytes of one line; neighbours stay apart in a picture
_LARGEST_TIME_S = 2.5e11  # the year 9892
_LARGEST_NUMBER = 1e100  # sums of many stay finite
_TEXT_CHARACTERS = 300


class Lines(Protocol):
    """The line of each of a column's values."""

    def __getitem__(self, index: int, /) -> int: ...


class At:
    """The same by way of the rows of the rounds."""

    def __init__(self, lines: list[int], rows: Whole) -> None:
        self._lines, self._rows = lines, rows

    def __getitem__(self, index: int) -> int:
        return self._lines[int(self._rows[index])]


def whole_number(key: str, value: object, line: int, most: int = _LARGEST_WHOLE) -> int:
    if type(value) is int and 0 <= value <= most:
        return value
    return int(whole_column(key, [value], [line], most)[0])  # which says what is wrong


def whole_column(key: str, values: Sequence[object], lines: Lines, most: int = _LARGEST_WHOLE) -> Whole:
    return _column(key, values, lines, np.int64, {int}, 0, most, f"a whole number from 0 to {most}")


def number_column(
    key: str, values: Sequence[object], lines: Lines, may_be_null: bool = False, may_be_negative: bool = False
) -> Numbers:
    """Null becomes NaN."""
    most = _LARGEST_TIME_S if key == "time" else _LARGEST_NUMBER
    least = -most if may_be_negative else 0.0
    legal = f"a number from {least:g} to {most:g}{' or null' if may_be_null else ''}"
    kinds: set[type] = {int, float, type(None)} if may_be_null else {int, float}
    return _column(key, values, lines, np.float64, kinds, least, most, legal)


def _column(
    key: str,
    values: Sequence[object],
    lines: Lines,
    dtype: type[Number],
    kinds: set[type],
    least: float,
    most: float,
    legal: str,
) -> NDArray[Number]:
    """The values as they are if all are of these kinds and within the range, else a sentence about the first misfit."""
    if set(map(type, values)) <= kinds:
        with suppress(OverflowError):
            column = np.array(values, dtype=dtype)
            nulls = values.count(None) if type(None) in kinds else 0
            if not ((column < least) | (column > most)).any() and np.isnan(column).sum() == nulls:
                return column

    def fits(value: object) -> bool:
        return type(value) in kinds and (not isinstance(value, (int, float)) or least <= value <= most)

    index = next(index for index, value in enumerate(values) if not fits(value))
    raise StateError(f"line {lines[index]}: {key} is {shortened(repr(values[index]), 60)}, must be {legal}")


def shortened(text: str, most: int = _TEXT_CHARACTERS) -> str:
    """On one line, without what would steer the terminal that shows it."""
    text = " ".join(text[: 4 * most].split())
    text = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return text if len(text) <= most else text[: most - 1] + "…"
