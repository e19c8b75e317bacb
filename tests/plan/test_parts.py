"""The planned fleet's parts against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from syncer.core.pace import Pace
from syncer.plan.advice import INTERVALS, Wishes, plan, shortfalls
from syncer.plan.agenda import Agenda
from syncer.plan.forecast import forecast
from syncer.plan.network import Pipe, Transfer, framed_bytes
from syncer.plan.situation import (
    ROUND_ANSWERS,
    Settings,
    Situation,
    layout_of,
    learner_bytes,
    syncer_bytes,
)
from yeto_torch.wire.chunks import Slicer
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.messages import PushFragment, encode

MB = 1_000_000
LAN = Situation(parameters=8 * MB, learners=2, step_s=0.5, link=125 * MB, syncer_link=125 * MB, latency_s=0.0)


def sent(*sizes: int, rates: tuple[float, ...] = (MB,), latency_s: float = 0.0) -> list[float]:
    """When messages of these sizes, all handed over at 0, have arrived."""
    agenda, arrivals = Agenda(), []
    pipes = [Pipe(agenda, rate) for rate in rates]
    for size in sizes:
        Transfer(agenda, size, pipes, latency_s, lambda: arrivals.append(agenda.now))
    agenda.run(1e6)
    return arrivals


class TestNetwork:
    def test_a_message_takes_its_bytes_over_the_rate_and_the_latency(self):
        assert sent(MB, latency_s=0.25) == [pytest.approx(1.25)]

    def test_two_messages_share_a_pipe_fairly_and_lose_nothing(self):
        first, second = sent(MB, MB)
        assert second == pytest.approx(2.0)
        assert first == pytest.approx(2.0, rel=0.1)  # not 1.0: they take turns

    def test_the_slower_pipe_of_two_decides(self):
        assert sent(8 * MB, rates=(8 * MB, MB))[0] == pytest.approx(8.0, rel=0.2)

    @pytest.mark.parametrize("nbytes", [1, 4_000_000, 9_000_000, 8 * 1024 * 1024])
    def test_framing_is_the_real_outbox_s(self, nbytes):
        push = PushFragment(0, 0, 1, 1, 0, 1, 1, 1, bytes(nbytes))
        chunks = Slicer().slice(encode(push), (1, 2))
        assert framed_bytes(48 + nbytes) == sum(len(part) for _, parts in chunks for part in parts)


class TestForecast:
    def test_on_a_fast_network_a_fragment_is_merged_every_h_steps(self):
        found = forecast(LAN, Settings(interval=24.0))
        assert found.interval_steps == pytest.approx(24, rel=0.1)
        assert found.participation == pytest.approx(1, abs=0.02)
        assert found.failures == found.relaunches == 0

    @pytest.mark.parametrize("dtype", list(WireDType))
    def test_bytes_follow_from_the_model_and_h_alone(self, dtype):
        found = forecast(LAN, Settings(dtype, interval=24.0))
        numel = LAN.parameters // 8
        up, down = framed_bytes(48 + dtype.nbytes(numel)), framed_bytes(12 + dtype.bulk.nbytes(numel))
        per_step = 8 / found.interval_steps
        assert found.sent_per_step == pytest.approx(up * per_step, rel=0.02)
        assert found.received_per_step == pytest.approx(down * per_step, rel=0.02)

    @pytest.mark.parametrize("learners", [2, 5])
    def test_the_syncer_works_for_every_answer_and_for_every_round(self, learners):
        """Answers, outer step, broadcast, and three messages of each learner."""
        fleet = replace(LAN, learners=learners, merge_rate=1e8, message_s=2e-3)
        found = forecast(fleet, Settings(interval=48.0, quorum=learners))
        per_round = (learners + ROUND_ANSWERS) * 4 * fleet.parameters / 8 / 1e8 + 3 * learners * 2e-3
        assert found.syncer_use / found.rounds_per_s == pytest.approx(per_round, rel=0.02)

    def test_the_estimate_behind_the_grace_window_knows_the_whole_round_s_work(self, monkeypatch):
        """As the actor reports it: merge, outer step and broadcast, and nothing for what is sent to who joins."""
        told = []
        original = Pace.observe_sync
        monkeypatch.setattr(Pace, "observe_sync", lambda self, s: (told.append(s), original(self, s)))
        fleet = replace(LAN, merge_rate=1e8, message_s=0.0)
        found = forecast(fleet, Settings(interval=48.0, quorum=2))
        assert len(told) >= found.rounds
        assert told == [pytest.approx((2 + ROUND_ANSWERS) * 4 * MB / 1e8)] * len(told)

    def test_only_four_bits_are_packed(self):
        slow = replace(LAN, encode_rate=4 * MB)  # a second per fragment
        round_s = {dtype: forecast(slow, Settings(dtype, interval=48.0)).round_s for dtype in WireDType}
        assert round_s[WireDType.Q4] > round_s[WireDType.BF16] + 0.9
        assert round_s[WireDType.F32] == pytest.approx(round_s[WireDType.BF16], abs=0.3)

    def test_a_link_that_is_too_slow_is_full_and_nothing_else_breaks(self):
        found = forecast(replace(LAN, link=MB), Settings(interval=24.0))
        assert found.interval_steps > 30
        assert found.merged_share < 0.9
        assert any("link" in sentence for sentence in shortfalls(found))

    def test_a_slow_learner_makes_the_interval_longer(self):
        """Not quite twice: the throttle estimates from few whole steps, as it is ruled."""
        equal, unequal = (
            forecast(replace(LAN, speeds=speeds), Settings(interval=24.0, quorum=2)) for speeds in ((), (1.0, 0.5))
        )
        assert 1.5 < unequal.interval_steps / equal.interval_steps <= 2.1

    def test_failures_cost_the_time_of_repair_and_little_more(self):
        fleet = replace(LAN, learners=4, mtbf_s=300 * LAN.step_s, repair_s=30 * LAN.step_s)
        found = forecast(fleet, Settings(interval=24.0))
        up = 300 / 330  # of the time a learner is there
        assert found.failures > 20
        lost = 24 / 300 + 24 / 300 / 2  # the interval it comes back in, and half of the one it was lost in
        assert up - lost <= found.goodput < up

    def test_rare_failures_are_scaled_to_their_rate(self):
        fleet = replace(LAN, learners=4, repair_s=60.0)
        often, rarely = (forecast(replace(fleet, mtbf_s=h * 3600.0), Settings(interval=24.0)) for h in (2, 20))
        calm = forecast(fleet, Settings(interval=24.0))
        assert often.goodput < rarely.goodput < calm.goodput
        assert (calm.goodput - often.goodput) == pytest.approx(10 * (calm.goodput - rarely.goodput), rel=0.35)

    def test_the_same_seed_is_the_same_run(self):
        fleet = replace(LAN, mtbf_s=600.0)
        assert forecast(fleet, Settings(), 7) == forecast(fleet, Settings(), 7)


class TestAdvice:
    def test_on_a_fast_network_the_default_stays(self):
        found = plan(LAN, Wishes())
        assert found.settings == Settings(WireDType.BF16, 8, 24.0, 2)

    def test_a_slow_link_makes_h_longer_and_the_wire_narrower(self):
        found = plan(replace(LAN, link=0.25 * MB, syncer_link=MB), Wishes(fragments=8))
        assert found.settings.interval > INTERVALS[0]
        assert found.settings.wire_dtype is WireDType.Q4
        assert any("q4" in reason for reason in found.reasons)

    def test_what_was_given_stays(self):
        wishes = Wishes(WireDType.F32, 4, 17.0, 1, 3)
        assert plan(LAN, wishes).settings == Settings(WireDType.F32, 4, 17.0, 1, 3)


@pytest.mark.parametrize(("dtype", "answer"), [(WireDType.F32, 4), (WireDType.BF16, 2), (WireDType.Q4, 132 / 256)])
def test_memory_is_the_state_and_the_rounds_in_flight(dtype, answer):
    fleet, settings = replace(LAN, parameters=8 * 256_000), Settings(dtype, pipeline=2)
    bulk = 4 if dtype is WireDType.F32 else 2
    decoded = 2 if dtype is WireDType.BF16 else 4
    state, values, one = 8 * 8 * 256_000, 256_000, 2 * (answer + decoded) + 4 + bulk
    assert syncer_bytes(fleet, settings) == state + 2 * values * one
    assert syncer_bytes(fleet, replace(settings, fragments=1)) == state + 8 * values * one
    assert learner_bytes(fleet, settings) == 8 * values * bulk + 2 * 4 * values


def test_fragments_are_equal_and_whole():
    layout = layout_of(replace(LAN, parameters=13), Settings(fragments=4))
    assert layout.numels == (4, 3, 3, 3)
    assert len(layout_of(replace(LAN, parameters=3), Settings(fragments=8))) == 3
