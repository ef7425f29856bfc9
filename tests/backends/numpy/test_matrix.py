"""Weights as float32 and in blocks, of two axes and of three, and the promises about memory."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_ops import random, tensor

from ggpy.backends.interface import Role
from ggpy.backends.numpy import matrix
from ggpy.backends.numpy.backend import Reference

MATRIX = Role("F D")


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_weights_in_blocks_give_the_same(kind, monkeypatch):
    monkeypatch.setattr(matrix, "CHUNK_WEIGHTS", 100)
    notes: list[str] = []
    w = tensor(random(50, 64), kind)
    roomy, full = Reference(1), Reference(1, note=notes.append, weight_memory=0)
    looked_up = Role("V D", lookup=True)
    a, b, c = roomy.weight(w, MATRIX), full.weight(w, MATRIX), roomy.weight(w, looked_up)
    full.weights_ready()
    assert a.array is not None and b.array is None and c.array is None
    assert "0.0 GB of the weights do not fit" in notes[0] and "in blocks" in notes[0]
    x = random(3, 64)
    np.testing.assert_allclose(b.multiply(x), a.multiply(x), atol=1e-5)
    for other in (b, c):
        np.testing.assert_array_equal(
            other.rows(np.array([3, 3, 49])), a.rows(np.array([3, 3, 49]))
        )


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("memory", [None, 0], ids=["floats", "blocks"])
@pytest.mark.parametrize("has_scale", [False, True])
def test_a_weight_of_three_axes_is_a_matrix_for_each_expert(kind, memory, has_scale, monkeypatch):
    monkeypatch.setattr(matrix, "CHUNK_WEIGHTS", 100)  # chunks that cross experts
    w, scale = tensor(random(5, 7, 64), kind), random(5, 7) if has_scale else None
    role = Role("X F D")
    given = None if scale is None else tensor(scale)
    experts = Reference(1, weight_memory=memory).weight(w, role, given)
    x, values = random(3, 64), w.dequantize()
    assert values.shape == (5, 7, 64)
    for e in range(5):
        expected = x @ values[e].T * (1 if scale is None else scale[e])
        np.testing.assert_allclose(experts.expert(e).multiply(x), expected, atol=1e-4)


def test_weights_fill_the_memory_that_there_is():
    ops = Reference(1, weight_memory=4 * 100 * 32 + 10)
    w = tensor(random(100, 32))
    assert ops.weight(w, MATRIX).array is not None
    assert ops.weight(w, MATRIX).array is None, "the second one does not fit"


def test_all_fit_and_nobody_is_told():
    ops = Reference(1, note=pytest.fail)
    ops.weight(tensor(random(10, 32)), MATRIX)
    ops.weights_ready()
