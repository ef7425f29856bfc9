"""The kernels of a mixture of experts against numpy: router, sorting, products, sums."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from cases import nmse
from kernel_buffers import Output, upload
from random_moe import FORMS, Form, random_moe, random_x
from tile_cases import Weights, bound, exact, tokens

from ggpy.backends.experts import LEAST_SUM
from ggpy.backends.numpy import moe as reference
from ggpy.backends.numpy.backend import Reference
from ggpy.backends.numpy.functions import normalised, sigmoid
from ggpy.evaluate import synthetic
from ggpy.formats import by_name
from ggpy.kernels.layout.tile import TiledMatrix, layout_of, repack
from ggpy.kernels.moe import expert_gemv, expert_rows, route
from ggpy.kernels.moe.combine import Combine, ExpertOutputs
from ggpy.kernels.moe.expert_gemm import CHUNK_STEPS, STATIC_SHARED, ExpertGemm, x_bytes
from ggpy.kernels.moe.expert_gemv import IN_FLIGHT, ExpertAddends, ExpertGemv, gemv_shape, sum_shape
from ggpy.kernels.moe.expert_rows import ExpertRows, Shape
from ggpy.kernels.moe.route import (
    SCORES,
    LateChoice,
    Route,
    RouterChoice,
    RouterWeights,
    Routes,
)
from ggpy.kernels.moe.sort import SortedPairs, SortPairs, work_tiles

ROUNDED = 1e-6  # weights of prefill GEMMs, and products with subnormal codes, are rounded


class Experts:
    """X random matrices [rows, columns] of one format, one after the other in tiles; scaled: each
    has a scale, of either sign.
    """

    def __init__(
        self,
        device,
        name: str,
        n: int,
        rows: int,
        columns: int,
        seed: int = 0,
        scaled: bool = False,
    ) -> None:
        self.each = [Weights(name, rows, columns, 100 * seed + i) for i in range(n)]
        layout = self.each[0].layout
        nbytes = layout.nbytes(rows, columns)
        data = device.alloc(n * nbytes, "experts")
        for i, w in enumerate(self.each):
            raw = upload(device, w.blocks)
            repack(device, w.format, raw, rows, columns, data.at(i * nbytes))
        rng = np.random.default_rng([seed, n])
        self.scales = rng.uniform(0.5, 2, n) * rng.choice([-1, 1], n) if scaled else np.ones(n)
        self.scales = self.scales.astype(np.float32)
        scale = upload(device, self.scales) if scaled else None
        self.tiles = TiledMatrix(layout, rows, columns, data, scale)

    def exact(self, ids: np.ndarray, x: np.ndarray) -> np.ndarray:
        """float64 y[pair] of x[pair]."""
        y = [exact(self.each[e], row[None])[0] for e, row in zip(ids, x, strict=True)]
        return np.stack(y) * self.scales[ids, None]


def run_router(device, f: Form, x: np.ndarray, late: bool = False):
    """(what the kernel makes of x, the choice that it was asked for, the layer). late: others
    choose experts.
    """
    ffn = random_moe(Reference(1), f)
    r, t = ffn.router, len(x)
    up = {name: None if a is None else upload(device, a) for name, a in (
        ("bias", r.bias), ("choice_bias", r.choice_bias),
        ("shared_gate", ffn.shared and ffn.shared.gate))}  # fmt: skip
    weights = RouterWeights(
        upload(device, ffn.norm.weight), ffn.norm.eps, upload(device, r.weight.array), **up
    )
    shapes = {
        "normed": (np.float16, (t, f.D)),
        "ids": (np.int32, (t, f.J)),
        "weights": (np.float32, (t, f.J)),
        "logits": (np.float32, (t, f.X)),
        "strength": (np.float32, (t,)),
    }
    if up["shared_gate"] is None:
        del shapes["strength"]
    if late:
        del shapes["ids"], shapes["weights"]
    outs = {
        name: Output(device, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        for name, (dtype, shape) in shapes.items()
    }
    choice = RouterChoice(f.X, f.J, f.score, f.normalise, f.scale, f.groups, LEAST_SUM)
    none = {"ids": None, "weights": None}
    routes = Routes(**none | {name: out.buffer for name, out in outs.items()})
    Route(device).launch(upload(device, x), weights, choice, routes, t, f.D)
    return {name: outs[name].read(*shape) for name, shape in shapes.items()}, choice, ffn


def routed(device, f: Form, x: np.ndarray):
    """(normed, ids, weights, strength) of the kernel, and the reference's."""
    made, _, ffn = run_router(device, f, x)
    got = tuple(made.get(name) for name in ("normed", "ids", "weights", "strength"))
    n = normalised(x, ffn.norm)
    strength = sigmoid(n @ ffn.shared.gate) if "strength" in made else None
    return got, (n, *reference.route(n, ffn.router), strength)


ROUTERS = {
    name: f
    for name, f in FORMS.items()
    if "types" not in name and name not in ("gelu", "shared") and f.score in SCORES
}
ROUTERS["many"] = Form(X=130, J=8, D=264, normalise=True, type="F16")
ROUTERS["many in groups"] = Form(
    X=64, J=6, score="sigmoid", choice_bias=True, normalise=True, groups=(8, 4), scale=2.5
)


