"""Weights that become f16 for a GEMM of many tokens: when, how exactly, in which pieces."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from cases import nmse, random_rows, silu
from counting_device import CountingDevice, LaunchesOnHopper
from kernel_buffers import Output, upload
from products import Products
from tile_cases import IN_BLOCKS

from ggpy.backends.cuda import weights_f16
from ggpy.backends.cuda.arrays import Array, Matrix
from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.cuda.plan.candidates import PREFILL_TOKENS
from ggpy.backends.cuda.plan.products import WGMMA_TOKENS
from ggpy.backends.cuda.weights_f16 import PartOfRows, fit_scratch, pieces, scratch_bytes
from ggpy.backends.interface import Role
from ggpy.formats import by_name
from ggpy.gguf import Tensor
from ggpy.kernels.blocks.block_kernel import BlockMatrix
from ggpy.kernels.layout.blocks_to_f16 import F16_TILES
from ggpy.kernels.layout.pack import CODES, F16, PLAIN
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
    (y,) = multiply(machine, Products(machine), [w], x)
    assert nmse(y, x.astype(np.float64) @ w.values.T) <= ROUNDED
    hopper = machine.arch == "sm_90a"
    assert launched == ["blocks_to_f16", *(["pack", "gemm_wgmma"] if hopper else ["gemm_prefill"])]


def test_matrices_of_one_x_in_one_launch(machine, launched):
    """Also of several formats: as halves they are alike."""
    weights = [Weights(machine, n, r, 512) for n, r in ((SOME, 37), ("IQ3_XXS", 16), (SOME, 1))]
    x = tokens(40, 512)
    outs = multiply(machine, Products(machine), weights, x)
    for w, y in zip(weights, outs, strict=True):
        assert nmse(y, x.astype(np.float64) @ w.values.T) <= ROUNDED
    assert launched.count("blocks_to_f16") == 3 and sum("gemm" in name for name in launched) == 1


def test_gate_and_up(machine):
    gate, up = (Weights(machine, SOME, 64, 256, seed) for seed in (0, 1))
    scale = 4 / np.abs(gate.values).max()
    x = (tokens(40, 256) * scale).astype(np.float16)
    (y,) = multiply(machine, Products(machine), [gate, up], x, "GLU")
    g = x.astype(np.float64) @ gate.values.T
    assert nmse(y, silu(g) * (x.astype(np.float64) @ up.values.T)) <= 4 * ROUNDED


@pytest.mark.parametrize("epilogue", ["STORE", "ADD"])
def test_pieces_have_the_bits_of_the_whole(machine, monkeypatch, epilogue):
    """Of a product that needs more than the scratch: three pieces of 16 rows and one of 8."""
    w, x = Weights(machine, SOME, 112, 256), tokens(40, 256)
    start = tokens(40, 112).astype(np.float32) if epilogue == "ADD" else None
    cap = 0.0 if epilogue == "ADD" else 3.0
    options = {"epilogue": epilogue, "start": start, "soft_cap": cap}
    (whole,) = multiply(machine, Products(machine), [w], x, **options)
    monkeypatch.setattr(weights_f16, "SCRATCH", F16_TILES.nbytes(32, 256))
    found = Products(machine)
    assert not fit_scratch([w.matrix, w.matrix])
    (y,) = multiply(machine, found, [w], x, **options)
    assert np.array_equal(y, whole)
    if cap:
        assert np.abs(y).max() <= cap and np.abs(y).max() > 0.9 * cap


def test_rows_that_fill_no_tile_are_not_cut(machine, monkeypatch, launched):
    w, x = Weights(machine, SOME, 37, 256), tokens(40, 256)
    monkeypatch.setattr(weights_f16, "SCRATCH", F16_TILES.nbytes(16, 256))
    (y,) = multiply(machine, Products(machine), [w], x)
    assert nmse(y, x.astype(np.float64) @ w.values.T) <= ROUNDED
    assert launched.count("blocks_to_f16") == 1


def test_cuts():
    assert list(pieces(100, weights_f16.SCRATCH // 40)) == [(0, 32), (32, 32), (64, 32), (96, 4)]
    assert list(pieces(100, 2)) == [(0, 100)]
    assert list(pieces(40, 1 << 40)) == [(0, 16), (16, 16), (32, 8)]
    part = PartOfRows(F16_TILES, 100, 64, None, count=33)
    assert (part.n_rows, part.tile_rows) == (100, 3)


# When


@pytest.mark.parametrize(("n", "prompt"), [(PREFILL_TOKENS - 1, True), (PREFILL_TOKENS, False)])
def test_few_tokens_and_decode_stay_exact(emulator, n, prompt):
    w, x = Weights(emulator, SOME, 3, 256), tokens(n, 256)
    found = Products(emulator, prompt)
    assert found.kernels([w.matrix], n) == ["dequantize_mul_mat_vec"]
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
    hopper, blocks = LaunchesOnHopper(), ["dequantize_mul_mat_vec"]
    found = Products(hopper, False)
    assert found.kernels([w], WGMMA_TOKENS) == ["blocks_to_f16 gemm_wgmma"]
    assert found.kernels([w], WGMMA_TOKENS - 1) == blocks
    assert found.kernels([tiled], PREFILL_TOKENS) == ["gemm_wgmma"]
    assert Products(hopper, batch_invariant=True).kernels([w], 512) == blocks
    q8_1 = Products(hopper, False, activations="q8_1")
    assert q8_1.kernels([w], 512) == ["mul_mat_vec_q"]
    assert q8_1.kernels([matrix("F32", 64, 512)], 512) == ["blocks_to_f16 gemm_wgmma"]
    assert found.kernels([matrix("F32", 64, 12)], 512) == blocks


def test_the_layout_of_activations_is_that_of_f16_weights():
    found = Products(LaunchesOnHopper(), False)
    w, tiled = matrix(SOME, 64, 512), matrix("Q8_0", 64, 512)
    few = WGMMA_TOKENS - 1
    layouts = {
        (n, name): found.plan(weights, n).x_layout
        for n in (64, few)
        for name, weights in (("f16", [w, w]), ("codes", [tiled]), ("both", [w, tiled]))
    }
    assert layouts[64, "f16"] == F16 and layouts[64, "codes"] == CODES
    assert layouts[64, "both"] == layouts[few, "f16"] == layouts[few, "codes"] == PLAIN
    assert len(found.kernels([w, w], 64)) == 1 and len(found.kernels([w, w], few)) == 2
    assert found.kernels([w, tiled], 64) == ["blocks_to_f16 gemm_wgmma", "gemm_wgmma"]


def test_weights_just_made_are_not_read_ahead():
    """A product usually reads weights before the kernel before it ends; these it must not."""
    device = LaunchesOnHopper()
    found, out = Products(device), device.alloc(1 << 20)
    x = Array(device.alloc(1 << 20), np.float16, (40, 512), 512, F16)
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
    one = F16_TILES.nbytes(1024, 4096)
    assert scratch_bytes([(iq, 1024, 4096), (q8, 9999, 4096)], "auto", grows) == 3 * one
    assert scratch_bytes([(by_name("F32"), 1024, 4096)], "auto") == 3 * one
    assert scratch_bytes([(iq, 1024, 4096)], "auto") == 0
    assert scratch_bytes([(q8, 9999, 4096)], "auto") == 0
    assert scratch_bytes([(iq, 128256, 4096)], "auto", grows) == weights_f16.SCRATCH
    assert scratch_bytes([(iq, 128257, 4096)], "auto", grows) == F16_TILES.nbytes(128257, 4096)
    assert scratch_bytes([(q8, 1024, 4096)], "cublas") == 2 * 1024 * 4096
    assert scratch_bytes([(q8, 128257, 4096)], "cublas") == weights_f16.SCRATCH


@pytest.mark.parametrize("rows", [(4096, 1024, 1024), (14336, 14336), (128256,), (4096,)])
def test_no_more_scratch_is_taken(rows):
    device = LaunchesOnHopper()
    found = Products(device)
    weights = [matrix(SOME, r, 4096) for r in rows]
    x = Array(device.alloc(1 << 30), np.float16, (64, 4096), 4096, F16)
    outs = [Array(device.alloc(1 << 30), np.float32, (64, r), r) for r in rows]
    found.multiply(x, weights, outs)
    taken = device.allocated[weights_f16.NAME]
    foreseen = scratch_bytes([(by_name(SOME), r, 4096) for r in rows], "auto", grows)
    assert 0 < taken <= foreseen <= weights_f16.SCRATCH


def test_what_a_model_needs_is_asked_for():
    tensor = SimpleNamespace(format=by_name("F32"), shape=(1024, 4096), nbytes=1)
    vector = SimpleNamespace(format=by_name("F32"), shape=(4096,), nbytes=1)
    roles = Role("F D"), Role("V D", lookup=True), Role("D")
    weights = list(zip((tensor, tensor, vector), roles, strict=True))
    demand = SimpleNamespace(n_batch=512, weights=weights)
    hopper, other = LaunchesOnHopper(), CountingDevice()
    needed = 3 * F16_TILES.nbytes(1024, 4096)
    assert Products(hopper).planner.scratch_bytes(demand) == needed
    assert Products(other).planner.scratch_bytes(demand) == needed
    assert Products(hopper, batch_invariant=True).planner.scratch_bytes(demand) == 0
    demand.n_batch = PREFILL_TOKENS - 1
    assert Products(hopper).planner.scratch_bytes(demand) == needed
    assert Products(other).planner.scratch_bytes(demand) == 0
    demand.n_batch = WGMMA_TOKENS - 1
    assert Products(hopper).planner.scratch_bytes(demand) == 0


def test_blocks_that_stay_where_memory_is_short(emulator):
    w = Weights(emulator, SOME, 3, 256)
    tensor = Tensor("w", (3, 256), by_name(SOME), w.blocks)
    ops, role = Cuda(emulator), Role("F D")
    assert ops.weight(tensor, role).tiles is not None
    ops.context.planner.compact = True
    kept = ops.weight(tensor, role)
    assert kept.tiles is None
    x = tokens(2, 256)
    found = [SimpleNamespace(matrix=kept)]
    (y,) = multiply(emulator, Products(emulator, False), found, x)
    assert nmse(y, x.astype(np.float64) @ w.values.T) <= 1e-10
