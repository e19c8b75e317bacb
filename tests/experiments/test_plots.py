"""Pictures show what the records hold: every number drawn is one of theirs, and what was not run is not drawn."""

from __future__ import annotations

from statistics import fmean

import pytest
from matplotlib.figure import Figure

from experiments import plots
from experiments.records import Records
from experiments.specs import ARMS, OUTER, Scale, arm_job, jobs_of
from tests.support.invented_records import made_up

SCALE = Scale()


def result_of(job):
    """The larger H and the momentum, the worse the loss; a little of the seed is in it, too."""
    fleet = job.config["fleet"]
    if fleet is None:
        return {"loss": 2.0}
    worse = fleet["interval"] / 1e4 + fleet["momentum"] / 100 + (fleet["guard"] == "cap") / 1e3
    loss = 2.0 * (1 + worse) * (1 + 1e-4 * job.config["seed"])
    return {"loss": loss, "gain": [1.0 + fleet["momentum"], 1.2 + fleet["momentum"]]}


@pytest.fixture(scope="module")
def records():
    return made_up(("e1", "e5", "e6"), result_of)


@pytest.fixture
def axes():
    return Figure().subplots()


def test_the_map_has_a_cell_for_every_arm_and_the_arms_own_numbers(records, axes):
    losses = plots.of_map(SCALE, records, "loss")
    assert set(losses) == {(h, outer) for h in (8, 24, 80) for outer in OUTER}
    assert fmean(losses[80, (0.7, 0.9)]) == pytest.approx(100 * (80 / 1e4 + 0.009), abs=0.1)
    assert fmean(plots.of_map(SCALE, records, "gain")[24, (0.7, 0.5)]) == pytest.approx(1.6)
    assert plots.regime_map(axes, SCALE, records, "loss")
    (image,) = axes.images
    assert image.get_array().shape == (len(OUTER), 3)
    assert not image.get_array().mask.any()
    shown = [text.get_text() for text in axes.texts]
    assert f"{fmean(losses[8, OUTER[0]]):+.2f}" in shown[0]
    assert len(shown) == 3 * len(OUTER)


def test_a_cell_that_was_not_run_is_empty(records, axes):
    part = Records(None)
    gone = {job.key for job in jobs_of("e6", SCALE, records) if (job.config["fleet"] or {}).get("momentum") == 0.9}
    part.by_key = {key: record for key, record in records.by_key.items() if key not in gone}
    assert plots.regime_map(axes, SCALE, part, "loss")
    assert axes.images[0].get_array().mask.sum() == 3
    assert len(axes.texts) == 3 * (len(OUTER) - 1)


@pytest.mark.parametrize(
    ("task", "lines"),
    [("char", {"M = 2": [2, 8, 24, 80], "M = 4": [2, 8, 24, 80]}), ("digits", {"M = 2": [8, 24, 80]})],
)
def test_lines_run_over_every_interval(records, axes, task, lines):
    assert plots.parity(axes, SCALE, records, task)
    drawn = {container.get_label(): list(container[0].get_xdata()) for container in axes.containers}
    assert drawn == {f"{task}, {label}": intervals for label, intervals in lines.items()}


def test_every_merge_stands_at_its_own_name(records, axes):
    assert plots.merges(axes, SCALE, records)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["avg", "avg-norm", "rda", "iso-mean", "iso-norm"]
    for container in axes.containers:
        assert [round(x) for x in container[0].get_xdata()] == [0, 1, 2, 3, 4]


def test_the_counterpart_differs_in_nothing_but_guard_and_correction(records):
    guarded = [arm for arm in ARMS["e6"][0](SCALE) if arm.fleet.guard == "cap"]
    assert guarded
    for arm in guarded:
        other = plots.counterpart(SCALE, arm)
        assert other.label == arm.label.removesuffix(", cap")
        assert arm_job(SCALE, other, 3, 2e-3).config["fleet"]["guard"] == "off"
        values = plots.compared(SCALE, records, "e6", [arm], other.label)[arm.label]
        assert fmean(values) == pytest.approx(0.1, abs=0.01)


def test_rows_of_one_seed_have_no_interval_and_rows_of_none_are_left_out(axes):
    assert plots.bars(axes, {"one": [1.0], "none": [], "two": [1.0, 2.0]})
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two"]
    empty = Figure().subplots()
    assert not plots.bars(empty, {"none": []})
    assert [text.get_text() for text in empty.texts] == ["not run"]


def test_goodput_is_that_of_traces_and_real_processes(axes):
    found = Records(None)
    assert not plots.goodput(axes, found)
    result = dict.fromkeys(("decoupled", "of_ideal", "stalled", "elastic"), 0.8)
    result |= dict.fromkeys(("decoupled_bound", "of_ideal_bound", "stalled_formula", "elastic_formula"), 0.9)
    found.append({"key": "a", "kind": "trace", "config": {}, "result": result})
    assert plots.goodput(Figure().subplots(), found)


@pytest.mark.parametrize("draw", [plots.parity, plots.regimes, plots.merges])
def test_without_records_nothing_is_drawn(draw, axes):
    assert not draw(axes, SCALE, Records(None))


def test_the_report_gets_its_pictures(records, tmp_path):
    made = [draw(SCALE, records, tmp_path) for draw in plots.PICTURES]
    assert made == ["parity.png", "regimes.png", "regime-map.png"]
    assert all((tmp_path / name).stat().st_size > 5000 for name in made)
    assert [draw(SCALE, Records(None), tmp_path) for draw in plots.PICTURES] == [None] * len(made)
