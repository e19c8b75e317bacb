"""The processes of one learner: one, or one per rank, with torchrun's environment and one place to meet.

Decides what each rank is told, and how the learner as a whole has ended: with its first failure. It must not know the
syncer, nor when to start or stop anybody. The ranks meet at a store that this process serves, on this machine alone and
on a port that it holds from the start, so that nobody else can take it; every learner has its own.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from yeto_torch.launcher.processes import Child

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_HOST = "127.0.0.1"


@dataclass(eq=False)
class LearnerProcesses:
    """The processes of one learner, from one start to their end."""

    id: int
    size: int  # how many ranks
    attempt: int  # 0 for the learner's first start
    run_id: str
    living: set[Child] = field(default_factory=set)  # the children that have not ended
    failure: tuple[Child, int] | None = None  # the first that ended with another exit code than 0, and the code
    _store: TCPStore | None = None  # serves as long as it is referred to

    @property
    def name(self) -> str:
        return f"learner {self.id}"

    def name_of(self, rank: int) -> str:
        """What a rank is called in the output."""
        return self.name if self.size == 1 else f"{self.name}.{rank}"

    def environment(self, rank: int) -> dict[str, str]:
        """torchrun's variables; none for a learner of one process."""
        if self.size == 1:
            return {}
        if self._store is None:
            self._store = _serve()
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "ROLE_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_RUN_ID": f"{self.run_id}-{self.id}",
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 serves none of its own
        }

    def ended(self, child: Child, code: int) -> bool:
        """One of them has ended; is it the learner's first failure?"""
        self.living.remove(child)
        if code == 0 or self.failure is not None:
            return False
        self.failure = child, code
        return True


def _serve() -> TCPStore:
    import torch.distributed as dist  # takes seconds; only learners of several ranks need it

    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())  # type: ignore[attr-defined]
