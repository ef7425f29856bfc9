"""Tiles times packed activations of few tokens, against float64."""

import numpy as np
import pytest
from cases import ACTIVATIONS, nmse, silu
from packed_products import check_handing, multiply
from tile_cases import Weights, energy, exact, tile_types, tokens

from ggpy.device.compile import compile_cubin
from ggpy.kernels.gemm import gemm_skinny as gemm_skinny
from ggpy.kernels.gemm.gemm import STATIC_SHARED
from ggpy.kernels.gemm.gemm_skinny import MulMatFew
from ggpy.kernels.layout.pack import CODES, HALVES, PLAIN, UNIT
from ggpy.kernels.layout.tile import ROWS

EXACT = 1e-11  # of the energy of a sum: what float32 loses
FORMATS = ["Q8_0", "F16", "I8", "F8_E4M3"]
SHAPES = [(1, 256), (37, 384), (256, 2048)]  # tile rows of one block and of several, of few chunks


@pytest.fixture(params=["emulator", "hopper"])
def machine(request):
    """Only Hopper's backend makes these products: a CTA has most of 227 KB."""
    return request.getfixturevalue(request.param)


def few(device):
    return MulMatFew(device, device.sm_count)


def close(y, w, x, scale=1.0):
    return nmse(y, exact(w, x) * scale, energy(w, x)) <= EXACT


