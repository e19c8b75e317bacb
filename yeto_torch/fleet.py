"""A local fleet: one syncer and N learners as child processes, and what the end of one means for the others.

The launcher and the demonstration both run on this. The syncer is started as a process: this module must not import it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from yeto_torch.crew import Crew
from yeto_torch.folder import RunFolder
from yeto_torch.processes import Child, Children, Event, Exited, Line, Signalled

INTERRUPTED = 130
IDLE_SYNCER_S = 15.0  # a syncer whose learners all ended well has only its marker left to write
_LISTENING = re.compile(r"syncer listening on (\S+:\d+)\s*$")
_JOINED = re.compile(r"learner (\d+) \(generation \w+\) joined$")
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True, slots=True)
class Secrets:
    """Files that protect the fleet, as the syncer's keys and as the learners' environment."""

    hmac_key: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None

    @property
    def keys(self) -> dict[str, str]:
        """For the syncer."""
        files = {"hmac_key_file": self.hmac_key, "tls_cert": self.tls_cert, "tls_key": self.tls_key}
        return {f"security.{name}": str(path) for name, path in files.items() if path is not None}

    @property
    def environment(self) -> dict[str, str]:
        """For the learners; a certificate that nobody else has signed is its own authority."""
        files = {"YETO_HMAC_KEY_FILE": self.hmac_key, "YETO_TLS_CA": self.tls_ca or self.tls_cert}
        return {name: str(path) for name, path in files.items() if path is not None}


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start.

    Attributes:
        folder: where everything of the run lies.
        learners: how many learners, ids 0 to learners - 1.
        command: what to give the Python interpreter for one learner: a script or ``-m module``, and its arguments.
        nproc_per_learner: how many rank processes a learner is.
        overrides: ``key=value`` for the syncer; they win over the launcher's own.
        max_restarts: how often each learner may be started again after it failed.
        grace_s: how long an interrupted child may take to end before it is killed.
        secrets: what the fleet is protected with.
    """

    folder: RunFolder
    learners: int
    command: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    max_restarts: int = 0
    grace_s: float = 30.0
    secrets: Secrets = Secrets()
    nproc_per_learner: int = 1

    def syncer_command(self) -> list[str]:
        """``python -m syncer`` with the run folder's files, under the user's own keys."""
        own = {
            "listen.port": "0",
            "checkpoint.path": str(self.folder.checkpoint),
            "checkpoint.mark_final": "true",
            "checkpoint.resume": "auto",
            "tape.path": str(self.folder.tape),
            "final.state_path": str(self.folder.state),
            "final.layout_path": str(self.folder.layout),
            "progress": "off",
        }
        chosen = {key_of(override) for override in self.overrides}
        keys = {"learners": str(self.learners), "listen.address_file": str(self.folder.address)}
        keys |= {key: value for key, value in (own | self.secrets.keys).items() if key not in chosen}
        return [sys.executable, "-m", "syncer", *(f"{k}={_quoted(v)}" for k, v in keys.items()), *self.overrides]

    def environment(self, run_id: str) -> dict[str, str]:
        """What every child gets on top of our own environment."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        env = {
            "OMP_NUM_THREADS": str(max(1, cores // (self.learners * self.nproc_per_learner))),  # they share the cores
            "PYTHONFAULTHANDLER": "1",  # a crash in native code has a traceback too
        }
        env |= os.environ
        env |= {
            "PYTHONUNBUFFERED": "1",
            "YETO_LEARNERS": str(self.learners),
            "YETO_RUN_ID": run_id,
            "YETO_RUN_DIR": str(self.folder.path),
            **self.secrets.environment,
        }
        source = Path(__file__).resolve().parent.parent
        if source.name not in ("site-packages", "dist-packages"):  # a checkout, which need not be installed
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(source), env.get("PYTHONPATH"))))
        return env


def key_of(override: str) -> str:
    """The key of one Hydra override."""
    return override.lstrip("+~").partition("=")[0]


def _quoted(value: str) -> str:
    """A value that Hydra's override grammar takes as it is: spaces and brackets included, no letter but ASCII is plain.

    Backslashes count only before an interpolation, before a quote and at the end.
    """
    if re.fullmatch(r"[A-Za-z0-9_./:-]*", value):
        return value
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    value = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return "'" + re.sub(r"(\\+)$", r"\1\1", value) + "'"


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
    """

    launch: Launch
    run_id: str
    output: Output
    note: Callable[[str], None]
    children: Children = field(default_factory=Children)
    _syncer: Child | None = None
    _crews: list[Crew] = field(default_factory=list)  # the learners that live
    _joined: set[Crew] = field(default_factory=set)
    _too_late: set[Crew] = field(default_factory=set)
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
                self._rank_ended(self._crew_of(child), child, code)
            case Signalled():
                if self._interrupted:
                    self._kill()
                self._interrupted = True
                self._stop("stopping: the syncer saves its state")

    def _line(self, child: Child, text: str) -> None:
        if child is self._syncer:
            self.output(child.name, text)
            if not self._starts and not self._stopping and (found := _LISTENING.search(text)):
                for learner in range(self.launch.learners):
                    self._start_learner(learner, found[1])
            elif found := _JOINED.search(text):
                self._joined.update(crew for crew in self._crews if crew.learner == int(found[1]))
        elif child in self._held_back or (self._told_to_end(child) and text.startswith(_TRACEBACK)):
            self._held_back.setdefault(child, []).append(text)
        else:
            self.output(child.name, text)

    def _flush(self, child: Child) -> None:
        """Show what a stopped learner said last, unless it is only the traceback of having been interrupted."""
        held = self._held_back.pop(child, [])
        last = next((text for text in reversed(held) if text.strip()), "")
        if not last.startswith("KeyboardInterrupt"):
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
            self._too_late = set(self._crews) - self._joined
            for late in self._too_late:
                self.note(f"the run was complete before {late.name} had joined; stopping it")
                self._tell(late.living, signal.SIGINT)

    def _rank_ended(self, crew: Crew, child: Child, code: int) -> None:
        is_told = self._is_leaving(crew)
        is_first = crew.ended(child, code)
        if is_first and crew.living and not is_told:
            self.note(f"{child.name} ended with exit code {code}; ending the other ranks of {crew.name}")
            self._tell(crew.living, signal.SIGTERM)
        if not crew.living:
            self._crews.remove(crew)
            if not is_told:
                self._learner_ended(crew)

    def _learner_ended(self, crew: Crew) -> None:
        syncer_lives = self._syncer is not None and self._syncer.code is None
        if crew.failure is not None:
            child, code = crew.failure
            if syncer_lives and self._starts[crew.learner] <= self.launch.max_restarts:
                self.note(f"{crew.name} ended with exit code {code}; starting it again")
                self._start_learner(crew.learner, self._address)
                return
            self.note(f"{crew.name} failed with exit code {code}" + ("; the others go on" if self._crews else ""))
            self._fail(child, code)
        if not self._crews and syncer_lives:
            if crew.failure is not None:
                self._stop("no learner is left; stopping the syncer")
            else:
                self._idle_deadline = time.monotonic() + IDLE_SYNCER_S

    def _fail(self, child: Child, code: int) -> None:
        if self._failure is None:
            self._failure = Failure(child.name, code, _end_of(list(child.tail)))

    # what must be done

    def _crew_of(self, child: Child) -> Crew:
        return next(crew for crew in self._crews if child in crew.living)

    def _is_leaving(self, crew: Crew) -> bool:
        """Was it told to, by us or by a signal to us, so that its exit codes mean nothing?"""
        return self._stopping or crew in self._too_late

    def _told_to_end(self, child: Child) -> bool:
        if self._stopping or child is self._syncer:
            return self._stopping
        crew = self._crew_of(child)
        return self._is_leaving(crew) or crew.failure is not None

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
                    "every learner has ended, but the syncer was still waiting for steps: the run is not complete"
                )
            self._stop("no learner is left; stopping the syncer")

    def _timeout(self, every_s: float | None) -> float | None:
        due = [d - time.monotonic() for d in (self._deadline, self._idle_deadline) if d is not None]
        return min([*due, every_s] if every_s is not None else due, default=None)

    # children

    def _start_syncer(self) -> None:
        env = self.launch.environment(self.run_id)
        self._syncer = self.children.start("syncer", self.launch.syncer_command(), env)

    def _start_learner(self, learner: int, address: str) -> None:
        self._address = address
        self._starts[learner] = self._starts.get(learner, 0) + 1
        crew = Crew(learner, self.launch.nproc_per_learner, self._starts[learner] - 1, self.run_id)
        self._crews.append(crew)
        env = self.launch.environment(self.run_id) | {"YETO_SYNCER": address, "YETO_LEARNER_ID": str(learner)}
        for rank in range(crew.size):
            command = [sys.executable, *self.launch.command]
            crew.living.add(self.children.start(crew.name_of(rank), command, env | crew.environment(rank)))


def _end_of(tail: list[str]) -> tuple[str, ...]:
    """The part of a child's last lines worth repeating: from its first traceback on, or the last twenty."""
    for index, text in enumerate(tail):
        if text.startswith(_TRACEBACK):
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
