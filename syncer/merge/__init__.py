"""The coordinator's mathematics: pure functions on flat f32 tensors, on the CPU or a GPU."""

from syncer.merge.blocks import norm
from syncer.merge.correction import normalized_share
from syncer.merge.intake import decode_gradient
from syncer.merge.iso import Spectrum, flatten_spectrum
from syncer.merge.merge import merge_fragment
from syncer.merge.nesterov import nesterov_step
from syncer.merge.weights import learner_weight

__all__ = [
    "Spectrum",
    "decode_gradient",
    "flatten_spectrum",
    "learner_weight",
    "merge_fragment",
    "nesterov_step",
    "norm",
    "normalized_share",
]