@pytest.mark.parametrize("n_tokens", [1, 35, 515])
@pytest.mark.parametrize("name", ROUTERS)
def test_router(machine, name, n_tokens):
    f = ROUTERS[name]
    (normed, ids, weights, strength), expected = routed(machine, f, random_x(f, n_tokens))
    assert np.array_equal(ids, expected[1])
    np.testing.assert_allclose(weights, expected[2], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(normed.astype(np.float32), expected[0], rtol=1e-3, atol=1e-3)
    if strength is not None:
        np.testing.assert_allclose(strength, expected[3], rtol=1e-5)


@pytest.mark.parametrize("columns", [128, 264, 2880, 4096, 4104])
@pytest.mark.parametrize("name", ["gpt-oss", "gated shared"])
def test_router_of_few_tokens(machine, name, columns):
    """A warp for each expert, and for a shared expert's gate; and more columns than it can hold."""
    f = replace(FORMS[name], X=41, D=columns, type="F16")
    x = random_x(f, 2)
    made, _, ffn = run_router(machine, f, x, late=True)
    n = normalised(x, ffn.norm)
    logits = n @ ffn.router.weight.array.T
    if ffn.router.bias is not None:
        logits += ffn.router.bias
    np.testing.assert_allclose(made["logits"], logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(made["normed"].astype(np.float32), n, rtol=1e-3, atol=1e-3)
    assert ("strength" in made) == (name == "gated shared")
    if "strength" in made:
        strength = sigmoid(n @ ffn.shared.gate)
        np.testing.assert_allclose(made["strength"], strength, rtol=1e-5, atol=1e-7)
    alone, _, _ = run_router(machine, f, x[1:], late=True)
    assert all(np.array_equal(made[key][1:], alone[key]) for key in made)


def test_a_token_is_routed_alike_alone_and_among_others(machine):
    f = ROUTERS["many"]
    x = random_x(f, 516)
    alone = routed(machine, f, x[5:6])[0]
    for n in (8, 40, 516):
        together = routed(machine, f, x[:n])[0]
        for a, b in zip(together[:3], alone[:3], strict=True):
            assert np.array_equal(a[5:6], b)


@pytest.mark.parametrize("columns", [264, 2312])
def test_router_has_the_same_bits_with_all_tiles(machine, monkeypatch, columns):
    """Tokens and experts that fill no tile; a shared expert's gate; columns beyond those in
    registers.
    """
    f = replace(ROUTERS["many"], X=43, D=columns, shared=True)
    x = random_x(f, 19)
    results, room = [], machine.shared_bytes - route.STATIC_SHARED
    for tile in [t for t in route.SHAPES if route.shared_bytes(t[0], columns) <= room]:
        monkeypatch.setattr(route, "SHAPES", (tile,))
        results.append(run_router(machine, f, x)[0])
    *others, first = results
    assert others
    for made in others:
        assert all(np.array_equal(made[name], first[name]) for name in first)


@pytest.mark.parametrize(
    ("n_expert", "n_tokens", "tile"),
    [
        *((128, n, tile) for n, tile in ((8, (1, 1)), (16, (2, 1)), (32, (4, 1)), (64, (4, 2)))),
        *((128, n, tile) for n, tile in ((128, (8, 2)), (256, (8, 4)), (4096, (8, 4)))),
        *((32, n, tile) for n, tile in ((4, (1, 1)), (64, (2, 1)), (256, (4, 2)))),
    ],
)
def test_tiles_of_the_router_leave_work_for_all_sms(n_expert, n_tokens, tile):
    hopper = SimpleNamespace(sm_count=132, shared_bytes=227 << 10)
    assert Route(hopper)._shape(n_tokens, 2048, n_expert) == tile


def test_of_equal_experts_the_first_are_chosen_and_nan_chooses_some(machine):
    f = Form(J=3)
    x = np.zeros((2, f.D), np.float32)
    x[1] = np.nan
    (_, ids, weights, _), _ = routed(machine, f, x)
    assert ids[0].tolist() == [0, 1, 2] and (ids[1] < 8).all() and (ids[1] >= 0).all()
    np.testing.assert_allclose(weights[0], 1 / 8, rtol=1e-6)
    assert np.isnan(weights[1]).all()


@pytest.mark.parametrize(
    ("choice", "k", "message"),
    [
        (RouterChoice(2000, 2), 64, "2000 experts, 1024 are the most"),
        (RouterChoice(64, 33), 64, "33 experts of a token, 32 are the most"),
        (RouterChoice(128, 2, groups=(64, 2)), 64, "64 groups of experts, 32 are the most"),
        (RouterChoice(8, 2), 60, "rows of 60 columns"),
    ],
)
def test_routers_that_are_too_large(emulator, choice, k, message):
    x = emulator.alloc(16, "x")
    with pytest.raises(ValueError, match=message):
        Route(emulator).launch(x, RouterWeights(x, 0, x), choice, Routes(x, x, x, x), 1, k)


TILES = [16, 32, 64]  # rows of a work tile


def sorted_pairs(device, ids: np.ndarray, n_expert: int, tile: int = 16):
    """pair_of, row_of and work tiles."""
    n, n_work = len(ids), work_tiles(len(ids), n_expert, tile)
    outs = [Output(device, 4 * n), Output(device, 4 * n), Output(device, 16 * n_work)]
    memory = SortedPairs(*(out.buffer for out in outs), tile)
    SortPairs(device).launch(upload(device, ids), memory, n, n_expert)
    arrays = [out.read(np.int32, shape) for out, shape in zip(outs, ((n,), (n,), (n_work, 4)),
                                                             strict=True)]  # fmt: skip
    return memory, arrays


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize(("n_pairs", "n_expert"), [(64, 8), (1500, 7), (300, 1), (40, 1024)])
def test_sorting(machine, n_pairs, n_expert, tile):
    ids = np.random.default_rng(n_pairs).integers(0, n_expert, n_pairs).astype(np.int32)
    _, (pair_of, row_of, work) = sorted_pairs(machine, ids, n_expert, tile)
    assert np.array_equal(np.sort(pair_of), np.arange(n_pairs))
    assert np.array_equal(row_of[pair_of], np.arange(n_pairs))
    assert (np.diff(ids[pair_of]) >= 0).all()
    tiles = work[work[:, 0] >= 0]
    assert (work[len(tiles) :, 0] == -1).all(), "tiles without work are the last"
    for expert, first, end, _ in tiles:
        assert 0 < end - first <= tile and set(ids[pair_of[first:end]]) == {expert}
    covered = np.concatenate([np.arange(first, end) for _, first, end, _ in tiles])
    assert np.array_equal(covered, np.arange(n_pairs))


SCALED = ("MXFP4", "NVFP4")  # kinds of which each expert has a scale here
KINDS = ["Q8_0", "Q4_0", "MXFP4", "Q6_K", "F16"]


def gemv(device, experts, ids, x, n_used, epilogue="STORE", activation="silu", biases=None):
    """Of each pair; x[tokens, columns]."""
    rows, up = experts[0].tiles.n_rows, [upload(device, b) for b in biases or ()]
    dtype = np.float16 if epilogue == "GLU" else np.float32
    n_pairs, memory = len(x) * n_used, ids if isinstance(ids, LateChoice) else upload(device, ids)
    out = Output(device, n_pairs * rows * np.dtype(dtype).itemsize)
    ExpertGemv(device).launch(
        *([e.tiles for e in experts], memory, upload(device, x), out.buffer),
        *(len(x), n_used),
        **{"epilogue": epilogue, "activation": activation, "biases": up},
    )
    return out.read(dtype, (n_pairs, rows)).astype(np.float32)


def gemv_sum(device, experts, ids, h, old, weights, **addends):
    """old + the weighted sum of each token's experts; h[pairs, columns], weights[tokens, used]."""
    out = Output(device, old.nbytes)
    device.upload(out.buffer, old)
    some = {name: upload(device, array) for name, array in addends.items()}
    late = isinstance(ids, LateChoice)
    memory = ids if late else upload(device, ids), upload(device, h), out.buffer
    added = ExpertAddends(None if late else upload(device, weights), **some)
    sizes = weights.shape
    ExpertGemv(device).launch([experts.tiles], *memory, *sizes, epilogue="SUM", addends=added)
    return out.read(np.float32, old.shape)


@pytest.mark.parametrize(("name", "columns"), [(name, 256) for name in KINDS] + [("MXFP4", 1952)])
def test_gemv_of_every_kind(machine, name, columns):
    """Rows that fill no tile and columns that fill no unit, each token with two experts; then
    their sums.
    """
    experts = Experts(machine, name, 5, 37, columns, scaled=name in SCALED)
    ids, x = np.array([3, 0, 4, 3, 1, 2], np.int32), tokens(3, columns)
    y = gemv(machine, [experts], ids, x, 2)
    assert nmse(y, experts.exact(ids, np.repeat(x, 2, axis=0))) <= bound(experts.each[0])
    h, old = tokens(6, columns), np.zeros((3, 37), np.float32)
    weights = np.array([[0.5, 0.25], [1, -2], [0, 1.5]], np.float32)
    y = gemv_sum(machine, experts, ids, h, old, weights)
    each = experts.exact(ids, h) * weights.reshape(-1, 1)
    assert nmse(y, each.reshape(3, 2, 37).sum(1)) <= bound(experts.each[0])


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_gemv_of_gate_and_up(machine, activation):
    gate, up = (Experts(machine, "Q8_0", 4, 40, 800, seed, scaled=True) for seed in (1, 2))
    ids, x = np.array([3, 0, 2, 3], np.int32), (tokens(2, 800) / 16).astype(np.float16)
    rows, rng = np.repeat(x, 2, axis=0), np.random.default_rng(7)
    biases = [rng.standard_normal((4, 40), np.float32) for _ in range(2)]
    h = gemv(machine, [gate, up], ids, x, 2, "GLU", activation, biases)
    g, u = (e.exact(ids, rows) + b[ids] for e, b in zip((gate, up), biases, strict=True))
    assert nmse(h, reference.gated(activation, g, u)) <= 1e-6


@pytest.mark.parametrize(
    ("n_used", "cluster", "two"),
    [(1, 1, False), (1, 1, True), (5, 1, False), (5, 1, True), (5, 2, False), (5, 2, True)],
)
def test_gemv_adds_up_experts(machine, monkeypatch, n_used, cluster, two):
    """With biases and a shared part; rows of x that take several rounds of shared memory."""
    monkeypatch.setattr(expert_gemv, "cluster_of", lambda tile_rows, n_sms: cluster)
    monkeypatch.setattr(expert_gemv, "takes_two", lambda *args: two)
    columns = 256 if n_used > 1 else 256 * 70
    experts = Experts(machine, "Q4_0", 6, 20, columns, scaled=n_used > 1)
    rng = np.random.default_rng(n_used)
    ids = rng.integers(0, 6, 2 * n_used).astype(np.int32)
    h, weights = tokens(2 * n_used, columns), rng.random((2, n_used), np.float32)
    old, shared = rng.standard_normal((2, 2, 20)).astype(np.float32) * 100
    bias, strength = rng.standard_normal((6, 20), np.float32), rng.random(2, np.float32)
    parts = {"bias": bias, "shared": shared, "strength": strength}
    y = gemv_sum(machine, experts, ids, h, old, weights, **parts)
    each = (experts.exact(ids, h) + bias[ids]) * weights.reshape(-1, 1)
    expected = old + each.reshape(2, n_used, 20).sum(1) + shared * strength[:, None]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_bits_of_two_tile_rows_at_once_are_those_of_one(machine, monkeypatch, name):
    """Where clusters share tile rows, two at once are shared by twice as many CTAs: other bits, so
    the choice does not depend on the number of tokens.
    """
    monkeypatch.setattr(expert_gemv, "cluster_of", lambda tile_rows, n_sms: 1)
    experts, rng = Experts(machine, name, 4, 50, 512), np.random.default_rng(9)
    ids, h = np.array([2, 0, 3, 1], np.int32), tokens(4, 512)
    weights, old = rng.random((2, 2), np.float32), rng.standard_normal((2, 50)).astype(np.float32)
    y = []
    for two in (False, True):
        monkeypatch.setattr(expert_gemv, "takes_two", lambda *args, two=two: two)
        y.append(gemv_sum(machine, experts, ids, h, old, weights))
    np.testing.assert_array_equal(*y)


def test_how_a_tile_row_is_split_does_not_depend_on_the_number_of_tokens():
    """In all known shapes, for GPUs with and without clusters."""
    gpus = [(132, 227 << 10, True), (108, 163 << 10, False), (40, 64 << 10, False)]
    known = [shape.settings for shape in synthetic.shapes().values()]
    mixtures = [settings for settings in known if "expert_used_count" in settings]
    tiles = set()
    names = ("Q4_K", "Q8_0", "MXFP4")
    for settings, name, (n_sms, most, clusters) in product(mixtures, names, gpus):
        widths = (settings.get(f"{kind}feed_forward_length") for kind in ("expert_", ""))
        n_ff = next(filter(None, widths))
        layout = Weights(name, 16, n_ff).layout
        matrix = TiledMatrix(layout, settings["embedding_length"], n_ff, None)
        n_used = settings["expert_used_count"]
        of = [sum_shape(matrix, n, n_used, n_sms, most - 1024, clusters) for n in (1, 2, 3, 4, 8)]
        assert len({shape.cluster * shape.warps for shape in of}) == 1, settings
        assert max(shape.shared for shape in of) <= most - 1024
        tiles.add(tuple(shape.tiles for shape in of))
    assert {(1,) * 5, (1, 2, 1, 2, 2), (2,) * 5} <= tiles


@pytest.mark.parametrize(
    ("name", "d", "n_ff", "n_used", "n_ctas"),
    [("Q4_K", 2048, 768, 8, 3), ("MXFP4", 2880, 2880, 4, 6)],
)
def test_ctas_of_a_token_are_resident_at_once(name, d, n_ff, n_used, n_ctas):
    """Those of gate and up, on 132 SMs, with enough bytes in flight."""
    layout, limit = Weights(name, 16, d).layout, 227 << 10
    n_tiles = -(-n_ff // 16) * n_used
    shape = gemv_shape(layout, n_tiles, d, 1, 2, 132, limit)
    assert n_ctas == -(-n_tiles // 132) and n_ctas * (shape.shared + 1024) <= limit
    assert 64 << 10 <= n_ctas * shape.warps * shape.stages * 2 * layout.chunk_bytes <= IN_FLIGHT
    assert shape.whole and n_ctas * shape.warps <= 24, "registers"


@pytest.mark.parametrize(
    ("n_tiles", "n_ff", "n_used", "n_sms", "warps"),
    [
        (128, 768, 8, 132, 12),
        (128, 1024, 8, 132, 16),
        (128, 512, 8, 132, 8),
        (128, 2048, 8, 132, 8),  # 64 units: 32 warps are too many
        (256, 768, 8, 132, 8),  # CTAs share SMs
        (96, 256, 2, 132, 4),
    ],
)
def test_a_cta_alone_on_an_sm_has_a_warp_for_two_units(n_tiles, n_ff, n_used, n_sms, warps):
    layout, limit = Weights("Q6_K", 16, n_ff).layout, 227 << 10
    shape = gemv_shape(layout, n_tiles, n_ff, n_used, 1, n_sms, limit)
    assert shape.warps == warps and shape.shared <= limit


def test_tile_rows_of_few_more_than_the_sms_have_clusters():
    rows = {180: 2, 128: 1, 256: 1, 133: 2, 264: 1}
    assert {n: expert_gemv.cluster_of(n, 132) for n in rows} == rows


@pytest.mark.parametrize(
    ("name", "tile_rows", "cluster", "n_tokens", "two"),
    [
        ("MXFP4", 180, 2, 1, True),
        ("MXFP4", 181, 2, 1, False),
        ("Q8_0", 180, 2, 1, False),
        ("Q8_0", 128, 1, 1, True),
        ("Q8_0", 127, 1, 1, False),
        ("Q8_0", 96, 1, 1, False),
        ("Q8_0", 96, 1, 2, True),
        ("Q8_0", 256, 1, 1, False),
        ("Q4_K", 128, 1, 1, False),  # each CTA has an SM
        ("Q4_K", 128, 1, 2, True),
        ("Q4_K", 128, 1, 3, False),  # an SM would have two CTAs of two, not three of one
        ("Q4_K", 128, 1, 4, True),
        ("Q4_K", 160, 2, 1, False),
        ("Q4_K", 256, 1, 1, False),
    ],
)
def test_two_tile_rows_at_once(name, tile_rows, cluster, n_tokens, two):
    layout = Weights(name, 16, 704 if name == "MXFP4" else 768).layout
    assert expert_gemv.takes_two(layout, tile_rows, cluster, n_tokens, 132) == two


def test_gemv_has_the_same_bits_in_a_larger_batch(machine):
    experts, x = Experts(machine, "Q4_0", 4, 80, 512), tokens(3, 512)
    ids = np.array([3, 0, 2, 3, 1, 0], np.int32)
    all_ = gemv(machine, [experts], ids, x, 2)
    assert np.array_equal(all_[2:4], gemv(machine, [experts], ids[2:4], x[1:2], 2))
    h, old, weights = tokens(6, 512), np.ones((3, 80), np.float32), np.ones((3, 2), np.float32)
    all_ = gemv_sum(machine, experts, ids, h, old, weights)
    one = gemv_sum(machine, experts, ids[2:4], h[2:4], old[:1], weights[:1])
    assert np.array_equal(all_[1:2], one)


@pytest.mark.parametrize("name", ["many", "many in groups", "gpt-oss"])
def test_gemv_that_chooses_has_the_same_bits(machine, name):
    """As with the router's choice: h of gate and up, and the sum of down."""
    f, n_tokens = ROUTERS[name], 3
    made, choice, ffn = run_router(machine, f, random_x(f, n_tokens))
    bias = ffn.router.choice_bias
    logits = upload(machine, made["logits"])
    late = LateChoice(choice, logits, None if bias is None else upload(machine, bias))
    scaled = name == "many"
    gate, up = (Experts(machine, "Q8_0", f.X, 16, 64, seed, scaled) for seed in (1, 2))
    ids, x, h = made["ids"].reshape(-1), tokens(n_tokens, 64), tokens(n_tokens * f.J, 64)
    of_ids, of_choice = (gemv(machine, [gate, up], which, x, f.J, "GLU") for which in (ids, late))
    assert np.array_equal(of_ids, of_choice)
    inputs = h, np.zeros((n_tokens, 16), np.float32), made["weights"]
    of_ids, of_choice = (gemv_sum(machine, gate, which, *inputs) for which in (ids, late))
    assert np.array_equal(of_ids, of_choice)


def gemm(device, experts, ids, x, tile, n_used=0, epilogue="STORE"):
    """Outputs in the order of pairs, and pair_of; n_used: x has a row for so many pairs."""
    if x_bytes(tile, CHUNK_STEPS) > device.shared_bytes - STATIC_SHARED:
        pytest.skip(f"tiles of {tile} rows do not fit into the shared memory of {device.arch}")
    memory, (pair_of, row_of, _) = sorted_pairs(device, ids, len(experts[0].each), tile)
    rows, glu = experts[0].tiles.n_rows, epilogue == "GLU"
    dtype = np.float16 if glu else np.float32
    outs = [
        Output(device, len(ids) * rows * np.dtype(dtype).itemsize)
        for _ in (experts[:1] if glu else experts)
    ]
    ExpertGemm(device).launch(
        [e.tiles for e in experts],
        memory,
        upload(device, x if n_used else x[pair_of]),
        [out.buffer for out in outs],
        len(ids),
        len(experts[0].each),
        n_used=n_used,
        epilogue=epilogue,
    )
    return [out.read(dtype, (len(ids), rows)).astype(np.float32)[row_of] for out in outs]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", KINDS)
def test_gemm_of_every_kind(machine, name, tile):
    """More rows of one expert than a tile has, a few of another, and an expert without any."""
    experts = Experts(machine, name, 4, 150, 512, scaled=name in SCALED)
    ids = np.random.default_rng(0).choice([0, 1, 3], 90, p=[0.8, 0.1, 0.1]).astype(np.int32)
    x = tokens(len(ids), 512)
    (y,) = gemm(machine, [experts], ids, x, tile)
    assert nmse(y, experts.exact(ids, x)) <= ROUNDED


@pytest.mark.parametrize("tile", TILES)
def test_gemm_of_the_rows_of_tokens(machine, tile):
    """Each row is multiplied by three experts; of gate and up."""
    gate, up = (Experts(machine, "Q4_K", 5, 20, 768, seed, scaled=seed > 1) for seed in (1, 2))
    ids = np.random.default_rng(5).integers(0, 5, 63).astype(np.int32)
    x = (tokens(21, 768) / 16).astype(np.float16)
    rows = np.repeat(x, 3, axis=0)
    for y, w in zip(gemm(machine, [gate, up], ids, x, tile, 3), (gate, up), strict=True):
        assert nmse(y, w.exact(ids, rows)) <= ROUNDED


def test_gemms_of_all_tiles_have_the_same_bits(machine):
    experts, x = Experts(machine, "Q4_K", 3, 40, 512), tokens(70, 512)
    ids = np.random.default_rng(6).integers(0, 3, 70).astype(np.int32)
    first, *others = (gemm(machine, [experts], ids, x, tile)[0] for tile in TILES)
    assert all(np.array_equal(first, y) for y in others)
    (few,) = gemm(machine, [experts], ids[:9], x[:9], 64)
    assert np.array_equal(few, first[:9])


def few_rows(device, experts, ids, x, n_used=0, activation="", biases=(), tile=8):
    """As gemm, of ExpertRows; activation: GLU."""
    memory, (pair_of, row_of, _) = sorted_pairs(device, ids, len(experts[0].each), tile)
    rows, dtype = experts[0].tiles.n_rows, np.float16 if activation else np.float32
    out = Output(device, len(ids) * rows * np.dtype(dtype).itemsize)
    ExpertRows(device).launch(
        *([e.tiles for e in experts], memory, upload(device, x if n_used else x[pair_of])),
        *(out.buffer, len(ids), len(experts[0].each)),
        n_used=n_used,
        epilogue="GLU" if activation else "STORE",
        activation=activation or "silu",
        biases=[upload(device, b) for b in biases],
    )
    return out.read(dtype, (len(ids), rows)).astype(np.float32)[row_of]


def holds_rows(device, name: str, columns: int, tile: int = 8) -> bool:
    """Whether a shape of ExpertRows with work tiles of so many rows fits on an SM."""
    w = Weights(name, 16, columns)
    tiles = TiledMatrix(w.layout, 16, columns, None)  # type: ignore[arg-type]
    return ExpertRows(device).shape(tiles, tile) is not None


@pytest.mark.parametrize("tile", [8, 16])
@pytest.mark.parametrize(
    "name", [*KINDS, "Q4_1", "Q4_K", "Q5_K", "Q2_K", "Q3_K", "IQ4_XS", "IQ2_XS", "NVFP4", "F8_E4M3"]
)
def test_few_rows_of_every_kind(machine, name, tile):
    """More rows of one expert than a tile has, a few of another, and an expert without any; tile
    rows that fill no round.
    """
    if not holds_rows(machine, name, 512, tile):
        pytest.skip(f"no shape fits into the shared memory of an SM of {machine.arch}")
    experts = Experts(machine, name, 4, 150, 512, scaled=name in SCALED)
    ids = np.random.default_rng(0).choice([0, 1, 3], 30, p=[0.7, 0.15, 0.15]).astype(np.int32)
    x = tokens(len(ids), 512)
    y = few_rows(machine, [experts], ids, x, tile=tile)
    assert nmse(y, experts.exact(ids, x)) <= ROUNDED
    assert np.array_equal(y[:5], few_rows(machine, [experts], ids[:5], x[:5], tile=tile))
    if holds_rows(machine, name, 512):
        assert np.array_equal(y, few_rows(machine, [experts], ids, x))


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q2_K", "MXFP4"])
@pytest.mark.parametrize("rows", [160, 144])
def test_few_rows_have_the_same_bits_in_all_shapes(machine, monkeypatch, name, rows):
    """With one tile row and with two at once; an odd number of tile rows has one at once."""
    if not holds_rows(machine, name, 512):
        pytest.skip(f"no shape fits into the shared memory of an SM of {machine.arch}")
    gate, up = (Experts(machine, name, 3, rows, 512, seed) for seed in range(2))
    ids = np.array([0, 2, 0, 0], np.int32)
    x = tokens(len(ids), 512)
    found = []
    for tiles in (1, 2):
        shapes = Shape(tiles, 8, 1), Shape(1, 8, 1)
        monkeypatch.setattr(expert_rows, "shapes", lambda *_, shapes=shapes: shapes)
        assert ExpertRows(machine).shape(up.tiles, 8) == shapes[rows == 144]
        found.append(
            [few_rows(machine, [up], ids, x), few_rows(machine, [gate, up], ids, x, 1, "silu")]
        )
    for one, two in zip(*found, strict=True):
        assert np.array_equal(one, two)


def test_shapes_of_few_rows():
    """Of gate and up with 2048 columns, of down with 768."""
    rows = ExpertRows(SimpleNamespace(shared_bytes=227 << 10))
    expected = {
        "Q4_K": [Shape(2, 8, 2), Shape(2, 8, 2)],
        "Q8_0": [Shape(2, 8, 2), Shape(2, 8, 2)],
        "Q6_K": [Shape(1, 8, 2), Shape(1, 8, 3)],
        "IQ4_XS": [Shape(1, 8, 3), Shape(1, 8, 3)],
    }
    for name, shapes in expected.items():
        up, down = (TiledMatrix(layout_of(by_name(name), k), 768, k, None) for k in (2048, 768))
        assert [rows.shape(up, 8, True), rows.shape(down, 8)] == shapes, name
    table, codes = (
        TiledMatrix(layout_of(by_name(name), 2880), 2880, 2880, None) for name in ("MXFP4", "Q4_0")
    )
    assert rows.shape(table, 16) == Shape(2, 12, 1)
    pairs = 4, 6, 7, 8, 9, 13, 14
    assert [rows.tile_rows([table], n * 32, 32) for n in pairs] == [8, 8, 16, 16, 16, 16, 0]
    assert [rows.tile_rows([codes], n * 32, 32) for n in pairs] == [8, 8, 8, 8, 0, 0, 0]


@pytest.mark.parametrize("tile", [8, 16])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
@pytest.mark.parametrize(("name", "columns"), [("MXFP4", 672), ("Q8_0", 96)])
def test_few_rows_of_gate_and_up(machine, name, columns, activation, tile):
    """Of the rows of tokens, each with three experts, with biases; columns that fill no chunk."""
    if not holds_rows(machine, name, columns, tile):
        pytest.skip(f"no shape fits into the shared memory of an SM of {machine.arch}")
    scaled = name in SCALED
    gate, up = (Experts(machine, name, 5, 200, columns, seed, scaled) for seed in (1, 2))
    ids, rng = (
        np.random.default_rng(5).integers(0, 5, 15).astype(np.int32),
        np.random.default_rng(7),
    )
    x = (tokens(5, columns) / 16).astype(np.float16)
    rows, biases = np.repeat(x, 3, axis=0), rng.standard_normal((2, 5, 200)).astype(np.float32)
    h = few_rows(machine, [gate, up], ids, x, 3, activation, biases, tile)
    g, u = (e.exact(ids, rows) + b[ids] for e, b in zip((gate, up), biases, strict=True))
    assert nmse(h, reference.gated(activation, g, u)) <= 1e-6


def test_weights_of_down_are_read_before_h_is_there(machine):
    """The same bits, launch after launch."""
    if not holds_rows(machine, "Q4_0", 256):
        pytest.skip(f"no shape fits into the shared memory of an SM of {machine.arch}")
    gate, up, down = (
        Experts(machine, "Q4_0", 5, rows, 256, seed) for seed, rows in enumerate((256, 256, 160))
    )
    ids, x = np.random.default_rng(5).integers(0, 5, 24).astype(np.int32), tokens(8, 256)
    memory, (_, row_of, _) = sorted_pairs(machine, ids, 5, 8)
    h, y = Output(machine, 24 * 256 * 2), Output(machine, 24 * 160 * 4)
    kernels, inputs = ExpertRows(machine), upload(machine, x)
    both, found = [gate.tiles, up.tiles], []
    for early in (False, True, True, True):
        kernels.launch(both, memory, inputs, h.buffer, 24, 5, n_used=3, epilogue="GLU")
        kernels.launch([down.tiles], memory, h.buffer, y.buffer, 24, 5, sorted_before=early)
        found.append(y.read(np.float32, (24, 160))[row_of])
    act = h.read(np.float16, (24, 256))[row_of]
    assert nmse(found[0], down.exact(ids, act)) <= ROUNDED
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_rows_of_work_tiles():
    """By the pairs of an expert, and by shared memory."""
    hopper, turing = (ExpertGemm(SimpleNamespace(shared_bytes=n << 10)) for n in (227, 64))
    assert [hopper.tile_rows(n * 128, 128) for n in (1, 4, 8, 9, 18, 19, 500)] == [
        *(16, 16, 16, 32, 32, 64, 64)
    ]
    assert turing.tile_rows(500 * 128, 128) == 32


@pytest.mark.parametrize("tile", TILES)
def test_gemm_of_gate_and_up(machine, tile):
    gate, up = (Experts(machine, "Q8_0", 3, 48, 96, seed, scaled=True) for seed in (1, 2))
    ids = np.random.default_rng(1).integers(0, 3, 50).astype(np.int32)
    x = (tokens(50, 96) / 16).astype(np.float16)
    (h,) = gemm(machine, [gate, up], ids, x, tile, epilogue="GLU")
    g, u = gate.exact(ids, x), up.exact(ids, x)
    assert nmse(h, g / (1 + np.exp(-g)) * u) <= ROUNDED


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
def test_activations_with_biases(machine, activation, is_sorted):
    rng = np.random.default_rng(3)
    gate, up = (rng.standard_normal((6, 300)).astype(np.float32) * 6 for _ in range(2))
    biases = [rng.standard_normal((4, 300)).astype(np.float32) for _ in range(2)]
    ids, pair_of = np.array([3, 0, 1, 2, 1, 0], np.int32), np.array([5, 3, 0, 1, 4, 2], np.int32)
    out = Output(machine, 2 * gate.size)
    parts, added = ([upload(machine, a) for a in arrays] for arrays in ((gate, up), biases))
    order = upload(machine, pair_of) if is_sorted else None
    args = upload(machine, ids), order, out.buffer, 6, 300, activation
    Combine(machine).glu(tuple(parts), tuple(added), *args)
    experts = ids[pair_of] if is_sorted else ids
    expected = reference.gated(activation, gate + biases[0][experts], up + biases[1][experts])
    assert nmse(out.read(np.float16, gate.shape), expected.astype(np.float64)) <= 2e-7


@pytest.mark.parametrize("parts", [(), ("bias",), ("row_of", "shared"), ("shared", "strength")])
def test_sums_of_outputs(machine, parts):
    rng = np.random.default_rng(4)
    t, j, d = 5, 3, 300
    x, shared = (rng.standard_normal((t, d)).astype(np.float32) for _ in range(2))
    y, weights = rng.standard_normal((t * j, d)).astype(np.float32), rng.random(t * j, np.float32)
    given = {
        "bias": rng.standard_normal((4, d)).astype(np.float32),
        "row_of": rng.permutation(t * j).astype(np.int32),
        "shared": shared,
        "strength": rng.random(t, np.float32),
    }
    given = {name: array for name, array in given.items() if name in parts}
    ids = rng.integers(0, 4, t * j).astype(np.int32)
    out = Output(machine, x.nbytes)
    machine.upload(out.buffer, x)
    memory = [upload(machine, a) for a in (y, ids, weights)]
    some = {name: upload(machine, array) for name, array in given.items()}
    Combine(machine).launch(out.buffer, ExpertOutputs(*memory, **some), t, j, d)
    rows = y[given["row_of"]] if "row_of" in given else y
    rows = rows + given["bias"][ids] if "bias" in given else rows
    expected = x + (rows * weights[:, None]).reshape(t, j, d).sum(1)
    if "shared" in given:
        expected += shared * given.get("strength", np.ones(t, np.float32))[:, None]
    np.testing.assert_allclose(out.read(np.float32, (t, d)), expected, rtol=1e-5, atol=1e-5)


def test_under_sanitizers(emulated):
    """Every kernel once: an access out of bounds is an error there."""
    f = replace(FORMS["gated shared"], X=9, D=72, J=3, type="F16")
    (_, ids, _, _), expected = routed(emulated, f, random_x(f, 3))
    assert np.array_equal(ids, expected[1])
    experts, flat, x = (
        Experts(emulated, "Q8_0", 9, 20, 96, scaled=True),
        ids.reshape(-1),
        tokens(9, 96),
    )
    y = gemv(emulated, [experts], flat, x[:3], 3)
    assert nmse(y, experts.exact(flat, np.repeat(x[:3], 3, axis=0))) <= bound(experts.each[0])
    zeros, weights = np.zeros((3, 20), np.float32), np.ones((3, 3), np.float32)
    y = gemv_sum(emulated, experts, flat, x, zeros, weights, bias=np.zeros((9, 20), np.float32))
    assert nmse(y, experts.exact(flat, x).reshape(3, 3, 20).sum(1)) <= bound(experts.each[0])
    memory, (pair_of, row_of, _) = sorted_pairs(emulated, flat, 9)
    out, sums = Output(emulated, 4 * 9 * 20), Output(emulated, 4 * 3 * 20)
    up = upload(emulated, x)
    ExpertGemm(emulated).launch([experts.tiles], memory, up, [out.buffer], 9, 9)
    y = out.read(np.float32, (9, 20))
    assert nmse(y, experts.exact(flat[pair_of], x)) <= ROUNDED
    emulated.upload(sums.buffer, np.zeros((3, 20), np.float32))
    ones, order = upload(emulated, np.ones(9, np.float32)), upload(emulated, row_of)
    given = ExpertOutputs(out.buffer, upload(emulated, flat), ones, row_of=order)
    Combine(emulated).launch(sums.buffer, given, 3, 3, 20)
    expected = y[row_of].reshape(3, 3, 20).sum(1)
    np.testing.assert_allclose(sums.read(np.float32, (3, 20)), expected, rtol=1e-4, atol=1e-4)
