"""The demonstration itself, short: real data, real processes, and everything it promises in its run folder."""

import json

import pytest

pytest.importorskip("torchvision")
pytest.importorskip("sklearn")
pytest.importorskip("rich")

from safetensors import safe_open

from yeto_torch import demo, load_final
from yeto_torch.demos import comparison
from yeto_torch.demos.report import draw
from yeto_torch.demos.task import evaluate, make_task


def test_two_learners_with_split_classes_know_all_digits(tmp_path, capfd, monkeypatch):
    folder = tmp_path / "run"
    drawn = []
    monkeypatch.setattr(comparison, "draw", lambda path, title, arms: (drawn.extend(arms), draw(path, title, arms)))
    code = demo.main(["--split", "classes", "--run-dir", str(folder)])
    out, err = capfd.readouterr()
    assert code == 0, out + err
    result = json.loads((folder / "result.json").read_text())
    seed = result["seeds"][0]
    fleet, alone = seed["fleet"], seed["alone"]
    assert len(alone) == 2
    assert fleet["accuracy"] >= max(run["accuracy"] for run in alone) + 30
    assert fleet["samples"] == pytest.approx(seed["synchronous"]["samples"], abs=32)
    assert 0 < fleet["bytes_moved"] < seed["synchronous"]["bytes_moved"] / 8

    task = make_task("digits", split="classes", seed=0)  # what the table says is what the run folder holds
    model = task.model()
    assert load_final(model, folder) == seed["outer_steps"]
    assert evaluate(model, task) == pytest.approx((fleet["accuracy"], fleet["loss"]))
    with safe_open(folder / "model.safetensors", framework="pt") as state:
        assert set(state.keys()) == {name for name, _ in model.named_parameters()}
    merges = [json.loads(line) for line in (folder / "tape.jsonl").read_text().splitlines()]
    assert [m["step"] for m in merges if "event" not in m] == list(range(1, seed["outer_steps"] + 1))
    assert len(drawn) == 4
    sampled = [point[0] for point in drawn[0].points]
    for arm in drawn:  # one sampling and one beginning for all of them, to half a step of both learners
        expected = [samples for samples in sampled if samples < arm.end.samples - 32]
        assert [point[0] for point in arm.points][: len(expected)] == pytest.approx(expected, abs=32)
        assert len(arm.points) - len(expected) <= 2
        assert arm.points[0][2] == pytest.approx(drawn[0].points[0][2], rel=0.05)  # broadcasts are bf16
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "checkpoint.yeto").exists()
    assert str(folder) in out
    for row in ("fleet, final model", "alone, digits 0 to 4", "alone, digits 5 to 9", "synchronous training"):
        assert row in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--text", "--split", "classes"], "--split classes is for the digits"),
        (["--seeds", "0"], "--seeds 0: must be at least 1"),
        (["--steps", "1"], "--steps 1: must be at least 50"),
        (["--run-dir", "/dev/null"], "must be a new or an empty folder"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(capfd, arguments, complaint):
    assert demo.main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert complaint in err


def test_a_folder_that_cannot_be_made_is_one_line(capfd):
    assert demo.main(["--run-dir", "/dev/null/run"]) == 1
    assert "/dev/null/run" in capfd.readouterr().err.splitlines()[-1]
