"""The experiment as it happens: learners, the cut-off process, the consolidation process on the same endpoint.

Decides when what is started and when going on makes no sense. Whether it was a valid experiment is judged afterwards,
from what it left behind (``verdict``).

    start the cut-off syncer -> once it listens, the learners -> it ends with 0
    -> read C and F from its checkpoint -> start the consolidation syncer, at C, to C + F -> it and all learners end

    what ends                                    | then
    ---------------------------------------------|------------------------------------------------------------
    a syncer, not with 0                         | the learners are stopped
    a learner before its turn, or not with 0     | the syncer has ``_LAST_WORD_S`` to say why, then all is stopped
    the consolidation syncer, with 0             | the learners finish their own work
    we, by a signal                              | all is stopped; a second signal kills at once

A learner's turn to end comes once the consolidation has frozen its final membership.

Source: v4 §Budget (two processes on one endpoint, F ordinary rounds from the cut-off checkpoint).
"""

from __future__ import annotations

import json
import random
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from syncer.benchmark.config import ENDLESS, BenchmarkPlan
from syncer.benchmark.files import Folder
from syncer.benchmark.processes import LoggedChild, LoggedChildren
from syncer.benchmark.verdict import Arms, Evidence, Process, Saved
from yeto_torch.launcher.processes import Exited, Signalled, python_environment
from yeto_torch.wire.errors import RunError

_LAST_WORD_S = 5.0
_LOOK_EVERY_S = 0.05  # for the address file
_TELL_EVERY_S = 10.0
_TAIL_LINES = 20
_LOG_HEAD = re.compile(r"^\d\d:\d\d:\d\d [A-Z]+ ")
_MEANT_OTHERWISE = ("null", "true", "false", "nan", "inf")
_PORTS = range(20_000, 30_000)

Say = Callable[[str], None]


class InterruptedExperimentError(RunError):
    """A signal has ended it; nothing runs any more."""


