"""The coordinator's mind as the actor calls it: who may open the session, and who decides from then on.

Until a HELLO is admitted nobody is here and nothing can happen but another HELLO or an interrupt. The first admitted
one brings the layout, and with it ``lifecycle.Lifecycle``, which decides everything after it.

It must not know sockets, tensors, files or clocks: gradients are opaque, time is an argument, work is an Effect.

Source: v4 §Versions and admission (the first accepted HELLO fixes the session), v4 §Scheduler (one sequential actor).
"""

from __future__ import annotations

from syncer.config.policy import SyncerPolicy
from syncer.core import effects as fx
from syncer.core import events as ev
from syncer.core.admission import Admission, ResumePoint
from syncer.core.lifecycle import Lifecycle, Phase, interrupted
from syncer.core.rejections import Rejections


class Coordinator:
    """All decisions of one syncer process; ``profile`` is the 32-byte identity of its policy."""

    def __init__(self, policy: SyncerPolicy, profile: bytes, resumed: ResumePoint | None = None) -> None:
        self._policy, self._resumed = policy, resumed
        self._admission = Admission(policy.session, profile, resumed.check if resumed else None)
        self._rejections = Rejections()
        self._life: Lifecycle | None = None

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Settle one event that arrived at ``now``; returns what must be done, in order."""
        if self._life is not None:
            return self._life.handle(event, now)
        match event:
            case ev.HelloArrived(_, hello):
                refusal = self._admission.decide(hello)
                if refusal is not None:
                    return self._rejections.hello(event, refusal, now)
                fragments = len(hello.layout)
                self._life = Lifecycle(self._policy, fragments, self._admission, self._rejections, self._resumed)
                return self._life.open(event, now)
            case ev.Interrupted():
                return interrupted(self.committed)
        return []

    def on_time(self, now: float) -> list[fx.Effect]:
        """Fire what is due by ``now``, then launch what may be launched."""
        return self._life.on_time(now) if self._life else []

    def next_deadline(self) -> float | None:
        """When ``on_time`` must be called next if nothing happens; None = not before an event."""
        return self._life.next_deadline() if self._life else None

    def waiting_for(self) -> str:
        """Why nothing moves, in one sentence for the operator."""
        if self._life is None:
            return f"assembling: no learner is connected yet, {self._policy.learners} are awaited"
        return self._life.waiting_for()

    @property
    def phase(self) -> Phase:
        """Where the run stands."""
        return self._life.phase if self._life else Phase.ASSEMBLING

    @property
    def connected(self) -> tuple[int, ...]:
        """Ids of the learners that are here, ascending."""
        return self._life.connected if self._life else ()

    @property
    def committed(self) -> int:
        """Global step t: rounds committed."""
        if self._life is None:
            return self._resumed.step if self._resumed else 0
        return self._life.committed
