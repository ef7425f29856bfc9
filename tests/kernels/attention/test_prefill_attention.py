"""Prefill attention against float64: the mma kernel and the wgmma kernels, which need a Hopper GPU
or the emulator, and must compile without spills.
"""

from collections import namedtuple

import numpy as np
import pytest
from attention_cases import PromptAttention, Sequences, expected, fill, heads, random
from cache_cases import PAIRS, WIDE, typed
from cache_cases import fill as fill_typed
from cases import nmse
from static_shared import most_static

from ggpy.device.compile import compile_cubin
from ggpy.kernels.attention import prefill_attention
from ggpy.kernels.attention.prefill_attention import ROWS, PrefillAttention, plan_prefill_tiles
from ggpy.kernels.gemm.hopper import has_wgmma
from ggpy.kernels.layout.pack import CODES, F16, PLAIN

NMSE = 5e-6
Gpu = namedtuple("Gpu", "arch shared_bytes")
STEPS = {
    "first": Sequences([7], [7]),
    "page": Sequences([64], [64]),
    "deep": Sequences([260], [70]),
    "several": Sequences([66, 70, 200], [66, 9, 40]),
}
HEADS = [
    *[(4, 2, 64), (3, 1, 80), (8, 1, 96), (7, 1, 128), (4, 4, 128), (2, 2, 256), (20, 1, 64)],
    *[(8, 1, 512), (6, 2, 448)],
]
WIDE_BLOCKS = ("q8_0", "q8_0", 8, 2, 512)


@pytest.fixture(params=["emulator", "gpu", "hopper"])
def kind(request):
    """A device, and whether to use the wgmma kernel."""
    device = request.getfixturevalue("emulator" if request.param == "emulator" else "gpu")
    if request.param == "hopper" and not has_wgmma(device.arch):
        pytest.skip(f"{device.arch} has no wgmma")
    return device, request.param == "hopper"


def kinds(name, shapes, head=2):
    """Pairs of a kernel and a shape that it supports; only wgmma supports large heads. `head` is
    the index of the head size in a shape.
    """
    both = [(kind, shape) for kind in ("emulator", "gpu", "hopper") for shape in shapes]
    some = [(kind, s) for kind, s in both if kind == "hopper" or s[head] <= 128]
    return pytest.mark.parametrize(
        f"kind, {name}", some, indirect=["kind"], ids=[f"{kind}-{shape}" for kind, shape in some]
    )


# Without a GPU


@pytest.mark.parametrize(
    ("stem", "arch", "rows"),
    [
        ("prefill_attention_wgmma", "sm_90a", (32, 64, 96, 128, 256)),
        ("prefill_attention_wgmma_wide", "sm_90a", (512,)),
        ("prefill_attention", "sm_75", (32, 64, 96, 128)),
        ("prefill_attention", "sm_80", (32, 64, 96, 128)),
        ("prefill_attention", "sm_120", (64, 128)),
    ],
)
def test_nothing_spills(nvrtc, stem, arch, rows):
    names = [f"{stem}<{row}>" for row in rows]
    cubin = compile_cubin(f"attention/{stem}.cu", arch, expressions=names)
    assert "serialized" not in cubin.log, "ptxas serialised the wgmma instructions"
    assert set(cubin.resources) == set(names)
    for name, r in cubin.resources.items():
        assert (r.spill_loads, r.spill_stores, r.stack) == (0, 0, 0), f"{name} spills: {r}"
        assert r.shared <= most_static(f"attention/{stem}.cu", name)


@pytest.mark.parametrize(
    ("stem", "arch", "row"),
    [
        ("prefill_attention_wgmma", "sm_90a", 128),
        ("prefill_attention_wgmma_wide", "sm_90a", 512),
        ("prefill_attention", "sm_120", 128),
    ],
)
@pytest.mark.parametrize("variant", ["CHUNKED", "BOTH_SIDES", "GATED"])
def test_variants_do_not_spill_either(nvrtc, stem, arch, row, variant):
    cubin = compile_cubin(
        f"attention/{stem}.cu", arch, expressions=[f"{stem}<{row}>"], defines={variant: 1}
    )
    assert "serialized" not in cubin.log, "ptxas serialised the wgmma instructions"
    assert all((r.spill_loads, r.stack) == (0, 0) for r in cubin.resources.values())


