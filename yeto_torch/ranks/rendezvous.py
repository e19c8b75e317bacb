"""The ranks of one learner meet, before anything is sent: do they all come, and with the same parameters?

Decides from one record per rank whether the learner may start; the same verdict falls on every rank, so that none waits
for one that has already failed. It must not know the fleet.

    record   status | layout fingerprint (32) | class of an error | bytes of its sentence | the sentence, cut to fit
    verdict  a rank failed -> its error on all; YETO_DISABLE on some only, or different layouts -> ValueError on all
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from yeto_torch.ranks.commands import error_code, error_of, error_text
from yeto_torch.ranks.group import RankGroup
from yeto_torch.wire.constants import HASH_BYTES
from yeto_torch.wire.model_layout import Layout

_HEAD = struct.Struct(f"<B{HASH_BYTES}sBH")
_TEXT_BYTES = 1024
_READY, _DISABLED, _FAILED = range(3)


@dataclass(frozen=True, slots=True)
class _Record:
    status: int
    fingerprint: bytes = bytes(HASH_BYTES)
    code: int = 0
    text: bytes = b""

    def encode(self) -> bytes:
        text = self.text[:_TEXT_BYTES]
        return _HEAD.pack(self.status, self.fingerprint, self.code, len(text)) + text.ljust(_TEXT_BYTES, b"\0")

    @staticmethod
    def decode(data: bytes) -> _Record:
        status, fingerprint, code, length = _HEAD.unpack_from(data)
        return _Record(status, fingerprint, code, data[_HEAD.size : _HEAD.size + length])


class Rendezvous:
    """A context in which one rank gets ready; its end is where all ranks meet. Without a group it does nothing."""

    def __init__(self, ranks: RankGroup | None) -> None:
        self._ranks = ranks
        self.layout: Layout | None = None  # to be set inside, unless YETO_DISABLE is set

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._ranks is None or not (error is None or isinstance(error, Exception)):
            return
        records = [_Record.decode(data) for data in self._ranks.all_gather(_record(error, self.layout).encode())]
        if error is None:  # else it goes on as it is
            _judge(records)
            if self.layout is not None:
                _compare(self._ranks, self.layout, records)


def _record(error: Exception | None, layout: Layout | None) -> _Record:
    if error is not None:
        return _Record(_FAILED, code=error_code(error), text=error_text(error))
    return _Record(_DISABLED) if layout is None else _Record(_READY, layout.fingerprint)


def _judge(records: Sequence[_Record]) -> None:
    """Raise what keeps the learner from starting."""
    for rank, record in enumerate(records):
        if record.status == _FAILED:
            raise error_of(record.code, b"rank %d of this learner cannot start: %b" % (rank, record.text))
    disabled = [rank for rank, record in enumerate(records) if record.status == _DISABLED]
    if disabled and len(disabled) < len(records):
        raise ValueError(f"YETO_DISABLE is set on ranks {disabled} of this learner only: set it on all of them or none")


def _compare(ranks: RankGroup, layout: Layout, records: Sequence[_Record]) -> None:
    """Raise ValueError unless all layouts are equal; every rank says how its own differs from rank 0's."""
    if len({record.fingerprint for record in records}) == 1:
        return
    difference = _difference(_listing(layout), _listing_of_rank_0(ranks, layout))
    if records[0].fingerprint == layout.fingerprint:
        difference = ""
    said = ranks.all_gather(_Record(_READY, text=difference.encode()).encode())
    for rank, text in enumerate(_Record.decode(data).text.decode(errors="replace") for data in said):
        if text:
            raise ValueError(f"named_parameters: rank {rank} of this learner {text}: all ranks must train one model")


def _listing_of_rank_0(ranks: RankGroup, layout: Layout) -> dict[str, tuple[int, ...]]:
    data = json.dumps(list(_listing(layout).items())).encode() if ranks.rank == 0 else None
    length = torch.tensor([0 if data is None else len(data)])
    ranks.broadcast(length)
    listing = json.loads(ranks.broadcast_bytes(data, int(length)))
    return {name: tuple(shape) for name, shape in listing}


def _listing(layout: Layout) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in layout.tensors}


def _difference(mine: dict[str, tuple[int, ...]], first: dict[str, tuple[int, ...]]) -> str:
    """How one rank's parameters differ from rank 0's, to follow its number."""
    for name in sorted(mine.keys() | first.keys()):
        if name not in mine:
            return f"has no parameter {name!r}, which rank 0 has"
        if name not in first:
            return f"has a parameter {name!r}, which rank 0 has not"
        if mine[name] != first[name]:
            return f"has parameter {name!r} of shape {mine[name]}, rank 0 of shape {first[name]}"
    return "cuts the same parameters into other fragments (fragments, pattern, matrix_merge, average)"
