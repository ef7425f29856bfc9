"""Norms, rotations and activations against their formulas, written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy_ops import random

from ggpy.backends.interface import Norm, Rope
from ggpy.backends.numpy import functions


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_norms(centred, has_bias):
    x, weight = random(3, 2, 20) + 1, random(20, seed=1)
    bias = random(20, seed=2) if has_bias else None
    norm = Norm(weight, 1e-3, bias, centred)
    assert norm.is_rms == (not centred and not has_bias)
    got = functions.normalised(x, norm)
    for i in np.ndindex(3, 2):
        row = x[i].astype(float)
        if centred:
            row = row - sum(row) / 20
        size = math.sqrt(sum(v * v for v in row) / 20 + 1e-3)
        expected = [v / size * w for v, w in zip(row, weight, strict=True)]
        expected = expected if bias is None else np.add(expected, bias)
        np.testing.assert_allclose(got[i], expected, atol=1e-5)


def test_what_is_added():
    x, y, norm = random(3, 8), random(3, 8, seed=1), Norm(random(8), 1e-5)
    np.testing.assert_array_equal(functions.added(x, y, None, 1.0), x + y)
    np.testing.assert_allclose(functions.added(x, y, None, 0.25), x + y / 4, atol=1e-6)
    normed = functions.normalised(y, norm)
    np.testing.assert_allclose(functions.added(x, y, norm, 0.5), x + normed / 2, atol=1e-6)


def test_rope_styles_and_passing_through():
    x = random(1, 1, 8)
    angle = np.array([0.5, 0.25])
    for style, pairs in (("norm", [(0, 1), (2, 3)]), ("neox", [(0, 2), (1, 3)])):
        rope = Rope(style, angle, magnitude=1.5)
        out = functions.rotated(x, rope, *functions.angles(rope, np.array([3])))
        for (i, j), t in zip(pairs, 3 * angle, strict=True):
            c, s = 1.5 * math.cos(t), 1.5 * math.sin(t)
            assert out[0, 0, i] == pytest.approx(x[0, 0, i] * c - x[0, 0, j] * s, abs=1e-5)
            assert out[0, 0, j] == pytest.approx(x[0, 0, i] * s + x[0, 0, j] * c, abs=1e-5)
        np.testing.assert_array_equal(out[..., 4:], x[..., 4:])


def test_rotation_is_exact_far_out():
    """At a million positions the angle still has its digits."""
    rope = Rope("norm", np.array([1.0]))
    cos, _ = functions.angles(rope, np.array([1_000_003], np.int32))
    assert cos[0, 0, 0] == pytest.approx(math.cos(1_000_003), abs=1e-7)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_activations_survive_large_inputs(name):
    with np.errstate(all="raise", under="ignore"):
        y = functions.ACTIVATIONS[name](np.array([-1e4, -90, 0, 90, 1e4], np.float32))
    np.testing.assert_allclose(y, [0, 0, 0, 90, 1e4], atol=1e-30)
