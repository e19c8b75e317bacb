"""The page says what the records hold, no more, and its verdicts follow the margins."""

from __future__ import annotations

import random
import re

import pytest

from experiments import report
from experiments.records import Records
from experiments.specs import Scale, jobs_of


def recorded(factor, seeds=range(8)):
    """Records of e1 as if every fleet's loss were ``factor`` times the baseline's, but for a little noise."""
    records, rng = Records(None), random.Random(0)
    while missing := [job for job in jobs_of("e1", Scale(), records, seeds) if job.key not in records.by_key]:
        for job in missing:
            loss = 2.0 + 0.01 * job.config["seed"]
            if job.config["fleet"] is not None:
                loss *= factor * (1 + rng.uniform(-1e-3, 1e-3))
            result = {"loss": loss, "gain": [1.25, 1.75]}
            told = {"wall_seconds": 30.0, "commit": "abc1234", "versions": {"python": "3.11"}}
            records.append({"key": job.key, "kind": "train", "config": job.config, "result": result, **told})
    return records


def row(text, start):
    return next(line for line in text.splitlines() if line.startswith(start))


PARITY = "| char, M = 2, H = 24, rda"


def test_without_records_it_says_so():
    text = report.text(Scale(), Records(None))
    assert "Nothing was run yet" in text
    assert "## What tiny scale cannot show" in text
    assert "Claims" not in text


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "**met**"), (1.05, "**not met**"), (0.95, "**not met**")])
def test_the_verdict_is_that_of_the_margin(factor, verdict):
    text = report.text(Scale(), recorded(factor))
    assert verdict in row(text, PARITY)
    shown = re.search(r"\| ([+-][\d.]+) \(", row(text, "| char, M = 2, H = 24 |"))
    assert float(shown[1]) == pytest.approx(100 * (factor - 1), abs=0.1)
    assert "| 1.50 |" in row(text, "| char, M = 2, H = 24 |")
    assert "not run" in row(text, "| bytes at the sockets")


def test_too_few_seeds_claim_nothing():
    assert "5 pairs, 6 are needed" in row(report.text(Scale(), recorded(1.0, range(5))), PARITY)


def test_pictures_are_drawn_from_the_same_records(tmp_path):
    text = report.text(Scale(), recorded(1.0), tmp_path / "evidence")
    assert "![parity.png](evidence/parity.png)" in text
    assert (tmp_path / "evidence" / "parity.png").stat().st_size > 1000


def test_the_estimate_counts_what_is_missing():
    empty = report.estimate(Scale(), Records(None), 2)
    assert "e1: 75 of 75 runs missing" in empty
    assert "e1: 0 of 75 runs missing" in report.estimate(Scale(), recorded(1.0), 2)
