"""Who may enter: every check, their order, and that a refusal pins nothing."""

from itertools import combinations

import pytest

from syncer.core.admission import Admission
from tests.support.coordinator_desk import CONTRACT, FINGERPRINT, PROFILE, hello, layout_of, session_policy
from yeto_torch.wire.constants import MergeMode, WireDType
from yeto_torch.wire.layout import WireFragment, WireLayout

ISO = WireLayout((WireFragment(MergeMode.ISO, (6,), ((2, 3),)),))
OTHER = b"\x33" * 32


def door(resume=None, **session):
    return Admission(session_policy(**session), PROFILE, resume)


def pinned(**session):
    """A door through which learner 0 went, generation 1."""
    admission = door(**session)
    assert admission.decide(hello(0, 1)) is None
    return admission


# One fault per check, in the order of the checks: (name, fields of the HELLO, words of the refusal)
FAULTS = [
    ("profile", {"profile": OTHER}, "profile mismatch"),
    ("contract", {"contract": OTHER}, "contract mismatch"),
    ("resume", {"fingerprint": OTHER}, "the checkpoint belongs to another layout"),
    ("identity", {"dtype": WireDType.BF16}, "wire dtype bf16, this session uses f32"),
    ("generation", {"generation": 1}, "admitted before"),
]


def everything_checked(*, pin):
    """Every check is on. Resume speaks only while nothing is pinned, identity and generation only afterwards."""

    def resume(_layout, fingerprint, _contract):
        return None if fingerprint == FINGERPRINT else "the checkpoint belongs to another layout"

    admission = door(resume, expected_contract=CONTRACT)
    if pin:
        assert admission.decide(hello(0, 1)) is None
    return admission


@pytest.mark.parametrize(("first", "second"), list(combinations(FAULTS, 2)), ids=lambda fault: fault[0])
def test_of_two_faults_the_earlier_check_speaks(first, second):
    pin = "resume" not in (first[0], second[0])
    if not pin and {"identity", "generation"} & {first[0], second[0]}:
        fault = first if first[0] == "resume" else second
        refusal = everything_checked(pin=False).decide(hello(0, 1, **fault[1]))
        assert (fault[2] in refusal) == (fault[0] == "resume")
        return
    fields = {"learner_id": 0, "generation": 2, **second[1], **first[1]}
    refusal = everything_checked(pin=pin).decide(hello(**fields))
    assert first[2] in refusal
    assert second[2] not in refusal


@pytest.mark.parametrize("fault", FAULTS[:3], ids=lambda fault: fault[0])
def test_a_refusal_pins_nothing_and_remembers_no_generation(fault):
    admission = everything_checked(pin=False)
    assert admission.decide(hello(0, 7, **fault[1])) is not None
    assert admission.identity is None
    assert admission.decide(hello(0, 7)) is None, "the same generation may still enter with a good HELLO"
    assert admission.identity.fingerprint == FINGERPRINT


@pytest.mark.parametrize("fault", FAULTS[3:4], ids=lambda fault: fault[0])
def test_a_refused_identity_leaves_the_pinned_one(fault):
    admission = pinned()
    before = admission.identity
    assert admission.decide(hello(1, 7, **fault[1])) is not None
    assert admission.identity == before
    assert admission.decide(hello(1, 7)) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": WireDType.Q4}, "wire dtype q4, this session uses f32"),
        ({"layout": layout_of(4, 5)}, "another model: 9 values in 2 fragments, this session has 8 in 2 fragments"),
        ({"layout": layout_of(8)}, "another model: 8 values in 1 fragment"),
        ({"layout": layout_of(4, 4, mode=MergeMode.RDA)}, "another model"),
        ({"fingerprint": OTHER}, "names, order or shapes differ"),
        (
            {"contract": OTHER},
            "another run: contract 333333333333, this session is 222222222222; learners of one run have one run_id",
        ),
        ({"profile": PROFILE}, "all learners must bind alike"),
    ],
)
def test_every_part_of_the_identity_must_be_repeated(fields, words):
    assert words in pinned().decide(hello(1, 1, **fields))


def test_present_and_absent_profile_are_different_values():
    admission = door()
    assert admission.decide(hello(0, 1, profile=PROFILE)) is None
    assert "all learners must bind alike" in admission.decide(hello(1, 1))


def test_two_runs_at_one_syncer_see_both_short_hashes():
    refusal = pinned().decide(hello(1, 1, layout=layout_of(4, 5), fingerprint=OTHER, contract=b"\x44" * 32))
    for digest in (OTHER, b"\x44" * 32, FINGERPRINT, CONTRACT):
        assert digest.hex()[:12] in refusal


@pytest.mark.parametrize(
    ("required", "profile", "words"),
    [
        (False, None, None),
        (False, PROFILE, None),
        (False, OTHER, "profile mismatch"),
        (True, None, "requires profile binding"),
        (True, PROFILE, None),
        (True, OTHER, "profile mismatch"),
    ],
)
def test_profile_binding(required, profile, words):
    refusal = door(require_profile_binding=required).decide(hello(0, 1, profile=profile))
    assert refusal is None if words is None else words in refusal


def test_an_expected_contract_keeps_strangers_out_and_pins_nothing():
    admission = door(expected_contract=CONTRACT)
    assert "expected is 222222222222" in admission.decide(hello(0, 1, contract=OTHER))
    assert admission.identity is None


def test_a_stranger_cannot_end_a_resuming_run():
    calls = []

    def resume(layout, fingerprint, contract):
        calls.append((layout, fingerprint, contract))
        return None if contract == CONTRACT else "the checkpoint belongs to another contract"

    admission = door(resume)
    assert admission.decide(hello(0, 1, contract=OTHER)) == "the checkpoint belongs to another contract"
    assert admission.decide(hello(1, 1)) is None
    assert admission.decide(hello(0, 2)) is None
    assert len(calls) == 2, "once the identity is pinned it has been checked"


def test_a_recorded_hello_cannot_come_again_whoever_lives():
    admission = pinned()
    for generation in (2, 3):
        assert admission.decide(hello(0, generation)) is None
    for generation in (1, 2, 3):
        assert "admitted before" in admission.decide(hello(0, generation))
    assert admission.decide(hello(1, 1)) is None, "generations of another learner are other generations"


def test_a_generation_is_remembered_for_thousands_of_connections_and_memory_ends_there():
    admission = pinned()
    for generation in range(2, 20_000):
        assert admission.decide(hello(0, generation)) is None
        assert admission.decide(hello(0, max(1, generation - 16_383))) is not None
    assert admission.decide(hello(0, 1)) is None, "the oldest are forgotten, each learner's by themselves"
    assert admission.decide(hello(1, 1)) is None
    assert admission.decide(hello(1, 1)) is not None
    assert len(admission._admitted[0]) == 16_384