@pytest.mark.parametrize("n", [1, 4, 7, 8, 9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_layout(machine, name, shape, n):
    w = Weights(name, *shape)
    x = tokens(n, w.columns)
    (y,) = multiply(few(machine), [w.tiled(machine)], x)
    assert close(y, w, x)


@pytest.mark.parametrize(
    "shape",
    [
        (16 * 132 * 5 + 1, 4096, 8),
        (4096, 14336, 4),
        (4097, 14336, 8),
        (4096, 14336, 16),
        (4097, 14336, 9),
        (300, 14336, 13),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["Q8_0", "F16"])
def test_large(hopper, name, shape):
    """More tile rows than blocks, in several rounds, some of which only one group has a part in;
    and rows of which two blocks have a half each, or four a quarter.
    """
    rows, columns, n = shape
    w = Weights(name, rows, columns)
    x = tokens(n, w.columns)
    (y,) = multiply(few(hopper), [w.tiled(hopper)], x)
    assert close(y, w, x)


def test_a_token_does_not_depend_on_others(machine, sharing):
    w = Weights("Q8_0", 37, 512)
    product, tiles, x = few(machine), w.tiled(machine), tokens(8, w.columns)
    (y,) = multiply(product, [tiles], x)
    for n in (1, 3, 5, 8):
        assert np.array_equal(multiply(product, [tiles], x[:n])[0], y[:n])


def test_segments(machine, sharing):
    weights = [Weights("Q8_0", rows, 256, seed) for seed, rows in enumerate((200, 37, 16))]
    x = tokens(5, 256)
    outs = multiply(few(machine), [w.tiled(machine) for w in weights], x)
    assert all(close(y, w, x) for w, y in zip(weights, outs, strict=True))


@pytest.fixture(params=["one", "cluster", "parts"])
def sharing(request, monkeypatch):
    """Every block has all of x, or every two of them a half each, as clusters or without."""
    clusters = {"one": (1,), "cluster": (2,), "parts": ()}[request.param]
    monkeypatch.setattr(gemm_skinny, "CLUSTERS", clusters)
    monkeypatch.setattr(gemm_skinny, "PARTS", 2)
    monkeypatch.setattr(gemm_skinny, "has_clusters", lambda arch: True)


@pytest.mark.parametrize("n", [3, 7, 12])
def test_add(machine, sharing, n):
    w, product = Weights("Q8_0", 337, 512), few(machine)
    x, start = tokens(n, 512), tokens(n, 337).astype(np.float32)
    (plain,) = multiply(product, [w.tiled(machine)], x)
    (y,) = multiply(product, [w.tiled(machine)], x, epilogue="ADD", start=start)
    assert np.array_equal(y, start + plain)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("order", [PLAIN, CODES, HALVES])
@pytest.mark.parametrize(("activation", "n"), [("silu", 6), ("gelu_tanh", 6), ("silu", 4)])
def test_gate_and_up(machine, sharing, activation, n, order, late):
    gate, up = (Weights("Q8_0", 2 * UNIT, 256, seed) for seed in (0, 1))
    x = (tokens(n, 256) / 16).astype(np.float16)
    options = {"epilogue": "GLU", "activation": activation, "order": order, "late": late}
    (y,) = multiply(few(machine), [gate.tiled(machine), up.tiled(machine)], x, **options)
    assert nmse(y, ACTIVATIONS[activation](exact(gate, x)) * exact(up, x)) <= 1e-6  # halves


@pytest.mark.parametrize("name", ["I8", "F8_E4M3"])
def test_scales_of_rows(machine, name):
    """Before a sum is added, before the activation, and not of the matrix beside."""
    gate, up = (Weights(name, 150, 256, seed) for seed in (0, 1))
    x, start = tokens(8, 256), tokens(8, 150).astype(np.float32)
    product, tiles = few(machine), gate.scaled(machine)
    plain, other = multiply(product, [gate.tiled(machine), up.tiled(machine)], x)
    y, beside = multiply(product, [tiles, up.tiled(machine)], x)
    assert np.array_equal(y, plain * gate.row_scales) and np.array_equal(beside, other)
    (added,) = multiply(product, [tiles], x, epilogue="ADD", start=start)
    assert np.array_equal(added, start + y)
    small = (x / (4096 if name == "I8" else 64)).astype(np.float16)
    (h,) = multiply(product, [tiles, up.scaled(machine)], small, epilogue="GLU")
    g, u = (exact(w, small) * w.row_scales for w in (gate, up))
    assert nmse(h, silu(g) * u) <= 1e-6


@pytest.mark.parametrize("n", [1, 4, 5, 8, 9, 16])
@pytest.mark.parametrize("name", ["Q8_0", "F16"])
def test_a_norm_is_handed_on(machine, sharing, name, n):
    check_handing(few(machine), ROWS, name, (256, 512), n, behind=name)


@pytest.mark.parametrize("n", [8, 16])
def test_a_norm_of_a_long_row_is_handed_on(hopper, n):
    check_handing(few(hopper), ROWS, "Q8_0", (4096, 2048), n)


def test_under_sanitizers(emulated, sharing):
    test_every_layout(emulated, "Q8_0", (37, 512), 8)
    test_add(emulated, sharing, 12)
    test_gate_and_up(emulated, sharing, "silu", 4, CODES, late=False)


TYPES, EPILOGUES = tile_types(*FORMATS), ("STORE", "ADD", "GLU")


# Of the instances that are asked for: see gemm_hopper.faster.
@pytest.mark.parametrize(
    ("arch", "stages"), [("sm_80", 2), ("sm_80", 3), ("sm_90a", 3), ("sm_120", 2)]
)
def test_nothing_spills(nvrtc, arch, stages):
    """For three stages sm_120 has no room; on sm_90a blocks that share no x have no less."""
    names = [f"{t}, {n}, GLU" for t in TYPES for n in (4, 8)]
    names += [f"{TYPES[0]}, 8, {e}" for e in ("STORE", "ADD")]
    of_16 = TYPES[:2] if arch == "sm_90a" else TYPES[1:2]
    names += [f"{t}, 16, {e}" for t in of_16 for e in EPILOGUES]
    check_nothing_spills(arch, stages, 1, [f"{name}, 1, 1" for name in names])
    four = [f"{t}, 4, {e}, 1, 1" for t in TYPES[:2] for e in EPILOGUES]
    check_nothing_spills(arch, stages, 4, four)


@pytest.mark.parametrize(("stages", "types"), [(2, TYPES), (3, TYPES[:1])])
def test_nothing_spills_of_blocks_that_share_x(nvrtc, stages, types):
    each = [f"{t}, {n}, {e}" for t in types for n in (8, 16) for e in EPILOGUES]
    names = [f"{one}, {sharing}" for one in each for sharing in ("2, 1", "1, 4")]
    check_nothing_spills("sm_90a", stages, 1, names)


def check_nothing_spills(arch, stages, batch, instances):
    names = [f"gemm_skinny<{instance}>" for instance in instances]
    defines = {"WARPS": 16, "STAGES": stages, "BATCH": batch}
    found = compile_cubin("gemm/gemm_skinny.cu", arch, expressions=names, defines=defines).resources
    for name, r in found.items():
        assert r.shared <= STATIC_SHARED, f"{name} has {r.shared} bytes of its own"
        assert max(r.spill_loads, r.spill_stores) == 0, f"{name} spills: {r}"
    assert set(found) == set(names)


@pytest.mark.parametrize(
    ("name", "columns", "n", "tokens", "batch"),
    [
        ("Q8_0", 14336, 4, 4, 1),
        ("Q8_0", 4096, 4, 4, 4),
        ("Q8_0", 4096, 5, 8, 2),
        ("F16", 4096, 9, 16, 1),
        ("Q8_0", 14336, 5, 8, 1),  # x takes more than a block has, but for a quarter
        ("Q8_0", 14336, 16, 16, 1),
        ("Q8_0", 14336 + 128, 16, None, None),  # which there is none of
        ("Q8_0", 576, 5, None, None),  # packed rows are longer
        ("Q8_0", 256, 17, None, None),
    ],
)
def test_what_there_is_room_for(emulator, monkeypatch, name, columns, n, tokens, batch):
    monkeypatch.setattr(emulator, "shared_bytes", 227 << 10, raising=False)
    fit = few(emulator).fit(Weights(name, 1, columns).tiled(emulator), n)
    assert (fit and fit.tokens) == tokens and (fit and fit.batch) == batch


@pytest.mark.parametrize(
    ("columns", "blocks", "stages"), [(4096, 1, 3), (8192, 2, 3), (14336, 2, 2)]
)
def test_rather_two_blocks_than_two_stages(emulator, monkeypatch, columns, blocks, stages):
    weights = Weights("Q8_0", 1, columns).tiled(emulator)
    monkeypatch.setattr(emulator, "shared_bytes", 227 << 10, raising=False)
    monkeypatch.setattr(emulator, "arch", "sm_90a")
    fit = few(emulator).fit(weights, 8)
    assert fit is not None and (fit.cluster, fit.stages) == (blocks, stages)


def test_what_there_is_no_room_for_is_an_error(emulator):
    w, x = Weights("Q8_0", 16, 576).tiled(emulator), emulator.alloc(16, "x")
    with pytest.raises(ValueError, match="9 tokens of 576 columns"):
        few(emulator).launch([w], x, [x], 9)
