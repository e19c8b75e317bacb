"""From the answers of one round to its outer gradient, by the syncer's own functions; and how far the outer step went.

Decides which of those functions an arm uses. It must not know rounds or learners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from experiments.codecs import decode_answer
from experiments.configs import Fleet
from syncer.merge.gain import mean_answer
from syncer.merge.merge import merge_fragment
from syncer.merge_words import correction_of, spectrum_of
from syncer.merger import outer_momentum
from yeto_torch.fragments import build_layout
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.layout import WireFragment
from yeto_torch.wire.model_layout import Layout


def layout_for(fleet: Fleet, shapes: Sequence[tuple[str, tuple[int, ...]]], average: str | None) -> Layout:
    """The product's layout; of the avg arms that of rda with every fragment averaged."""
    mode = "iso" if fleet.merge.startswith("iso") else "rda"
    layout = build_layout(shapes, fragments=fleet.fragments, matrix_merge=mode, average=average)
    if not fleet.merge.startswith("avg"):
        return layout
    return Layout(tuple(replace(fragment, mode=MergeMode.AVG) for fragment in layout.fragments))


def outer_gradient(
    fleet: Fleet, fragment: WireFragment, gradients: Sequence[Tensor], weights: Sequence[float], momentum: Tensor
) -> Tensor:
    """The merged signed outer gradient [numel] f32 of one round; arguments as of ``merge_fragment``."""
    spectrum = spectrum_of("norm" if fleet.merge == "iso-norm" else "mean")
    arguments, correction = (
        (gradients, weights, momentum),
        correction_of(fleet.correction, fleet.outer(fragment.mode)[1]),
    )
    merged = merge_fragment(fragment, *arguments, correction=correction, spectrum=spectrum)[0]
    if fleet.merge == "avg-norm":
        radial = merge_fragment(replace(fragment, mode=MergeMode.RDA), *arguments, correction=correction)[0]
        for part, model in zip(merged.split(fragment.numels), radial.split(fragment.numels), strict=True):
            length = part.double().norm()
            if length > 0:
                part.mul_(float(model.double().norm() / length))
    return merged


def outer_step(
    fleet: Fleet,
    mode: MergeMode,
    gradients: Sequence[Tensor],
    weights: Sequence[float],
    momentum: Tensor,
    merged: Tensor,
) -> tuple[float, float]:
    """Rate and momentum of the round's outer step: the fleet's, the momentum less under its guard.

    ``merged`` is the outer gradient.
    """
    lr, mu = fleet.outer(mode)
    if fleet.guard == "off":
        return lr, mu
    answers = mean_answer(gradients, weights, momentum)
    found = None if answers is None else answers.against(merged)
    return lr, outer_momentum(fleet.guard, found, lr, mu)


def decoded(fleet: Fleet, fragment: WireFragment, payloads: Sequence[memoryview]) -> list[Tensor]:
    """The signed outer gradients of the answers, [numel] f32 each."""
    return [decode_answer(payload, fragment.numel, fleet.wire) for payload in payloads]


def aligned_gain(step: Tensor, gradients: Sequence[Tensor], weights: Sequence[float]) -> float:
    """How far the outer step went along the learners' mean progress, in units of that progress.

    gain = <theta_new - theta_old, m> / <m, m>, in f64, with m = -sum(w_i d_i) / sum(w_i) the weighted mean of the
    learners' deltas (their signed outer gradients d_i negated, as decoded, before any correction). Plain averaging
    with lr 1 and momentum 0 has gain 1; a steady direction under lr and momentum mu has gain lr / (1 - mu), times
    what the merge mode adds to the mean's length. 0 where the mean is zero.

    Args:
        step: theta_new - theta_old of one fragment, [n] f32.
        gradients, weights: one per member.
    """
    mean = torch.zeros_like(step, dtype=torch.float64)
    for gradient, weight in zip(gradients, weights, strict=True):
        mean -= gradient.double() * (weight / sum(weights))
    square = float(mean @ mean)
    return float(step.double() @ mean) / square if square > 0 else 0.0
