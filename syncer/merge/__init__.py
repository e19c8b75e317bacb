"""The coordinator's mathematics: pure functions on flat f32 tensors, on the CPU or a GPU."""

from syncer.config.policy import IsoScale
from syncer.merge.correction import correction_of
from syncer.merge.intake import decode_gradient
from syncer.merge.iso import Spectrum, flatten_spectrum
from syncer.merge.merge import merge_and_measure, merge_fragment, total_norm
from syncer.merge.nesterov import nesterov_step
from syncer.merge.weights import learner_weight

__all__ = [
    "IsoScale",
    "Spectrum",
    "correction_of",
    "decode_gradient",
    "flatten_spectrum",
    "learner_weight",
    "merge_and_measure",
    "merge_fragment",
    "nesterov_step",
    "total_norm",
]
