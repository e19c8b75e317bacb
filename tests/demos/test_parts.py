"""The demonstration's parts: what each training sees, and that the numbers of the table are what they are called."""

import json

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("sklearn")

from yeto_torch.demos.baselines import train_alone, train_synchronously
from yeto_torch.demos.follow import JsonLines, RunView
from yeto_torch.demos.report import Arm, Result, Trained, draw, findings, gradient_bytes, plt
from yeto_torch.demos.task import evaluate, inner_optimizer, loss_of, make_task, set_lr
from yeto_torch.launcher.folder import RunFolder


def labels_seen(task, learner, batches=40):
    stream = task.batches(learner)
    return {int(label) for _ in range(batches) for label in next(stream)[1]}


def test_the_class_split_shows_each_learner_its_own_digits():
    task = make_task("digits", split="classes", seed=0)
    assert labels_seen(task, 0) == {0, 1, 2, 3, 4}
    assert labels_seen(task, 1) == {5, 6, 7, 8, 9}
    assert labels_seen(make_task("digits", split="even", seed=0), 0) == set(range(10))


@pytest.mark.parametrize("name", ["digits", "text"])
def test_everything_follows_from_the_seed(name):
    first, second, other = (make_task(name, split="even", seed=seed) for seed in (3, 3, 4))
    for a, b in zip(first.model().parameters(), second.model().parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(next(first.batches(1)), next(second.batches(1)), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(next(first.batches(1))[0], next(first.batches(0))[0])
    assert not torch.equal(next(first.batches(1))[0], next(other.batches(1))[0])
    for a, b in zip(first.held_out(), other.held_out(), strict=True):  # the same exam for every seed
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["digits", "text"])
def test_a_few_steps_learn_and_no_state_is_outside_the_parameters(name):
    torch.set_num_threads(1)
    task = make_task(name, split="even", seed=0)
    model = task.model()
    assert not list(model.buffers())
    optimizer, batches = inner_optimizer(task, model), task.batches(None)
    before = evaluate(model, task)
    for _ in range(30):
        loss = loss_of(model, *next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = evaluate(model, task)
    assert after[0] > before[0] + 10
    assert after[1] < before[1] - 0.5


def test_the_text_model_sees_no_future():
    model = make_task("text", split="even", seed=0).model()
    text = torch.randint(90, (1, 32))
    changed = text.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 90
    a, b = model(text), model(changed)
    assert torch.equal(a[0, :20], b[0, :20])
    assert not torch.equal(a[0, 20:], b[0, 20:])


def test_the_learning_rate_warms_up_holds_and_ends_at_zero():
    task = make_task("text", split="even", seed=0)
    optimizer = inner_optimizer(task, task.model())
    rates = []
    for tenth in range(11):
        set_lr(optimizer, task, tenth / 10)
        rates.append(optimizer.param_groups[0]["lr"] / task.lr)
    assert rates[0] == pytest.approx(0.1)
    assert rates[1:7] == [1.0] * 6
    assert rates[-1] == 0.0
    assert rates[6:] == sorted(rates[6:], reverse=True)


def test_a_file_that_grows_is_read_line_by_line(tmp_path):
    lines = JsonLines(tmp_path / "grows.jsonl")
    assert lines.new() == []
    with (tmp_path / "grows.jsonl").open("w") as file:
        for text, expected in [('{"a": 1}\n{"a"', [{"a": 1}]), (": 2}", []), ('\n{"a": 3}\n', [{"a": 2}, {"a": 3}])]:
            file.write(text)
            file.flush()
            assert lines.new() == expected


def test_a_run_is_read_from_its_folder(tmp_path):
    folder = RunFolder(tmp_path)
    view = RunView(folder, 2)
    view.update()
    assert view.round == 0
    responders = [{"id": 0, "bytes": 100}, {"id": 1, "bytes": 100}]
    events = [{"event": "start", "step": 0}, {"step": 1, "quorum": 2, "responders": responders}]
    folder.tape.write_text("".join(json.dumps(event) + "\n" for event in events))
    metrics = [
        {"time": 10.0, "step": 1, "loss": 2.0},
        {"time": 12.0, "step": 21, "loss": 1.0},
        {"time": 12.5, "step": 26, "held_out_accuracy": 50.0, "held_out_loss": 1.5},
        {"time": 13.0, "step": 30, "done": True, "bytes_sent": 3, "bytes_received": 4},
    ]
    (tmp_path / "learner-1.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in metrics))
    view.update()
    assert (view.round, view.quorum, view.responded, view.tensor_bytes) == (1, 2, 2, 400)
    learner = view.learners[1]
    assert (learner.step, learner.loss, learner.bytes_moved) == (30, 1.0, 7)
    assert learner.steps_per_s == pytest.approx(29 / 3)
    assert learner.held_out == [(12.5, 50.0, 1.5)]
    assert [learner.steps_at(time) for time in (9.9, 10.0, 11.0, 13.0, 14.0)] == [0, 1, 11, 30, 30]


def test_what_the_fleet_is_compared_with_is_evaluated_when_it_is_asked_to_be():
    task = make_task("digits", split="even", seed=0)
    synchronous, alone = train_synchronously(task, 2, 7, evaluate_at=[0, 3, 6]), train_alone(task, 0, 7, [0, 6, 12])
    for curve, expected in ((synchronous, [0, 3, 6, 7]), (alone, [0, 6, 7])):
        assert [step for step, _, _ in curve.held_out] == expected
        assert curve.held_out[-1] == (7, curve.accuracy, curve.final_loss)
    assert synchronous.held_out[0] == alone.held_out[0]  # the same weights, the same data


def test_every_arm_is_drawn_by_the_same_rule_and_as_it_was_measured(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    end = Trained("", 90.0, 0.5, 10, 600, None)
    points = [[(100 * i, 10.0 * i + arm, 3.0 - 0.5 * i + arm) for i in range(5)] for arm in range(3)]
    draw(tmp_path / "curves.png", "title", [Arm(f"arm {i}", points[i], end) for i in range(3)])
    for axes, column, last in zip(figures[0].axes, (2, 1), (0.5, 90.0), strict=True):
        lines, dots = axes.lines[::2], axes.lines[1::2]
        for line, measured in zip(lines, points, strict=True):
            assert line.get_xydata().tolist() == [[point[0], point[column]] for point in measured]
        assert [dot.get_xydata().tolist() for dot in dots] == [[[600, last]]] * 3
        assert [line.get_linestyle() for line in lines] == ["-"] * 3


def test_gradients_of_every_step_are_sent_and_received_by_every_learner():
    assert gradient_bytes(parameters=10, steps=3, learners=2) == 10 * 4 * 3 * 2 * 2


def test_the_findings_pair_each_seed_with_itself():
    def result(seed, fleet, alone, synchronous):
        return Result(
            seed,
            Trained("fleet", fleet, 0.1, 10, 640, 100),
            [Trained("alone", accuracy, 0.1, 10, 320, None) for accuracy in alone],
            Trained("synchronous", synchronous, 0.1, 10, 640, 5000),
            4,
            1.0,
        )

    sentences = findings([result(0, 90.0, [50.0, 40.0], 91.0), result(1, 94.0, [40.0, 48.0], 93.0)])
    assert "synchronous training: +0.0 ± 1.4 points" in sentences[0]
    assert "the better lone learner: +43.0 ± 4.2 points" in sentences[1]
    assert "50 times fewer" in sentences[2]
