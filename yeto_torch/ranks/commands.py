"""What rank 0 of a learner tells the others: commands of eight numbers, and the release that ends each of its turns.

Decides how a command, an error and a learner's state travel. It must not know what a command does. Rank 0's turn (the
end of a step, ``finish``, ...) is any number of commands and one release; the others follow until they are released.
Errors travel as the number of their class and their sentence in UTF-8: every rank raises the same.

    command   | numbers behind its own            | what every rank does
    IDLE      |                                   | nothing: rank 0 still waits for the syncer
    COUNT     |                                   | sums the tokens
    GATHER    | fragment                          | hands its shards to rank 0
    CHECK     | fragment                          | says which parameters are not finite and bounded; if none, GATHER
    WRITE     | fragment, dtype, alpha (f64 bits) | receives the values and writes its part of them
    NONFINITE | fragment                          | says which are not finite and bounded, and remembers what all said
    FORGET    |                                   | drops the optimizer state of those, where it is spoilt on any rank
    RELEASE   | local step, free steps, flags, error class, error bytes, numbers | raises the error, or goes on
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag, auto

import torch

from yeto_torch.ranks.group import RankGroup
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


class Command(IntEnum):
    """See the table above."""

    IDLE = auto()
    COUNT = auto()
    GATHER = auto()
    CHECK = auto()
    WRITE = auto()
    NONFINITE = auto()
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
    """The end of rank 0's turn."""

    local_step: int = 0  # rank 0's
    free_steps: int = 0  # so many calls of ``step`` may now pass without a turn
    flags: Flag = _NOTHING  # as they are on every rank from now on
    error: Exception | None = None  # what every rank raises
    numbers: tuple[int, ...] = ()  # rank 0's statistics; empty when nothing was exchanged


class Commands:
    """The channel of one rank group: rank 0 sends, the others receive, in the same order."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._words = torch.zeros(_WORDS, dtype=torch.int64)

    def send(self, command: Command, *numbers: int) -> None:
        """Rank 0: tell all others. Raises RankLostError."""
        words = (int(command), *numbers)
        self._words.copy_(torch.tensor(words + (0,) * (_WORDS - len(words))))
        self._ranks.broadcast(self._words)

    def receive(self) -> tuple[Command, list[int]]:
        """Any other rank: wait for the next command. Raises RankLostError."""
        self._ranks.broadcast(self._words)
        command, *numbers = self._words.tolist()
        return Command(command), numbers

    def release(self, release: Release) -> None:
        """Rank 0: end the turn."""
        code, text = error_code(release.error), error_text(release.error)
        state = release.local_step, release.free_steps, int(release.flags)
        self.send(Command.RELEASE, *state, code, len(text), len(release.numbers))
        if text:
            self._ranks.broadcast_bytes(text, len(text))
        if release.numbers:
            self._ranks.broadcast(torch.tensor(release.numbers))

    def released(self, numbers: Sequence[int]) -> Release:
        """Any other rank: the release whose first ``numbers`` have come."""
        local_step, free_steps, flags, code, text_bytes, count = numbers[:6]
        text = self._ranks.broadcast_bytes(None, text_bytes) if text_bytes else b""
        error = error_of(code, text) if code else None
        rest = torch.zeros(count, dtype=torch.int64)
        if count:
            self._ranks.broadcast(rest)
        return Release(local_step, free_steps, Flag(flags), error, tuple(rest.tolist()))


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


def error_of(code: int, text: bytes) -> Exception:
    """The error of that class (a code above 0) and sentence."""
    return _ERRORS[code - 1](text.decode(errors="replace"))


def f64_bits(value: float) -> int:
    """The bits of an f64, as a number that fits into a command."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def f64_of(bits: int) -> float:
    """The f64 of those bits."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
