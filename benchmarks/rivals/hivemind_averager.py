"""hivemind's decentralised averager with 8-bit quantisation; finding the group is not part of the sync."""

from __future__ import annotations

import time

from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Uniform8BitQuantization

from benchmarks.rivals.common import matrices, serve


class Hivemind:
    def __init__(self, numel: int, rank: int, world: int, **_: str) -> None:
        self._tensors = [parameter.detach() for parameter in matrices(numel, rank).parameters()]
        self._rank, self._world = rank, world
        self._dht = DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"]) if rank == 0 else None

    def address(self) -> str | None:
        return str(self._dht.get_visible_maddrs()[0]) if self._dht else None

    def meet(self, at: str | None) -> None:
        if self._dht is None:
            self._dht = DHT(start=True, initial_peers=[at], host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        self._averager = DecentralizedAverager(
            self._tensors,
            self._dht,
            start=True,
            prefix="bench",
            target_group_size=self._world,
            min_matchmaking_time=1.5,
            request_timeout=1.0,
            compression=Uniform8BitQuantization(),
        )

    def prepare(self) -> None:
        self._step = self._averager.step(wait=False, require_trigger=True, timeout=120)
        while self._step.stage is not AveragingStage.AWAITING_TRIGGER:  # nothing to wait on but the stage
            if self._step.done():
                self._step.result()
            time.sleep(0.01)

    def sync(self) -> None:
        self._step.allow_allreduce()
        if self._step.result(timeout=240) is None:
            raise RuntimeError("hivemind averaged nothing")


if __name__ == "__main__":
    serve(Hivemind)
