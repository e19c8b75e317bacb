"""A local fleet: one syncer and N learners as child processes, and what the end of one means for the others.

The launcher and the demonstration both run on this. The syncer is started as a process: this module must not import it.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from yeto_torch.launcher.launch import Launch, visible_gpus
from yeto_torch.launcher.learner_processes import LearnerProcesses
from yeto_torch.launcher.processes import Child, Children, Event, Exited, Line, Signalled, leashed

INTERRUPTED = 130
IDLE_SYNCER_S = 15.0  # a syncer whose learners all ended well has only its marker left to write
_LISTENING = re.compile(r"syncer listening on (\S+:\d+)\s*$")
_JOINED = re.compile(r"learner (\d+) \(generation \w+\) joined$")
_TRACEBACK = "Traceback (most recent call last):"
_RANK = re.compile(r"^\[rank\d+\]: ")  # torch.distributed puts it before each line of a rank's traceback


@dataclass(frozen=True, slots=True)
class Failure:
    """The first thing that went wrong: which child, its exit code, and the end of its output."""

    name: str
    code: int
    tail: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended. ``code`` is 0 only if the syncer completed and no learner failed for good."""

    code: int
    failure: Failure | None = None
    note: str = ""


Output = Callable[[str, str], None]  # child's name, one line


