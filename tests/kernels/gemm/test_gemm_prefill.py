"""The prefill GEMM against float64."""

import numpy as np
import pytest
from cases import nmse, silu
from kernel_buffers import Output, upload
from tile_cases import MANY, Weights, exact, layouts, tokens

from ggpy.kernels.gemm.gemm_prefill import GemmPrefill

ROUNDED = 1e-6  # the weights are rounded to f16


def multiply(device, weights, x, *, residual=None, **options):
    """The outputs as float32 [tokens, rows]."""
    glu = options.get("epilogue") == "GLU"
    dtype = np.dtype(np.float16 if glu else np.float32)
    shapes = [(len(x), w.n_rows) for w in (weights[:1] if glu else weights)]
    outs = [Output(device, n * rows * dtype.itemsize) for n, rows in shapes]
    if residual is not None:
        options["residual"] = upload(device, residual)
    buffers = [out.buffer for out in outs]
    GemmPrefill(device).launch(weights, upload(device, x), buffers, len(x), **options)
    return [
        out.read(dtype, shape).astype(np.float32) for out, shape in zip(outs, shapes, strict=True)
    ]


@pytest.mark.parametrize("n_tokens", [33, 130])
@pytest.mark.parametrize("name", MANY)
def test_every_kind_of_layout(machine, name, n_tokens):
    """Rows and tokens that fill neither a tile nor a CTA."""
    w = Weights(name, 150, 512)
    x = tokens(n_tokens, w.columns)
    (y,) = multiply(machine, [w.tiled(machine)], x)
    assert nmse(y, exact(w, x)) <= ROUNDED


SHAPES = [(1, 256), (7, 33 * 256), (4097, 256), (300, 14336)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", sorted({w.name for w in layouts().values()}))
def test_gpu(gpu, name, shape):
    """Of 1, 64 and 300 tokens, which share the matrix and its reference."""
    w = Weights(name, *shape)
    many = tokens(300, w.columns)
    wanted, tiles = exact(w, many), [w.tiled(gpu)]
    scale = np.square(many.astype(np.float64)) @ np.square(w.values.astype(np.float64)).T
    for n_tokens in (1, 64, 300):
        (y,) = multiply(gpu, tiles, many[:n_tokens])
        assert nmse(y, wanted[:n_tokens], scale[:n_tokens].sum()) <= ROUNDED, n_tokens


def test_columns_that_fill_no_chunk(machine):
    w = Weights("Q8_0", 37, 96)
    x = tokens(40, 96)
    (y,) = multiply(machine, [w.tiled(machine)], x)
    assert nmse(y, exact(w, x)) <= ROUNDED


def test_segments(machine):
    """q, k, v and a gate: four matrices of different sizes."""
    weights = [Weights("Q8_0", rows, 96, seed) for seed, rows in enumerate((200, 37, 16, 21))]
    x = tokens(40, 96)
    outs = multiply(machine, [w.tiled(machine) for w in weights], x)
    for w, y in zip(weights, outs, strict=True):
        assert nmse(y, exact(w, x)) <= ROUNDED


def test_residual(machine):
    w = Weights("Q8_0", 37, 96)
    x, residual = tokens(40, 96), tokens(40, 37).astype(np.float32)
    (plain,) = multiply(machine, [w.tiled(machine)], x)
    (y,) = multiply(machine, [w.tiled(machine)], x, epilogue="ADD", residual=residual)
    assert np.array_equal(y, residual + plain)


def test_gate_and_up(machine):
    gate, up = (Weights("Q8_0", 150, 96, seed) for seed in (0, 1))
    x = (tokens(40, 96) / 16).astype(np.float16)
    (y,) = multiply(machine, [gate.tiled(machine), up.tiled(machine)], x, epilogue="GLU")
    g = exact(gate, x)
    assert nmse(y, silu(g) * exact(up, x)) <= ROUNDED


@pytest.mark.parametrize("name", ["I8", "Q8_0"])
def test_scales_of_rows(machine, name):
    """The row scale is applied before the residual and the activation; the adjacent matrix has
    none.
    """
    gate, up = (Weights(name, 150, 96, seed) for seed in (0, 1))
    x, residual = tokens(40, 96), tokens(40, 150).astype(np.float32)
    tiles = gate.scaled(machine)
    y, other = multiply(machine, [tiles, up.tiled(machine)], x)
    assert nmse(y, exact(gate, x) * gate.row_scales) <= ROUNDED
    assert nmse(other, exact(up, x)) <= ROUNDED
    (added,) = multiply(machine, [tiles], x, epilogue="ADD", residual=residual)
    assert np.array_equal(added, residual + y)
    small = (x / (2048 if name == "I8" else 16)).astype(np.float16)
    (h,) = multiply(machine, [tiles, up.scaled(machine)], small, epilogue="GLU")
    g, u = (exact(w, small) * w.row_scales for w in (gate, up))
    assert nmse(h, silu(g) * u) <= ROUNDED


def test_soft_cap(machine):
    w = Weights("Q8_0", 37, 96)
    x = tokens(40, 96)
    (y,) = multiply(machine, [w.tiled(machine)], x, soft_cap=3.0)
    assert nmse(y, 3 * np.tanh(exact(w, x) / 3)) <= ROUNDED


def test_matrices_that_do_not_match(emulator):
    a, b = Weights("Q8_0", 16, 96).tiled(emulator), Weights("Q4_0", 16, 96).tiled(emulator)
    x = emulator.alloc(16, "x")
    with pytest.raises(ValueError, match="one layout"):
        GemmPrefill(emulator).launch([a, b], x, [x, x], 40)
    with pytest.raises(ValueError, match="2 matrices and 2 outputs"):
        GemmPrefill(emulator).launch([a, a], x, [x, x], 40, epilogue="GLU")
