"""The W8A8 GEMM for Hopper: integers bit by bit.

Only a GPU can run the kernel. Without a GPU, tests check that it compiles and that the schedule
gives work to every CTA.
"""

import numpy as np
import pytest
from cases import ACTIVATIONS, nmse
from kernel_buffers import upload
from w8a8_cases import KINDS, ByteMatrix, activations, agrees, exact, multiply, quantize

from ggpy.device.compile import compile_cubin
from ggpy.kernels.gemm.gemm import STATIC_SHARED
from ggpy.kernels.gemm.tile_scheduler import SPLIT_K, KStages, Tiling, fastest
from ggpy.kernels.w8a8.quantize_rows import STEP, VALUES
from ggpy.kernels.w8a8.w8a8_wgmma import TILE_COSTS, W8A8Wgmma

TENSOR_CORES = 1e-6  # see test_mul_mat_w8a8.py
SIZES = [(kind, size) for kind in KINDS for size in TILE_COSTS[kind].tokens]
WAYS = [
    (kind, Tiling(size, split, one_cta_per_sm=True))
    for kind, size in SIZES
    for split in (False, True)
]
SOME = [
    (kind, Tiling(size, size < 128, one_cta_per_sm=True)) for kind in KINDS for size in (16, 128)
]


def product_on(device):
    return W8A8Wgmma(device, device.sm_count)


# Without a GPU


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("n_tokens", [16, 128, 256])
def test_nothing_spills(n_tokens):
    kinds = [kind for kind in KINDS if n_tokens in TILE_COSTS[kind].tokens]
    names = [f"w8a8_wgmma<{VALUES[k]}, {n_tokens}, {e}>" for k in kinds for e in EPILOGUES]
    cubin = compile_cubin("w8a8/w8a8_wgmma.cu", "sm_90a", expressions=names)
    assert "serialized" not in cubin.log, "ptxas made the products wait for each other"
    for name, r in cubin.resources.items():
        assert r.shared <= STATIC_SHARED, f"{name} has {r.shared} bytes of its own"
        assert max(r.stack, r.spill_loads, r.spill_stores) == 0, f"{name} spills: {r}"
        assert r.registers == 168  # before setmaxnreg redistributes them
    assert set(cubin.resources) == set(names)


EPILOGUES = ("GLU", "ADD", "QKV")
SHAPES = [(1, 17), (32, 64), (48, 512), (224, 512), (112, 2048), (1002, 300), (32, 4096)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("stages", [1, 32, 112])
@pytest.mark.parametrize("kind", KINDS)
def test_tiling(kind, shape, stages):
    """Up to 128 tokens take one or two tiles; more take tiles of at least 128; one CTA per SM."""
    tiling = fastest(TILE_COSTS[kind], *shape, KStages(stages, STEP, 8.0), 132)
    assert tiling.one_cta_per_sm and not tiling.pairs and tiling.tokens in TILE_COSTS[kind].tokens
    assert tiling.tokens >= (shape[1] / 2 if shape[1] <= 128 else 128)
    assert tiling.tokens < 2 * max(shape[1], 16)


# On a GPU


@pytest.mark.parametrize("n_tokens", [1, 9, 64, 130, 300])
@pytest.mark.parametrize("shape", [(1, 32), (37, 1056), (4097, 256), (300, 14336)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes(hopper, kind, shape, n_tokens):
    """Rows, columns and tokens that do not fill a tile or a CTA."""
    w, x = ByteMatrix(kind, *shape), activations(n_tokens, shape[1])
    (y,) = multiply(product_on(hopper), [w.tiled(hopper)], quantize(hopper, x, kind))
    assert agrees(w, x, y, TENSOR_CORES)


@pytest.mark.parametrize(("kind", "tiling"), WAYS, ids=str)
def test_every_tiling(hopper, kind, tiling):
    """Several launches with one workspace: sums of one launch must not affect the next."""
    w, x = ByteMatrix(kind, 1500, 1184), activations(2 * tiling.tokens + 3, 1184)
    product, tiles = product_on(hopper), w.tiled(hopper)
    rows = quantize(hopper, x, kind)
    (first,) = multiply(product, [tiles], rows, tiling=tiling)
    (again,) = multiply(product, [tiles], rows, tiling=tiling)
    assert agrees(w, x, first, TENSOR_CORES)
    assert np.array_equal(first, again)


@pytest.mark.parametrize("split_k", SPLIT_K)
@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_pieces_of_tiles(hopper, kind, size, split_k):
    w, x = ByteMatrix(kind, 1500, 1024), activations(size - 3, 1024)
    tiling, rows = (
        Tiling(size, True, split_k=split_k, one_cta_per_sm=True),
        quantize(hopper, x, kind),
    )
    (y,) = multiply(product_on(hopper), [w.tiled(hopper)], rows, tiling=tiling)
    assert agrees(w, x, y, TENSOR_CORES)


@pytest.mark.parametrize("kind", KINDS)
def test_segments(hopper, kind):
    """q, k and v: three matrices of different sizes, two of which share a CTA."""
    weights = [ByteMatrix(kind, rows, 96, seed) for seed, rows in enumerate((200, 37, 16))]
    x = activations(40, 96)
    tiles = [w.tiled(hopper) for w in weights]
    outs = multiply(product_on(hopper), tiles, quantize(hopper, x, kind))
    assert all(agrees(w, x, y, TENSOR_CORES) for w, y in zip(weights, outs, strict=True))


@pytest.mark.parametrize(("kind", "tiling"), SOME, ids=str)
def test_add(hopper, kind, tiling):
    w, x = ByteMatrix(kind, 337, 4096), activations(40, 4096)
    rows, tiles, product = quantize(hopper, x, kind), w.tiled(hopper), product_on(hopper)
    start = activations(40, 337).astype(np.float32)
    (plain,) = multiply(product, [tiles], rows, tiling=tiling)
    out = upload(hopper, start)
    product.launch([tiles], rows, [out], epilogue="ADD", tiling=tiling)
    assert np.array_equal(hopper.download(out, np.float32, start.shape), start + plain)


@pytest.mark.parametrize("rows", [150, 152, 64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("kind", "tiling"), SOME, ids=str)
def test_gate_and_up(hopper, kind, tiling, activation, rows):
    """Rows that do not fill a CTA; 150 rows, whose outputs are not 16-byte aligned."""
    gate, up = (ByteMatrix(kind, rows, 96, seed) for seed in (0, 1))
    x = activations(40, 96) / np.float16(64)
    tiles = [gate.tiled(hopper), up.tiled(hopper)]
    options = {"epilogue": "GLU", "activation": activation, "tiling": tiling}
    (y,) = multiply(product_on(hopper), tiles, quantize(hopper, x, kind), **options)
    g = exact(gate, x).astype(np.float64)
    assert nmse(y, ACTIVATIONS[activation](g) * exact(up, x)) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_with_its_token(hopper, kind):
    w, x = ByteMatrix(kind, 37, 96), activations(33, 96)
    x[1, 7] = np.inf
    (y,) = multiply(product_on(hopper), [w.tiled(hopper)], quantize(hopper, x, kind))
    assert np.isfinite(np.delete(y, 1, 0)).all() and np.isnan(y[1]).all()
