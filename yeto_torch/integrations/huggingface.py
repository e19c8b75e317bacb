"""A callback that makes a Hugging Face Trainer one learner of a fleet.

Decides when the Trainer stops, when the final parameters are taken, and what a step counts. It must not know the
protocol: all it has of the fleet is the optimizer. Needs transformers: ``pip install 'yeto-torch[ecosystem]'``.

    optimizer = YetoOuterOptimizer(AdamW(model.parameters(), lr=3e-4), model)
    Trainer(model, args, ..., optimizers=(optimizer, scheduler), callbacks=[YetoCallback(optimizer)]).train()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from yeto_torch.wire.errors import RunError

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "yeto_torch.integrations.huggingface needs transformers: pip install 'yeto-torch[ecosystem]'"
    ) from error

if TYPE_CHECKING:
    from transformers import TrainerControl as Control
    from transformers import TrainerState as State
    from transformers import TrainingArguments as Arguments

    from yeto_torch.optimizer import YetoOuterOptimizer


class YetoCallback(TrainerCallback):
    """Ends the training with the fleet, and the fleet's part with the training.

    The run over: the Trainer stops after the step that installed the final parameters. The data over: the last step
    waits in ``optimizer.finish()`` until the run is. Either way what the Trainer evaluates and saves last, and whatever
    is saved after ``train()``, is the final model.

    A Trainer checkpoint that is resumed gives back the state of optimizer, schedule and data; the parameters are the
    fleet's.

    Args:
        optimizer: the one given to the Trainer, as it was before the Trainer wrapped it.
        count_tokens: tell the fleet how many tokens a step had, as the Trainer counts them: by
            ``include_num_input_tokens_seen``, which is set to ``"non_padding"`` where it is ``"no"``. If False, and
            for inputs in which the Trainer finds no tokens, a step counts ``tokens_per_step``.

    Raises:
        ValueError: when training begins, or earlier: the Trainer has another optimizer, or would load its best model
            over the final parameters.
        RunError: the run had ended before the Trainer loaded a checkpoint over its final parameters.
    """

    def __init__(self, optimizer: YetoOuterOptimizer, count_tokens: bool = True) -> None:
        self._optimizer, self._counts = optimizer, count_tokens
        self._seen = 0  # tokens that were handed on, or are of an earlier process

    def on_init_end(self, args: Arguments, state: State, control: Control, **_: object) -> None:
        _check_arguments(args)

    def on_train_begin(
        self, args: Arguments, state: State, control: Control, optimizer: object = None, **_: object
    ) -> None:
        _check_arguments(args)
        if self._optimizer not in (optimizer, getattr(optimizer, "optimizer", None)):
            raise ValueError(
                f"the Trainer's optimizer is {type(optimizer).__name__}, not the one YetoCallback was given; "
                "pass Trainer(..., optimizers=(optimizer, scheduler))"
            )
        if self._counts and args.include_num_input_tokens_seen == "no":
            args.include_num_input_tokens_seen = "non_padding"
        self._seen = state.num_input_tokens_seen
        if not self._optimizer.finished:
            self._optimizer.resync()  # the Trainer may have loaded a checkpoint over the fleet's weights
        elif state.global_step:
            raise RunError(
                "the run had ended before the Trainer loaded a checkpoint over its final parameters; "
                "do not train any more: load_final() gives them"
            )

    def on_pre_optimizer_step(self, args: Arguments, state: State, control: Control, **_: object) -> None:
        if self._counts and state.num_input_tokens_seen > self._seen:
            tokens = state.num_input_tokens_seen - self._seen  # of all ranks together: one of them tells
            self._optimizer.count_tokens(tokens if state.is_world_process_zero else 0)
            self._seen = state.num_input_tokens_seen

    def on_step_end(self, args: Arguments, state: State, control: Control, **_: object) -> Control:
        if self._optimizer.finished and not control.should_training_stop:  # then as the Trainer does at its own end
            control.should_training_stop = True
            control.should_evaluate |= args.eval_strategy == "steps"
            control.should_save |= args.save_strategy == "steps"
        self._finish_if_over(control)
        return control

    def on_epoch_end(self, args: Arguments, state: State, control: Control, **_: object) -> None:
        self._finish_if_over(control)

    def on_train_end(self, args: Arguments, state: State, control: Control, **_: object) -> None:
        self._optimizer.finish()

    def _finish_if_over(self, control: Control) -> None:
        """Before the Trainer evaluates and saves for the last time."""
        if control.should_training_stop:
            self._optimizer.finish()


def _check_arguments(args: Arguments) -> None:
    if args.load_best_model_at_end:
        raise ValueError(
            "load_best_model_at_end=True would overwrite the fleet's final parameters with an earlier checkpoint of "
            "this learner; set it to False"
        )
