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
from yeto_torch.ranks.group import Team
from yeto_torch.wire.constants import HASH_BYTES
from yeto_torch.wire.layout import Layout

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


class Assembly:
    """A context in which one rank gets ready; its end is where all ranks meet. Without a team it does nothing.

    Attributes:
        layout: set it inside.
        disabled: set it inside when YETO_DISABLE is set.
    """

    def __init__(self, team: Team | None) -> None:
        self._team = team
        self.layout: Layout | None = None
        self.disabled = False

    def __enter__(self) -> Assembly:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._team is None or not (error is None or isinstance(error, Exception)):
            return
        records = [_Record.decode(data) for data in self._team.all_say(self._record(error).encode())]
        if error is None:  # else it goes on as it is
            _judge(records)
            if not self.disabled:
                self._compare(records)

    def _record(self, error: Exception | None) -> _Record:
        if error is not None:
            return _Record(_FAILED, code=error_code(error), text=error_text(error))
        if self.disabled:
            return _Record(_DISABLED)
        assert self.layout is not None
        return _Record(_READY, self.layout.fingerprint)

    def _compare(self, records: Sequence[_Record]) -> None:
        """Raise ValueError unless all layouts are equal; every rank says how it differs from rank 0."""
        if len({record.fingerprint for record in records}) == 1:
            return
        assert self._team is not None
        assert self.layout is not None
        difference = _difference(_listing(self.layout), self._listing_of_rank_0())
        if records[0].fingerprint == self.layout.fingerprint:
            difference = ""
        said = self._team.all_say(_Record(_READY, text=difference.encode()).encode())
        for rank, text in enumerate(_Record.decode(data).text.decode(errors="replace") for data in said):
            if text:
                raise ValueError(
                    f"named_parameters: rank {rank} of this learner {text}: all ranks must train one model"
                )

    def _listing_of_rank_0(self) -> dict[str, tuple[int, ...]]:
        assert self._team is not None
        assert self.layout is not None
        data = json.dumps(list(_listing(self.layout).items())).encode() if self._team.rank == 0 else None
        length = torch.tensor([0 if data is None else len(data)])
        self._team.share(length)
        listing = json.loads(self._team.share_bytes(data, int(length)))
        return {name: tuple(shape) for name, shape in listing}


def _judge(records: Sequence[_Record]) -> None:
    """Raise what keeps the learner from starting."""
    for rank, record in enumerate(records):
        if record.status == _FAILED:
            error = error_of(record.code, b"rank %d of this learner cannot start: %b" % (rank, record.text))
            assert error is not None
            raise error
    disabled = [rank for rank, record in enumerate(records) if record.status == _DISABLED]
    if disabled and len(disabled) < len(records):
        raise ValueError(f"YETO_DISABLE is set on ranks {disabled} of this learner only: set it on all of them or none")


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
