"""May this run continue from that checkpoint?

Decides: at start, what the file alone tells; at the first HELLO, what only a session can tell. The answer is None, or
one sentence why not: at start it ends the process before it listens, at HELLO it turns away one learner.
Must not know: paths, tensors, sockets, who acts on the answer.

    file | at start                                | at HELLO
    V1   | never: a scalar file looks like an SVD's | -
    V2   | same backend, step <= total_steps       | sizes; one tensor a fragment; contract = fingerprint
    V3   | same backend, step <= total_steps       | fingerprint; sizes; contract, or without one = fingerprint

Source: v4 §Checkpoints (backend and fingerprint are compared before anything is installed; V1 never resumes, V2 only
with one tensor per fragment); rulings §7.

* pure
"""

from __future__ import annotations

from syncer.checkpoint.format import CheckpointFacts
from syncer.config.policy import IsoBackend
from yeto_torch.wire.layout import WireLayout


def at_start(facts: CheckpointFacts, backend: int, total_steps: int) -> str | None:
    """Judge by the file alone, before anything listens; one that is at ``total_steps`` goes on to finalization."""
    if facts.version == 1 or facts.backend is None:
        return (
            "a V1 checkpoint does not say which iso backend wrote it, so it cannot be resumed; "
            "`python -m syncer.migrate` rewrites it once you can vouch for backend and layout"
        )
    if facts.backend != backend:
        return (
            f"the checkpoint was written with iso backend {IsoBackend(facts.backend).key}, "
            f"but merge.iso_backend is {IsoBackend(backend).key}"
        )
    if facts.step > total_steps:
        return f"the checkpoint is at step {facts.step}, beyond total_steps={total_steps}"
    return None


def at_hello(facts: CheckpointFacts, layout: WireLayout, fingerprint: bytes, contract: bytes) -> str | None:
    """Judge a file that ``at_start`` let pass by what a learner's HELLO adds, before any of its state is installed."""
    if facts.fingerprint is not None and facts.fingerprint != fingerprint:
        return f"the checkpoint belongs to layout {_short(facts.fingerprint)}, this session has {_short(fingerprint)}"
    if facts.contract is None and contract != fingerprint:
        return (
            f"the checkpoint carries no contract and resumes only under its fingerprint {_short(fingerprint)}, "
            f"this session has contract {_short(contract)}"
        )
    if facts.contract is not None and facts.contract != contract:
        return f"the checkpoint belongs to contract {_short(facts.contract)}, this session has {_short(contract)}"
    return _sizes(facts, layout)


def _sizes(facts: CheckpointFacts, layout: WireLayout) -> str | None:
    if len(facts.numels) != len(layout):
        return f"the checkpoint has {len(facts.numels)} fragments, this session has {len(layout)}"
    for index, (ours, theirs) in enumerate(zip(facts.numels, layout.numels, strict=True)):
        if ours != theirs:
            return f"fragment {index} has {ours} values in the checkpoint and {theirs} in this session"
    if facts.fingerprint is None:
        for index, fragment in enumerate(layout.fragments):
            if len(fragment.numels) != 1:
                return (
                    f"a V{facts.version} checkpoint records no layout, and fragment {index} groups "
                    f"{len(fragment.numels)} tensors, so it cannot be resumed without an audited migration"
                )
    return None


def _short(digest: bytes) -> str:
    return digest.hex()[:12]
