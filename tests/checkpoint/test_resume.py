"""Whether a run may continue from a file: the table of the law, row by row."""

import dataclasses

import pytest

from syncer.checkpoint.format import CheckpointFacts
from syncer.checkpoint.resume import at_hello, at_start
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.layout import WireFragment, WireLayout

FP, OTHER, CONTRACT = b"\x01" * 32, b"\x02" * 32, b"\x03" * 32
V3 = CheckpointFacts(3, 1, FP, CONTRACT, 6, (4, 6))
V3_BARE = dataclasses.replace(V3, contract=None)
V2 = dataclasses.replace(V3_BARE, version=2, fingerprint=None)
V1 = dataclasses.replace(V2, version=1, backend=None)
SINGLE = WireLayout((WireFragment(MergeMode.AVG, (4,)), WireFragment(MergeMode.ISO, (6,), ((2, 3),))))
GROUPED = WireLayout((WireFragment(MergeMode.AVG, (4,)), WireFragment(MergeMode.RDA, (2, 4))))
OTHER_SIZES = WireLayout((WireFragment(MergeMode.AVG, (4,)), WireFragment(MergeMode.RDA, (7,))))
SWAPPED = WireLayout(tuple(reversed(SINGLE.fragments)))
LONGER = WireLayout((*SINGLE.fragments, WireFragment(MergeMode.AVG, (1,))))


@pytest.mark.parametrize("facts", [V3, V3_BARE, V2])
@pytest.mark.parametrize("total_steps", [6, 7, 1000])
def test_same_backend_and_a_step_within_the_run_may_start(facts, total_steps):
    assert at_start(facts, 1, total_steps) is None


@pytest.mark.parametrize("backend", [0, 1])
def test_v1_is_never_resumed(backend):
    assert "does not say which iso backend" in at_start(V1, backend, 1000)


@pytest.mark.parametrize("facts", [V3, V3_BARE, V2])
def test_another_backend_is_refused_by_name(facts):
    assert at_start(facts, 0, 1000) == (
        "the checkpoint was written with iso backend torch-svd, but merge.iso_backend is scalar"
    )
    scalar = dataclasses.replace(facts, backend=0)
    assert at_start(scalar, 0, 1000) is None
    assert "scalar, but merge.iso_backend is torch-svd" in at_start(scalar, 1, 1000)


def test_a_step_beyond_the_run_is_refused():
    assert at_start(V3, 1, 5) == "the checkpoint is at step 6, beyond total_steps=5"


@pytest.mark.parametrize(
    ("facts", "layout", "fingerprint", "contract", "reason"),
    [
        (V3, SINGLE, FP, CONTRACT, None),
        (V3, GROUPED, FP, CONTRACT, None),
        (V3, SINGLE, OTHER, CONTRACT, "belongs to layout 010101010101, this session has 020202020202"),
        (V3, SINGLE, FP, OTHER, "belongs to contract 030303030303, this session has 020202020202"),
        (V3, SINGLE, FP, FP, "belongs to contract 030303030303, this session has 010101010101"),
        (V3, OTHER_SIZES, FP, CONTRACT, "fragment 1 has 6 values in the checkpoint and 7 in this session"),
        (V3, SWAPPED, FP, CONTRACT, "fragment 0 has 4 values in the checkpoint and 6 in this session"),
        (V3, LONGER, FP, CONTRACT, "the checkpoint has 2 fragments, this session has 3"),
        (V3_BARE, SINGLE, FP, FP, None),
        (V3_BARE, GROUPED, FP, FP, None),
        (V3_BARE, SINGLE, FP, CONTRACT, "carries no contract and resumes only under its fingerprint 010101010101"),
        (V3_BARE, SINGLE, OTHER, OTHER, "belongs to layout"),
        (V2, SINGLE, FP, FP, None),
        (V2, SINGLE, OTHER, OTHER, None),
        (V2, SINGLE, FP, CONTRACT, "carries no contract"),
        (V2, GROUPED, FP, FP, "fragment 1 groups 2 tensors, so it cannot be resumed without an audited migration"),
        (V2, OTHER_SIZES, FP, FP, "fragment 1 has 6 values"),
        (V2, LONGER, FP, FP, "2 fragments"),
    ],
)
def test_what_only_a_session_decides(facts, layout, fingerprint, contract, reason):
    answer = at_hello(facts, layout, fingerprint, contract)
    assert answer is None if reason is None else reason in answer
