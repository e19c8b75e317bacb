"""May this HELLO enter?

The first HELLO that passes every check pins the session identity for the life of the process; every later one must
match it exactly. A refusal is a value with one sentence, sent back as ERROR to that socket only; it pins nothing and
disturbs nobody. The HELLO has been parsed and range-checked before it comes here.

    checks, in order: profile, expected contract, resume (what only a HELLO can decide), pinned identity,
    (learner, generation) never admitted before

Only the newest ``_GENERATIONS`` of a learner are remembered, so that redialling for months costs no more than a MiB.

Source: v4 §Versions and admission (the first accepted HELLO fixes the session, every later one must match it exactly),
v4 §Contract and profile (a mismatch, and with require_profile_binding an omitted hash, is refused); rulings §2.3, §2.4,
§2.8.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from syncer.config.policy import SessionPolicy
from syncer.core.events import Member
from syncer.core.ledger import LedgerRow
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.layout import WireLayout
from yeto_torch.wire.messages import Hello

_GENERATIONS = 16_384  # at the fastest pace of redialling, of the last four hours

ResumeCheck = Callable[[WireLayout, bytes, bytes], str | None]
"""(layout, fingerprint, contract) -> why the checkpoint may not continue under this HELLO, or None."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What a checkpoint brings: its step, its ledger rows, and the check that only a HELLO can complete."""

    step: int
    ledger: tuple[LedgerRow, ...]
    check: ResumeCheck


@dataclass(frozen=True, slots=True)
class Identity:
    """What every HELLO of one session must repeat."""

    dtype: WireDType
    layout: WireLayout
    fingerprint: bytes
    contract: bytes
    profile: bytes | None

    @staticmethod
    def of(hello: Hello) -> Identity:
        return Identity(hello.dtype, hello.layout, hello.fingerprint, hello.contract, hello.profile)


class Admission:
    """Decides on HELLOs and remembers the generations it let in."""

    def __init__(self, policy: SessionPolicy, profile: bytes, resume_check: ResumeCheck | None = None) -> None:
        self._policy, self._profile, self._resume_check = policy, profile, resume_check
        # Per learner its newest generations, oldest first.
        self._admitted: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
        self.identity: Identity | None = None

    def decide(self, hello: Hello) -> str | None:
        """None: admitted, and the identity pinned if it was the first. Else the sentence why not."""
        refusal = self._profile_refusal(hello) or self._contract_refusal(hello) or self._resume_refusal(hello)
        refusal = refusal or self._identity_refusal(hello)
        admitted = self._admitted[hello.learner_id]
        if refusal is None and hello.generation in admitted:
            member = Member(hello.learner_id, hello.generation)
            refusal = f"{member} was admitted before: every connection needs a fresh generation"
        if refusal is None:
            if len(admitted) == _GENERATIONS:
                admitted.popitem(last=False)
            admitted[hello.generation] = None
            self.identity = self.identity or Identity.of(hello)
        return refusal

    def _profile_refusal(self, hello: Hello) -> str | None:
        if hello.profile is None:
            if self._policy.require_profile_binding:
                return (
                    f"this syncer requires profile binding and the HELLO carries no profile: give the learner "
                    f"profile=, the configuration whose hash is {_short(self._profile)}"
                )
        elif hello.profile != self._profile:
            return (
                f"profile mismatch: the learner is bound to {_short(hello.profile)}, this syncer's configuration is "
                f"{_short(self._profile)} (or the learner signs with an hmac_key that this syncer does not have)"
            )
        return None

    def _contract_refusal(self, hello: Hello) -> str | None:
        expected = self._policy.expected_contract
        if expected is not None and hello.contract != expected:
            return f"contract mismatch: the learner's run is {_short(hello.contract)}, expected is {_short(expected)}"
        return None

    def _resume_refusal(self, hello: Hello) -> str | None:
        if self._resume_check is None or self.identity is not None:
            return None
        return self._resume_check(hello.layout, hello.fingerprint, hello.contract)

    def _identity_refusal(self, hello: Hello) -> str | None:
        pinned = self.identity
        if pinned is None or pinned == Identity.of(hello):
            return None
        if hello.contract != pinned.contract and hello.fingerprint == pinned.fingerprint:
            return (
                f"another run: contract {_short(hello.contract)}, this session is {_short(pinned.contract)}; "
                "learners of one run have one run_id (YETO_RUN_ID)"
            )
        if hello.dtype != pinned.dtype:
            return f"wire dtype {hello.dtype.name.lower()}, this session uses {pinned.dtype.name.lower()}"
        if hello.layout != pinned.layout:
            same_size = sum(hello.layout.numels) == sum(pinned.layout.numels)
            cure = "; give all of them the same fragments, pattern, matrix_merge and average" if same_size else ""
            return (
                f"another model: {sum(hello.layout.numels)} values in {_fragments(hello.layout)}, this session has "
                f"{sum(pinned.layout.numels)} in {_fragments(pinned.layout)} (fingerprint {_short(hello.fingerprint)}, "
                f"contract {_short(hello.contract)}; session {_short(pinned.fingerprint)}, "
                f"{_short(pinned.contract)}){cure}"
            )
        if hello.fingerprint != pinned.fingerprint:
            return (
                f"another model: the sizes are equal but tensor names, order or shapes differ (fingerprint "
                f"{_short(hello.fingerprint)}, this session has {_short(pinned.fingerprint)})"
            )
        had = "none" if pinned.profile is None else _short(pinned.profile)
        has = "none" if hello.profile is None else _short(hello.profile)
        return f"profile binding {has}, this session was opened with {had}: all learners must bind alike"


def _short(digest: bytes) -> str:
    return digest.hex()[:12]


def _fragments(layout: WireLayout) -> str:
    return "1 fragment" if len(layout) == 1 else f"{len(layout)} fragments"