@dataclass
class Fleet:
    """The policy of one launch.

    | what ends | then |
    |---|---|
    | syncer, code 0 | the learners finish their own work; one that had not joined yet is stopped: it came too late |
    | syncer, else | it is the failure; the learners are stopped |
    | learner, code 0 | the others go on |
    | one rank of a learner, code 0 | its other ranks go on |
    | one rank of a learner, else | its other ranks are ended by SIGTERM, SIGKILL after ``grace_s``; then as below |
    | learner, else | started again while it may be; then it is the failure, and the others go on |
    | the last learner, having failed | the syncer is stopped: nobody is left to train |
    | the last learner, code 0 | the syncer has ``IDLE_SYNCER_S`` to end by itself |
    | a signal to us | SIGINT to all, SIGKILL after ``grace_s``; a second signal kills at once |
    | we, killed | on Linux SIGTERM to all: else a second launch would meet the first one's syncer in its folder |
    """

    launch: Launch
    run_id: str
    output: Output
    note: Callable[[str], None]
    children: Children = field(default_factory=Children)
    _syncer: Child | None = None
    _learners: list[LearnerProcesses] = field(default_factory=list)  # the learners that live
    _joined: set[LearnerProcesses] = field(default_factory=set)
    _too_late: set[LearnerProcesses] = field(default_factory=set)
    _starts: dict[int, int] = field(default_factory=dict)
    _address: str = ""
    _held_back: dict[Child, list[str]] = field(default_factory=dict)
    _failure: Failure | None = None
    _code: int | None = None  # decided, whatever the children still do
    _note: str = ""
    _interrupted: bool = False
    _stopping: bool = False
    _deadline: float | None = None  # until then those that were told to must have ended
    _idle_deadline: float | None = None

    def run(self, tick: Callable[[], None] | None = None, every_s: float = 0.25) -> Outcome:
        """Start the syncer, then the learners; return when every child has ended. ``tick`` is called between events."""
        self.launch.folder.address.unlink(missing_ok=True)  # of an earlier launch in this folder
        with self.children.signals():
            try:
                self._start_syncer()
                while self.children.alive:
                    event = self.children.next_event(self._timeout(every_s if tick else None))
                    if event is not None:
                        self._handle(event)
                    self._on_time(time.monotonic())
                    if tick:
                        tick()
            finally:
                self.children.kill()
        return self._outcome()

    def _outcome(self) -> Outcome:
        if self._interrupted:
            return Outcome(INTERRUPTED, note="interrupted")
        if self._failure is not None:
            return Outcome(self._failure.code, self._failure, self._note)
        return Outcome(self._code or 0, note=self._note)

    # what happened

    def _handle(self, event: Event) -> None:
        match event:
            case Line(child, text):
                self._line(child, text)
            case Exited(child, code) if child is self._syncer:
                self._syncer_ended(child, code)
            case Exited(child, code):
                self._flush(child)
                self._rank_ended(self._learner_of(child), child, code)
            case Signalled():
                if self._interrupted:
                    self._kill()
                self._interrupted = True
                self._stop("stopping: the syncer saves its state")

    def _line(self, child: Child, text: str) -> None:
        if child is self._syncer:
            self.output(child.name, text)
            if not self._starts and not self._stopping and (found := _LISTENING.search(text)):
                for learner_id in range(self.launch.learners):
                    self._start_learner(learner_id, found[1])
            elif found := _JOINED.search(text):
                self._joined.update(learner for learner in self._learners if learner.id == int(found[1]))
        elif child in self._held_back or (self._told_to_end(child) and _begins_traceback(text)):
            self._held_back.setdefault(child, []).append(text)
        else:
            self.output(child.name, text)

    def _flush(self, child: Child) -> None:
        """Show what a stopped learner said last, unless it is only the traceback of having been interrupted."""
        held = self._held_back.pop(child, [])
        last = next((text for text in reversed(held) if text.strip()), "")
        if not _RANK.sub("", last).startswith("KeyboardInterrupt"):
            for text in held:
                self.output(child.name, text)

    def _syncer_ended(self, child: Child, code: int) -> None:
        self._idle_deadline = None
        if self._stopping:
            return
        if code != 0:
            self._fail(child, code)
            self._stop("the syncer has ended; stopping the learners")
        elif not self._starts:
            self._code, self._note = 1, "the syncer ended before it listened"
        else:
            self._too_late = set(self._learners) - self._joined
            for late in self._too_late:
                self.note(f"the run was complete before {late.name} had joined; stopping it")
                self._tell(late.living, signal.SIGINT)

    def _rank_ended(self, learner: LearnerProcesses, child: Child, code: int) -> None:
        is_told = self._is_leaving(learner)
        is_first = learner.ended(child, code)
        if is_first and learner.living and not is_told:
            self.note(f"{child.name} ended with exit code {code}; ending the other ranks of {learner.name}")
            self._tell(learner.living, signal.SIGTERM)
        if not learner.living:
            self._learners.remove(learner)
            if not is_told:
                self._learner_ended(learner)

    def _learner_ended(self, learner: LearnerProcesses) -> None:
        syncer_lives = self._syncer is not None and self._syncer.code is None
        if learner.failure is not None:
            child, code = learner.failure
            if syncer_lives and self._starts[learner.id] <= self.launch.max_restarts:
                self.note(f"{learner.name} ended with exit code {code}; starting it again")
                self._start_learner(learner.id, self._address)
                return
            self.note(f"{learner.name} failed with exit code {code}" + ("; the others go on" if self._learners else ""))
            self._fail(child, code)
        if not self._learners and syncer_lives:
            if learner.failure is not None:
                self._stop("no learner is left; stopping the syncer")
            else:
                self._idle_deadline = time.monotonic() + IDLE_SYNCER_S

    def _fail(self, child: Child, code: int) -> None:
        if self._failure is None:
            self._failure = Failure(child.name, code, _end_of(list(child.tail)))

    # what must be done

    def _learner_of(self, child: Child) -> LearnerProcesses:
        return next(learner for learner in self._learners if child in learner.living)

    def _is_leaving(self, learner: LearnerProcesses) -> bool:
        """Was it told to, by us or by a signal to us, so that its exit codes mean nothing?"""
        return self._stopping or learner in self._too_late

    def _told_to_end(self, child: Child) -> bool:
        if child.code is not None:  # it has ended: these are words of something that it left behind
            return False
        if self._stopping or child is self._syncer:
            return self._stopping
        learner = self._learner_of(child)
        return self._is_leaving(learner) or learner.failure is not None

    def _stop(self, why: str) -> None:
        if self._stopping:
            return
        self._stopping = True
        if self.children.alive:
            self.note(why)
        self._tell(self.children.alive, signal.SIGINT)

    def _tell(self, children: Collection[Child], signum: int) -> None:
        for child in children:
            child.signal(signum)
        if children:
            self._deadline = time.monotonic() + self.launch.grace_s

    def _kill(self) -> None:
        for child in self.children.alive:
            if self._told_to_end(child):
                child.signal(signal.SIGKILL)

    def _on_time(self, now: float) -> None:
        if self._deadline is not None and now >= self._deadline:
            self._kill()
            self._deadline = None
        if self._idle_deadline is not None and now >= self._idle_deadline:
            self._idle_deadline = None
            if self._failure is None:
                self._code = 1
                self._note = (
                    "every learner has ended, but the syncer was still waiting for steps: the run is not complete (a "
                    "loop that may end first calls optimizer.finish())"
                )
            self._stop("no learner is left; stopping the syncer")

    def _timeout(self, every_s: float | None) -> float | None:
        due = [d - time.monotonic() for d in (self._deadline, self._idle_deadline) if d is not None]
        return min([*due, every_s] if every_s is not None else due, default=None)

    # children

    def _start_syncer(self) -> None:
        env = self.launch.environment(self.run_id)
        self._syncer = self.children.start("syncer", leashed(self.launch.syncer_command()), env)

    def _start_learner(self, learner_id: int, address: str) -> None:
        self._address = address
        attempt = self._starts.get(learner_id, 0)
        self._starts[learner_id] = attempt + 1
        learner = LearnerProcesses(learner_id, self.launch.nproc_per_learner, attempt, self.run_id)
        self._learners.append(learner)
        env = self.launch.environment(self.run_id) | {"YETO_SYNCER": address, "YETO_LEARNER_ID": str(learner_id)}
        env |= self.launch.gpus_of(learner_id, visible_gpus())
        for rank in range(learner.size):
            command = leashed([sys.executable, *self.launch.command])
            learner.living.add(self.children.start(learner.name_of(rank), command, env | learner.environment(rank)))


def _begins_traceback(text: str) -> bool:
    return _RANK.sub("", text).startswith(_TRACEBACK)


def _end_of(tail: list[str]) -> tuple[str, ...]:
    """The part of a child's last lines worth repeating: from its first traceback on, or the last twenty."""
    for index, text in enumerate(tail):
        if _begins_traceback(text):
            return tuple(tail[index:])
    return tuple(tail[-20:])


def start(
    launch: Launch, output: Output, note: Callable[[str], None], tick: Callable[[], None] | None = None
) -> Outcome:
    """Hold the run folder, run the fleet in it, and say how it ended.

    Raises RunError when another launcher works in the folder, OSError when it cannot be written.
    """
    with launch.folder.held() as run_id:
        return Fleet(launch, run_id, output, note).run(tick)
