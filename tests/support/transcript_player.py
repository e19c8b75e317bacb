"""Conversations with the pure machines, as text files.

A file is a list of exchanges: a command, a line of dashes, and what the machine said, one line each, up to a blank
line. Lines that start with ``#`` are prose. ``play`` runs the commands and returns the text with what the machine says
now; a test compares, ``--rewrite`` stores, and the difference is read in review.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from syncer.core import effects as fx
from syncer.core.events import Member
from tests.support.coordinator_desk import FINGERPRINT, Desk, session_policy, syncer_policy
from yeto_torch.learner.effects import Adopt, Fail, Install, Respond
from yeto_torch.learner.session import Session
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.errors import PeerError
from yeto_torch.wire.messages import BcastFragment, FinalFragment, FinalManifest, PullReq, Shutdown

RULE = "----"


def play(text: str, machine: Syncer | Learner) -> str:
    """The same file with what the machine says now."""
    out: list[str] = []
    skipping = False
    for line in text.splitlines():
        if skipping and line.strip():
            continue
        skipping = False
        if line.strip() == RULE:
            skipping = True
            continue
        out.append(line)
        if line.strip() and not line.startswith("#"):
            name, *words = shlex.split(line)
            plain = [word for word in words if "=" not in word]
            named = {k: _value(v) for k, v in (word.split("=", 1) for word in words if "=" in word)}
            said = list(getattr(machine, "do_" + name.replace("-", "_"))(plain, named))
            out += [RULE, *(f"  {sentence}" for sentence in said or ["nothing"])]
    return "\n".join(out) + "\n"


def _hash(byte: Any) -> bytes:
    """32 times the byte that two hex digits name."""
    return bytes.fromhex(f"{byte:0>2}") * len(FINGERPRINT)


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class Syncer:
    """Commands to a coordinator; every answer is the list of its effects."""

    def __init__(self) -> None:
        self.desk: Desk | None = None

    def _now(self) -> Desk:
        assert self.desk is not None, "the first command must be `run`"
        return self.desk

    def do_run(self, _words: list[str], keys: dict[str, Any]) -> Iterable[str]:
        fragments = keys.pop("fragments", 2)
        contract = _hash(keys.pop("expected_contract")) if "expected_contract" in keys else None
        policy = syncer_policy(**keys, session=session_policy(expected_contract=contract))
        self.desk = Desk(policy, fragments=fragments)
        return [self.desk.coordinator.waiting_for()]

    def do_join(self, words: list[str], keys: dict[str, Any]) -> Iterable[str]:
        generation = keys.pop("generation", 1)
        if "dtype" in keys:
            keys["dtype"] = WireDType[keys["dtype"].upper()]
        for name in ("fingerprint", "contract", "profile"):
            if name in keys:
                keys[name] = _hash(keys[name])
        self._now().join(int(words[0]), generation, **keys)
        return self._said()

    def do_init(self, _words: list[str], _keys: dict[str, Any]) -> Iterable[str]:
        before = len(self._now().orders)
        self._now().init()
        return [show(effect) for effect in self._now().orders[before:]]

    def do_leave(self, words: list[str], keys: dict[str, Any]) -> Iterable[str]:
        learner = int(words[0])
        self._now().leave(Member(learner, keys["generation"]) if "generation" in keys else learner)
        return self._said()

    def do_push(self, words: list[str], keys: dict[str, Any]) -> Iterable[str]:
        learner, step = int(words[0]), keys.pop("step")
        member = Member(learner, keys.pop("generation")) if "generation" in keys else learner
        self._now().push(member, step, **keys)
        return self._said()

    def do_wait(self, words: list[str], _keys: dict[str, Any]) -> Iterable[str]:
        self._now().wait(float(words[0]))
        return self._said()

    def do_ack(self, words: list[str], keys: dict[str, Any]) -> Iterable[str]:
        learner = int(words[0])
        member = Member(learner, keys["generation"]) if "generation" in keys else learner
        self._now().ack(member, keys.get("step"))
        return self._said()

    def do_waiting(self, _words: list[str], _keys: dict[str, Any]) -> Iterable[str]:
        return [self._now().coordinator.waiting_for()]

    def _said(self) -> Iterable[str]:
        return [show(effect) for effect in self._now().new]


class Learner:
    """Commands to a session; parameters are not there, so a broadcast's bytes are a word."""

    def __init__(self) -> None:
        self._session = Session(2)
        self._steps = self._tokens = 0

    def do_attached(self, words: list[str], _keys: dict[str, Any]) -> Iterable[str]:
        self._session.attached(int(words[0]))
        return [self._session.waiting_for()]

    def do_detached(self, _words: list[str], _keys: dict[str, Any]) -> Iterable[str]:
        self._session.detached()
        return [self._session.waiting_for()]

    def do_bcast(self, words: list[str], keys: dict[str, Any]) -> Iterable[str]:
        return self._receive(BcastFragment(int(words[0]), keys["version"], str(keys["bytes"]).encode()))

    def do_pull(self, words: list[str], keys: dict[str, Any]) -> Iterable[str]:
        return self._receive(PullReq(int(words[0]), keys["step"], keys.get("attempt", 1)))

    def do_final(self, words: list[str], keys: dict[str, Any]) -> Iterable[str]:
        return self._receive(FinalFragment(int(words[0]), keys["version"], str(keys["bytes"]).encode()))

    def do_manifest(self, words: list[str], keys: dict[str, Any]) -> Iterable[str]:
        return self._receive(FinalManifest(keys["step"], tuple(map(int, words))))

    def do_shutdown(self, _words: list[str], _keys: dict[str, Any]) -> Iterable[str]:
        return self._receive(Shutdown())

    def do_refused(self, words: list[str], _keys: dict[str, Any]) -> Iterable[str]:
        self._session.refused(" ".join(words))
        return self._do()

    def do_step(self, words: list[str], keys: dict[str, Any]) -> Iterable[str]:
        """So many local steps, then the boundary."""
        count = int(words[0]) if words else 1
        self._steps += count
        self._tokens += count * keys.get("tokens", 1)
        return self._do()

    def do_finish(self, _words: list[str], _keys: dict[str, Any]) -> Iterable[str]:
        self._session.enter_finish()
        return self._do()

    def do_boundary(self, _words: list[str], _keys: dict[str, Any]) -> Iterable[str]:
        return self._do()

    def do_ack_sent(self, words: list[str], _keys: dict[str, Any]) -> Iterable[str]:
        """The link did what was due: the acknowledgement's bytes left on this generation."""
        due = self._session.ack_due
        self._session.ack_started()
        self._session.ack_sent(int(words[0]))
        return [f"FINAL_ACK of step {due}", f"finished {self._session.finished}, phase {self._session.phase.name}"]

    def do_waiting(self, _words: list[str], _keys: dict[str, Any]) -> Iterable[str]:
        return [self._session.waiting_for()]

    def _receive(self, message: Any) -> Iterable[str]:
        try:
            self._session.received(message)
        except PeerError as violation:
            return [f"violation: {violation}"]
        return []

    def _do(self) -> Iterable[str]:
        said = []
        for effect in self._session.boundary(self._steps, self._tokens):
            said.append(show(effect))
            if isinstance(effect, Install):
                self._session.installed(effect.manifest)
        return said


