"""One round's answers of one fragment, merged tensor by tensor.

Decides which formula a tensor gets. Knows nothing of rounds, learners' names or the outer step: it takes gradients in
the order of their members, and that order fixes the bits.

Source: v4 §Merging; rulings §4
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from syncer.merge import pieces
from syncer.merge.average import average
from syncer.merge.correction import Corrected
from syncer.merge.iso import Spectrum, flatten_spectrum, isotropic_average
from syncer.merge.pieces import Values
from syncer.merge.rda import radial_directional_average
from syncer.merge.weights import total_weight
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.errors import LocalError
from yeto_torch.wire.layout import WireFragment


def merge_fragment(
    fragment: WireFragment,
    gradients: Sequence[Tensor],
    weights: Sequence[float],
    momentum: Tensor,
    *,
    correction: float,
    spectrum: Spectrum = flatten_spectrum,
) -> Tensor:
    """The merged signed outer gradient of a fragment: the first of what ``merge_and_measure`` returns."""
    return merge_and_measure(fragment, gradients, weights, momentum, correction=correction, spectrum=spectrum)[0]


def merge_and_measure(
    fragment: WireFragment,
    gradients: Sequence[Tensor],
    weights: Sequence[float],
    momentum: Tensor,
    *,
    correction: float,
    spectrum: Spectrum = flatten_spectrum,
) -> tuple[Tensor, float]:
    """The merged signed outer gradient of a fragment.

    Args:
        fragment: merge mode and tensor sizes.
        gradients: one [numel] f32 or bf16 per member, ascending by (learner id, generation), on the device of
            ``momentum``; not modified.
        weights: one f64 per member. If they sum to 0 the result is zero.
        momentum: [numel] f32, the fragment's momentum before this step; not modified.
        correction: whether each gradient is corrected against the momentum first; below 1 (True), the share of the
            momentum's length that counts for that, see ``correction_of``.
        spectrum: the SVD backend for iso.

    Returns:
        A fresh [numel] f32 tensor on the same device, and its norm in f64: the tape's ``gnorm``.

    Raises:
        LocalError: sizes that do not match.
        RunError: the SVD failed.
    """
    if len(gradients) != len(weights) or any(part.shape != (fragment.numel,) for part in (momentum, *gradients)):
        raise LocalError(f"merge: {len(gradients)} gradients and {len(weights)} weights for {fragment.numel} values")
    merged = pieces.empty_like(momentum)
    if not total_weight(weights) > 0:
        return merged.zero_(), 0.0
    room = pieces.empty_like(momentum[: max(fragment.numels)])
    wholes = pieces.sliceable(gradients)
    end = 0
    lengths = []
    for index, numel in enumerate(fragment.numels):
        tensor = slice(end, end := end + numel)
        parts: Sequence[Values] = [whole[tensor] for whole in wholes]
        known = None
        if correction and numel:
            corrected = Corrected(parts, momentum[tensor], room[:numel], correction)
            parts, known = (parts, corrected.products) if corrected.is_idle else (corrected, None)
        out = merged[tensor]
        match fragment.mode:
            case MergeMode.AVG:
                length = average(parts, weights, out)
            case MergeMode.RDA:
                length = radial_directional_average(parts, weights, out, known)
            case MergeMode.ISO:
                length = isotropic_average(parts, weights, fragment.dims[index], out, spectrum)
        lengths.append(length)
    return merged, math.sqrt(pieces.total([length**2 for length in lengths]))


def total_norm(gradient: Tensor) -> float:
    """The l2 norm of a gradient [n], in f64."""
    return pieces.norm(gradient)
