"""A callback that makes a Lightning Trainer one learner of a fleet.

Decides when the Trainer stops, when the final parameters are taken, and what a step counts. It must not know the
protocol: all it has of the fleet is the optimizer. Needs lightning: ``pip install 'yeto-torch[ecosystem]'``.

    class Module(LightningModule):
        def configure_optimizers(self):  # the weights are loaded and on their device: the fleet may be waited for
            return YetoOuterOptimizer(AdamW(self.parameters(), lr=3e-4), self)

    Trainer(max_epochs=3, callbacks=[YetoCallback()]).fit(Module(), loader)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    raise ImportError(
        "yeto_torch.integrations.lightning needs lightning: pip install 'yeto-torch[ecosystem]'"
    ) from error

from yeto_torch.optimizer import YetoOuterOptimizer

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def non_padding_tokens(batch: object) -> int | None:
    """Tokens of a batch that has an ``attention_mask``, None for others."""
    if isinstance(batch, Mapping) and "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    return None


class YetoCallback(Callback):
    """Ends the training with the fleet, and the fleet's part with the training.

    The run over: the Trainer stops after the step that installed the final parameters. The data over: the last batch
    waits in ``optimizer.finish()`` until the run is. Either way what is validated and saved last, and whatever is saved
    after ``fit()``, is the final model. (Where another callback ends the training, the waiting is done after the last
    validation; ``trainer.save_checkpoint()`` after ``fit()`` is always right.)

    Args:
        count: tokens of a batch, summed over the batches of a step; None leaves it at ``tokens_per_step``. Default:
            ``non_padding_tokens``.

    Raises:
        ValueError: when training begins, unless ``configure_optimizers`` returned exactly one YetoOuterOptimizer.
    """

    def __init__(self, count: Callable[[Any], int | None] = non_padding_tokens) -> None:
        self._count = count
        self._optimizer: YetoOuterOptimizer

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._optimizer = _only(trainer)
        if not self._optimizer.finished:
            self._optimizer.resync()  # some strategies load a checkpoint over the fleet's weights

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        tokens = self._count(batch)
        if tokens is not None:
            self._optimizer.count_tokens(tokens)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self._optimizer.finished:
            trainer.should_stop = True
        elif _is_last(trainer):
            self._optimizer.finish()  # before the last validation and checkpoint

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._optimizer.finish()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _only(trainer).finish()  # a resumed fit with no step left to make has had no training to end


def _only(trainer: Trainer) -> YetoOuterOptimizer:
    found = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, YetoOuterOptimizer)]
    if len(found) != 1:
        raise ValueError(
            f"configure_optimizers must return one YetoOuterOptimizer (around all optimizers of the model), not "
            f"{len(found)} among {[type(optimizer).__name__ for optimizer in trainer.optimizers]}"
        )
    return found[0]


def _is_last(trainer: Trainer) -> bool:
    """Was this the last batch, whatever anybody else may want?"""
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return True
    return bool(trainer.is_last_batch) and trainer.current_epoch + 1 == trainer.max_epochs
