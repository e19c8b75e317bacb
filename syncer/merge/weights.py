"""How much a learner's answer counts.

Source: v4 §Merging (tokens² / steps); rulings §4.
"""

from __future__ import annotations


def learner_weight(c_tokens: int, c_steps: int) -> float:
    """``c_tokens^2 / c_steps`` in f64: tokens seen times tokens per step. 0 for a learner that made no step."""
    return float(c_tokens) ** 2 / c_steps if c_steps else 0.0
