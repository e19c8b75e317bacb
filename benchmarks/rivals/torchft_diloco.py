"""torchft's DiLoCo: every step is a sync of the whole model over gloo, decided on by its manager and lighthouse."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from benchmarks.rivals.common import matrices, serve

TIMEOUT = timedelta(minutes=5)


class TorchFT:
    def __init__(self, numel: int, rank: int, world: int, **_: str) -> None:
        self._model, self._rank, self._world = matrices(numel, 0), rank, world
        self._lighthouse = None
        if rank == 0:
            self._lighthouse = LighthouseServer(bind="[::]:0", min_replicas=world, join_timeout_ms=100)

    def address(self) -> str | None:
        return self._lighthouse.address() if self._lighthouse else None

    def meet(self, at: str | None) -> None:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            min_replica_size=self._world,
            load_state_dict=self._model.load_state_dict,
            state_dict=self._model.state_dict,
            use_async_quorum=False,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            replica_id=f"replica_{self._rank}",
            store_addr="localhost",
            store_port=store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=at,
            init_sync=False,
        )
        self._store = store
        self._inner = torch.optim.SGD(self._model.parameters(), lr=1.0)  # no gradients: it changes nothing
        outer = torch.optim.SGD(self._model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        DiLoCo(self._manager, [self._model], self._inner, outer, sync_every=1).__enter__()

    def prepare(self) -> None:
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.view(-1)[:1024].add_(1e-3 * (self._rank + 1))

    def sync(self) -> None:
        self._inner.step()


if __name__ == "__main__":
    serve(TorchFT)