def show(effect: Any) -> str:  # noqa: C901 - one flat table
    """One line for one effect."""
    match effect:
        case fx.SendPull(member, fragment, step, attempt):
            return f"PULL fragment {fragment}, round {step}, attempt {attempt} -> {_who(member)}"
        case fx.Broadcast(fragment, version, members):
            return f"BCAST fragment {fragment}, version {version} -> {', '.join(map(_who, members)) or 'nobody'}"
        case fx.Merge(step, fragment, responses, weights):
            names = ", ".join(f"{_who(r.member)} w {w:g}" for r, w in zip(responses, weights, strict=True))
            return f"merge round {step}, fragment {fragment}: {names}"
        case fx.Record(step, _, line):
            head = f"tape: merge line of round {step}, attempt {line['attempt']}, quorum {line['quorum']}, responded "
            return f"{head}{line['responded']}, missed {line['missed_grace']}, rejected {line['rejected']}"
        case fx.Note(event, noted):
            words = ", ".join(f"{k} {v}" for k, v in noted.items())
            return f"tape: {event}{': ' if words else ''}{words}"
        case fx.Say(text, _):
            return f"log: {text}"
        case fx.Admit(_, member, _):
            return f"admit {_who(member)}"
        case fx.RefuseHello(_, text):
            return f"ERROR: {text}"
        case fx.Expel(member, text):
            return f"ERROR -> {_who(member)}, and close: {text}"
        case fx.SendCut(member, step, versions):
            return f"final cut of step {step}, versions {versions} -> {_who(member)}"
        case fx.SendShutdown(member):
            return f"SHUTDOWN -> {_who(member)}"
        case Adopt(fragment, version, data, write, back):
            note = f", set back from version {back}" if back is not None else ""
            return f"adopt fragment {fragment}, version {version} ({bytes(data).decode()}): {write.name.lower()}{note}"
        case Respond(pull, _, base, anchor, local_step, c_steps, c_tokens, zero):
            what = "zeros" if zero else f"local - {bytes(anchor).decode()}"
            return (
                f"push fragment {pull.fragment}, round {pull.step}, attempt {pull.attempt}: {what}, base {base}, "
                f"local step {local_step}, {c_steps} steps, {c_tokens} tokens"
            )
        case Install(manifest, data):
            return f"install the cut of step {manifest.step}: {', '.join(bytes(d).decode() for d in data)}"
        case Fail(error):
            return f"raise {type(error).__name__}: {error}"
    assert is_dataclass(effect)
    words = ", ".join(f"{f.name} {getattr(effect, f.name)}" for f in fields(effect) if getattr(effect, f.name) != "")
    return f"{type(effect).__name__}{': ' if words else ''}{words}"


def _who(member: Member) -> str:
    return f"{member.learner_id}.{member.generation}"
