"""The Hopper prefill GEMM against float64, on a Hopper GPU; whole tiles in the emulator, too. It
must compile, and its schedules must give every CTA work.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import packed_gemm_cases
import pytest
from cases import ACTIVATIONS, nmse, silu
from kernel_buffers import Output
from packed_gemm_cases import ROUNDED, check_deferred_norm
from tile_cases import MANY, Weights, energy, exact, layouts, tile_types, tokens

from ggpy.device.compile import compile_cubin
from ggpy.kernels.gemm.gemm import STATIC_SHARED
from ggpy.kernels.gemm.gemm_wgmma import TILE_COSTS, GemmWgmma, WgmmaPart, by_layout, k_stages
from ggpy.kernels.gemm.hopper import ROW_BLOCK, has_wgmma
from ggpy.kernels.gemm.tile_scheduler import SPLIT_K, TOKENS, KStages, Tiling, fastest
from ggpy.kernels.layout.pack import CODES, F16, PLAIN, order_of
from ggpy.kernels.layout.tile import TiledMatrix
from ggpy.kernels.norm.deferred_norm import DeferredNorm

SPILLED = 32  # spilled bytes of a few instances, outside of their loops
TILINGS = [Tiling(t, s, pairs=Tiling(t, s).may_pair) for t in TOKENS for s in (False, True)]
SOME_TILINGS = [Tiling(8, True), Tiling(16, True), Tiling(128, False), Tiling(256, True)]


def multiply(device, weights, x, *, product=None, **options):
    """The outputs as float32 [tokens, rows]."""
    product = product or GemmWgmma(device, device.sm_count)
    return packed_gemm_cases.multiply(product, weights, x, **options)


def close(y, w, x):
    """Whether y equals x w^T within the error of weights rounded to f16."""
    return nmse(y, exact(w, x), energy(w, x)) <= ROUNDED


# Without a GPU


LEAST = tile_types("Q8_0")
HARD_NAMES = ("Q8_0", "Q5_1", "Q6_K", "IQ4_XS", "Q2_K")
HARD, SOME = tile_types(*HARD_NAMES), tile_types("F16", "Q6_K")
INSTANCES = [
    (64, "STORE", tile_types(*MANY)),
    (256, "GLU", HARD),
    (16, "ADD", LEAST),
    (8, "GLU", LEAST),
]
INSTANCES += [(128, "QKV", SOME), (256, "QKV", SOME)]
IDS = ["few", "many", "16", "least", "rotated", "many rotated"]


@pytest.mark.parametrize(("n", "epilogue", "types"), INSTANCES, ids=IDS)
def test_nothing_spills_in_the_loops(nvrtc, n, epilogue, types):
    """A spill inside a loop would be much larger."""
    clusters = (2,) if n == TOKENS[-1] else (1,)
    names = [f"gemm_wgmma<{t}, {n}, {epilogue}, {s}>" for t in types for s in clusters]
    cubin = compile_cubin("gemm/gemm_wgmma.cu", "sm_90a", expressions=names)
    assert "serialized" not in cubin.log, "ptxas made the products wait for each other"
    for name, r in cubin.resources.items():
        assert r.shared <= STATIC_SHARED, f"{name} has {r.shared} bytes of its own"
        assert max(r.spill_loads, r.spill_stores) <= SPILLED, f"{name} spills: {r}"
        assert r.stack <= 64, f"{name}: an array lies in memory, where wgmma does not write it"
        assert r.registers == (80 if n <= 64 else 168)  # before setmaxnreg redistributes them
    assert set(cubin.resources) == set(names)


def test_two_layouts_compile(nvrtc):
    """Both main loops in one kernel: their registers, and no products that wait for each other."""
    q4, q6 = tile_types("Q4_K", "Q6_K")
    names = [f"gemm_wgmma_two<{q6}, {q4}, {n}>" for n in (16, 64)]
    cubin = compile_cubin("gemm/gemm_wgmma.cu", "sm_90a", expressions=names)
    assert "serialized" not in cubin.log
    for name, r in cubin.resources.items():
        assert max(r.spill_loads, r.spill_stores) <= SPILLED and r.registers == 80, f"{name}: {r}"


SHAPES = [(7, 8), (1, 17), (32, 64), (48, 512), (224, 512), (112, 2048), (1002, 300), (32, 4096)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("stages", "columns"), [(1, 128), (16, 128), (56, 256)])
def test_tiling(shape, stages, columns):
    """Tiles have at least as many tokens as the GEMM, up to 256, or half of them if there are few
    tiles, and at most half of a tile is padding.
    """
    tiling = fastest(TILE_COSTS, *shape, KStages(stages, columns, 8.5), 132)
    assert replace(tiling, split_k=0) in TILINGS and tiling.split_k in (0, *SPLIT_K)
    few = 32 < shape[1] <= 128 and shape[0] * stages * columns / 128 <= 3 * 132
    assert tiling.tokens >= min(shape[1], 128) // (2 if few else 1)
    assert tiling.tokens < 2 * max(shape[1], 8)


def test_many_tiles_are_not_split_and_few_are():
    pairs, row, long_row = (
        Tiling(256, False, pairs=True),
        KStages(32, 128, 8.5),
        KStages(56, 256, 4.5),
    )
    assert fastest(TILE_COSTS, 33, 1024, row, 132) == pairs  # 132 tiles
    assert fastest(TILE_COSTS, 32, 1024, KStages(16, 256, 4.5), 132) == pairs
    assert (
        fastest(TILE_COSTS, 32, 2048, long_row, 132) == pairs
    )  # 256 tiles: two waves, nearly full
    # 96 tiles: 36 CTAs are idle, which costs less than passing sums
    assert fastest(TILE_COSTS, 48, 512, row, 132) == pairs
    assert fastest(TILE_COSTS, 48, 512, long_row, 132).split
    assert fastest(TILE_COSTS, 32, 16, row, 132).split


@pytest.mark.parametrize(("tiles", "token_blocks", "waves"), [(96, 2, 0), (448, 2, 3), (448, 1, 0)])
def test_waves_of_whole_tiles(tiles, token_blocks, waves):
    """Tiles that share weights stay in whole waves; the rest is split."""
    assert Tiling(256, True).whole_waves(tiles, token_blocks, 132) == waves
    assert Tiling(256, False).whole_waves(tiles, token_blocks, 132) == -(-tiles // 132)


def test_stages():
    """Two chunks of f16 weights are one stage."""
    layouts = [Weights(name, 1, 4096).layout for name in ("F16", "Q8_0", "Q4_K")]
    assert [k_stages(layout, 4096).count for layout in layouts] == [32, 32, 16]
    assert [k_stages(layout, 4097).columns for layout in layouts] == [128, 128, 256]
    assert [k_stages(layout, 1).bits for layout in layouts] == [16, 8.5, 4.5]


def test_runs_only_on_hopper():
    assert [a for a in ("sm_80", "sm_90", "sm_90a", "sm_100a") if has_wgmma(a)] == ["sm_90a"]


def test_matrices_that_do_not_match(emulator):
    a, b = Weights("Q8_0", 16, 96).tiled(emulator), Weights("Q4_0", 16, 96).tiled(emulator)
    x = emulator.alloc(16, "x")
    with pytest.raises(ValueError, match="one layout"):
        GemmWgmma(emulator, 1).launch([a, b], x, [x, x], 40)
    with pytest.raises(ValueError, match="2 matrices and 2 outputs"):
        GemmWgmma(emulator, 1).launch([a, a], x, [x, x], 40, epilogue="GLU")


WHOLE = [
    ("Q4_K", 130, Tiling(256, False, pairs=True), "GLU"),
    ("Q8_0", 70, Tiling(32, False), "STORE"),
    ("F16", 9, Tiling(16, False), "STORE"),
]


@pytest.mark.parametrize(("name", "n", "tiling", "epilogue"), WHOLE)
def test_whole_tiles_in_the_emulator(emulator, name, n, tiling, epilogue):
    """Emulated wgmma, bulk copies, and their multicast to the CTAs of a cluster."""
    gate, up = weights = [Weights(name, 150, 512, seed) for seed in (0, 1)]
    tiles = [w.tiled(emulator) for w in weights]
    x, glu = (tokens(n, 512) / 64).astype(np.float16), epilogue == "GLU"
    (y, *_) = multiply(emulator, tiles, x, tiling=tiling, epilogue=epilogue)
    if glu:
        assert nmse(y, silu(exact(gate, x)) * exact(up, x)) <= ROUNDED
    else:
        assert close(y, gate, x)


def two(device, n, tiling=None, product=None):
    """Whether two matrices of one layout and one of another, in one launch, are close; outputs."""
    weights = [Weights("Q4_K", 150, 2048), Weights("Q6_K", 270, 2048), Weights("Q4_K", 40, 2048)]
    x, tiles = tokens(n, 2048), [w.tiled(device) for w in weights]
    outs = [Output(device, 4 * n * w.rows) for w in weights]
    parts = []
    for part in by_layout(tiles):
        operand = packed_gemm_cases.packed(device, x, order_of(tiles[part[0]].layout))
        parts.append(WgmmaPart([tiles[i] for i in part], operand, [outs[i].buffer for i in part]))
    product = product or GemmWgmma(device, device.sm_count)
    assert product.supports_two([part.weights for part in parts], n)
    product.launch_two(parts, n, tiling=tiling)
    ys = [out.read(np.float32, (n, w.rows)) for out, w in zip(outs, weights, strict=True)]
    return all(close(y, w, x) for w, y in zip(weights, ys, strict=True)), ys


@pytest.mark.parametrize("n", [9, 40])
def test_two_layouts_in_the_emulator(emulator, n):
    assert two(emulator, n, Tiling(16 if n < 16 else 64, False))[0]


@pytest.mark.parametrize("n", [5, 16, 32, 64, 128, 256])
def test_two_layouts_share_the_sms(n):
    """The shapes of Qwen3-30B-A3B: all CTAs are resident at once, and about as long at work."""
    product = GemmWgmma(SimpleNamespace(arch="sm_90a"), 132)
    q, k, v = (
        TiledMatrix(Weights(name, 16, 2048).layout, rows, 2048, None)
        for name, rows in (("Q4_K", 4096), ("Q4_K", 512), ("Q6_K", 512))
    )
    parts = [[q, k], [v]]
    assert product.supports_two(parts, n) and not product.supports_two([[q, k, v]], n)
    assert not product.supports_two(parts, 257)
    schedules = product.schedule_two(parts, n)
    assert sum(schedule.ctas for schedule in schedules) <= (264 if n <= 64 else 132)
    assert all(schedule.cluster == 1 for schedule in schedules)
    assert schedules[0].tiling.tokens == schedules[1].tiling.tokens
    work = [s.tiles / s.ctas for s in schedules]
    assert 0.5 < work[0] / work[1] < 2


# On a GPU


@pytest.mark.parametrize("n", [5, 16, 32, 64, 100, 256])
def test_two_layouts(hopper, n):
    """Twice with one workspace."""
    product = GemmWgmma(hopper, hopper.sm_count)
    is_close, first = two(hopper, n, product=product)
    again = two(hopper, n, product=product)[1]
    assert is_close and all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("n_tokens", [3, 9, 64, 130, 300])
@pytest.mark.parametrize("shape", [(1, 256), (37, 33 * 256), (4097, 256), (300, 14336)], ids=str)
@pytest.mark.parametrize("name", sorted({w.name for w in layouts().values()}))
def test_every_layout(hopper, name, shape, n_tokens):
    """Rows and tokens that fill neither a tile nor a CTA."""
    w = Weights(name, *shape)
    x = tokens(n_tokens, w.columns)
    (y,) = multiply(hopper, [w.tiled(hopper)], x)
    assert close(y, w, x)


@pytest.mark.parametrize("split_k", SPLIT_K)
@pytest.mark.parametrize("size", TILE_COSTS.costs)
def test_split_k(hopper, size, split_k):
    w = Weights("Q8_0", 1500, 1024)
    x, tiling = tokens(size - 3, w.columns), Tiling(size, True, split_k=split_k)
    (y,) = multiply(hopper, [w.tiled(hopper)], x, tiling=tiling)
    assert close(y, w, x)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("name", ["Q8_0", "Q6_K"])
def test_every_tiling(hopper, name, tiling):
    """Several launches with one workspace: what a launch leaves in it must not reach the next
    launch.
    """
    w = Weights(name, 1500, 1024)
    x = tokens(2 * tiling.tokens + 3, w.columns)
    product, tiles = GemmWgmma(hopper, hopper.sm_count), w.tiled(hopper)
    (first,) = multiply(hopper, [tiles], x, product=product, tiling=tiling)
    (again,) = multiply(hopper, [tiles], x, product=product, tiling=tiling)
    assert close(first, w, x)
    assert np.array_equal(first, again)


@pytest.mark.parametrize("epilogue", ["STORE", "ADD", "GLU"])
@pytest.mark.parametrize("rows", [1500, 4096])
@pytest.mark.parametrize("n", [8, 300, 515, 2048])
def test_pairs_have_the_bits_of_single_ctas(hopper, n, rows, epilogue):
    """Also if one CTA of the pair has no tokens to copy, or no rows."""
    weights = [Weights("Q4_K", rows, 1024, seed) for seed in range(2 if epilogue == "GLU" else 1)]
    x, start = (tokens(n, 1024) / 64).astype(np.float16), tokens(n, rows).astype(np.float32)
    options = {"epilogue": epilogue, **({"start": start} if epilogue == "ADD" else {})}
    product, tiles = GemmWgmma(hopper, hopper.sm_count), [w.tiled(hopper) for w in weights]
    pairs, single = Tiling(256, False, pairs=True), Tiling(256, False)
    (y,) = multiply(hopper, tiles, x, product=product, tiling=pairs, **options)
    (z,) = multiply(hopper, tiles, x, product=product, tiling=single, **options)
    assert np.array_equal(y, z)
    row_blocks = -(-rows // (ROW_BLOCK // 2 if epilogue == "GLU" else ROW_BLOCK))
    assert pairs.schedule(row_blocks, n, 4, hopper.sm_count).cluster == 2


RAGGED = [("Q8_0", 96), ("Q8_0", 576), ("F16", 8), ("F16", 96), ("F16", 576), ("F16", 1088)]


@pytest.mark.parametrize(("name", "columns"), RAGGED)
def test_columns_that_fill_no_chunk(hopper, name, columns):
    w = Weights(name, 37, columns)
    x = tokens(40, columns)
    (y,) = multiply(hopper, [w.tiled(hopper)], x)
    assert close(y, w, x)


def test_segments(hopper):
    """q, k, v and a gate: four matrices of different sizes, three of which share a CTA."""
    weights = [Weights("Q8_0", rows, 96, seed) for seed, rows in enumerate((200, 37, 16, 21))]
    x = tokens(40, 96)
    outs = multiply(hopper, [w.tiled(hopper) for w in weights], x)
    assert all(close(y, w, x) for w, y in zip(weights, outs, strict=True))


@pytest.mark.parametrize("tiling", SOME_TILINGS, ids=str)
def test_add(hopper, tiling):
    w = Weights("Q8_0", 337, 4096)
    x, start = tokens(40, 4096), tokens(40, 337).astype(np.float32)
    (plain,) = multiply(hopper, [w.tiled(hopper)], x, tiling=tiling)
    (y,) = multiply(hopper, [w.tiled(hopper)], x, epilogue="ADD", start=start, tiling=tiling)
    assert np.array_equal(y, start + plain)


@pytest.mark.parametrize("tiling", SOME_TILINGS, ids=str)
@pytest.mark.parametrize("order", [PLAIN, CODES, F16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate_and_up(hopper, activation, order, tiling):
    gate, up = (Weights("Q8_0", 150, 96, seed) for seed in (0, 1))
    x = (tokens(40, 96) / 16).astype(np.float16)
    tiles = [gate.tiled(hopper), up.tiled(hopper)]
    options = {"epilogue": "GLU", "activation": activation, "order": order, "tiling": tiling}
    (y,) = multiply(hopper, tiles, x, **options)
    assert nmse(y, ACTIVATIONS[activation](exact(gate, x)) * exact(up, x)) <= ROUNDED


@pytest.mark.parametrize("tiling", SOME_TILINGS, ids=str)
@pytest.mark.parametrize("name", ["I8", "F8_E4M3", "Q4_0"])
def test_scales_of_rows(hopper, name, tiling):
    """The row scale is applied before the residual and the activation; the adjacent matrix has
    none.
    """
    gate, up = (Weights(name, 337, 1024, seed) for seed in (0, 1))
    x, start = tokens(40, 1024), tokens(40, 337).astype(np.float32)
    tiles = gate.scaled(hopper)
    plain, other = multiply(hopper, [gate.tiled(hopper), up.tiled(hopper)], x, tiling=tiling)
    (y, beside) = multiply(hopper, [tiles, up.tiled(hopper)], x, tiling=tiling)
    assert np.array_equal(y, plain * gate.row_scales) and np.array_equal(beside, other)
    (added,) = multiply(hopper, [tiles], x, epilogue="ADD", start=start, tiling=tiling)
    assert np.array_equal(added, start + y)
    small = (x / (4096 if name == "I8" else 64)).astype(np.float16)
    (h,) = multiply(hopper, [tiles, up.scaled(hopper)], small, epilogue="GLU", tiling=tiling)
    g, u = (exact(w, small) * w.row_scales for w in (gate, up))
    assert nmse(h, silu(g) * u) <= ROUNDED


@pytest.mark.parametrize("name", MANY)
def test_half_tiles(hopper, name):
    """GLU: a warp has half a tile of gate and half a tile of up, for every layout."""
    gate, up = (Weights(name, 150, 512, seed) for seed in (0, 1))
    x = (tokens(33, 512) / 64).astype(np.float16)
    (y,) = multiply(hopper, [gate.tiled(hopper), up.tiled(hopper)], x, epilogue="GLU")
    assert nmse(y, silu(exact(gate, x)) * exact(up, x)) <= ROUNDED


# Deferred norm (cuda/norm/deferred_norm.cuh)


@pytest.mark.parametrize("n", [1, 5, 8])
@pytest.mark.parametrize("shape", [(128, 256), (1152, 2048), (4096, 14336)], ids=str)
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_a_deferred_norm(hopper, name, shape, n):
    check_deferred_norm(GemmWgmma(hopper, hopper.sm_count), ROW_BLOCK, name, shape, n)


def test_a_norm_of_many_tokens_is_not_deferred(emulator):
    w, x = Weights("Q8_0", 128, 128).tiled(emulator), emulator.alloc(16, "x")
    with pytest.raises(ValueError, match="9 tokens are too many for a deferred norm"):
        GemmWgmma(emulator, 132).launch(
            [w], x, [x], 9, epilogue="ADD", deferred_norm=DeferredNorm(x, 1, x)
        )
