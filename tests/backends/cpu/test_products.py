"""Products from the blocks of a file against numpy: every format, odd shapes, any threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import random_rows

from ggpy.backends.cpu import kernels
from ggpy.backends.cpu.backend import Cpu
from ggpy.backends.cpu.compiled import progress
from ggpy.backends.cpu.jobs import BlockRows, Buffers, JobList
from ggpy.backends.cpu.loops.blocks import DECLARATIONS
from ggpy.backends.cpu.loops.blocks.expansion import NUMBERS
from ggpy.backends.cpu.pool import ThreadPool, address_of, aligned
from ggpy.backends.cpu.sizes import ACTIVATIONS
from ggpy.backends.interface import Role
from ggpy.formats import all_formats, by_name
from ggpy.formats.base import Format
from ggpy.gguf import Tensor

FORMATS = [*DECLARATIONS, *NUMBERS]
# Of what a product may differ by, the largest result being 1. q8 rounds to 1 part in 254.
TOLERANCE = {"f32": 3e-6, "q16": 2e-4, "q8": 2e-2}


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def pool(request: pytest.FixtureRequest) -> ThreadPool:
    """Threads, which may be more than this machine has."""
    return ThreadPool(request.param)


@pytest.fixture(scope="module")
def few() -> Iterator[dict[str, Cpu]]:
    """A backend for each type of activations."""
    yield {name: Cpu(2, activations=name) for name in TOLERANCE}
    progress.close()


def tensor(format: Format, n: int, k: int, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    return Tensor("w", (n, k), format, random_rows(format, n, k, rng, rms=0.05))


def columns(n: int, k: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((n, k)).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_in_float32_are_the_formats_own(name: str) -> None:
    """Bit for bit, from any 256th weight on."""
    format = by_name(name)
    k = 256 * 2 + (format.block_size if format.block_size < 256 else 256)
    rows = tensor(format, 5, k).data
    expected = format.dequantize(rows)
    call = ctypes_function(kernels.expand(format))
    for r in range(5):
        for first in (0, 256):
            out = aligned(4 * k).view(np.float32)
            call(address_of(rows[r]), first, k - first, address_of(out))
            np.testing.assert_array_equal(out[: k - first], expected[r, first:])


def ctypes_function(address: int) -> Any:
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(address)


@pytest.mark.parametrize("name", FORMATS)
def test_products_equal_numpys(name: str, few: dict[str, Cpu]) -> None:
    """Rows that are no multiple of anything, and every way to multiply."""
    format = by_name(name)
    shapes = [(37, 3 * max(format.block_size, 32)), (130, 1024)]
    shapes += [(9, 45)] if format.block_size == 1 else []
    for activations, ops in few.items():
        for n, k in shapes:
            w = tensor(format, n, k)
            matrix = ops.weight(w, Role("F D"))
            for t in (1, 2, 5, 6, 17, 64):
                x = columns(t, k)
                expected = x.astype(np.float64) @ format.dequantize(w.data).astype(np.float64).T
                error = np.abs(matrix.multiply(x) - expected).max() / np.abs(expected).max()
                assert error < TOLERANCE[activations], (activations, n, k, t)


@pytest.mark.parametrize("name", FORMATS)
def test_many_columns_of_q8_lose_less_than_8_bits(name: str, few: dict[str, Cpu]) -> None:
    """They are multiplied in float32, or with VNNI as whole numbers of 16 bits: one vector of
    columns, and an odd number of them.
    """
    format = by_name(name)
    for n, k in ((37, 3 * max(format.block_size, 32)), (130, 1024)):
        w = tensor(format, n, k)
        matrix = few["q8"].weight(w, Role("F D"))
        for t in (6, 33, 64):
            x = columns(t, k)
            expected = x.astype(np.float64) @ format.dequantize(w.data).astype(np.float64).T
            error = np.abs(matrix.multiply(x) - expected).max() / np.abs(expected).max()
            assert error < TOLERANCE["q16"] / 2, (n, k, t)


def test_one_scale_of_a_matrix_or_of_each_expert(few: dict[str, Cpu]) -> None:
    """As NVFP4 has them; the blocks stay as they are."""
    w, ops = tensor(by_name("NVFP4"), 48, 128), few["f32"]
    scale = Tensor("w.scale", (48,), by_name("F32"), np.full(48, 0.3, "f4").view(np.uint8))
    matrix = ops.weight(w, Role("F D"), scale)
    assert matrix.array is None
    for t in (1, 3, 33):
        x = columns(t, 128)
        np.testing.assert_allclose(matrix.multiply(x), x @ w.dequantize().T * 0.3, atol=1e-5)
    experts = Tensor("w", (3, 16, 128), w.format, w.data.reshape(3, 16, -1))
    values = np.array([0.5, 2.0, 3.0], np.float32)
    scale = Tensor("w.scale", (3,), by_name("F32"), values.view(np.uint8))
    matrix = ops.weight(experts, Role("X F D"), scale)
    for e in range(3):
        wanted = x @ experts.dequantize()[e].T * values[e]
        np.testing.assert_allclose(matrix.expert(e).multiply(x), wanted, atol=1e-5)


def test_activations_are_as_exact_as_they_say(few: dict[str, Cpu]) -> None:
    """q16 is a hundred times nearer to float32 than q8, and not float32 itself."""
    w, x = tensor(by_name("Q4_0"), 200, 512), columns(1, 512)
    exact = x @ w.dequantize().T
    found = {name: ops.weight(w, Role("F D")).multiply(x) for name, ops in few.items()}
    error = {name: np.abs(y - exact).max() for name, y in found.items()}
    assert error["f32"] < error["q16"] < error["q8"] / 50


@pytest.mark.parametrize(("t", "activations"), [(1, "q16"), (3, "q16"), (33, "q16"), (33, "q8")])
def test_bits_are_the_same_for_any_number_of_threads(
    pool: ThreadPool, t: int, activations: str
) -> None:
    for name in ("Q8_0", "Q4_K", "F16"):
        format, k = by_name(name), 512
        w = tensor(format, 700, k).data
        results = []
        for threads in (pool, ThreadPool(1)):
            buffers = Buffers(threads)
            source = buffers.floats("source", t, k)
            buffers.view("source", t, k)[:] = columns(t, k)
            out = aligned(4 * 700 * (t + 16)).view(np.float32)
            program = JobList(threads, buffers, activations)
            program.product(BlockRows(format, w, k), source, t, address_of(out))
            threads.begin()
            for _ in range(5):
                program.run()
            threads.end()
            threads.settle()
            results.append(out[: t * 700].copy())
        np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(("t", "activations"), [(1, "q16"), (33, "q16"), (33, "q8")])
def test_columns_that_changed_in_their_place_are_read_again(
    pool: ThreadPool, t: int, activations: str
) -> None:
    """Products know what they have of x as whole numbers, or as columns."""
    format, k = by_name("Q8_0"), 256
    rows = BlockRows(format, tensor(format, 64, k).data, k)
    buffers = Buffers(pool)
    x, other = buffers.floats("x", t, k), buffers.floats("other", t, k)
    outs = [aligned(4 * 64 * (t + 16)).view(np.float32) for _ in range(2)]
    program = JobList(pool, buffers, activations)
    program.product(rows, x, t, address_of(outs[0]))
    program.add("gated", t * k // 16, x, 64, x, other, ACTIVATIONS["silu"])
    program.product(rows, x, t, address_of(outs[1]))
    buffers.view("x", t, k)[:] = columns(t, k)
    program.run()
    pool.settle()
    assert outs[0][: t * 64].all() and not outs[1][: t * 64].any()  # silu(x) * 0


def test_large_and_odd_activations(few: dict[str, Cpu]) -> None:
    """Zeros, numbers whose scale's inverse is infinite, and one that is none, which stays in its
    column.
    """
    w = tensor(by_name("Q8_0"), 64, 64)
    for activations, ops in few.items():
        matrix = ops.weight(w, Role("F D"))
        assert not matrix.multiply(np.zeros((1, 64), np.float32)).any()
        tiny = matrix.multiply(np.full((1, 64), 1e-42, np.float32))
        assert np.abs(tiny).max() < 1e-38, activations
        many = matrix.multiply(np.zeros((20, 64), np.float32))
        assert not many.any() and not np.isnan(many).any()
        assert np.abs(matrix.multiply(np.full((20, 64), 1e-42, np.float32))).max() < 1e-38
        for n, odd in ((2, np.nan), (20, np.nan), (20, np.inf)):
            x = columns(n, 64)
            clean = matrix.multiply(x)
            x[0, 5] = odd
            spoiled = matrix.multiply(x)
            np.testing.assert_array_equal(spoiled[1:], clean[1:])
            assert not np.isfinite(spoiled[0]).any(), activations


def test_a_format_without_kernels_is_dequantised(few: dict[str, Cpu]) -> None:
    """Once, where that fits in memory; at each use, where not."""
    others = [f for f in all_formats() if not kernels.can_expand(f)]
    assert {f.name for f in others} == {
        *("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "F8_E4M3"),
    }
    w = tensor(by_name("F8_E4M3"), 20, 128)
    x = columns(3, 128)
    for ops in (few["q16"], Cpu(1, weight_memory=0)):
        found = ops.weight(w, Role("F D")).multiply(x)
        np.testing.assert_allclose(found, x @ w.dequantize().T, atol=1e-5)