class Experiment:
    """One experiment of ``plan``.

    Args:
        run_id: names it, so that no other experiment's checkpoint could be continued.
        children: started processes, watched.
        say: takes a line for the user.
    """

    def __init__(self, plan: BenchmarkPlan, run_id: str, children: LoggedChildren, say: Say) -> None:
        self._plan, self._run_id, self._children, self._say = plan, run_id, children, say
        self.folder = Folder(plan.folder)
        self._port = plan.port or free_port(plan.host)
        self._learners: list[LoggedChild] = []
        self._fleet: dict[int, Process] = {}
        self._syncer: LoggedChild | None = None
        self._stopping = False
        self._give_up_at: float | None = None

    def conduct(self) -> Evidence:
        """Run it to its end, whatever that is. Raises InterruptedExperimentError."""
        evidence = Evidence(self._plan.learners, self._plan.budget_steps)
        evidence = replace(evidence, first=self._cutoff())
        if evidence.first.code == 0:
            evidence = replace(evidence, cut=self.folder.read_saved())
            if isinstance(evidence.cut, Saved) and not self._fleet:
                evidence = replace(evidence, second=self._consolidation(evidence.cut))
        self._stop()
        if self._children.interrupted:
            raise InterruptedExperimentError("interrupted")
        return replace(
            evidence,
            fleet=tuple(self._fleet.get(learner, Process()) for learner in range(self._plan.learners)),
            final=self.folder.read_saved() if evidence.second.code == 0 else "not written",
            tape=self.folder.read_tape(),
        )

    def compare(self) -> Arms:
        """Train the synchronous arm of the default learner's task; what it and the fleet came to (``demos.arms``).

        Raises RunError when it fails, InterruptedExperimentError.
        """
        plan, folder = self._plan, self.folder
        self._say("synchronous arm: equal samples, alone on this machine")
        argv = [sys.executable, "-m", "yeto_torch.demos.arms", *_task(plan.options)]
        argv += [f"--learners={plan.learners}", f"--steps={plan.budget_steps}"]
        argv += [f"--run-dir={folder.path}", f"--output={folder.arms}"]
        arm = self._children.start_logged("synchronous arm", argv, python_environment(), folder.log("synchronous arm"))
        while arm.code is None:
            self._take_event(None)
        if arm.code:
            raise RunError(f"the synchronous arm ended with exit code {arm.code}: {arm.last_line}; log {arm.log}")
        arms: Arms = json.loads(folder.arms.read_text(encoding="utf-8"))
        return arms

    def last_words(self) -> list[str]:
        """The end of what the first failed child said, under its name; nothing if none has failed."""
        failed = [*(self._learners[i] for i, p in self._fleet.items() if p.code), self._syncer]
        child = next((child for child in failed if child is not None and child.code), None)
        if child is None or (self._stopping and child is self._syncer):
            return []
        return [f"the last lines of {child.name} ({child.log}):", *child.last_lines(_TAIL_LINES)]

    # ------------------------------------------------------------------------------------------ the two processes

    def _cutoff(self) -> Process:
        plan = self._plan
        syncer = self._start_syncer("cut-off", {"total_steps": ENDLESS, "budget.learner_steps": plan.budget_steps})
        while syncer.code is None and not self.folder.address.exists():
            self._take_event(_LOOK_EVERY_S)
        if syncer.code is None:
            address = self.folder.address.read_text(encoding="utf-8").strip()
            for learner in range(plan.learners):
                self._start_learner(learner, address)
            self._say(
                f"cut-off process on {address}: {plan.learners} learners of {plan.budget_steps} local steps; "
                f"logs in {plan.folder}"
            )
            self._attend(syncer, lambda: syncer.code is not None)
        while self._children.alive and self._take_event(0):
            continue  # who has ended up to now
        early = " before the cut-off checkpoint was written" if syncer.code else " between the two processes"
        self._fleet = {learner: replace(process, early=early) for learner, process in self._fleet.items()}
        return self._ended(syncer)

    def _consolidation(self, cut: Saved) -> Process:
        last = cut.step + cut.fragments
        self._say(f"cut-off checkpoint at step C = {cut.step}; consolidation: rounds {cut.step + 1} to {last}")
        keys = {"total_steps": last, "schedule.quorum": self._plan.learners}
        keys |= {"checkpoint.resume": True, "checkpoint.mark_final": True}
        syncer = self._start_syncer("consolidation", keys)
        self._attend(syncer, lambda: syncer.code is not None)
        if syncer.code == 0:
            self._attend(syncer, lambda: not self._children.alive)
        return self._ended(syncer)

    def _ended(self, syncer: LoggedChild) -> Process:
        if syncer.code == 0:
            return Process(0)
        if self._stopping:  # it had to be ended: why is known already
            return Process()
        return Process(syncer.code, self.folder.end_reason() or _LOG_HEAD.sub("", syncer.last_line))

    # ------------------------------------------------------------------------------------------ events

    def _attend(self, syncer: LoggedChild, done: Callable[[], bool]) -> None:
        """Take events until ``done()``, or until going on makes no sense: then everything is stopped.

        Meanwhile the user is told what the syncer says.
        """
        told, tell_at = "", time.monotonic() + _TELL_EVERY_S
        while not done():
            now = time.monotonic()
            if self._give_up_at is not None and now >= self._give_up_at:
                self._stop()
                return
            if now >= tell_at:
                tell_at = now + _TELL_EVERY_S
                text = f"{syncer.name}: {_LOG_HEAD.sub('', syncer.last_line)}"
                if text != told:
                    self._say(text)
                told = text
            self._take_event(min(tell_at, self._give_up_at or tell_at) - now)

    def _take_event(self, timeout_s: float | None) -> bool:
        """Take one event, if there is one in time."""
        event = self._children.next_event(timeout_s)
        match event:
            case Signalled():
                self._say("interrupted: stopping the syncer and the learners")
                self._stop()
                raise InterruptedExperimentError("interrupted")
            case Exited(child, code) if child in self._learners:
                self._learner_ended(self._learners.index(child), code)
        return event is not None

    def _learner_ended(self, learner: int, code: int) -> None:
        in_turn = self._syncer is not None and self._syncer.name == "consolidation" and self.folder.is_finalizing()
        self._fleet[learner] = Process(code, early="" if in_turn else " before the final cut")
        if (code or not in_turn) and self._give_up_at is None:
            self._give_up_at = time.monotonic() + _LAST_WORD_S

    def _stop(self) -> None:
        if self._children.alive:
            self._stopping = True
            self._children.stop(self._plan.stop_grace_s)

    # ------------------------------------------------------------------------------------------ children

    def _start_syncer(self, name: str, keys: Mapping[str, object]) -> LoggedChild:
        folder = self.folder
        own = {
            "listen.port": self._port,
            "listen.address_file": folder.address,
            "checkpoint.path": folder.checkpoint,
            "tape.path": folder.tape,
            "progress": "off",
        }
        values = {**self._plan.syncer, **own, **keys}
        argv = [sys.executable, "-m", "syncer", *(override(key, value) for key, value in values.items())]
        folder.address.unlink(missing_ok=True)
        self._syncer = self._children.start_logged(name, argv, python_environment(), folder.log(name))
        return self._syncer

    def _start_learner(self, learner: int, address: str) -> None:
        plan = self._plan
        env = python_environment(sharing=plan.learners) | {
            "YETO_SYNCER": address,
            "YETO_LEARNER_ID": str(learner),
            "YETO_LEARNERS": str(plan.learners),
            "YETO_RUN_ID": self._run_id,
            "YETO_RUN_DIR": str(plan.folder),
            "YETO_BUDGET_STEPS": str(plan.budget_steps),
            **plan.secrets,
        }
        name = f"learner {learner}"
        argv = [sys.executable, *(plan.command or default_learner(plan.options))]
        self._learners.append(self._children.start_logged(name, argv, env, self.folder.log(name)))


def default_learner(options: Mapping[str, object]) -> tuple[str, ...]:
    """The arguments of Python for a learner of the demonstration."""
    layout = {name: options[name] for name in ("fragments", "matrix_merge", "average", "wire_dtype", "streams")}
    words = (f"--{name.replace('_', '-')}={value}" for name, value in layout.items() if value is not None)
    return ("-m", "yeto_torch.demos.learner", *_task(options), *words)


def _task(options: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(f"--{name}={options[name]}" for name in ("task", "split", "seed"))


def override(key: str, value: object) -> str:
    """``key=value`` as Hydra's grammar reads it back, whatever the value holds."""
    return f"{key}={_written(value)}"


def _written(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return "[" + ",".join(_written(item) for item in value) + "]"
        case str() | Path():
            text = str(value)
            plain = re.fullmatch(r"[A-Za-z_/][A-Za-z0-9_./:-]*", text) and text.lower() not in _MEANT_OTHERWISE
            return text if plain else _quoted(text)
        case _:
            return str(value)


def _quoted(text: str) -> str:
    """Backslashes count only before an interpolation, before a quote and at the end."""
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return "'" + re.sub(r"(\\+)$", r"\1\1", text) + "'"


def free_port(host: str) -> int:
    """A port of ours for both processes. Raises RunError.

    It lies below the range from which systems take the ports of outgoing connections: while nobody listens, a learner
    that redials must neither take it nor, by chance, reach itself on it.
    """
    for port in random.sample(_PORTS, 100):
        try:
            info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            socket.create_server(info[4][:2], family=info[0]).close()
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return port
    raise RunError(f"cannot listen on {host}: {reason}; choose another listen.host")
