"""What rank 0 of a learner tells the other ranks: orders of eight numbers, and the release that ends each of its turns.

Decides how an order, an error and a learner's state travel. It must not know what an order does. Rank 0's turn (the end
of a step, ``finish``, ...) is any number of orders and one release; the others obey until they are released. Errors
travel as the number of their class and their sentence in UTF-8: every rank raises the same.

    order    | numbers behind its own            | what every rank does
    IDLE     |                                   | nothing: rank 0 still waits for the syncer
    COUNT    |                                   | sums the tokens
    GATHER   | fragment                          | hands its shards to rank 0
    CHECK    | fragment                          | says which parameters are not sound; if all are, GATHER
    WRITE    | fragment, dtype, alpha (f64 bits) | receives the values and writes its part of them
    UNSOUND  | fragment                          | says which parameters are not sound, and remembers what all said
    FORGET   |                                   | drops the optimizer state of those, where it is spoilt on any rank
    RELEASE  | local step, free steps, flags, error class, error bytes, numbers | raises the error, or goes on
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag, auto

import torch

from yeto_torch.ranks.group import Team
from yeto_torch.wire.errors import (
    ConnectionLostError,
    LocalError,
    NonFiniteError,
    PeerError,
    RefusedError,
    RunError,
    StateError,
)

_WORDS = 8
_ERRORS: tuple[type[Exception], ...] = (
    RunError,
    PeerError,
    LocalError,
    StateError,
    RefusedError,
    ConnectionLostError,
    NonFiniteError,
    ValueError,
)


class Order(IntEnum):
    """See the table above."""

    IDLE = auto()
    COUNT = auto()
    GATHER = auto()
    CHECK = auto()
    WRITE = auto()
    UNSOUND = auto()
    FORGET = auto()
    RELEASE = auto()


class Flag(IntFlag):
    """What is so with rank 0's learner."""

    INSTALLED = auto()
    FINISHED = auto()
    FROZEN = auto()
    CLOSED = auto()
    FINAL = auto()  # the error ends the session


_NOTHING = Flag(0)


@dataclass(frozen=True, slots=True)
class Release:
    """The end of rank 0's turn.

    Attributes:
        local_step: rank 0's.
        free_steps: so many calls of ``step`` may now pass without a turn.
        flags: as they are on every rank from now on.
        error: what every rank raises.
        numbers: rank 0's statistics; empty when nothing was exchanged.
    """

    local_step: int = 0
    free_steps: int = 0
    flags: Flag = _NOTHING
    error: Exception | None = None
    numbers: tuple[int, ...] = ()


class Orders:
    """The way of orders within one team: rank 0 gives, the others take, in the same order."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._words = torch.zeros(_WORDS, dtype=torch.int64)

    def give(self, order: Order, *numbers: int) -> None:
        """Rank 0: tell all others. Raises TeamError."""
        words = (int(order), *numbers)
        self._words.copy_(torch.tensor(words + (0,) * (_WORDS - len(words))))
        self._team.share(self._words)

    def take(self) -> tuple[Order, list[int]]:
        """Any other rank: wait for the next order. Raises TeamError."""
        self._team.share(self._words)
        order, *numbers = self._words.tolist()
        return Order(order), numbers

    def release(self, release: Release) -> None:
        """Rank 0: end the turn."""
        code, text = error_code(release.error), error_text(release.error)
        self.give(
            Order.RELEASE,
            release.local_step,
            release.free_steps,
            int(release.flags),
            code,
            len(text),
            len(release.numbers),
        )
        if text:
            self._team.share_bytes(text, len(text))
        if release.numbers:
            self._team.share(torch.tensor(release.numbers))

    def released(self, numbers: Sequence[int]) -> Release:
        """Any other rank: the release whose first ``numbers`` have come."""
        local_step, free_steps, flags, code, text_bytes, count = numbers[:6]
        text = self._team.share_bytes(None, text_bytes) if text_bytes else b""
        rest = torch.zeros(count, dtype=torch.int64)
        if count:
            self._team.share(rest)
        return Release(local_step, free_steps, Flag(flags), error_of(code, text), tuple(rest.tolist()))


def error_code(error: Exception | None) -> int:
    """The number of its class; 0 for none, that of RunError for a class that is not ours."""
    if error is None:
        return 0
    return 1 + (_ERRORS.index(type(error)) if type(error) in _ERRORS else 0)


def error_text(error: Exception | None) -> bytes:
    """Its sentence, not empty; an error of a class that is not ours is named."""
    if error is None:
        return b""
    text = str(error) if type(error) in _ERRORS else f"rank 0 of this learner failed: {type(error).__name__}: {error}"
    return (text or type(error).__name__).encode()


def error_of(code: int, text: bytes) -> Exception | None:
    """The error of that class and sentence."""
    return _ERRORS[code - 1](text.decode(errors="replace")) if code else None


def f64_bits(value: float) -> int:
    """The bits of an f64, as a number that fits into an order."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def f64_of(bits: int) -> float:
    """The f64 of those bits."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
