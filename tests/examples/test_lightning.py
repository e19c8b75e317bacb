"""A Lightning Trainer in this process, as the only learner of a real syncer."""

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.examples.conftest import assert_final, parameters_of, same, same_state, tokens_per_step
from yeto_torch import YetoOuterOptimizer
from yeto_torch.integrations.lightning import YetoCallback, non_padding_tokens

REAL, LENGTH = 5, 12
BATCH, ACCUMULATION = 4, 2
DATA = [{"x": torch.randn(8), "attention_mask": (torch.arange(LENGTH) < REAL).long()} for _ in range(40)]


class Module(lightning.LightningModule):
    """Two layers; remembers what it held in each validation."""

    def __init__(self, wrap=True):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.wrap, self.validated, self.joined_with = wrap, [], None

    def training_step(self, batch):
        return (self.layers(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch):  # noqa: ARG002
        self.validated.append(parameters_of(self))

    def configure_optimizers(self):
        inner = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if not self.wrap:
            return inner
        optimizer = YetoOuterOptimizer(inner, self, fragments=2, streams=1, connect_timeout_s=60, final_timeout_s=60)
        self.joined_with = parameters_of(self)
        return optimizer


class At(lightning.Callback):
    """Calls ``do(module, optimizer)`` when training begins (step None) or after a step."""

    def __init__(self, step, do):
        self._step, self._do = step, do

    def on_train_start(self, trainer, pl_module):
        if self._step is None:
            self._do(pl_module, trainer.optimizers[0])

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == self._step:
            self._do(pl_module, trainer.optimizers[0])


class PowerCutError(Exception):
    pass


def cut(_module, optimizer):
    optimizer.close()
    raise PowerCutError


def fit(module, out, *callbacks, resume=None, **arguments):
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=ACCUMULATION,
        num_sanity_val_steps=0,
        default_root_dir=out,
        callbacks=[ModelCheckpoint(dirpath=out, filename="{step}", save_top_k=-1), YetoCallback(), *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(module, DataLoader(DATA, batch_size=BATCH), DataLoader(DATA, batch_size=40), ckpt_path=resume)
    return trainer


def test_a_trainer_saves_resumes_and_ends_before_the_fleet(fleet, tmp_path):
    syncer, folder = fleet(total_steps=100)  # two rounds a step at most: the 18 steps below are over before
    with pytest.raises(PowerCutError):
        fit(Module(), tmp_path, At(8, cut), max_epochs=3)
    checkpoint = torch.load(tmp_path / "step=5.ckpt", weights_only=True)
    old, module, seen = Module(), Module(), []
    old.load_state_dict(checkpoint["state_dict"])

    def look(module, optimizer):
        seen.append(module.trainer.current_epoch)
        assert same(parameters_of(module), module.joined_with)
        assert not same(parameters_of(module), parameters_of(old))
        assert same_state(optimizer.state_dict()["state"], checkpoint["optimizer_states"][0]["state"])

    trainer = fit(module, tmp_path, At(None, look), max_epochs=3, resume=tmp_path / "step=5.ckpt")
    assert seen == [1]
    assert trainer.global_step == 15
    assert syncer.wait() == 0
    assert_final(module, folder)
    assert same(module.validated[-1], parameters_of(module))  # the last validation saw the final model ...
    old.load_state_dict(torch.load(tmp_path / "step=15.ckpt", weights_only=True)["state_dict"])
    assert_final(old, folder)  # ... and the last checkpoint has it
    assert tokens_per_step(folder) == {BATCH * ACCUMULATION * REAL, 0}


def test_a_fit_that_is_resumed_with_no_step_left_waits_for_the_fleet_all_the_same(fleet, tmp_path):
    """The power went while the last step waited: the checkpoint that was loaded is not the final model."""
    syncer, folder = fleet(total_steps=100)
    with pytest.raises(PowerCutError):
        fit(Module(), tmp_path, At(8, cut), max_epochs=3)
    module = Module()
    trainer = fit(module, tmp_path, max_epochs=1, resume=tmp_path / "step=5.ckpt")
    assert trainer.global_step == 5
    assert syncer.wait() == 0
    assert_final(module, folder)


@pytest.mark.parametrize("limits", [{"max_epochs": -1}, {"max_epochs": -1, "min_steps": 60}], ids=["free", "min_steps"])
def test_a_trainer_stops_with_the_fleet(fleet, tmp_path, limits):
    syncer, folder = fleet(total_steps=9)
    module = Module()
    with pytest.warns(UserWarning, match=r"run has finished") if "min_steps" in limits else _nothing():
        trainer = fit(module, tmp_path, **limits)
    assert syncer.wait() == 0
    assert trainer.global_step >= limits.get("min_steps", 4)
    assert_final(module, folder)
    assert same(module.validated[-1], parameters_of(module))


def test_max_steps_is_an_end_as_well(fleet, tmp_path):
    syncer, folder = fleet(total_steps=40)
    module = Module()
    fit(module, tmp_path, max_steps=7, max_epochs=-1)
    assert syncer.wait() == 0
    assert_final(module, folder)
    assert tokens_per_step(folder) == {BATCH * ACCUMULATION * REAL, 0}


def test_a_module_without_our_optimizer_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"must return one YetoOuterOptimizer.*0 among \['AdamW'\]"):
        fit(Module(wrap=False), tmp_path, max_epochs=1)


def test_only_batches_with_a_mask_are_counted():
    assert non_padding_tokens({"attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}) == 3
    assert non_padding_tokens({"input_ids": torch.ones(2, 3)}) is None
    assert non_padding_tokens([torch.ones(2, 3)]) is None


def _nothing():
    from contextlib import nullcontext

    return nullcontext()
