"""May this run continue from that checkpoint?

Decides: at start, what the file alone tells; at the first HELLO, what only a session can tell. Both answers are
values: a refusal at start ends the process before it listens, a refusal at HELLO turns away one learner.
Must not know: paths, tensors, sockets, who acts on the answer.

    file | at start                                | at HELLO
    V1   | never: a scalar file looks like an SVD's | -
    V2   | same backend, step <= total_steps       | sizes; one tensor a fragment; contract = fingerprint
    V3   | same backend, step <= total_steps       | fingerprint; sizes; contract, or without one = fingerprint

Source: v4 §Checkpoints; rulings §7
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from syncer.checkpoint.format import CheckpointFacts
from syncer.config.policy import IsoBackend
from yeto_torch.wire.layout import WireLayout


@dataclass(frozen=True, slots=True)
class Resume:
    """Nothing known so far speaks against continuing."""


@dataclass(frozen=True, slots=True)
class RefuseResume:
    """Continuing would be wrong. ``reason`` is one sentence for whoever asked."""

    reason: str


Decision: TypeAlias = Resume | RefuseResume


def at_start(facts: CheckpointFacts, backend: int, total_steps: int) -> Decision:
    """Judge by the file alone, before anything listens.

    Args:
        facts: the file.
        backend: the configured iso backend, 0 = scalar, 1 = torch-svd.
        total_steps: the configured number of outer steps; a file exactly there goes on to finalization.
    """
    if facts.version == 1 or facts.backend is None:
        return RefuseResume(
            "a V1 checkpoint does not say which iso backend wrote it, so it cannot be resumed; "
            "`python -m syncer.migrate` rewrites it once you can vouch for backend and layout"
        )
    if facts.backend != backend:
        return RefuseResume(
            f"the checkpoint was written with iso backend {IsoBackend(facts.backend).key}, "
            f"but merge.iso_backend is {IsoBackend(backend).key}"
        )
    if facts.step > total_steps:
        return RefuseResume(f"the checkpoint is at step {facts.step}, beyond total_steps={total_steps}")
    return Resume()


def at_hello(facts: CheckpointFacts, layout: WireLayout, fingerprint: bytes, contract: bytes) -> Decision:
    """Judge by what a learner's HELLO adds, before any checkpoint state is installed.

    Args:
        facts: a file that ``at_start`` let pass.
        layout: the numeric layout in HELLO.
        fingerprint: 32 bytes, the layout's semantic identity.
        contract: 32 bytes, the session contract.
    """
    if facts.fingerprint is not None and facts.fingerprint != fingerprint:
        return RefuseResume(
            f"the checkpoint belongs to layout {_short(facts.fingerprint)}, this session has {_short(fingerprint)}"
        )
    if facts.contract is None and contract != fingerprint:
        return RefuseResume(
            f"the checkpoint carries no contract and resumes only under its fingerprint {_short(fingerprint)}, "
            f"this session has contract {_short(contract)}"
        )
    if facts.contract is not None and facts.contract != contract:
        return RefuseResume(
            f"the checkpoint belongs to contract {_short(facts.contract)}, this session has {_short(contract)}"
        )
    return _sizes(facts, layout)


def _sizes(facts: CheckpointFacts, layout: WireLayout) -> Decision:
    if len(facts.numels) != len(layout):
        return RefuseResume(f"the checkpoint has {len(facts.numels)} fragments, this session has {len(layout)}")
    for index, (ours, theirs) in enumerate(zip(facts.numels, layout.numels, strict=True)):
        if ours != theirs:
            return RefuseResume(f"fragment {index} has {ours} values in the checkpoint and {theirs} in this session")
    if facts.fingerprint is None:
        for index, fragment in enumerate(layout.fragments):
            if len(fragment.numels) != 1:
                return RefuseResume(
                    f"a V{facts.version} checkpoint records no layout, and fragment {index} groups "
                    f"{len(fragment.numels)} tensors, so it cannot be resumed without an audited migration"
                )
    return Resume()


def _short(digest: bytes) -> str:
    return digest.hex()[:12]
