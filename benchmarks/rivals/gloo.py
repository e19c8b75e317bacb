"""A bare all-reduce of one flat f32 tensor over gloo."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.model import Matrices
from benchmarks.rivals.common import serve


class Gloo:
    def __init__(self, numel: int, rank: int, world: int, folder: str) -> None:
        self._tensor = torch.ones(Matrices(numel).numel)
        self._rank, self._world, self._store = rank, world, Path(folder) / "gloo-store"

    def address(self) -> None:
        return None

    def meet(self, _at: str | None) -> None:
        store = dist.FileStore(str(self._store), self._world)
        dist.init_process_group(
            "gloo", store=store, rank=self._rank, world_size=self._world, timeout=timedelta(minutes=5)
        )

    def prepare(self) -> None:
        self._tensor.fill_(1.0)
        dist.barrier()

    def sync(self) -> None:
        dist.all_reduce(self._tensor)


if __name__ == "__main__":
    serve(Gloo)
    dist.destroy_process_group()
