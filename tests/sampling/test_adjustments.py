"""Changes to the logits of the whole vocabulary, against their formulas."""

from __future__ import annotations

import math

import numpy as np

from ggpy.sampling.adjustments import add_bias, penalize


def test_bias_is_added_and_minus_infinity_forbids() -> None:
    logits = np.array([1, 2, 3], dtype=np.float32)
    out = add_bias(logits, {0: 2.5, 2: -math.inf})
    assert out.tolist() == [3.5, 2.0, -math.inf]
    assert logits.tolist() == [1, 2, 3]


def test_penalties_follow_the_formula() -> None:
    logits = np.array([2.0, -2.0, 0.0, 4.0], dtype=np.float32)
    out = penalize(logits, [0, 1, 1, 2], repeat=2.0, presence=0.5, frequency=0.25)
    assert out.tolist() == [1 - 0.75, -4 - 1.0, -0.75, 4.0]
