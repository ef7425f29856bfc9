"""Tiles of 8 bits times 8-bit activations on Hopper: integers to the bit. Only a GPU can run it;
here it must compile, and cut its work so that every block of threads has some.
"""

import numpy as np
import pytest
from cases import ACTIVATIONS, nmse
from kernel_buffers import upload
from w8a8_cases import KINDS, ByteMatrix, activations, agrees, exact, multiply, quantize

from ggpy.device.compile import compile_cubin
from ggpy.kernels.gemm.gemm import STATIC_SHARED
from ggpy.kernels.gemm.tile_scheduler import PIECES, Cut, Stages, fastest
from ggpy.kernels.w8a8.quantize_rows import STEP, VALUES
from ggpy.kernels.w8a8.w8a8_wgmma import TILES, MulMatW8A8Wgmma

TENSOR_CORES = 1e-6  # see test_mul_mat_w8a8.py
SIZES = [(kind, size) for kind in KINDS for size in TILES[kind].tokens]
WAYS = [(kind, Cut(size, split, alone=True)) for kind, size in SIZES for split in (False, True)]
SOME = [(kind, Cut(size, size < 128, alone=True)) for kind in KINDS for size in (16, 128)]


def product_on(device):
    return MulMatW8A8Wgmma(device, device.sm_count)


# Without a GPU


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("n_tokens", [16, 128, 256])
def test_nothing_spills(n_tokens):
    kinds = [kind for kind in KINDS if n_tokens in TILES[kind].tokens]
    names = [f"w8a8_wgmma<{VALUES[k]}, {n_tokens}, {e}>" for k in kinds for e in EPILOGUES]
    cubin = compile_cubin("w8a8/w8a8_wgmma.cu", "sm_90a", expressions=names)
    assert "serialized" not in cubin.log, "ptxas made the products wait for each other"
    for name, r in cubin.resources.items():
        assert r.shared <= STATIC_SHARED, f"{name} has {r.shared} bytes of its own"
        assert max(r.stack, r.spill_loads, r.spill_stores) == 0, f"{name} spills: {r}"
        assert r.registers == 168  # before they are dealt out anew
    assert set(cubin.resources) == set(names)


EPILOGUES = ("GLU", "ADD", "QKV")
SHAPES = [(1, 17), (32, 64), (48, 512), (224, 512), (112, 2048), (1002, 300), (32, 4096)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("stages", [1, 32, 112])
@pytest.mark.parametrize("kind", KINDS)
def test_cut(kind, shape, stages):
    """Up to 128 tokens are a tile or two, more are tiles of 128 at least; no two share an SM."""
    cut = fastest(TILES[kind], *shape, Stages(stages, STEP, 8.0), 132)
    assert cut.alone and not cut.pairs and cut.tokens in TILES[kind].tokens
    assert cut.tokens >= (shape[1] / 2 if shape[1] <= 128 else 128)
    assert cut.tokens < 2 * max(shape[1], 16)


# On a GPU


@pytest.mark.parametrize("n_tokens", [1, 9, 64, 130, 300])
@pytest.mark.parametrize("shape", [(1, 32), (37, 1056), (4097, 256), (300, 14336)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes(hopper, kind, shape, n_tokens):
    """Rows, columns and tokens that fill neither a tile nor a block."""
    w, x = ByteMatrix(kind, *shape), activations(n_tokens, shape[1])
    (y,) = multiply(product_on(hopper), [w.tiled(hopper)], quantize(hopper, x, kind))
    assert agrees(w, x, y, TENSOR_CORES)


@pytest.mark.parametrize(("kind", "cut"), WAYS, ids=str)
def test_every_cut(hopper, kind, cut):
    """Several launches with one workspace: what one leaves in it must not reach the next."""
    w, x = ByteMatrix(kind, 1500, 1184), activations(2 * cut.tokens + 3, 1184)
    product, tiles = product_on(hopper), w.tiled(hopper)
    rows = quantize(hopper, x, kind)
    (first,) = multiply(product, [tiles], rows, cut=cut)
    (again,) = multiply(product, [tiles], rows, cut=cut)
    assert agrees(w, x, first, TENSOR_CORES)
    assert np.array_equal(first, again)


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_pieces_of_tiles(hopper, kind, size, pieces):
    w, x = ByteMatrix(kind, 1500, 1024), activations(size - 3, 1024)
    cut, rows = Cut(size, True, pieces=pieces, alone=True), quantize(hopper, x, kind)
    (y,) = multiply(product_on(hopper), [w.tiled(hopper)], rows, cut=cut)
    assert agrees(w, x, y, TENSOR_CORES)


@pytest.mark.parametrize("kind", KINDS)
def test_segments(hopper, kind):
    """Query, key and value: three matrices of other sizes, two of which share a block."""
    weights = [ByteMatrix(kind, rows, 96, seed) for seed, rows in enumerate((200, 37, 16))]
    x = activations(40, 96)
    tiles = [w.tiled(hopper) for w in weights]
    outs = multiply(product_on(hopper), tiles, quantize(hopper, x, kind))
    assert all(agrees(w, x, y, TENSOR_CORES) for w, y in zip(weights, outs, strict=True))


@pytest.mark.parametrize(("kind", "cut"), SOME, ids=str)
def test_add(hopper, kind, cut):
    w, x = ByteMatrix(kind, 337, 4096), activations(40, 4096)
    rows, tiles, product = quantize(hopper, x, kind), w.tiled(hopper), product_on(hopper)
    start = activations(40, 337).astype(np.float32)
    (plain,) = multiply(product, [tiles], rows, cut=cut)
    out = upload(hopper, start)
    product.launch([tiles], rows, [out], epilogue="ADD", cut=cut)
    assert np.array_equal(hopper.download(out, np.float32, start.shape), start + plain)


@pytest.mark.parametrize("rows", [150, 152, 64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("kind", "cut"), SOME, ids=str)
def test_gate_and_up(hopper, kind, cut, activation, rows):
    """Rows that fill no block; 150 that do not start on 16 bytes."""
    gate, up = (ByteMatrix(kind, rows, 96, seed) for seed in (0, 1))
    x = activations(40, 96) / np.float16(64)
    tiles = [gate.tiled(hopper), up.tiled(hopper)]
    options = {"epilogue": "GLU", "activation": activation, "cut": cut}
    (y,) = multiply(product_on(hopper), tiles, quantize(hopper, x, kind), **options)
    g = exact(gate, x).astype(np.float64)
    assert nmse(y, ACTIVATIONS[activation](g) * exact(up, x)) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_with_its_token(hopper, kind):
    w, x = ByteMatrix(kind, 37, 96), activations(33, 96)
    x[1, 7] = np.inf
    (y,) = multiply(product_on(hopper), [w.tiled(hopper)], quantize(hopper, x, kind))
    assert np.isfinite(np.delete(y, 1, 0)).all() and np.isnan(y[1]).all()
