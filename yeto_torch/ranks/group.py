"""The ranks of one learner as a group: a few collectives on ``torch.distributed``, and what it means when one fails.

Decides which backend carries what, and turns every failure of a collective into one RunError that says what to do. It
must not know what is agreed on. Small things (commands, sums, texts) travel as CPU tensors, so that a step never waits
for a GPU; a group whose backends know GPUs alone gets a gloo group beside it for them. Fragments travel by the backend
of their device. Nothing is pickled: numbers, and bytes of a known length.

Source: torch.distributed; rulings §5.12.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from yeto_torch.wire.errors import RunError


class RankLostError(RunError):
    """A rank of this learner failed, left, or did not answer within its process group's timeout."""


class RankGroup:
    """The members of one process group; rank 0 of it leads.

    Args:
        group: of ``torch.distributed``, as ``dist.group.WORLD``; this process is a member.

    Attributes:
        rank: of this process within the group.
        members: all ranks, as numbers of the world.

    Raises:
        ValueError: ``group`` is something else.
    """

    def __init__(self, group: object) -> None:
        if not (dist.is_available() and dist.is_initialized() and isinstance(group, dist.ProcessGroup)):
            raise ValueError(
                f"process_group={group!r}: must be a process group this rank is a member of, as dist.group.WORLD "
                "behind dist.init_process_group()"
            )
        self.rank = dist.get_rank(group)
        self.members = tuple(dist.get_process_group_ranks(group))
        self._group = group
        self._backends = _backends(group)
        self._control = group if "cpu" in self._backends else self._beside(group)

    def _beside(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """A gloo group of the same ranks and timeout."""
        with self.collective():
            backend = group._get_backend(torch.device(next(iter(self._backends))))
            timeout = getattr(getattr(backend, "options", None), "_timeout", None)  # torch has no public way to ask
            made = dist.new_group(list(self.members), timeout, "gloo", use_local_synchronization=True)
            return cast("dist.ProcessGroup", made)  # of which this rank is a member

    @property
    def size(self) -> int:
        return len(self.members)

    def broadcast(self, tensor: Tensor) -> None:
        """Fill ``tensor`` (CPU, equal shape and dtype everywhere) with rank 0's."""
        with self.collective():
            dist.broadcast(tensor, self.members[0], self._control)

    def broadcast_bytes(self, data: bytes | None, length: int) -> bytes:
        """Rank 0's ``data`` of ``length`` bytes, which every rank knows."""
        tensor = torch.zeros(length, dtype=torch.uint8)
        if data is not None:
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.broadcast(tensor)
        return tensor.numpy().tobytes()

    def broadcast_values(self, values: Tensor, device: torch.device) -> Tensor:
        """Rank 0's ``values`` on every rank, by the backend of ``device`` if it has one of its own; returns them."""
        if self._backends.get(device.type, "gloo") == "gloo":
            self.broadcast(values)
            return values
        values = values.to(device)
        with self.collective():
            dist.broadcast(values, self.members[0], self._group)
        return values

    def maximum(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum over all ranks, on all ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def any(self, values: Sequence[bool]) -> list[bool]:
        """Element by element: is it so on any rank?"""
        return [value > 0 for value in self.maximum([int(value) for value in values])]

    def sum(self, value: int) -> int:
        """The sum over all ranks, on all ranks."""
        return self._reduced([value], dist.ReduceOp.SUM)[0]

    def _reduced(self, values: Sequence[int], by: dist.ReduceOp.RedOpType) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64)
        if len(values):
            with self.collective():
                dist.all_reduce(tensor, by, self._control)
        return [int(value) for value in tensor.tolist()]

    def all_gather(self, record: bytes) -> list[bytes]:
        """Every rank's ``record``, all of one length, in the order of ranks."""
        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        records = [torch.zeros_like(mine) for _ in self.members]
        with self.collective():
            dist.all_gather(records, mine, self._control)
        return [tensor.numpy().tobytes() for tensor in records]

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Around collectives: a RuntimeError inside, as torch raises it when one fails, becomes a RankLostError."""
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first_line = str(error).strip().partition("\n")[0][:200]
            raise RankLostError(
                f"a rank of this learner has failed, left, or not answered within the timeout of its process group "
                f"(ranks {', '.join(map(str, self.members))} of the job; this is rank {self.members[self.rank]}): look "
                "for the first error among them, then start all of them again, together; the other learners go on "
                f"({first_line})"
            ) from error


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Device type to backend, as ``{"cpu": "gloo", "cuda": "nccl"}``."""
    return dict(item.split(":") for item in dist.get_backend_config(group).split(","))
