"""YetoOuterOptimizer: any torch optimizer, as one learner of a fleet.

``wrapper`` makes it a torch optimizer, ``learner`` does the fleet's work; this file joins them: what a user says at
construction, what happens at the end of ``step``, and how a run ends. It must not know the protocol.

Source: README, "The learner".
"""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from yeto_torch.config import LearnerConfig, disabled
from yeto_torch.fragments import NamedParameters, bind, collect, kept, layout_of, raw_names
from yeto_torch.launcher.folder import save_layout
from yeto_torch.learner.learner import Learner
from yeto_torch.learner.shards import check_shards, check_wrapping, resharding
from yeto_torch.learner.stats import Stats
from yeto_torch.learner.syncs import OnSync
from yeto_torch.offline.local import LocalLearner
from yeto_torch.ranks.follower import Follower
from yeto_torch.ranks.group import RankGroup
from yeto_torch.ranks.leader import make_learner
from yeto_torch.ranks.rendezvous import Rendezvous
from yeto_torch.wire.errors import RunError
from yeto_torch.wire.layout import Layout
from yeto_torch.wrapper import Closure, OptimizerWrapper, value_of


class YetoOuterOptimizer(OptimizerWrapper):
    """Wraps ``inner`` so that the model it trains is trained by a whole fleet.

    The constructor connects and, like DDP's, returns when the fleet's weights are installed. Each ``step`` is the
    inner optimizer's; in between, and without waiting for the network, fragments of the model are exchanged with the
    syncer. ``state_dict`` is exactly the inner optimizer's: outer state comes from the syncer on joining.

    Args:
        inner: the optimizer, or a list of optimizers over one model.
        named_parameters: ``model.named_parameters()``, or the model; default: the names the inner optimizer knows.
        syncer: ``"host:port"``. Default: YETO_SYNCER. ``"local"``: no fleet; the outer step is made in this process, in
            the manner of Lookahead, by the rules in ``local``.
        learner_id: 0 to learners - 1. Default: YETO_LEARNER_ID.
        run_id: the name of the run. Default: YETO_RUN_ID.
        fragments, pattern, matrix_merge, average: the layout.
        wire_dtype: ``"bf16"``, ``"f32"`` or ``"q4"``; what travels.
        streams: data sockets.
        merge_alpha: how much of the local value survives a broadcast; 0 takes the global one.
        tokens_per_step: what a step counts unless ``step`` is told.
        profile: the syncer's configuration to bind to (``ProfileRecord`` or its hash).
        contract: 32 bytes instead of the contract derived from ``run_id``.
        hmac_key: signs HELLO. Default: the file that YETO_HMAC_KEY_FILE names.
        tls: ``True``, a path to a CA file, or a mapping; see ``security``. Default: YETO_TLS_CA, _CERT and _KEY.
        process_group: the ranks of this learner, if they are several (``dist.group.WORLD``); see ``island``. Every
            rank makes the same calls with its own part of the model and its own tokens; what is no parameter counts
            as rank 0 was told.
        budget_steps: the learner-budget target. Default: YETO_BUDGET_STEPS.
        wait_for_start: False returns at once; steps made before the first weights come are overwritten by them.
        on_nonfinite: ``"raise"``, or ``"resync"``: drop local progress and take the last broadcast again.
        max_reconnects: redials without a broadcast in between before giving up; None = never.
        connect_timeout_s, final_timeout_s: how long the constructor, and how long ``finish`` waits.
        on_sync: called with a ``Sync`` for every broadcast taken over, and once for the final cut (``final=True``), on
            the thread that steps; what it raises comes out of ``step`` or ``finish``. The constructor's own first
            weights are not told.
        local: with ``syncer="local"``: ``sync_interval_steps``, ``lr``, ``momentum``, ``delta_correction``,
            ``iso_scale``; the defaults are the syncer's preset ``balanced``.

    Raises:
        ValueError: a wrong argument; the sentence names it.
        ConnectionLostError: the fleet did not start within ``connect_timeout_s``.
        RefusedError: the syncer does not want this learner; carries its reason.
        NonFiniteError: learner 0's starting values are not finite.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        named_parameters: NamedParameters | None = None,
        syncer: str | None = None,
        learner_id: int | None = None,
        run_id: str | None = None,
        fragments: int = 8,
        pattern: str = "binpack",
        matrix_merge: str = "rda",
        average: str | None = None,
        wire_dtype: str = "bf16",
        streams: int = 4,
        merge_alpha: float = 0.0,
        tokens_per_step: int = 1,
        profile: Any = None,
        contract: bytes | str | None = None,
        hmac_key: bytes | None = None,
        tls: Any = None,
        process_group: Any = None,
        budget_steps: int | None = None,
        wait_for_start: bool = True,
        on_nonfinite: str = "raise",
        max_reconnects: int | None = None,
        connect_timeout_s: float = 900,
        final_timeout_s: float = 900,
        on_sync: OnSync | None = None,
        local: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(inner)
        self._learner: Learner | Follower | LocalLearner | None = None
        self._counted: int | None = None  # tokens of the step to come
        self._warned = self._ended = False
        self._rules: dict[str, Any] = {
            "fragments": fragments, "pattern": pattern, "matrix_merge": matrix_merge, "average": average,
        }  # fmt: skip
        self._named = named = kept(named_parameters)
        ranks = None if process_group is None else RankGroup(process_group)
        with Rendezvous(ranks) as rendezvous:
            if disabled():
                return
            config = LearnerConfig.resolve(
                syncer=syncer, learner_id=learner_id, run_id=run_id, **self._rules, wire_dtype=wire_dtype,
                streams=streams, merge_alpha=merge_alpha, tokens_per_step=tokens_per_step, profile=profile,
                contract=contract, hmac_key=hmac_key, tls=tls, process_group=process_group,
                budget_steps=budget_steps, wait_for_start=wait_for_start, on_nonfinite=on_nonfinite,
                max_reconnects=max_reconnects, connect_timeout_s=connect_timeout_s,
                final_timeout_s=final_timeout_s, on_sync=on_sync, local=local,
            )  # fmt: skip
            reshard = resharding(named)
            reshard()
            check_wrapping(named, raw_names(self._inner, named), process_group)
            parameters = collect(self._inner, named)
            check_shards(parameters, None if ranks is None else ranks.members)
            rendezvous.layout = self._layout = layout_of(parameters, **self._rules)
            if config.run_dir is not None and config.identity == 0 and (ranks is None or ranks.rank == 0):
                save_layout(self._layout, Path(config.run_dir))
        self._in_layout = {id(p) for p in parameters.values()}
        learner = make_learner(config, self._layout, bind(self._layout, parameters), self._inner, ranks, reshard)
        try:
            learner.start()
        except BaseException:
            learner.close()
            raise
        self._learner = learner
        weakref.finalize(self, learner.abandon).atexit = False  # at exit the link leaves by itself

    # ------------------------------------------------------------------------------------------ training

    def step(self, closure: Closure | None = None, *, tokens: int | None = None, **inner_arguments: Any) -> Any:
        """One step of the inner optimizer; then, if anything is due, the exchange with the fleet.

        Args:
            closure: as for any torch optimizer.
            tokens: what this step counts in the weight of the learner (w = tokens² / steps), on top of what
                ``count_tokens`` was told; default ``tokens_per_step``.
            **inner_arguments: handed on to the inner optimizer.

        Returns:
            What the inner optimizer returns. After the final cut was installed: what the closure returns, and no
            parameter changes.

        Raises:
            PeerError, RefusedError, ConnectionLostError: what ended the session.
            NonFiniteError: a parameter is not finite when its progress is asked for.
        """
        if tokens is not None:
            inner_arguments["tokens"] = tokens  # hooks see it, and may change it
        return super().step(closure, **inner_arguments)

    step.hooked = True  # type: ignore[attr-defined]  # as the wrapper's own

    def _step(self, closure: Closure | None = None, *, tokens: int | None = None, **inner_arguments: Any) -> Any:
        learner = self._learner
        if learner is None:
            return super()._step(closure, **inner_arguments)
        if learner.installed:
            self._warn_ended()
            value = value_of(closure)
            learner.stepped(None)
            return value
        if learner.frozen:
            raise RunError("step() after report_budget(): the parameters are frozen; call finish()")
        count = self._counted if tokens is None else _add("step", self._counted, tokens)
        loss = super()._step(closure, **inner_arguments)
        if self._was_skipped(inner_arguments):
            learner.stepped(None)
        else:
            self._counted = None
            learner.stepped(learner.config.tokens_per_step if count is None else count)
        return loss

    def count_tokens(self, tokens: int) -> None:
        """Count ``tokens`` for the next step that is made: for loops that call ``step()`` for you, and for the
        micro-batches of one step. Calls add up. Raises ValueError when negative.
        """
        self._counted = _add("count_tokens", self._counted, tokens)

    def resync(self) -> None:
        """Put the parameters back on the last broadcasts; progress made since is dropped.

        For after a training checkpoint was loaded into the model: what it holds is older than the fleet, and would
        travel as if it had been learnt just now. Raises RunError after the final cut was installed.
        """
        if self._learner is not None:
            self._learner.resync()

    def _switch(self, mode: str) -> None:
        """A mode moves the parameters, so that none may change behind the final cut."""
        if self._learner is None or not self._learner.installed:
            super()._switch(mode)

    def _warn_ended(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn("step() after the run has finished: the final parameters stay as they are", stacklevel=5)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the (first) inner optimizer, before the first step.

        Its parameters are in the layout already or do not require grad: what is exchanged is fixed when the optimizer
        is wrapped. Raises ValueError for others, and after the first step.
        """
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        if self._learner is not None:
            if self._learner.local_step:
                raise ValueError("add_param_group after the first step: the layout of the fleet is fixed by then")
            for item in params:
                tensor = item[1] if isinstance(item, tuple) else item
                if tensor.requires_grad and tensor.numel() and id(tensor) not in self._in_layout:
                    raise ValueError(
                        f"add_param_group: a new trainable parameter of shape {tuple(tensor.shape)} is not in the "
                        "layout; add it to the inner optimizer before wrapping it"
                    )
        self._inner[0].add_param_group({**param_group, "params": params})

    # ------------------------------------------------------------------------------------------ the end of a run

    @property
    def finished(self) -> bool:
        """True once the authoritative final parameters are installed and their acknowledgement was sent."""
        return self._ended if self._learner is None else self._learner.finished

    def finish(self, timeout: float | None = None) -> None:
        """Serve the fleet until the final cut, install it, return. Idempotent.

        Args:
            timeout: seconds; default ``final_timeout_s``.

        Raises:
            RunError: the cut did not come in time.
        """
        if self._learner is None:
            self._ended = True
        else:
            self._learner.finish(timeout)

    def report_budget(self, steps: int) -> None:
        """Learner-budget benchmark: report that exactly ``steps`` steps were made, and freeze the parameters.

        Returns once the report has left; ``finish()`` then serves the consolidation and the final cut. Raises
        ValueError, with nothing sent, unless ``steps`` is ``budget_steps`` (if given) and the number of steps made.
        """
        if self._learner is not None:
            self._learner.report_budget(steps)

    def close(self) -> None:
        """Leave, without the final cut if it has not come yet; ``step`` is then the inner optimizer's alone."""
        if self._learner is not None:
            self._learner.close()

    def __enter__(self) -> YetoOuterOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------ what can be looked at

    @property
    def stats(self) -> Stats:
        """A snapshot of this learner's numbers."""
        return Stats() if self._learner is None else self._learner.stats

    @property
    def layout(self) -> Layout:
        """The fragments, their tensors and the fingerprint."""
        if self._learner is None:
            return layout_of(collect(self._inner, self._named), **self._rules)
        return self._layout

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "YetoOuterOptimizer holds a connection and cannot be copied or pickled; save optimizer.state_dict()"
        )


def _add(call: str, counted: int | None, tokens: int) -> int:
    """``tokens`` more than were counted; bad ones are the fault of ``call``."""
    count = operator.index(tokens)
    if count < 0:
        raise ValueError(f"{call}(tokens={count}): must not be negative")
    return (counted or 0) + count
