"""Weights that become halves for a product of many tokens: when, how exactly, in which pieces."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from cases import nmse, random_rows, silu
from counting_device import CountingDevice, LaunchesOnHopper
from kernel_buffers import Output, upload
from tile_cases import IN_BLOCKS

from ggpy.backends.cuda import gemm_f16
from ggpy.backends.cuda.arrays import Array, Matrix
from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.cuda.gemm import Products
from ggpy.backends.cuda.gemm_f16 import MANY_TOKENS, PartOfRows, pieces, scratch_bytes
from ggpy.backends.cuda.gemm_hopper import FROM_TOKENS
from ggpy.formats import by_name
from ggpy.gguf import Tensor
from ggpy.kernels.blocks.block_kernel import BlockMatrix
from ggpy.kernels.gemm.elementwise import Elementwise
from ggpy.kernels.layout.blocks_to_f16 import TILES
from ggpy.kernels.layout.pack import CODES, HALVES, PLAIN
from ggpy.kernels.layout.tile import Layout, TiledMatrix, grows

ROUNDED = 1e-6  # the weights become halves
NAMES = [f.name for f in IN_BLOCKS if not f.name.startswith("Q8_")]
SOME = "IQ2_S"  # of 256 weights


class Weights:
    """A random matrix [rows, k] in blocks, on a device."""

    def __init__(self, device, name: str, rows: int, k: int, seed: int = 0) -> None:
        format, rng = by_name(name), np.random.default_rng([seed, rows, k])
        self.blocks = random_rows(format, rows, k, rng)
        self.values = format.dequantize(self.blocks).astype(np.float64)
        w = BlockMatrix(format, rows, k, upload(device, self.blocks))
        self.matrix = Matrix(rows, k, None, w)


def products(device, prompt: bool = True, **options) -> Products:
    found = Products(device, Elementwise(device), **options)
    found.prompt = prompt
    return found


def tokens(n: int, k: int) -> np.ndarray:
    """float16 x[n, k]."""
    return np.random.default_rng([n, k]).standard_normal((n, k)).astype(np.float16)


def multiply(device, found: Products, weights, x, epilogue="STORE", start=None, **options):
    """The outputs, as float32 [tokens, rows]."""
    n, half = len(x), epilogue == "GLU"
    dtype = np.dtype(np.float16 if half else np.float32)
    rows = [w.matrix.n_rows for w in (weights[:1] if half else weights)]
    outs = [Output(device, n * r * dtype.itemsize) for r in rows]
    if start is not None:
        device.upload(outs[0].buffer, start)
    arrays = [Array(o.buffer, dtype.type, (n, r), r) for o, r in zip(outs, rows, strict=True)]
    given = Array(upload(device, x), np.float16, x.shape, x.shape[1])
    found.multiply(given, [w.matrix for w in weights], arrays, epilogue, **options)
    return [o.read(dtype, (n, r)).astype(np.float32) for o, r in zip(outs, rows, strict=True)]


@pytest.fixture
def launched(machine, monkeypatch):
    """The names of all kernels in the order of their launches."""
    names, kernel = [], machine.kernel

    def noting(source, name, **options):
        found = kernel(source, name, **options)

        def launch(*args, **how):
            names.append(name.partition("<")[0])
            found.launch(*args, **how)

        return SimpleNamespace(name=name, launch=launch)

    # Kernels of blocks are kept for each device: a fresh one has none.
    monkeypatch.setattr("ggpy.kernels.blocks.block_kernel._kernels", {})
    monkeypatch.setattr(machine, "kernel", noting)
    return names


# What it computes


@pytest.mark.parametrize("name", NAMES)
def test_every_format(machine, launched, name):
    """Rows and tokens that fill no tile; a sum over columns that fill no chunk."""
    w, x = Weights(machine, name, 37, 256), tokens(33, 256)
    (y,) = multiply(machine, products(machine), [w], x)
    assert nmse(y, x.astype(np.float64) @ w.values.T) <= ROUNDED
    hopper = machine.arch == "sm_90a"
    assert launched == ["blocks_to_f16", *(["pack", "gemm_wgmma"] if hopper else ["gemm_prefill"])]


def test_matrices_of_one_x_in_one_launch(machine, launched):
    """Also of several formats: as halves they are alike."""
    weights = [Weights(machine, n, r, 512) for n, r in ((SOME, 37), ("IQ3_XXS", 16), (SOME, 1))]
    x = tokens(40, 512)
    outs = multiply(machine, products(machine), weights, x)
    for w, y in zip(weights, outs, strict=True):
        assert nmse(y, x.astype(np.float64) @ w.values.T) <= ROUNDED
    assert launched.count("blocks_to_f16") == 3 and sum("gemm" in name for name in launched) == 1


def test_gate_and_up(machine):
    gate, up = (Weights(machine, SOME, 64, 256, seed) for seed in (0, 1))
    scale = 4 / np.abs(gate.values).max()
    x = (tokens(40, 256) * scale).astype(np.float16)
    (y,) = multiply(machine, products(machine), [gate, up], x, "GLU")
    g = x.astype(np.float64) @ gate.values.T
    assert nmse(y, silu(g) * (x.astype(np.float64) @ up.values.T)) <= 4 * ROUNDED


@pytest.mark.parametrize("epilogue", ["STORE", "ADD"])
def test_pieces_have_the_bits_of_the_whole(machine, monkeypatch, epilogue):
    """Of a product that needs more than the scratch: three pieces of 16 rows and one of 8."""
    w, x = Weights(machine, SOME, 112, 256), tokens(40, 256)
    start = tokens(40, 112).astype(np.float32) if epilogue == "ADD" else None
    cap = 0.0 if epilogue == "ADD" else 3.0
    options = {"epilogue": epilogue, "start": start, "soft_cap": cap}
    (whole,) = multiply(machine, products(machine), [w], x, **options)
    monkeypatch.setattr(gemm_f16, "SCRATCH", TILES.nbytes(32, 256))
    found = products(machine)
    assert not found.together([w.matrix, w.matrix], 40)
    (y,) = multiply(machine, found, [w], x, **options)
    assert np.array_equal(y, whole)
    if cap:
        assert np.abs(y).max() <= cap and np.abs(y).max() > 0.9 * cap


def test_rows_that_fill_no_tile_are_not_cut(machine, monkeypatch, launched):
    w, x = Weights(machine, SOME, 37, 256), tokens(40, 256)
    monkeypatch.setattr(gemm_f16, "SCRATCH", TILES.nbytes(16, 256))
    (y,) = multiply(machine, products(machine), [w], x)
    assert nmse(y, x.astype(np.float64) @ w.values.T) <= ROUNDED
    assert launched.count("blocks_to_f16") == 1


def test_cuts():
    assert list(pieces(100, gemm_f16.SCRATCH // 40)) == [(0, 32), (32, 32), (64, 32), (96, 4)]
    assert list(pieces(100, 2)) == [(0, 100)]
    assert list(pieces(40, 1 << 40)) == [(0, 16), (16, 16), (32, 8)]
    part = PartOfRows(TILES, 100, 64, None, count=33)
    assert (part.n_rows, part.tile_rows) == (100, 3)


# When


@pytest.mark.parametrize(("n", "prompt"), [(MANY_TOKENS - 1, True), (MANY_TOKENS, False)])
def test_few_tokens_and_decode_stay_exact(emulator, n, prompt):
    w, x = Weights(emulator, SOME, 3, 256), tokens(n, 256)
    found = products(emulator, prompt)
    assert not found.becomes_halves(w.matrix, n)
    (y,) = multiply(emulator, found, [w], x)
    assert nmse(y, x.astype(np.float64) @ w.values.T) <= 1e-10


def matrix(format: str, rows: int, k: int) -> Matrix:
    """Without memory."""
    f = by_name(format)
    if f in IN_BLOCKS:
        return Matrix(rows, k, None, BlockMatrix(f, rows, k, CountingDevice().alloc(1 << 40)))
    layout = Layout(8, 32, "D", 128)
    return Matrix(rows, k, TiledMatrix(layout, rows, k, CountingDevice().alloc(1)), None)


def test_on_hopper_in_decode_too_but_not_batch_invariantly():
    w, tiled = matrix(SOME, 64, 512), matrix("Q8_0", 64, 512)
    found = products(LaunchesOnHopper(), False)
    assert found.becomes_halves(w, FROM_TOKENS) and not found.becomes_halves(w, FROM_TOKENS - 1)
    assert not found.becomes_halves(tiled, MANY_TOKENS)
    found.hopper.allowed = False
    assert not found.becomes_halves(w, 512)
    eight_bits = products(LaunchesOnHopper(), activations="q8_1")
    assert not eight_bits.becomes_halves(w, 512)
    assert eight_bits.becomes_halves(matrix("F32", 64, 512), 512)
    assert not products(LaunchesOnHopper()).becomes_halves(matrix("F32", 64, 12), 512)


def test_the_order_of_activations_is_that_of_halves():
    found = products(LaunchesOnHopper())
    w, tiled = matrix(SOME, 64, 512), matrix("Q8_0", 64, 512)
    assert found.order([w, w], 64) == HALVES and found.order([tiled], 64) == CODES
    few = FROM_TOKENS - 1
    assert found.order([w, tiled], 64) == PLAIN and found.order([w], few) == PLAIN
    assert found.together([w, w], 64) and not found.together([w, w], few)
    assert not found.together([w, tiled], 64)


def test_weights_just_made_are_not_read_ahead():
    """A product usually reads weights before the kernel before it ends; these it must not."""
    device = LaunchesOnHopper()
    found, out = products(device), device.alloc(1 << 20)
    x = Array(device.alloc(1 << 20), np.float16, (40, 512), 512, HALVES)
    y = [Array(out, np.float32, (40, 64), 64)]
    found.multiply(x, [matrix(SOME, 64, 512)], y)
    assert device.launched == [("blocks_to_f16", False), ("gemm_wgmma", False)]
    device.launched.clear()
    x = Array(x.data, np.float16, (40, 512), 512, CODES)
    found.multiply(x, [matrix("Q8_0", 64, 512)], y)
    assert device.launched == [("gemm_wgmma", True)]


# How much memory


def test_scratch_is_foreseen():
    iq, q8 = by_name(SOME), by_name("Q8_0")
    one = TILES.nbytes(1024, 4096)
    assert scratch_bytes([(iq, 1024, 4096), (q8, 9999, 4096)], "auto", grows) == 3 * one
    assert scratch_bytes([(by_name("F32"), 1024, 4096)], "auto") == 3 * one
    assert scratch_bytes([(iq, 1024, 4096)], "auto") == 0
    assert scratch_bytes([(q8, 9999, 4096)], "auto") == 0
    assert scratch_bytes([(iq, 128256, 4096)], "auto", grows) == gemm_f16.SCRATCH
    assert scratch_bytes([(iq, 128257, 4096)], "auto", grows) == TILES.nbytes(128257, 4096)
    assert scratch_bytes([(q8, 1024, 4096)], "cublas") == 2 * 1024 * 4096
    assert scratch_bytes([(q8, 128257, 4096)], "cublas") == gemm_f16.SCRATCH


@pytest.mark.parametrize("rows", [(4096, 1024, 1024), (14336, 14336), (128256,), (4096,)])
def test_no_more_scratch_is_taken(rows):
    device = LaunchesOnHopper()
    taken = {}

    def room(name, nbytes):
        taken[name] = max(nbytes, taken.get(name, 0))
        return device.alloc(nbytes)

    found = products(device, room=room)
    weights = [matrix(SOME, r, 4096) for r in rows]
    x = Array(device.alloc(1 << 30), np.float16, (64, 4096), 4096, HALVES)
    outs = [Array(device.alloc(1 << 30), np.float32, (64, r), r) for r in rows]
    found.multiply(x, weights, outs)
    foreseen = scratch_bytes([(by_name(SOME), r, 4096) for r in rows], "auto", grows)
    assert 0 < taken[gemm_f16.NAME] <= foreseen <= gemm_f16.SCRATCH


def test_what_a_model_needs_is_asked_for():
    tensor = SimpleNamespace(format=by_name("F32"), shape=(1024, 4096), nbytes=1)
    vector = SimpleNamespace(format=by_name("F32"), shape=(4096,), nbytes=1)
    demand = SimpleNamespace(
        n_batch=512, weights=[(tensor, False), (tensor, True), (vector, False)]
    )
    assert products(LaunchesOnHopper()).scratch_bytes(demand) == 3 * TILES.nbytes(1024, 4096)
    assert products(CountingDevice()).scratch_bytes(demand) == 3 * TILES.nbytes(1024, 4096)
    exact = Cuda(LaunchesOnHopper(), batch_invariant=True)
    assert exact._products.scratch_bytes(demand) == 0
    demand.n_batch = MANY_TOKENS - 1
    assert products(LaunchesOnHopper()).scratch_bytes(demand) == 3 * TILES.nbytes(1024, 4096)
    assert products(CountingDevice()).scratch_bytes(demand) == 0
    demand.n_batch = FROM_TOKENS - 1
    assert products(LaunchesOnHopper()).scratch_bytes(demand) == 0


def test_blocks_that_stay_where_memory_is_short(emulator):
    w = Weights(emulator, SOME, 3, 256)
    tensor = Tensor("w", (3, 256), by_name(SOME), w.blocks)
    ops = Cuda(emulator)
    assert ops.weight(tensor).tiles is not None
    ops._products.compact = True
    kept = ops.weight(tensor)
    assert kept.tiles is None
    x = tokens(2, 256)
    (y,) = multiply(emulator, ops._products, [SimpleNamespace(matrix=kept)], x)
    assert nmse(y, x.astype(np.float64) @ w.values.T) <= 1e-10
