"""The grouped GEMM of packed rows against numpy, on a Hopper GPU and in the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import nmse
from kernel_buffers import Output, upload
from packed_cases import unpacked
from tile_cases import tile_types, tokens

from ggpy.backends.numpy import moe as reference
from ggpy.device.compile import compile_cubin
from ggpy.kernels.gemm.gemm import STATIC_SHARED
from ggpy.kernels.layout.pack import CODES, order_of, packed_bytes
from ggpy.kernels.moe import expert_wgmma
from ggpy.kernels.moe.expert_wgmma import TILES, ExpertWgmma, GatedOutput, tile_rows
from ggpy.kernels.moe.pack_pairs import PackPairs
from ggpy.kernels.moe.sort import PACKED_UNIT, SortedPairs, SortPairs, packed_rows, work_tiles

from .test_moe_kernels import ROUNDED, SCALED, Experts

KINDS = ["Q8_0", "Q4_K", "MXFP4", "Q6_K", "F16"]
# Rows of each expert: none, one, less than a wgmma has, more than it, and more than one tile or
# several.
COUNTS = {64: [40, 0, 1, 150, 64], 256: [300, 0, 9, 96], 288: [330, 0, 9, 280, 1, 161]}


@pytest.fixture(params=["emulator", "hopper"])
def machine(request: pytest.FixtureRequest) -> Any:
    """The emulator, and a GPU with wgmma."""
    return request.getfixturevalue(request.param)


def ids_of(counts: list[int]) -> np.ndarray:
    """An expert for each pair, in random order."""
    ids = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    return np.random.default_rng(len(ids)).permutation(ids)


def sorted_pairs(
    device: Any, ids: np.ndarray, n_expert: int, tile: int
) -> tuple[SortedPairs, list[np.ndarray]]:
    """The memory of a sorted step; pair_of, row_of and work tiles."""
    n, n_work, n_rows = (
        len(ids),
        work_tiles(len(ids), n_expert, tile),
        packed_rows(len(ids), n_expert),
    )
    outs = [Output(device, nbytes) for nbytes in (4 * n_rows, 4 * n, 16 * n_work)]
    memory = SortedPairs(*(out.buffer for out in outs), tile, PACKED_UNIT, n_rows)
    SortPairs(device).launch(upload(device, ids), memory, n, n_expert)
    shapes: list[tuple[int, ...]] = [(n_rows,), (n,), (n_work, 4)]
    return memory, [out.read(np.int32, s) for out, s in zip(outs, shapes, strict=True)]


def multiply(
    device: Any,
    experts: list[Experts],
    ids: np.ndarray,
    x: np.ndarray,
    tile: int,
    n_used: int = 1,
    glu: GatedOutput | None = None,
) -> np.ndarray:
    """The outputs in the order of pairs; x has a row for n_used pairs."""
    first, n_expert = experts[0], len(experts[0].each)
    pairs, (_, row_of, _) = sorted_pairs(device, ids, n_expert, tile)
    n, rows, k = pairs.n_rows, first.tiles.n_rows, first.tiles.k
    packed = Output(device, packed_bytes(n, k))
    order = order_of(first.tiles.layout)
    PackPairs(device).launch(upload(device, x), pairs, packed.buffer, k, order, n_used)
    packed.read(np.uint8, (packed.nbytes,))
    out = Output(device, packed_bytes(n, rows) if glu else 4 * n * rows)
    weights = [e.tiles for e in experts]
    product = ExpertWgmma(device, device.sm_count)
    product.launch(weights, pairs, packed.buffer, out.buffer, len(ids), n_expert, glu)
    if glu is None:
        return out.read(np.float32, (n, rows))[row_of]
    h = unpacked(out.read(np.float16, (out.nbytes // 2,)), n, rows, glu.order)[row_of]
    assert not h[:, rows:].any(), "columns after the last one are 0"
    return h[:, :rows].astype(np.float32)


@pytest.mark.parametrize("tile", COUNTS)
@pytest.mark.parametrize("name", KINDS)
def test_every_kind(machine, name, tile):
    """An odd number of row blocks, the last one not full."""
    ids = ids_of(COUNTS[tile])
    experts = Experts(machine, name, len(COUNTS[tile]), 300, 512, scaled=name in SCALED)
    x = tokens(len(ids), 512)
    y = multiply(machine, [experts], ids, x, tile)
    assert nmse(y, experts.exact(ids, x)) <= ROUNDED


@pytest.mark.parametrize("tile", COUNTS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
def test_gate_and_up(machine, activation, tile):
    """With biases but for one activation, with scales but for another; a token has two pairs."""
    counts, scaled = COUNTS[tile], activation != "gelu_tanh"
    gate, up = (Experts(machine, "MXFP4", len(counts), 150, 416, i, scaled) for i in (1, 2))
    ids = ids_of([*counts[:-1], counts[-1] + sum(counts) % 2])
    x = (tokens(len(ids) // 2, 416) / 16).astype(np.float16)
    rng = np.random.default_rng(3)
    biases = [rng.standard_normal((len(counts), 150)).astype(np.float32) for _ in range(2)]
    given = (None, None) if activation == "silu" else tuple(upload(machine, b) for b in biases)
    glu = GatedOutput(order_of(gate.tiles.layout), activation, given)
    h = multiply(machine, [gate, up], ids, x, tile, 2, glu)
    rows = np.repeat(x, 2, axis=0)
    g, u = gate.exact(ids, rows), up.exact(ids, rows)
    if activation != "silu":
        g, u = g + biases[0][ids], u + biases[1][ids]
    assert nmse(h, reference.gated(activation, g, u)) <= ROUNDED


def test_rows_have_the_same_bits_in_all_tiles(machine):
    """Alone, beside others, and at another place."""
    experts, x = Experts(machine, "Q4_K", 3, 40, 512), tokens(410, 512)
    ids = ids_of([270, 70, 70])
    first, *others = (multiply(machine, [experts], ids, x, tile) for tile, _ in TILES)
    assert all(np.array_equal(first, other) for other in others)
    few = multiply(machine, [experts], ids[:9], x[:9], 288)
    assert np.array_equal(few, first[:9])


def test_under_sanitizers(emulated):
    """An access out of bounds is an error there."""
    gate, up = (Experts(emulated, "Q8_0", 3, 80, 192, seed, scaled=True) for seed in (1, 2))
    ids, x = ids_of([17, 0, 70]), (tokens(87, 192) / 16).astype(np.float16)
    h = multiply(emulated, [gate, up], ids, x, 288, glu=GatedOutput(CODES))
    g = gate.exact(ids, x)
    assert nmse(h, g / (1 + np.exp(-g)) * up.exact(ids, x)) <= ROUNDED
    y = multiply(emulated, [gate], ids, x, 64)
    assert nmse(y, g) <= ROUNDED


def test_padded_and_balanced_order(machine):
    """Experts begin at multiples of eight; tiles are even and the largest stand first."""
    counts = [0, 600, 3, 289, 64, 288, 7, 130]
    ids, n = ids_of(counts), sum(counts)
    pairs, (pair_of, row_of, work) = sorted_pairs(machine, ids, len(counts), 288)
    assert np.array_equal(np.sort(pair_of[pair_of >= 0]), np.arange(n))
    assert np.array_equal(pair_of[row_of], np.arange(n)) and pairs.n_rows % 8 == 0
    tiles = work[work[:, 0] >= 0]
    assert (work[len(tiles) :, 0] == -1).all()
    sizes = tiles[:, 2] - tiles[:, 1]
    assert sorted(sizes) == [3, 7, 64, 130, 137, 152, 200, 200, 200, 288]
    of_expert = [max(sizes[tiles[:, 0] == expert]) for expert in tiles[:, 0]]
    assert (np.diff([-(-size // 32) for size in of_expert]) <= 0).all()
    assert not (tiles[:, 1] % 8).any()
    for expert, first, end, _ in tiles:
        assert set(ids[pair_of[first:end]]) == {expert}


def test_rows_of_work_tiles():
    assert [tile_rows(n * 32, 32) for n in (66, 67, 200, 201)] == [64, 256, 256, 288]


@pytest.mark.usefixtures("nvrtc")
def test_nothing_spills() -> None:
    """Nor do wgmmas wait for each other."""
    types = tile_types("Q8_0", "Q4_K", "MXFP4", "Q6_K")
    names = [f"expert_wgmma<{types[0]}, 64, {e}, 1>" for e in ("STORE", "GLU")]
    names += [f"expert_wgmma<{t}, 288, {e}, 2>" for t in types for e in ("STORE", "GLU")]
    names = [n for n in names if n not in (names[2], names[5], names[6])]
    cubin = compile_cubin("moe/expert_wgmma.cu", "sm_90a", expressions=names,
                          extra_source=expert_wgmma.ASSERTS)  # fmt: skip
    assert "serialized" not in cubin.log
    for name, r in cubin.resources.items():
        assert r.shared <= STATIC_SHARED
        assert max(r.spill_loads, r.spill_stores, r.stack) == 0, f"{name} spills: {r}"
        assert r.registers == (80 if ", 64," in name else 168)  # before setmaxnreg
    assert set(cubin.resources) == set(names)
