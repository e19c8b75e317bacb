"""The second set chooses by its rules, from records that are made up here, and leaves the keys of old runs alone."""

from __future__ import annotations

import pytest

from experiments import lasting
from experiments.configs import Alone, Fleet, Training, key_of, plain
from experiments.lasting import MAIN, TODAY, TUNING_SEEDS, arm_job, arms, baseline_job, fleet_of, jobs_now
from experiments.records import Records
from yeto_torch.wire.constants import MergeMode


def pretend(records, job, loss):
    records.append({"key": job.key, "kind": job.kind, "result": {"loss": loss}})


def finished(loss_of, most=400):
    """Records of everything that is asked for, until nothing is."""
    records = Records(None)
    while jobs := jobs_now(records):
        for job in jobs:
            pretend(records, job, loss_of(job))
        assert len(records.by_key) < 3000
        most -= 1
        assert most
    return records


def lowest_at(best):
    return lambda job: 2.0 + abs(job.config["peak_lr"] / best - 1)


@pytest.mark.parametrize("best", [0.5e-3, 8e-3, 64e-3])
def test_the_grid_grows_until_its_best_peak_is_inside(best):
    records = finished(lowest_at(best))
    rates = lasting.grid(MAIN, records)
    assert rates[0] < best < rates[-1]
    assert lasting.peak(MAIN, records) == best


def test_the_outer_step_is_chosen_on_tuning_seeds_and_used_by_every_arm():
    def loss(job):
        fleet = job.config.get("fleet") or {}
        is_wanted = fleet.get("iso_lr") == 1.4 and job.config["seed"] in TUNING_SEEDS
        return lowest_at(8e-3)(job) - 0.1 * is_wanted

    records = finished(loss)
    assert lasting.outer_of("iso-norm", records) == (1.4, 0.5)
    assert lasting.outer_of("rda", records) == TODAY  # the first of equals
    tested = [job for job in records.by_key.values() if job["kind"] == "alone"]
    assert tested
    claimed = [arm for arm in arms() if arm.merge == "iso-norm" and arm.setting == MAIN and arm.learners == 2]
    lr = lasting.peak(MAIN, records)
    assert all(arm_job(claimed[0], (1.4, 0.5), lr, seed).key in records.by_key for seed in lasting.SEEDS)


def test_nothing_of_a_tested_seed_decides_anything():
    assert not set(TUNING_SEEDS) & set(lasting.SEEDS)
    assert set(lasting.FEW) <= set(lasting.SEEDS)


def test_an_iso_fleet_keeps_the_default_step_where_it_averages():
    fleet = fleet_of("iso-norm", (1.4, 0.6), 2, 24)
    assert fleet.outer(MergeMode.ISO) == (1.4, 0.6)
    assert fleet.outer(MergeMode.AVG) == TODAY
    assert fleet_of("rda", (1.0, 0.4), 2, 24).outer(MergeMode.RDA) == (1.0, 0.4)


def test_runs_of_the_first_set_keep_their_keys():
    """Literals: the keys under which they are recorded."""
    assert baseline_job(MAIN, 8e-3, 1).config.keys() == {"fleet", "peak_lr", "seed", "steps", "task", "warm_steps"}
    assert key_of("train", plain(Training("char", 101, 0.002))) == "15ccf0a82fa61d11"
    assert "iso_lr" not in plain(Training("char", 0, 0.004, fleet=Fleet()))["fleet"]
    assert "iso_lr" not in plain(Alone("char", 0, 0.004))
