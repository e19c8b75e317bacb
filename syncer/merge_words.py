"""What the words of the ``merge.*`` keys are to the mathematics.

The syncer and the learner's mode without a syncer take the same words. Neither ``syncer.merge``, which knows formulas
and no words, nor the syncer's configuration is asked for them.
"""

from __future__ import annotations

from functools import partial

from syncer.merge.correction import normalized_share
from syncer.merge.iso import Spectrum, flatten_spectrum


def correction_of(word: str, mu: float) -> float:
    """What ``merge.delta_correction`` is to ``merge_fragment``, with the outer momentum ``mu``.

    0 for ``none``, which is no correction, 1 for ``heloco``, 1 - mu for ``heloco-normalized``. Raises ValueError.
    """
    shares = {"none": 0.0, "heloco": 1.0, "heloco-normalized": normalized_share(mu)}
    if word not in shares:
        raise ValueError(f"delta_correction={word!r}: must be one of {', '.join(shares)}")
    return shares[word]


def spectrum_of(word: str) -> Spectrum:
    """What ``merge.iso_scale`` is to ``merge_fragment``: ``mean`` or ``norm``, computed here and in f64."""
    return partial(flatten_spectrum, keeps_norm={"mean": False, "norm": True}[word])
