"""Scales of rows, and activations of 8 bits: the reference against plain sums."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ggpy.backends.interface import Role
from ggpy.backends.numpy.backend import Reference
from ggpy.backends.numpy.matrix import HostMatrix
from ggpy.formats import by_name
from ggpy.gguf import Tensor

T, N, K = 5, 7, 2080  # K sums of bytes that float32 could not hold


def scaled(name: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    format = by_name(name)
    data = rng.integers(0, 256, (N, format.row_bytes(K)), np.uint8)
    if name == "F8_E4M3":
        data[data & 127 == 127] = 0
    if name == "Q4_0":
        format.blocks(data)["d"] = 1
    scale = rng.standard_normal(N).astype(np.float32)
    return (
        Tensor("blk.0.ffn_up.weight", (N, K), format, data),
        Tensor("blk.0.ffn_up.scale", (N,), by_name("F32"), scale.view(np.uint8)),
    )


def inputs() -> np.ndarray:
    x = np.random.default_rng(3).standard_normal((T, K)).astype(np.float32)
    x[:, 7] *= 30
    x[2] = 0
    return x


def multiplied(name: str, activations: str, memory: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(the reference's product, its weights)."""
    tensor, scale = scaled(name)
    matrix = Reference(1, weight_memory=memory).weight(tensor, Role("F D"), scale, activations)
    assert isinstance(matrix, HostMatrix)
    return matrix.multiply(inputs()), tensor.dequantize()


in_memory_and_in_blocks = pytest.mark.parametrize("memory", [None, 0], ids=["floats", "blocks"])


@in_memory_and_in_blocks
@pytest.mark.parametrize("name", ["I8", "F8_E4M3", "Q4_0"])
def test_weights_alone(name: str, memory: int | None) -> None:
    got, values = multiplied(name, "f16", memory)
    weights = values.astype(np.float64) * scaled(name)[1].dequantize()[:, None]
    assert np.allclose(got, inputs() @ weights.T, rtol=1e-5, atol=1e-3)


@in_memory_and_in_blocks
def test_whole_numbers_are_summed_exactly(memory: int | None) -> None:
    got, values = multiplied("I8", "int8", memory)
    scale = scaled("I8")[1].dequantize()
    for t, x in enumerate(inputs()):
        s = np.float32(np.abs(x).max() / np.float32(127))
        q = [0 if s == 0 else max(-127, min(127, round(float(np.float32(v / s))))) for v in x]
        for n in range(N):
            total = sum(a * int(b) for a, b in zip(q, values[n], strict=True))
            assert got[t, n] == np.float32(np.float32(total) * s) * scale[n]


@in_memory_and_in_blocks
def test_floats_of_8_bits(memory: int | None) -> None:
    got, values = multiplied("F8_E4M3", "e4m3", memory)
    x = inputs()
    s = np.abs(x).max(axis=1, keepdims=True) / np.float32(448)
    q = np.divide(x, s, out=np.zeros_like(x), where=s > 0).astype(ml_dtypes.float8_e4m3fn)
    exact = q.astype(np.float64) @ values.T.astype(np.float64)
    assert np.allclose(got, exact * s * scaled("F8_E4M3")[1].dequantize(), rtol=1e-4, atol=1e-2)


@in_memory_and_in_blocks
def test_rows_that_are_looked_up(memory: int | None) -> None:
    tensor, scale = scaled("I8")
    for lookup in (True, False):
        table = Reference(1, weight_memory=memory).weight(tensor, Role("V D", lookup), scale)
        assert isinstance(table, HostMatrix)
        ids = np.array([3, 0, 3])
        wanted = tensor.dequantize()[ids] * scale.dequantize()[ids, None]
        assert np.array_equal(table.rows(ids), wanted)
