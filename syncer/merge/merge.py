"""One round's answers of one fragment, merged tensor by tensor.

Decides which formula a tensor gets. Knows nothing of rounds, learners' names or the outer step: it takes gradients in
the order of their members, and that order fixes the bits.

Source: v4 §Merging (avg, rda, iso; the correction before each); rulings §4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from syncer.merge.average import average
from syncer.merge.blocks import empty_like, ordered_sum, sliceable
from syncer.merge.correction import Corrected
from syncer.merge.iso import Spectrum, flatten_spectrum, isotropic_average
from syncer.merge.members import Members, Uncorrected
from syncer.merge.rda import radial_directional_average
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
) -> tuple[Tensor, float]:
    """The merged signed outer gradient of a fragment.

    Args:
        fragment: merge mode and tensor sizes.
        gradients: one [numel] f32 or bf16 per member, ascending by (learner id, generation), on the device of
            ``momentum``; not modified.
        weights: one f64 per member. If they sum to 0 the result is zero.
        momentum: [numel] f32, the fragment's momentum before this step; not modified.
        correction: 0 leaves the gradients as they are; else each is corrected against the momentum first, and this is
            the share of the momentum's norm that counts for that.
        spectrum: the SVD backend for iso.

    Returns:
        A fresh [numel] f32 tensor on the same device, and its norm in f64: the tape's ``gnorm``.

    Raises:
        LocalError: sizes that do not match.
        RunError: the SVD failed.
    """
    if len(gradients) != len(weights) or any(part.shape != (fragment.numel,) for part in (momentum, *gradients)):
        raise LocalError(f"merge: {len(gradients)} gradients and {len(weights)} weights for {fragment.numel} values")
    merged = empty_like(momentum)
    if not ordered_sum(weights) > 0:
        return merged.zero_(), 0.0
    scratch = empty_like(momentum[: max(fragment.numels)])
    sources = sliceable(gradients)
    end = 0
    squares = []
    for index, numel in enumerate(fragment.numels):
        tensor = slice(end, end := end + numel)
        parts = [source[tensor] for source in sources]
        members: Members = Uncorrected(parts)
        if correction and numel:
            corrected = Corrected(parts, momentum[tensor], scratch[:numel], correction)
            members = Uncorrected(parts, corrected.products) if corrected.is_idle else corrected
        out = merged[tensor]
        match fragment.mode:
            case MergeMode.AVG:
                norm = average(members, weights, out)
            case MergeMode.RDA:
                norm = radial_directional_average(members, weights, out)
            case MergeMode.ISO:
                norm = isotropic_average(members, weights, fragment.dims[index], out, spectrum)
        squares.append(norm**2)
    return merged, math.sqrt(ordered_sum(squares))
