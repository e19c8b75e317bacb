"""The session machine: each rule by itself, then random conversations against a twin that is too simple to be wrong."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yeto_torch.learner.effects import Adopt, Fail, Install, Respond, Write
from yeto_torch.learner.session import Phase, Session
from yeto_torch.wire.constants import U64_MAX
from yeto_torch.wire.errors import ConnectionLostError, PeerError, RefusedError
from yeto_torch.wire.messages import (
    BcastFragment,
    FinalAck,
    FinalFragment,
    FinalManifest,
    PullReq,
    Shutdown,
)

OLD, NEW = b"old bytes", b"new bytes"


class Hand:
    """A session with the counters a training thread would keep."""

    def __init__(self, fragments=2, generation=7):
        self.session = Session(fragments)
        self.steps = self.tokens = 0
        if generation is not None:
            self.session.attached(generation)

    def bcast(self, fragment, version, data=OLD):
        self.session.received(BcastFragment(fragment, version, data))

    def pull(self, fragment, step, attempt=1):
        self.session.received(PullReq(fragment, step, attempt))

    def step(self, tokens=10, n=1):
        """``n`` steps, then the boundary."""
        self.steps += n
        self.tokens += n * tokens
        return self.boundary()

    def boundary(self):
        return self.session.boundary(self.steps, self.tokens)

    def anchored(self, *versions):
        """Adopt first broadcasts."""
        for fragment, version in enumerate(versions):
            self.bcast(fragment, version)
        self.step()
        return self

    def cut(self, step, versions, order="fragments first"):
        fragments = [FinalFragment(f, v, b"f%d" % v) for f, v in enumerate(versions)]
        manifest = FinalManifest(step, tuple(versions))
        for message in [*fragments, manifest] if order == "fragments first" else [manifest, *fragments]:
            self.session.received(message)


def answers(effects):
    return [(e.pull.fragment, e.pull.step, e.pull.attempt) for e in effects if isinstance(e, Respond)]


# ---------------------------------------------------------------------------------------------- anchors


def test_a_first_anchor_overwrites_and_a_later_one_blends():
    hand = Hand()
    hand.bcast(0, 0)
    hand.bcast(1, 4)
    assert hand.step() == [Adopt(0, 0, OLD, Write.OVERWRITE), Adopt(1, 4, OLD, Write.OVERWRITE)]
    hand.bcast(0, 3, NEW)
    assert hand.step() == [Adopt(0, 3, NEW, Write.BLEND)]
    assert hand.session.versions == (3, 4)
    assert hand.session.global_step == 4
    assert hand.session.merges == 3


def test_only_the_newest_broadcast_of_a_fragment_is_adopted():
    hand = Hand().anchored(0, 0)
    for version in (2, 6, 4):
        hand.bcast(0, version, b"%d" % version)
    assert hand.step() == [Adopt(0, 6, b"6", Write.BLEND)]


def test_lower_versions_are_dropped_and_equal_ones_are_idempotent():
    hand = Hand().anchored(5, 5)
    hand.bcast(0, 4, NEW)
    hand.bcast(0, 5, OLD)
    assert not hand.session.attention
    assert hand.step() == []
    hand.bcast(0, 6, NEW)  # queued, and replayed before it is adopted
    hand.bcast(0, 6, NEW)
    assert hand.step() == [Adopt(0, 6, NEW, Write.BLEND)]


@pytest.mark.parametrize("adopted", [True, False])
def test_other_bytes_of_the_same_version_are_a_violation(adopted):
    hand = Hand().anchored(5, 5)
    hand.bcast(0, 6, OLD)
    if adopted:
        hand.step()
    with pytest.raises(PeerError, match="version 6 came twice"):
        hand.bcast(0, 6, NEW)


@pytest.mark.parametrize(
    ("version", "data", "adopted"),
    [
        (5, OLD, []),
        (6, OLD, [Adopt(0, 6, OLD, Write.BLEND)]),
        (4, OLD, [Adopt(0, 4, OLD, Write.OVERWRITE, set_back_from=5)]),
        (5, NEW, [Adopt(0, 5, NEW, Write.OVERWRITE, set_back_from=5)]),
    ],
    ids=["replay", "higher", "lower", "other bytes"],
)
def test_the_first_broadcast_of_a_generation_is_the_present_truth(version, data, adopted):
    hand = Hand().anchored(5, 5)
    hand.session.detached()
    hand.session.attached(8)
    hand.bcast(0, version, data)
    assert hand.step() == adopted
    hand.bcast(0, version - 1, b"too late")  # from then on the generation is monotone again
    assert hand.step() == []
    with pytest.raises(PeerError):
        hand.bcast(0, version, b"yet other bytes")


def test_a_newer_broadcast_behind_a_set_back_still_overwrites():
    hand = Hand().anchored(5, 5)
    hand.session.attached(8)
    hand.bcast(0, 2, NEW)
    hand.bcast(0, 7, NEW)
    assert hand.step() == [Adopt(0, 7, NEW, Write.OVERWRITE, set_back_from=5)]


def test_a_teardown_takes_what_was_not_adopted():
    hand = Hand().anchored(1, 2)
    hand.bcast(0, 3, NEW)
    hand.pull(1, 4)
    hand.session.received(FinalManifest(9, (8, 9)))
    hand.session.detached()
    assert not hand.session.attention
    assert hand.session.phase is Phase.TRAINING
    hand.session.attached(8)
    assert hand.step() == []
    assert hand.session.versions == (1, 2)


# ---------------------------------------------------------------------------------------------- pulls


def test_a_pull_waits_for_an_anchor_and_a_step():
    hand = Hand()
    hand.pull(0, 1)
    assert answers(hand.step()) == []
    hand.bcast(0, 0)
    assert answers(hand.step()) == []  # adopted at this boundary: no step on the fresh base yet
    hand.step(tokens=0, n=0)
    effects = hand.step(tokens=3)
    assert effects == [Respond(PullReq(0, 1, 1), 7, 0, OLD, local_step=3, c_steps=1, c_tokens=3)]
    assert answers(hand.step()) == []


def test_counters_run_since_the_adoption_and_are_not_reset_by_a_push():
    hand = Hand().anchored(0, 0)
    hand.pull(0, 1)
    (first,) = hand.step(tokens=2, n=3)
    hand.pull(0, 1, attempt=2)
    (second,) = hand.step(tokens=5)
    assert (first.c_steps, first.c_tokens, first.local_step) == (3, 6, 4)
    assert (second.c_steps, second.c_tokens, second.local_step) == (4, 11, 5)
    hand.bcast(0, 1, NEW)
    hand.step()
    hand.pull(0, 3)
    (third,) = hand.step(tokens=1)
    assert (third.c_steps, third.c_tokens, third.base_version, third.anchor) == (1, 1, 1, NEW)


def test_counters_stop_at_what_a_push_can_carry():
    hand = Hand().anchored(0, 0)
    hand.pull(0, 1)
    (respond,) = hand.step(tokens=U64_MAX, n=2)
    assert respond.c_tokens == U64_MAX
    hand.session.freeze(hand.steps, hand.tokens)
    hand.pull(1, 2)
    (respond,) = hand.boundary()
    assert respond.c_tokens == U64_MAX


def test_the_newest_pull_of_a_fragment_wins_and_fragments_are_answered_together():
    hand = Hand().anchored(0, 0)
    hand.pull(0, 1)
    hand.pull(0, 3)
    hand.pull(0, 1, attempt=2)
    hand.pull(1, 2)
    assert answers(hand.step()) == [(0, 3, 1), (1, 2, 1)]


def test_broadcasts_come_before_answers():
    hand = Hand().anchored(0, 0)
    hand.pull(0, 3)
    hand.bcast(0, 1, NEW)
    hand.pull(1, 2)
    effects = hand.step()
    assert isinstance(effects[0], Adopt)
    assert answers(effects[1:]) == [(1, 2, 1)]
    assert answers(hand.step()) == [(0, 3, 1)]


def test_an_answer_names_the_generation_that_asked():
    hand = Hand().anchored(0, 0)
    hand.session.attached(9)
    hand.bcast(0, 0)
    hand.pull(0, 1)
    (respond,) = hand.step()
    assert respond.generation == 9


def test_a_pull_that_overtakes_the_first_broadcast_of_its_generation_waits_for_it():
    hand = Hand().anchored(8, 9)
    hand.session.attached(9)
    hand.pull(0, 3)
    assert hand.step() == []
    hand.bcast(0, 2)  # the syncer was set back: 8 would have been a base from its future
    (adopt,) = hand.step()
    assert adopt.write is Write.OVERWRITE
    (respond,) = hand.step()
    assert respond.base_version == 2


def test_attention_is_true_exactly_when_there_is_something_to_do():
    hand = Hand()
    assert not hand.session.attention
    hand.bcast(0, 0)
    assert hand.session.attention
    hand.step()
    assert not hand.session.attention
    hand.pull(1, 2)  # no anchor yet: it stays
    assert hand.session.attention
    hand.step()
    assert hand.session.attention
    assert not hand.session.news  # but nobody needs to spin


def test_inside_finish_a_pull_without_steps_gets_a_zero_delta_of_weight_zero():
    hand = Hand().anchored(4, 5)
    hand.session.enter_finish()
    assert hand.session.phase is Phase.PASSING
    hand.pull(0, 7)
    (respond,) = hand.boundary()
    assert (respond.zero, respond.c_steps, respond.c_tokens, respond.base_version) == (True, 1, 0, 4)


def test_inside_finish_a_pull_with_steps_is_answered_as_usual():
    hand = Hand().anchored(4, 5)
    hand.step(tokens=2)
    hand.session.enter_finish()
    hand.pull(0, 7)
    (respond,) = hand.boundary()
    assert (respond.zero, respond.c_steps, respond.c_tokens) == (False, 1, 2)


def test_a_resync_counts_anew_and_answers_later():
    hand = Hand().anchored(0, 0)
    hand.pull(0, 1)
    (respond,) = hand.step(n=5)
    hand.session.resynced(respond, [0, 1], hand.steps, hand.tokens)
    assert hand.boundary() == []
    (again,) = hand.step(tokens=4)
    assert (again.pull, again.c_steps, again.c_tokens) == (respond.pull, 1, 4)


# ---------------------------------------------------------------------------------------------- a boundary broken off


def test_what_a_broken_boundary_left_undone_is_asked_for_again():
    hand = Hand().anchored(0, 0)
    hand.bcast(0, 1, NEW)
    hand.bcast(1, 2, NEW)
    hand.step()
    hand.pull(1, 7)
    effects = hand.step()
    assert answers(effects)
    hand.session.broken_off([Adopt(1, 2, NEW, Write.BLEND), *effects])
    assert hand.session.attention
    assert hand.step(tokens=3) == [Adopt(1, 2, NEW, Write.OVERWRITE)]  # the pull waits for a step on it
    (respond,) = hand.step(tokens=5)
    assert (respond.pull, respond.base_version, respond.c_steps, respond.c_tokens) == (PullReq(1, 7, 1), 2, 1, 5)
    assert hand.session.merges == 4


def test_what_was_left_undone_survives_a_teardown_and_a_newer_broadcast_takes_its_place():
    hand = Hand().anchored(0, 0)
    hand.session.broken_off([Adopt(0, 0, OLD, Write.OVERWRITE)])
    hand.session.attached(8)
    assert hand.session.attention
    hand.bcast(0, 3, NEW)
    assert hand.step() == [Adopt(0, 3, NEW, Write.OVERWRITE)]
    assert not hand.session.attention


def test_nothing_that_was_left_undone_moves_frozen_parameters():
    hand = Hand().anchored(0, 0)
    hand.session.broken_off([Adopt(0, 0, OLD, Write.BLEND), Adopt(1, 0, OLD, Write.KEEP)])
    hand.session.freeze(hand.steps, hand.tokens)
    assert hand.boundary() == []


# ---------------------------------------------------------------------------------------------- the budget


def test_frozen_broadcasts_move_anchors_only_and_answers_carry_budget_and_total():
    hand = Hand().anchored(5, 5)
    hand.step(tokens=10, n=3)
    hand.bcast(1, 6, NEW)  # queued before the freeze: it must not move a parameter after it either
    hand.session.freeze(4, 40)
    assert hand.session.budget_due == 4
    assert hand.boundary() == [Adopt(1, 6, NEW, Write.KEEP)]
    hand.session.is_budget_sent = True
    assert hand.session.budget_due is None
    hand.session.detached()
    hand.session.attached(8)
    hand.bcast(0, 2, NEW)
    hand.bcast(1, 9, NEW)
    hand.pull(0, 3)
    hand.pull(0, 5)
    effects = hand.boundary()
    assert effects == [
        Adopt(0, 2, NEW, Write.KEEP, set_back_from=5),
        Adopt(1, 9, NEW, Write.KEEP),
        Respond(PullReq(0, 5, 1), 8, 2, NEW, local_step=4, c_steps=4, c_tokens=40),
    ]
    assert hand.session.phase is Phase.FROZEN


def test_a_budget_report_waits_for_a_connection():
    hand = Hand(generation=None)
    hand.session.freeze(1, 1)
    assert hand.session.budget_due is None
    hand.session.attached(3)
    assert hand.session.budget_due == 1


# ---------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("order", ["fragments first", "manifest first"])
def test_the_cut_is_installed_then_acknowledged_then_released(order):
    hand = Hand().anchored(1, 2)
    hand.cut(4, (3, 4), order)
    hand.pull(0, 9)
    hand.bcast(0, 9)
    assert hand.step() == [Install(FinalManifest(4, (3, 4)), (b"f3", b"f4"))]
    assert hand.session.ack_due is None
    hand.session.installed(FinalManifest(4, (3, 4)))
    assert hand.session.ack_due == 4
    assert not hand.session.finished
    hand.session.ack_started()
    assert hand.session.ack_due is None
    hand.session.ack_sent(7)
    assert hand.session.finished
    assert hand.session.phase is Phase.ACKED
    assert hand.step() == []
    hand.session.received(Shutdown())
    assert hand.session.phase is Phase.CLOSED
    assert hand.session.versions == (3, 4)
    assert hand.session.global_step == 4


def test_shutdown_may_overtake_the_news_that_the_acknowledgement_left():
    hand = Hand().anchored(1, 2)
    hand.cut(4, (3, 4))
    hand.session.installed(hand.boundary()[0].manifest)
    hand.session.ack_started()
    hand.session.received(Shutdown())
    assert hand.session.finished


@pytest.mark.parametrize("progress", ["nothing", "cut", "installed", "acknowledged on another generation"])
def test_shutdown_before_the_acknowledgement_is_a_violation(progress):
    hand = Hand().anchored(1, 2)
    if progress != "nothing":
        hand.cut(4, (3, 4))
    if progress in ("installed", "acknowledged on another generation"):
        hand.session.installed(hand.boundary()[0].manifest)
    if progress == "acknowledged on another generation":
        hand.session.ack_started()
        hand.session.ack_sent(7)
        hand.session.detached()
        hand.session.attached(8)
    with pytest.raises(PeerError, match="SHUTDOWN"):
        hand.session.received(Shutdown())


def test_after_a_lost_connection_the_cut_must_come_again_before_it_is_acknowledged_again():
    hand = Hand().anchored(1, 2)
    hand.cut(4, (3, 4))
    hand.session.installed(hand.boundary()[0].manifest)
    hand.session.ack_started()
    hand.session.ack_sent(7)
    hand.session.detached()
    hand.session.attached(8)
    assert hand.session.ack_due is None
    hand.cut(4, (3, 4))
    assert hand.boundary() == []  # it is in the parameters already
    assert hand.session.ack_due == 4


def test_an_acknowledgement_that_left_on_an_old_generation_does_not_count():
    hand = Hand().anchored(1, 2)
    hand.cut(4, (3, 4))
    hand.session.installed(hand.boundary()[0].manifest)
    hand.session.ack_started()
    hand.session.attached(8)
    hand.session.ack_sent(7)
    assert not hand.session.finished


def test_another_cut_of_a_later_generation_is_installed_again():
    hand = Hand().anchored(1, 2)
    hand.cut(4, (3, 4))
    hand.session.installed(hand.boundary()[0].manifest)
    hand.session.attached(8)
    hand.cut(6, (5, 6))
    assert hand.boundary() == [Install(FinalManifest(6, (5, 6)), (b"f5", b"f6"))]


def test_an_error_is_terminal_until_the_cut_is_acknowledged():
    hand = Hand().anchored(1, 2)
    hand.session.refused("no room")
    (fail,) = hand.step()
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, RefusedError)
    assert "no room" in str(fail.error)
    assert hand.session.phase is Phase.FAILED
    hand.session.fail(ConnectionLostError("later"))
    assert hand.step() == [fail]  # the first reason counts


def test_a_refusal_after_the_acknowledgement_is_a_warning():
    hand = Hand().anchored(1, 2)
    hand.cut(4, (3, 4))
    hand.session.installed(hand.boundary()[0].manifest)
    hand.session.ack_started()
    hand.session.ack_sent(7)
    hand.session.refused("the run is ending")
    assert hand.session.failure is None
    assert "the run is ending" in hand.session.warning
    assert hand.session.over


def test_messages_for_a_syncer_and_fragments_beyond_the_layout_are_violations():
    hand = Hand()
    with pytest.raises(PeerError, match="FINAL_ACK"):
        hand.session.received(FinalAck(1))
    with pytest.raises(PeerError, match="fragment 2"):
        hand.pull(2, 1)


def test_what_it_waits_for_is_always_sayable():
    hand = Hand(generation=None)
    assert hand.session.waiting_for() == "a connection to the syncer"
    hand.session.attached(1)
    assert hand.session.waiting_for() == "the first weights of fragments 0, 1 of 2"
    hand.bcast(0, 0)
    assert hand.session.waiting_for() == "the first weights of fragment 1 of 2"
    hand.bcast(1, 0)
    hand.step()
    assert hand.session.waiting_for() == "the final cut"
    hand.session.received(FinalManifest(4, (3, 4)))
    hand.session.received(FinalFragment(0, 3, b"f3"))
    assert hand.session.waiting_for() == "the final values of fragment 1 at step 4"
    hand.session.received(FinalFragment(1, 4, b"f4"))
    assert hand.session.waiting_for() == "the final acknowledgement to leave"
    hand.session.installed(hand.boundary()[0].manifest)
    hand.session.ack_started()
    hand.session.ack_sent(1)
    assert hand.session.waiting_for() == "SHUTDOWN"


def test_a_learner_that_left_asks_for_nothing():
    hand = Hand().anchored(0, 0)
    hand.pull(0, 1)
    hand.session.leave()
    assert not hand.session.attention
    assert hand.step() == []


# ---------------------------------------------------------------------------------------------- the twin


@dataclass
class Twin:
    """The rules again for one fragment, as lists: everything heard is kept, and read anew at each boundary."""

    heard: list = field(default_factory=list)  # (version, data) of this generation, in order of arrival
    pulls: list = field(default_factory=list)
    anchor: tuple | None = None
    adopted_at: tuple = (0, 0)

    def boundary(self, steps, tokens):
        out = []
        if self.heard:
            first = self.heard[0]
            newest = max(self.heard, key=lambda item: item[0])
            held = self.anchor
            set_back = held and self.fresh and (first[0] < held[0] or (first[0] == held[0] and first != held))
            if held is None or set_back:
                out.append(("adopt", newest, Write.OVERWRITE))
            elif newest[0] > held[0]:
                out.append(("adopt", newest, Write.BLEND))
            self.fresh = False
            if out:
                self.anchor, self.adopted_at = newest, (steps, tokens)
        c_steps = steps - self.adopted_at[0]
        if self.pulls and self.heard and c_steps >= 1:  # not before this generation has told its truth
            out.append(("answer", max(self.pulls), self.anchor[0], c_steps, tokens - self.adopted_at[1]))
            self.pulls = []
        return out

    def attach(self):
        self.heard, self.pulls, self.fresh = [], [], True


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("bcast"), st.integers(0, 4), st.sampled_from([b"a", b"b"])),
        st.tuples(st.just("pull"), st.integers(1, 4), st.integers(1, 2)),
        st.tuples(st.just("step"), st.integers(0, 3)),
        st.tuples(st.just("attach")),
    ),
    max_size=40,
)


@given(EVENTS)
def test_random_conversations_agree_with_the_twin(events):
    hand, twin, generation = Hand(1), Twin(), 7
    twin.attach()
    for event in events:
        match event:
            case ("bcast", version, data):
                known = dict(twin.heard)
                newest = max(known, default=None)
                if newest == version and known[version] != data:
                    with pytest.raises(PeerError):
                        hand.bcast(0, version, data)
                    return
                hand.bcast(0, version, data)
                if newest is None or version > newest:
                    twin.heard.append((version, data))
            case ("pull", step, attempt):
                hand.pull(0, step, attempt)
                twin.pulls.append((step, attempt))
            case ("attach",):
                generation += 1
                hand.session.attached(generation)
                twin.attach()
            case ("step", tokens):
                effects = hand.step(tokens)
                said = [
                    ("adopt", (e.version, e.data), e.write)
                    if isinstance(e, Adopt)
                    else ("answer", (e.pull.step, e.pull.attempt), e.base_version, e.c_steps, e.c_tokens)
                    for e in effects
                ]
                assert said == twin.boundary(hand.steps, hand.tokens)
