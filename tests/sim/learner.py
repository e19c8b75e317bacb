"""A learner in the simulated world: training thread and link around the real session and the real exchange.

What the training thread and the link decide is the session's; their part is copied here in its plainest form: a step,
the boundary, its effects in order; one waiting push per fragment, the newest wins, one on its way; INIT, heartbeat,
acknowledgement, redial. Beside it stands a twin that remembers anchors and counters for itself and compares.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from syncer.core.events import Member
from tests.sim.faults import Faults
from tests.sim.judge import Judge
from tests.sim.network import Connection
from tests.sim.scenario import WHOLE, Scenario
from tests.sim.syncer import SyncerNode
from tests.sim.wire import ByteConnection
from tests.sim.world import SafetyError, Task, Thread, Wait, World
from tests.support.coordinator_desk import CONTRACT
from yeto_torch.learner import session as sessions
from yeto_torch.learner.effects import Adopt, Effect, Fail, Install, Respond, Write
from yeto_torch.learner.exchange import Exchange
from yeto_torch.wire import codec, messages
from yeto_torch.wire.constants import Direction, WireDType
from yeto_torch.wire.errors import PeerError, RefusedError
from yeto_torch.wire.limits import GroupLimits

HEARTBEAT_S, RELEASE_S = 5.0, 5.0
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0
_ENCODE_S = 0.002
_NOISES = 50
_ACK_S = 3.0  # within which a whole cut is installed and acknowledged, slow steps included


class LearnerNode:
    """The place one learner runs at; it is booted again after a kill.

    Attributes:
        connection: the living one, or None.
        done: the present process has left with the final cut.
        turned_away: the run had ended without it.
        ack_boot: the process that sent an acknowledgement last.
    """

    def __init__(
        self, world: World, scenario: Scenario, judge: Judge, faults: Faults, syncer: SyncerNode, learner_id: int
    ) -> None:
        self.world, self.scenario, self.judge, self.faults, self.syncer = world, scenario, judge, faults, syncer
        self.learner_id, self.plan = learner_id, scenario.learners[learner_id]
        self.process: LearnerProcess | None = None
        self.boots = self.ack_boot = 0
        self._used: set[int] = set()
        self.done = self.turned_away = self.gone = False
        faults.learners[learner_id] = self
        world.after(self.plan.joins_at, self.boot)

    def tell(self, what: str) -> None:
        self.world.tell(f"learner {self.learner_id}", what)

    def boot(self) -> None:
        """A new process with fresh weights."""
        if self.process is None and not self.over:
            self.boots += 1
            self.tell("boots")
            self.process = LearnerProcess(self)

    def fresh_generation(self) -> int:
        """Random and never used before, but short enough to be read in a story."""
        while (generation := self.world.rng.randrange(1, 1 << 16)) in self._used:
            pass
        self._used.add(generation)
        return generation

    @property
    def over(self) -> bool:
        return self.done or self.turned_away or self.gone

    @property
    def connection(self) -> Connection | None:
        return self.process.connection if self.process is not None else None

    def kill(self, *, may_end: bool = True) -> None:
        """SIGKILL; booted again after a while, unless it is never to come back."""
        if self.process is None:
            return
        self.process.end()
        self.process = None
        if may_end and self.learner_id == self.scenario.never_back and self.judge.committed > 0:
            self.gone = True
            self.tell("KILLED for good")
            return
        self.tell("KILLED")
        self.world.after(self.world.rng.choice([0.2, 2.0, 10.0]), self.boot)

    def freeze(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        if self.process is not None:
            self.tell(f"FROZEN for {seconds} s")
            self.process.freeze(self.world.now + seconds)


class LearnerProcess:
    """One process of a learner."""

    def __init__(self, node: LearnerNode) -> None:
        self._node, self._world, self._judge, self._scenario = node, node.world, node.judge, node.scenario
        self._layout, self._dtype = self._scenario.layout, self._scenario.dtype
        self._id = node.learner_id
        self._start_weights()
        self.exchange = Exchange(self._layout, self._parameters, self._dtype.bulk, self._scenario.alpha)
        self.session = sessions.Session(len(self._layout))
        self.local_step = self.tokens = 0
        self.connection: Connection | None = None
        self._generation = 0
        self._inits = (
            {f: codec.encode(self.exchange.values(f), self._dtype.bulk) for f in range(len(self._layout))}
            if node.learner_id == 0
            else {}
        )
        self._outbox: dict[int, tuple[Respond, torch.Tensor | None]] = {}
        self._on_their_way: set[int] = set()
        self._pause_s = FIRST_PAUSE_S
        self._passing = self._ended = False
        self._awake_at = 0.0
        # the twin: per fragment (version, raw bytes, local_step and tokens then), and what this connection adopted
        self._anchors: dict[int, tuple[int, bytes, int, int]] = {}
        self._adopted: dict[int, int] = {}
        self._installed = False
        self._cut: set[int] = set()  # fragments of the final cut on this connection; -1 is the manifest
        self._acked_on = 0
        self._last_push: messages.PushFragment | None = None
        self._trainer: Task = self._world.spawn(self._train())
        self._world.after(0.0, self._dial)

    def _start_weights(self) -> None:
        """Random weights, and the noise that stands for training; the parameters are views of one memory."""
        chance = torch.Generator().manual_seed(self._world.rng.getrandbits(40))
        self._memory = torch.randn(sum(self._layout.wire.numels), generator=chance)
        self._noise = 0.1 * torch.randn(_NOISES, len(self._memory), generator=chance)
        tensors = iter(self._memory.split([tensor.numel for tensor in self._layout.tensors]))
        self._parameters = [
            [next(tensors).view(tensor.shape) for tensor in fragment.tensors] for fragment in self._layout.fragments
        ]

    @property
    def _member(self) -> Member:
        """Who this process is on its present connection."""
        return Member(self._id, self._generation)

    # ------------------------------------------------------------------ life and death

    def tell(self, what: str) -> None:
        self._node.tell(what)

    def end(self) -> None:
        """The process is gone; the kernel closes its sockets."""
        self._ended = True
        self._trainer.kill()
        if self.connection is not None:
            self.connection.learner.close()
            self.connection = None

    def freeze(self, until: float) -> None:
        self._awake_at = max(self._awake_at, until)
        self._trainer.freeze(until)
        if self.connection is not None:
            self.connection.stall_towards(self.connection.learner, until - self._world.now)

    def _later(self, delay_s: float, action: Any, *args: Any) -> None:
        """Something this process does after a while; not while it is stopped, nor after its end."""
        self._world.after(delay_s, self._now, action, args)

    def _now(self, action: Any, args: tuple[Any, ...]) -> None:
        if self._ended:
            return
        if self._world.now < self._awake_at:
            self._world.at(self._awake_at, self._now, action, args)
        else:
            action(*args)

    # ------------------------------------------------------------------ the training thread

    def _train(self) -> Thread:
        plan = self._node.plan
        if plan.waits_for_start:
            while not (self.session.anchored or self.session.is_installed):
                self._boundary()
                if not self.session.news:
                    yield Wait()
        while not self.session.finished and self.local_step != plan.steps:
            yield plan.step_s * self._world.rng.uniform(0.8, 1.2)
            if not self.session.is_installed:
                self._step(plan.tokens)
            if self.session.failure is not None:
                self._boundary()
        self.session.enter_finish()
        self._passing = True
        while not self.session.finished:
            self._boundary()
            if not self.session.finished and not self.session.news:
                yield Wait()
        give_up_at = self._world.now + RELEASE_S
        while not self.session.over and self._world.now < give_up_at:
            yield Wait(give_up_at)
        self._leave()

    def _step(self, tokens: int) -> None:
        self._memory.add_(self._noise[self.local_step % _NOISES])
        self.local_step += 1
        self.tokens += tokens
        if self.session.attention:
            self._boundary()

    def _boundary(self) -> None:
        for effect in self.session.boundary(self.local_step, self.tokens):
            self._do(effect)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Adopt():
                self._adopt(effect)
            case Respond():
                self._respond(effect)
            case Install():
                self._install(effect)
            case Fail(error):
                if not (isinstance(error, RefusedError) and "the run is ending" in str(error)):
                    raise SafetyError(f"learner {self._id} fails: {error}")

    def _leave(self) -> None:
        self._check_final()
        self.tell("leaves with the final cut")
        if self.session.phase is not sessions.Phase.CLOSED:
            self._judge.left_alone.add(self._id)
        self._node.done, self._node.process = True, None
        self.session.leave()
        self.end()

    def _turned_away(self) -> None:
        self.tell("is turned away: the run is ending")
        self._node.turned_away, self._node.process = True, None
        self.end()

    # ------------------------------------------------------------------ effects, and the twin that checks them

    def _claim(self, holds: bool, sentence: str) -> None:
        self._judge.claim(holds, f"learner {self._id}: {sentence}")

    def _flat(self, fragment: int) -> np.ndarray:
        return np.concatenate([t.numpy().ravel() for t in self._parameters[fragment]])

    def _decoded(self, data: Any, fragment: int, dtype: WireDType) -> np.ndarray:
        return codec.decode(data, self._layout.wire.numels[fragment], dtype).numpy()

    def _adopt(self, adopt: Adopt) -> None:
        fragment, version, raw = adopt.fragment, adopt.version, bytes(adopt.data)
        self._judge.adopting(self._member, fragment, version, raw, self._adopted.get(fragment))
        before, wanted = self._flat(fragment), self._decoded(raw, fragment, self._dtype.bulk)
        old = self._anchors.get(fragment)
        set_back = old is not None and version <= old[0]
        self.exchange.adopt(fragment, adopt.data, adopt.write)
        if old is not None and not set_back:
            alpha = np.float32(self._scenario.alpha)
            wanted = alpha * before + (np.float32(1) - alpha) * wanted
        self._claim(
            np.allclose(self._flat(fragment), wanted, rtol=1e-6, atol=1e-6), f"version {version} adopted wrongly"
        )
        self._claim(adopt.write is not Write.KEEP, "nothing froze it")
        self._anchors[fragment] = (version, raw, self.local_step, self.tokens)
        self._adopted[fragment] = version
        self.tell(f"adopts fragment {fragment} version {version}" + (" (set back)" if set_back else ""))

    def _respond(self, respond: Respond) -> None:
        pull = respond.pull
        self._claim(respond.generation == self._generation, "an answer to a pull of another connection")
        self._claim(pull.fragment in self._anchors, f"answers round {pull.step} without an anchor")
        version, raw, steps_then, tokens_then = self._anchors[pull.fragment]
        self._claim(respond.base_version == version, f"base {respond.base_version}, its anchor is {version}")
        self._claim(bytes(respond.anchor) == raw, "an answer against bytes that are not its anchor")
        steps, tokens = self.local_step - steps_then, self.tokens - tokens_then
        delta = None if respond.zero else self.exchange.delta(pull.fragment, respond.anchor)
        if respond.zero:
            self._claim(self._passing and steps == 0, "a zero delta although it has made steps")
            self._claim((respond.c_steps, respond.c_tokens) == (1, 0), "a zero delta with weight")
        else:
            assert delta is not None
            self._claim((respond.c_steps, respond.c_tokens) == (steps, tokens), f"counters {respond}")
            self._claim(steps >= 1, "an answer without a step")
            anchor = self._decoded(raw, pull.fragment, self._dtype.bulk)
            self._claim(np.array_equal(delta.numpy(), self._flat(pull.fragment) - anchor), "delta")
        self._outbox[pull.fragment] = (respond, delta)
        self._later(_ENCODE_S, self._serve)

    def _install(self, install: Install) -> None:
        self.exchange.install(install.fragments)
        self.session.installed(install.manifest)
        self._installed = True
        self._claim(install.manifest.step == self._scenario.policy.total_steps, "a cut of another step")
        self._check_final()
        self.tell(f"installs the final cut of step {install.manifest.step}")
        self._later(_ENCODE_S, self._serve)

    def _check_final(self) -> None:
        for fragment, data in enumerate(self._judge.final_bytes()):
            same = self._flat(fragment).tobytes() == data
            self._claim(same, f"fragment {fragment} is not the checkpoint's at the end")

    # ------------------------------------------------------------------ the link

    def _dial(self) -> None:
        if self.session.over or self.connection is not None:
            return
        if self._node.syncer.process is None:
            self._redial()
            return
        self._generation = self._node.fresh_generation()
        connection, hello = self._new_connection(self._generation)
        generation = self._generation
        self.connection = connection
        connection.learner.on_message = lambda message: self._received(generation, message)
        connection.learner.on_closed = lambda reason, error: self._later(0.0, self._lost, generation, reason, error)
        self._outbox.clear()
        self._on_their_way.clear()
        self._adopted.clear()
        self._cut.clear()
        self.session.attached(generation)
        self.tell(f"dials, generation {generation:x}")
        connection.hello(hello, lambda said: self._node.syncer.knock(connection, said))
        for fragment in sorted(self.session.unseen & self._inits.keys()):
            connection.learner.send(messages.InitParams(fragment, self._inits[fragment]))
        self._later(HEARTBEAT_S, self._beat, generation)

    def _new_connection(self, generation: int) -> tuple[Connection, messages.Hello]:
        wire, scenario = self._layout.wire, self._scenario
        if scenario.bytes_level:
            limits = {
                "learner": GroupLimits(wire, self._dtype, Direction.TO_LEARNER),
                "syncer": GroupLimits(wire, self._dtype, Direction.TO_SYNCER, scenario.policy.schedule.pipeline),
            }
            connection: Connection = ByteConnection(
                self._world, scenario.streams, scenario.latency_s, limits, scenario.kernel_bytes
            )
        else:
            connection = Connection(self._world, scenario.streams, scenario.latency_s)
        hello = messages.Hello(
            self._id,
            generation,
            self._dtype,
            wire,
            self._layout.fingerprint,
            CONTRACT,
            None,
            scenario.streams,
        )
        return connection, hello

    def _redial(self) -> None:
        self._later(min(LAST_PAUSE_S, self._pause_s * self._world.rng.uniform(1.0, 1.5)), self._dial)
        self._pause_s = min(LAST_PAUSE_S, 2 * self._pause_s)

    def _beat(self, generation: int) -> None:
        if self.connection is not None and generation == self._generation:
            self.connection.learner.send(messages.Heartbeat(self._id, self.local_step))
            self._later(HEARTBEAT_S, self._beat, generation)

    def _received(self, generation: int, message: messages.Message) -> None:
        if self._ended or generation != self.session.generation:
            return
        try:
            self.session.received(message)
        except PeerError as violation:
            raise SafetyError(f"learner {self._id} finds the syncer in violation: {violation}") from violation
        if isinstance(message, messages.PullReq) and self._node.faults.silly():
            self._clone(message)
        if isinstance(message, messages.FinalFragment | messages.FinalManifest):
            self._cut.add(getattr(message, "fragment", -1))
            if len(self._cut) > len(self._layout):
                self._later(_ACK_S, self._must_have_acked, generation, self._awake_at)
        if isinstance(message, messages.BcastFragment):
            self._inits.pop(message.fragment, None)
            self._pause_s = FIRST_PAUSE_S
        self._wake()

    def _must_have_acked(self, generation: int, awake_at: float) -> None:
        """The whole cut came on this connection some time ago."""
        if self._awake_at > awake_at:  # it was stopped meanwhile
            self._later(_ACK_S, self._must_have_acked, generation, self._awake_at)
        elif self.connection is not None and generation == self._generation:
            self._claim(self._acked_on == generation, "holds the whole cut and does not acknowledge it")

    def _lost(self, generation: int, reason: str, error: str | None) -> None:
        if generation != self._generation or self.connection is None:
            return
        self.tell(f"lost its connection: {reason}")
        if error is not None:
            self.session.refused(error)
        self.session.detached()
        self.connection = None
        if self.session.failure is not None and "the run is ending" in str(self.session.failure):
            self._turned_away()
            return
        self._wake()
        self._redial()

    def _wake(self) -> None:
        self._trainer.wake()
        self._later(_ENCODE_S, self._serve)

    def _serve(self) -> None:
        """Send what is due."""
        if self.connection is None or self.session.generation is None:
            return
        generation, end = self._generation, self.connection.learner
        if (step := self.session.ack_due) is not None:
            self.session.ack_started()
            self._claim(self._installed, "acknowledges a cut it has not installed")
            self.tell(f"acknowledges step {step}")
            self._node.ack_boot, self._acked_on = self._node.boots, generation
            end.send(messages.FinalAck(step), lambda: self._ack_sent(generation))
            self._node.faults.trouble(self._id)
        for fragment in [f for f in self._outbox if f not in self._on_their_way]:
            self._on_their_way.add(fragment)
            self._push(*self._outbox.pop(fragment))

    def _ack_sent(self, generation: int) -> None:
        self.session.ack_sent(generation)
        self._trainer.wake()

    def _push(self, respond: Respond, delta: torch.Tensor | None) -> None:
        pull, generation = respond.pull, self._generation
        if respond.generation != generation or self.connection is None:
            return
        nbytes = self._layout.wire.nbytes(pull.fragment, self._dtype)
        data = bytes(nbytes) if delta is None else bytes(codec.encode(delta, self._dtype))
        push = messages.PushFragment(
            self._id,
            pull.fragment,
            pull.step,
            pull.attempt,
            respond.base_version,
            respond.local_step,
            respond.c_steps,
            respond.c_tokens,
            data,
        )
        self._judge.pushed(self._member, push)
        self.tell(f"answers {pull.step}.{pull.attempt} from version {respond.base_version}")
        deadline = self._judge.deadline_of(pull.step, pull.attempt)
        not_before = self._node.faults.arrival(deadline)
        self.connection.learner.send(push, lambda: self._push_left(generation, pull.fragment), not_before)
        self._last_push = push
        if self._node.faults.silly():
            self._say_silly(self._world.rng.choice(["again", "early", "late", "future"]))
        self._node.faults.trouble(self._id)

    def _clone(self, pull: messages.PullReq) -> None:
        """Another process with our name connects, is current from then on, and answers what only we were asked."""
        connection, hello = self._new_connection(self._node.fresh_generation())
        data = bytes(self._layout.wire.nbytes(pull.fragment, self._dtype))
        push = messages.PushFragment(self._id, pull.fragment, pull.step, pull.attempt, 0, self.local_step, 1, 5, data)
        self._judge.silly.add((self._id, pull.step, pull.attempt))
        self.tell(f"is cloned, generation {hello.generation:x}, which answers {pull.step}.{pull.attempt}")
        connection.hello(hello, lambda said: self._node.syncer.knock(connection, said))
        connection.learner.send(push)
        self._world.after(self._world.rng.uniform(1.0, 3.0), self._end_of_clone, connection)

    def _end_of_clone(self, clone: Connection) -> None:
        """Both lines end: superseded, we should not be asked again on ours."""
        clone.learner.close()
        if self.connection is not None:
            self.connection.cut()

    def _say_silly(self, how: str) -> None:
        """What a strange or confused client may send: it must be rejected, and change nothing."""
        push, rng = self._last_push, self._world.rng
        pieces = self._scenario.bytes_level and self._scenario.slice_bytes < WHOLE
        if push is None or self.connection is None or pieces:  # in pieces, more pushes than lawful would be a violation
            return
        if how == "again":
            numel = self._layout.wire.numels[push.fragment]
            other = codec.encode(torch.full((numel,), 7.0), self._dtype)
            push = replace(push, data=bytes(other), c_tokens=push.c_tokens + 1)
        elif how in ("early", "late"):
            push = replace(push, attempt=max(1, push.attempt + (1 if how == "early" else -1)))
        elif how == "future":
            push = replace(push, base_version=push.base_version + rng.choice([1, 1000]))
        self._judge.silly.add((self._id, push.step, push.attempt))
        self.tell(f"says {push.step}.{push.attempt} once more ({how})")
        end = self.connection.learner
        self._later(rng.choice([0.0, 0.1, 2.0]), end.send, push)

    def _push_left(self, generation: int, fragment: int) -> None:
        if generation == self.session.generation:
            self._on_their_way.discard(fragment)
            self._later(0.0, self._serve)
