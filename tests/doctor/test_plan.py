"""The formulas of the plan, by hand."""

import pytest

from yeto_torch.doctor.plan import Rates, Workload, least_interval, needed_rate, plan, sync_seconds

FLEET = Workload(parameters=30e6, step_time_s=0.5, learners=4)


@pytest.mark.parametrize(
    ("dtype", "seconds"),
    [
        ("f32", 4 * 30e6 * 4 / 100e6 + 4 * 30e6 * 4 / 50e6),
        ("bf16", 4 * 30e6 * 2 / 100e6 + 4 * 30e6 * 2 / 50e6),
        ("q4", 4 * 30e6 * 132 / 256 / 100e6 + 4 * 30e6 * 2 / 50e6),
    ],
)
def test_a_sync_carries_the_model_of_every_learner_up_and_down(dtype, seconds):
    assert sync_seconds(FLEET, Rates(up=100e6, down=50e6), dtype) == pytest.approx(seconds)


def test_the_least_interval_keeps_the_line_half_idle():
    rates = Rates(up=100e6, down=100e6)  # bf16: 2 x 240 MB in 4.8 s
    assert least_interval(FLEET, rates, "bf16") == 20  # 4.8 / (0.5 / 2) = 19.2
    advice = plan(FLEET, rates)
    assert (advice.wire_dtype, advice.interval_steps, advice.feasible) == ("bf16", 24, True)
    assert advice.sync_s == pytest.approx(4.8)
    assert advice.busy == pytest.approx(4.8 / 12)
    assert advice.least_steps == {"f32": 39, "bf16": 20, "q4": 13}  # q4: 0.61875 + 2.4 = 3.01875 s


def test_a_slower_line_lengthens_the_interval_then_coarsens_the_answers_then_is_too_slow():
    slower = plan(FLEET, Rates(up=40e6, down=40e6))  # bf16: 12 s
    assert (slower.wire_dtype, slower.interval_steps) == ("bf16", 48)
    slow = plan(FLEET, Rates(up=5e6, down=20e6))  # bf16: 48 + 12 s would be 240 steps; q4: 12.375 + 12 s
    assert (slow.wire_dtype, slow.interval_steps, slow.feasible) == ("q4", 98, True)
    too_slow = plan(FLEET, Rates(up=1e6, down=1e6))
    assert not too_slow.feasible
    assert too_slow.interval_steps > 500


def test_what_a_line_must_carry_is_what_makes_the_usual_interval_the_least():
    for dtype in ("f32", "bf16", "q4"):
        rate = needed_rate(FLEET, dtype)
        assert least_interval(FLEET, Rates(rate * 1.001, rate * 1.001), dtype) == 24
        assert least_interval(FLEET, Rates(rate * 0.95, rate * 0.95), dtype) > 24
