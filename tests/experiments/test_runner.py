"""Runs are made once, by real worker processes, and go on where they were stopped."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from experiments.records import Records
from experiments.runner import run_all
from experiments.specs import EXPERIMENTS, TUNING_SEEDS, Job, Scale, Trace, jobs_of, tuned_lr


def traces(count):
    return [Job("trace", asdict(Trace(seed, up=100.0, repair=10.0, steps=150))) for seed in range(count)]


def test_a_stopped_experiment_goes_on_where_it_was(tmp_path):
    path = tmp_path / "records.jsonl"
    run_all(traces(3), Records(path), workers=2)
    results = {key: record["result"] for key, record in Records(path).by_key.items()}
    assert results.keys() == {job.key for job in traces(3)}

    before = path.read_bytes()
    path.write_bytes(before[:-20])  # killed while it wrote
    broken = Records(path)
    assert len(broken.by_key) == 2
    run_all(traces(3), broken, workers=1)
    assert {key: record["result"] for key, record in Records(path).by_key.items()} == results

    whole = path.read_bytes()
    run_all(traces(3), Records(path), workers=2)
    assert path.read_bytes() == whole


def test_a_run_that_fails_is_said_and_leaves_no_record(tmp_path, capfd):
    records = Records(tmp_path / "records.jsonl")
    with pytest.raises(RuntimeError, match=r"the run nothing \{'seed': 1\} failed"):
        run_all([Job("nothing", {"seed": 1})], records, workers=1)
    assert "job of kind 'nothing': expected train, alone, trace, wire or kills" in capfd.readouterr().err
    assert records.by_key == {}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_runs_of_their_own_names(name, quick):
    jobs = jobs_of(name, Scale(quick), Records(None))
    assert jobs
    assert len({job.key for job in jobs}) == len(jobs)


def test_an_experiment_tunes_first_and_on_other_seeds():
    records = Records(None)
    first = jobs_of("e4", Scale(), records)
    assert {job.config["seed"] for job in first} == set(TUNING_SEEDS)
    assert all(job.config["fleet"] is None for job in first)
    assert tuned_lr(Scale(), "char", records) is None
    for job in first:
        loss = abs(job.config["peak_lr"] - 8e-3) + 1
        records.append({"key": job.key, "kind": "train", "config": job.config, "result": {"loss": loss}})
    assert tuned_lr(Scale(), "char", records) == 8e-3
    then = jobs_of("e4", Scale(), records)
    assert {job.config["peak_lr"] for job in then} == {8e-3}
    assert not {job.config["seed"] for job in then} & set(TUNING_SEEDS)


def test_an_unknown_experiment_is_named():
    with pytest.raises(ValueError, match="experiment 'e9': expected one of e1, e2"):
        jobs_of("e9", Scale(), Records(None))
