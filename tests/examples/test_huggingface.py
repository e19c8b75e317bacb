"""A Hugging Face Trainer in this process, as the only learner of a real syncer."""

import pytest
import torch
from safetensors.torch import load_model
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from tests.examples.conftest import assert_final, parameters_of, same, same_state, tokens_per_step
from yeto_torch import YetoOuterOptimizer
from yeto_torch.integrations.huggingface import YetoCallback

REAL, LENGTH = 5, 12  # words of each sentence; with padding
BATCH, ACCUMULATION = 2, 3


def sentence(number):
    words = torch.zeros(LENGTH, dtype=torch.long)
    words[:REAL] = 1 + (torch.arange(REAL) + number) % 15
    mask = (words > 0).long()
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


DATA = [sentence(number) for number in range(60)]  # ten steps an epoch


def gpt2(seed):
    torch.manual_seed(seed)
    size = {"vocab_size": 16, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **size))


def wrapped(model):
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return YetoOuterOptimizer(inner, model, fragments=3, streams=1, connect_timeout_s=60, final_timeout_s=60)


def trainer_of(model, optimizer, out, *callbacks, own=True, schedule=lambda step: 0.9**step, **arguments):
    arguments = {"save_strategy": "no", "num_train_epochs": 1000, **arguments}
    return Trainer(
        model,
        TrainingArguments(
            output_dir=str(out),
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATION,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            **arguments,
        ),
        train_dataset=DATA,
        eval_dataset=DATA[:4],
        optimizers=(optimizer, LambdaLR(optimizer, schedule)) if own else (None, None),
        callbacks=[YetoCallback(optimizer), *callbacks],
    )


class At(TrainerCallback):
    """Calls ``do(model, optimizer, state)`` when training begins (step None) or after a step."""

    def __init__(self, step, do):
        self._step, self._do = step, do

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **_):  # noqa: ARG002
        if self._step is None:
            self._do(model, optimizer, state)

    def on_step_end(self, args, state, control, model=None, optimizer=None, **_):  # noqa: ARG002
        if state.global_step == self._step:
            self._do(model, optimizer, state)


class PowerCutError(Exception):
    pass


def cut(*_):
    raise PowerCutError


def test_a_trainer_saves_resumes_and_ends_before_the_fleet(fleet, tmp_path):
    syncer, folder = fleet(total_steps=100)  # two rounds a step at most: the 25 steps below are over before
    model = gpt2(0)
    optimizer = wrapped(model)
    first = trainer_of(model, optimizer, tmp_path, At(15, cut), max_steps=20, save_strategy="steps", save_steps=10)
    with pytest.raises(PowerCutError):
        first.train()
    optimizer.close()

    saved = torch.load(tmp_path / "checkpoint-10" / "optimizer.pt", weights_only=True)
    old, model = gpt2(1), gpt2(2)
    load_model(old, tmp_path / "checkpoint-10" / "model.safetensors")
    optimizer = wrapped(model)
    of_the_fleet = parameters_of(model)
    seen = []

    def look(model, optimizer, state):
        seen.append(state.global_step)
        assert same(parameters_of(model), of_the_fleet)
        assert not same(parameters_of(model), parameters_of(old))
        assert same_state(optimizer.state_dict()["state"], saved["state"])
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.9**10)

    second = trainer_of(model, optimizer, tmp_path, At(None, look), max_steps=20, save_strategy="steps", save_steps=10)
    second.train(resume_from_checkpoint=True)
    assert seen == [10]
    assert second.state.global_step == 20
    assert optimizer.finished
    assert syncer.wait() == 0

    assert_final(model, folder)
    load_model(old, tmp_path / "checkpoint-20" / "model.safetensors")
    assert_final(old, folder)  # the Trainer's own last checkpoint is the final model too
    assert tokens_per_step(folder) == {BATCH * ACCUMULATION * REAL, 0}


def test_a_trainer_stops_with_the_fleet(fleet, tmp_path):
    syncer, folder = fleet(total_steps=9)
    model = gpt2(0)
    optimizer = wrapped(model)
    rare = {"save_strategy": "steps", "save_steps": 5000, "eval_strategy": "steps", "eval_steps": 5000}
    trainer = trainer_of(
        model, optimizer, tmp_path, schedule=lambda _: 1 - optimizer.stats.global_step / 9, logging_steps=1, **rare
    )
    trainer.train()
    assert optimizer.finished
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates[0] == pytest.approx(1e-3)
    assert rates == sorted(rates, reverse=True)
    assert optimizer.param_groups[0]["lr"] == 0.0  # a schedule that follows the fleet is at its end with it
    assert syncer.wait() == 0
    assert 3 <= trainer.state.global_step < 5000
    assert_final(model, folder)
    load_model(last := gpt2(1), tmp_path / f"checkpoint-{trainer.state.global_step}" / "model.safetensors")
    assert_final(last, folder)
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated == [trainer.evaluate()["eval_loss"]]  # once, of the final model
    assert tokens_per_step(folder) == {BATCH * ACCUMULATION * REAL}


@pytest.fixture
def alone(monkeypatch):
    """No fleet: the wrapper is the plain optimizer."""
    monkeypatch.setenv("YETO_DISABLE", "1")


@pytest.mark.usefixtures("alone")
def test_switched_off_the_trainer_trains_alone(tmp_path):
    model = gpt2(0)
    optimizer = wrapped(model)
    before = parameters_of(model)
    trainer = trainer_of(model, optimizer, tmp_path, max_steps=3)
    trainer.train()
    assert trainer.state.global_step == 3
    assert not same(parameters_of(model), before)
    assert optimizer.finished


@pytest.mark.usefixtures("alone")
def test_the_best_model_may_not_replace_the_final_one(tmp_path):
    model = gpt2(0)
    best = {"load_best_model_at_end": True, "save_strategy": "epoch", "eval_strategy": "epoch"}
    with pytest.raises(ValueError, match="load_best_model_at_end=True would overwrite"):
        trainer_of(model, wrapped(model), tmp_path, **best)


@pytest.mark.usefixtures("alone")
def test_a_trainer_with_an_optimizer_of_its_own_is_told(tmp_path):
    model = gpt2(0)
    trainer = trainer_of(model, wrapped(model), tmp_path, own=False, max_steps=1)
    with pytest.raises(ValueError, match=r"not the one YetoCallback was given.*optimizers="):
        trainer.train()
