"""Records survive whatever ends their writer, and no run is made twice."""

from __future__ import annotations

import pytest

from experiments.records import Records


def record(key, **result):
    return {"key": key, "kind": "train", "result": result}


def test_what_was_appended_is_read_back(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    records = Records(path)
    assert records.missing(["a", "b"]) == ["a", "b"]
    records.append(record("a", loss=1.5))
    records.append(record("b", loss=0.1 + 0.2))
    found = Records(path)
    assert found.missing(["a", "b", "c"]) == ["c"]
    assert found.by_key == records.by_key


@pytest.mark.parametrize("keep", [1, 10, -1])
def test_a_broken_last_line_is_run_again(tmp_path, keep):
    path = tmp_path / "records.jsonl"
    records = Records(path)
    records.append(record("a", loss=1.0))
    whole = path.read_bytes()
    records.append(record("b", loss=2.0))
    path.write_bytes(whole + path.read_bytes()[len(whole) :][:keep])
    found = Records(path)
    assert found.missing(["a", "b"]) == ["b"]
    found.append(record("b", loss=2.0))
    assert Records(path).by_key == records.by_key


def test_the_first_record_of_a_run_counts(tmp_path):
    path = tmp_path / "records.jsonl"
    first, second = Records(path), Records(path)
    first.append(record("a", loss=2.0))
    second.append(record("a", loss=1.0))  # another process did not know of it
    first.append(record("a", loss=0.5))
    assert Records(path).by_key["a"]["result"] == {"loss": 2.0}
    assert len(path.read_text().splitlines()) == 2


def test_a_broken_line_in_between_is_no_accident(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"key": "a", "kind": "train"}\n{"kind": \n{"key": "b", "kind": "train"}\n')
    with pytest.raises(ValueError, match="line 2: no record"):
        Records(path)


def test_a_value_that_is_no_number_is_not_recorded(tmp_path):
    records = Records(tmp_path / "records.jsonl")
    with pytest.raises(ValueError):
        records.append(record("a", loss=float("nan")))
    assert Records(tmp_path / "records.jsonl").by_key == {}