@pytest.mark.parametrize("shape", [*HEADS, (71, 1, 64)], ids=str)
@pytest.mark.parametrize("least", [1, 20, 1000])
@pytest.mark.parametrize("step", STEPS)
def test_tiles(step, least, shape):
    """Every token of the long sequences is in one tile, the longest context comes first, and a tile
    has tokens of one sequence.
    """
    h, s = heads(*shape), STEPS[step]
    tiles = plan_prefill_tiles(s.positions, s.sequences, h, least)
    covered = sorted(i for first, n, *_ in tiles for i in range(first, first + n))
    counts = np.bincount(s.sequences)
    assert covered == [i for i, of in enumerate(s.sequences) if counts[of] >= least]
    assert (np.diff(s.positions[tiles[:, 0]]) <= 0).all()
    for first, n, n_split, workspace in tiles:
        assert len(set(s.sequences[first : first + n])) == 1
        assert n * min(16, h.n_head // h.n_head_kv) <= ROWS
        assert (n_split, workspace) == (1, -1)


def test_where_it_fits():
    """The wgmma kernels support heads of 256 and 512; the mma kernel needs shared memory for two
    pages.
    """
    hopper, ada = Gpu("sm_90a", 227 << 10), Gpu("sm_89", 99 << 10)
    sizes = (64, 80, 128, 160, 256, 320, 400, 512)
    fitting = {of: [e for e in sizes if PrefillAttention.fits(of, heads(4, 2, e))]
               for of in (hopper, ada)}  # fmt: skip
    assert fitting == {hopper: [64, 80, 128, 256, 400, 512], ada: [64, 80, 128]}
    assert not PrefillAttention.fits(Gpu("sm_75", 63 << 10), heads(4, 2, 128))
    assert PrefillAttention.fits(Gpu("sm_75", 64 << 10), heads(4, 2, 128))


# On every device


def check(kind, h, s, scale=None, **options):
    device, wgmma = kind
    options["scale"] = scale or h.head_size**-0.5
    pages, q, contents = fill(device, h, s)
    o = PromptAttention(device, h, wgmma).run(s, pages, q, **options)
    assert nmse(o, expected(h, s, q, contents, **options)) <= NMSE


@pytest.mark.parametrize("step", STEPS)
@kinds("shape", [*HEADS, (32, 2, 32)])
def test_shapes(kind, shape, step):
    check(kind, heads(*shape), STEPS[step])


@pytest.mark.parametrize("step", STEPS)
@kinds("shape", [(3, 1, 80), (8, 1, 128), (4, 2, 256), (6, 2, 448)])
def test_gates(kind, shape, step):
    check_gate(kind, shape, STEPS[step])


def check_gate(kind, shape, s):
    """The sigmoid of a gate multiplies the output."""
    h = heads(*shape)
    check(kind, h, s, gate=random(len(s.positions), h.n_head, h.head_size, seed=5) * 20)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("window", [1, 40, 64, 100, 5000])
@kinds("shape", [(4, 2, 64), (4, 2, 256), (4, 2, 512)])
def test_windows(kind, shape, window, step):
    check(kind, heads(*shape), STEPS[step], window=window)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("options", ["soft cap", "sinks", "all"])
@kinds("shape", [(4, 2, 80), (4, 2, 128), (4, 2, 256), (4, 2, 512)])
def test_caps_and_sinks(kind, shape, options, step):
    cap, sinks = {"soft_cap": 1.5}, {"sinks": random(4, seed=4) * 3}
    made = {"soft cap": cap, "sinks": sinks, "all": {**cap, **sinks, "window": 50}}
    check(kind, heads(*shape), STEPS[step], **made[options])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("window", [0, 50])
@kinds("pair", [*PAIRS, WIDE, WIDE_BLOCKS], head=4)
def test_types(kind, pair, window, step):
    """A KV cache of other types, converted to f16 first."""
    h, s = typed(*pair), STEPS[step]
    options = {"scale": h.head_size**-0.5, "window": window}
    pages, q, contents = fill_typed(kind[0], h, s)
    o = PromptAttention(kind[0], h, kind[1]).run(s, pages, q, **options)
    assert nmse(o, expected(h, s, q, contents, **options)) <= NMSE


@pytest.mark.parametrize("shape", [(71, 1, 64), (32, 8, 128), (8, 2, 256), (32, 4, 512)], ids=str)
def test_gpu(gpu, shape):
    """Long contexts, many CTAs."""
    s = Sequences([700, 2100, 130], [190, 300, 130])
    if PrefillAttention.fits(gpu, heads(*shape)):
        check((gpu, has_wgmma(gpu.arch)), heads(*shape), s)
    check((gpu, False), heads(*shape[:2], 128), s, window=300)


@pytest.mark.parametrize("scale", [1e-4, 3.0])
def test_flat_and_sharp(kind, scale):
    """Softmax over equal scores, and over scores of which one dominates."""
    check(kind, heads(4, 2, 128), STEPS["several"], scale=scale)


def test_scores_of_any_size(kind):
    """Scores of 60000 and -60000 give neither infinity nor NaN."""
    h, s = heads(2, 1, 32), Sequences([40], [40])
    pages, q, contents = fill(kind[0], h, s)
    q[..., :32] = 60
    k, v = contents[0]
    for keys in (np.where(np.arange(40) % 2, 31, -31)[:, None, None], np.array(-31)):
        k[:] = keys
        pages.put(0, np.arange(40), k, v)
        o = PromptAttention(kind[0], h, kind[1]).run(s, pages, q, scale=1.0)
        assert nmse(o, expected(h, s, q, contents, scale=1.0)) <= NMSE


@pytest.mark.parametrize("order", [CODES, F16])
@kinds(
    "shape",
    [(4, 2, 32), (4, 2, 64), (4, 1, 96), (8, 2, 128), (2, 1, 256), (8, 1, 512), (2, 1, 448)],
)
def test_packed(kind, shape, order):
    check_packed(kind, shape, order)


def check_packed(kind, shape, order):
    """A packed output has the bits of the plain output, also with gates."""
    h, s = heads(*shape), Sequences([150, 70], [33, 20])
    pages, q, _ = fill(kind[0], h, s)
    kernel = PromptAttention(kind[0], h, kind[1])
    for gate in (None, random(len(q), h.n_head, h.head_size, seed=5) * 3):
        options = {"scale": 0.1, "gate": gate}
        rows, packed = (kernel.run(s, pages, q, order=o, **options) for o in (PLAIN, order))
        assert np.array_equal(rows, packed)


def test_again_and_again(kind):
    """Repeated launches give equal bits."""
    large = getattr(kind[0], "sm_count", 1) > 8
    h = heads(32, 8, 128) if large else heads(4, 2, 64)
    s = Sequences([1500], [1200]) if large else Sequences([150], [50])
    pages, q, _ = fill(kind[0], h, s)
    kernel = PromptAttention(kind[0], h, kind[1])
    first = kernel.run(s, pages, q, scale=0.1)
    assert all(np.array_equal(kernel.run(s, pages, q, scale=0.1), first) for _ in range(5))


# wgmma in the emulator

SIGHTS = {
    "all": {},
    "window": {"window": 40},
    "chunks": {"window": 48, "chunked": True},
    "both sides": {"both_sides": True},
    "both sides of a window": {"window": 30, "both_sides": True},
}
EMULATED = [(4, 2, 64), (3, 1, 256), (8, 1, 512), (5, 1, 448)]


@pytest.fixture
def wgmma(emulator, monkeypatch):
    """The emulator, whose architecture has no wgmma, and the wgmma kernels."""
    monkeypatch.setattr(prefill_attention, "has_wgmma", lambda arch: True)
    return emulator, True


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", EMULATED, ids=str)
def test_wgmma_in_the_emulator(wgmma, shape, step):
    sinks = random(shape[0], seed=4) * 3
    check(wgmma, heads(*shape), STEPS[step])
    check(wgmma, heads(*shape), STEPS[step], window=50, soft_cap=1.5, sinks=sinks)
    check_gate(wgmma, shape, STEPS[step])


@kinds("shape", [(4, 2, 64), (4, 2, 256), (8, 1, 512)])
@pytest.mark.parametrize("sight", SIGHTS)
def test_sights(kind, shape, sight):
    check(kind, heads(*shape), Sequences([70, 200], [20, 75]), **SIGHTS[sight])


@pytest.mark.parametrize("sight", SIGHTS)
def test_sights_with_wgmma_in_the_emulator(wgmma, sight):
    check(wgmma, heads(8, 1, 512), Sequences([70, 200], [20, 75]), **SIGHTS[sight])


def test_order_of_ctas_and_warps(wgmma, monkeypatch):
    """Consumers and the CTAs of a cluster wait for each other where they must."""
    h, s = heads(6, 1, 512), Sequences([400], [30])
    pages, q, _ = fill(wgmma[0], h, s)
    outs = []
    for order in range(4):
        monkeypatch.setattr(wgmma[0].unprepared, "order", order)
        outs.append(PromptAttention(wgmma[0], h, True).run(s, pages, q, scale=0.05))
    assert all(np.array_equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("order", [CODES, F16])
@pytest.mark.parametrize("shape", [(8, 1, 512), (2, 1, 448)], ids=str)
def test_packed_with_wgmma_in_the_emulator(wgmma, shape, order):
    check_packed(wgmma, shape, order)


def test_wgmma_of_blocks_in_the_emulator(wgmma):
    """A KV cache in blocks, converted to f16 first."""
    h, s = typed(*WIDE_BLOCKS), STEPS["several"]
    options = {"scale": h.head_size**-0.5}
    pages, q, contents = fill_typed(wgmma[0], h, s)
    o = PromptAttention(wgmma[0], h, True).run(s, pages, q, **options)
    assert nmse(o, expected(h, s, q, contents, **options)) <= NMSE
