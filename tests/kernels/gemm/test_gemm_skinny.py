"""The skinny GEMM against float64."""

import numpy as np
import pytest
from cases import ACTIVATIONS, nmse, silu
from packed_gemm_cases import check_deferred_norm, multiply
from tile_cases import Weights, energy, exact, tile_types, tokens

from ggpy.device.compile import compile_cubin
from ggpy.kernels.gemm import gemm_skinny as gemm_skinny
from ggpy.kernels.gemm.gemm import STATIC_SHARED
from ggpy.kernels.gemm.gemm_skinny import GemmSkinny
from ggpy.kernels.layout.pack import CODES, F16, PLAIN, UNIT
from ggpy.kernels.layout.tile import ROWS

EXACT = 1e-11  # relative squared error of f32 sums
ROUNDED = 1e-10  # the same: tensor cores drop bits of products with subnormal codes
EXACT_TYPES = ["Q8_0", "F16", "I8", "F8_E4M3"]
SUMMED = ["Q4_K", "Q6_K", "Q2_K", "Q3_K", "Q4_0", "Q5_1", "IQ4_XS", "MXFP4"]
FORMATS = [*EXACT_TYPES, *SUMMED]
SHAPES = [(1, 256), (37, 512), (256, 2048)]  # tile rows of one CTA and of several; few chunks


@pytest.fixture(params=["emulator", "hopper"])
def machine(request):
    """Only Hopper's backend uses this kernel: a CTA has most of 227 KB."""
    return request.getfixturevalue(request.param)


def skinny(device):
    return GemmSkinny(device, device.sm_count)


def close(y, w, x, scale=1.0):
    bound = ROUNDED if w.name in SUMMED else EXACT
    return nmse(y, exact(w, x) * scale, energy(w, x)) <= bound


@pytest.mark.parametrize("n", [1, 4, 7, 8, 9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_layout(machine, name, shape, n):
    w = Weights(name, *shape)
    x = tokens(n, w.columns)
    (y,) = multiply(skinny(machine), [w.tiled(machine)], x)
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
@pytest.mark.parametrize("name", ["Q8_0", "F16", "Q4_K", "Q6_K"])
def test_large(hopper, name, shape):
    """More tile rows than CTAs, in several rounds, in some of which only one group of warps has a
    tile row; and rows of which two CTAs have a half each, or four a quarter each.
    """
    rows, columns, n = shape
    w, product = Weights(name, rows, columns), skinny(hopper)
    x, tiles = tokens(n, w.columns), w.tiled(hopper)
    if name == "Q6_K" and n > 8 and columns == 14336:
        assert product.config_for(tiles, n) is None  # x does not fit beside its chunks
        return
    (y,) = multiply(product, [tiles], x)
    assert close(y, w, x)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_a_token_does_not_depend_on_others(machine, sharing, name):
    w = Weights(name, 37, 1024)
    product, tiles, x = skinny(machine), w.tiled(machine), tokens(8, w.columns)
    (y,) = multiply(product, [tiles], x)
    for n in (1, 3, 5, 8):
        assert np.array_equal(multiply(product, [tiles], x[:n])[0], y[:n])


def test_segments(machine, sharing):
    weights = [Weights("Q8_0", rows, 256, seed) for seed, rows in enumerate((200, 37, 16, 21))]
    x = tokens(5, 256)
    outs = multiply(skinny(machine), [w.tiled(machine) for w in weights], x)
    assert all(close(y, w, x) for w, y in zip(weights, outs, strict=True))


@pytest.fixture(params=["one", "cluster", "parts"])
def sharing(request, monkeypatch):
    """All of x in every CTA, half of x in each of two CTAs of a cluster, or a part in each of
    several CTAs without a cluster.
    """
    clusters = {"one": (1,), "cluster": (2,), "parts": ()}[request.param]
    monkeypatch.setattr(gemm_skinny, "CLUSTERS", clusters)
    monkeypatch.setattr(gemm_skinny, "SPLIT_K", 2)
    monkeypatch.setattr(gemm_skinny, "has_clusters", lambda arch: True)


@pytest.mark.parametrize("n", [3, 7, 12])
def test_add(machine, sharing, n):
    w, product = Weights("Q8_0", 337, 512), skinny(machine)
    x, start = tokens(n, 512), tokens(n, 337).astype(np.float32)
    (plain,) = multiply(product, [w.tiled(machine)], x)
    (y,) = multiply(product, [w.tiled(machine)], x, epilogue="ADD", start=start)
    assert np.array_equal(y, start + plain)


@pytest.mark.parametrize("slow_producer", [False, True])
@pytest.mark.parametrize("order", [PLAIN, CODES, F16])
@pytest.mark.parametrize(("activation", "n"), [("silu", 6), ("gelu_tanh", 6), ("silu", 4)])
def test_gate_and_up(machine, sharing, activation, n, order, slow_producer):
    gate, up = (Weights("Q8_0", 2 * UNIT, 256, seed) for seed in (0, 1))
    x = (tokens(n, 256) / 16).astype(np.float16)
    options = {
        "epilogue": "GLU",
        "activation": activation,
        "order": order,
        "slow_producer": slow_producer,
    }
    (y,) = multiply(skinny(machine), [gate.tiled(machine), up.tiled(machine)], x, **options)
    assert nmse(y, ACTIVATIONS[activation](exact(gate, x)) * exact(up, x)) <= 1e-6  # f16 output


@pytest.mark.parametrize("name", ["I8", "F8_E4M3"])
def test_scales_of_rows(machine, name):
    """The row scale is applied before the residual and the activation; the adjacent matrix has
    none.
    """
    gate, up = (Weights(name, 150, 256, seed) for seed in (0, 1))
    x, start = tokens(8, 256), tokens(8, 150).astype(np.float32)
    product, tiles = skinny(machine), gate.scaled(machine)
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
@pytest.mark.parametrize("name", ["Q8_0", "F16", "Q4_K"])
def test_a_deferred_norm(machine, sharing, name, n):
    check_deferred_norm(skinny(machine), ROWS, name, (512, 1024), n, behind=name)


@pytest.mark.parametrize("n", [8, 16])
def test_a_deferred_norm_of_a_long_row(hopper, n):
    check_deferred_norm(skinny(hopper), ROWS, "Q8_0", (4096, 2048), n)


def test_under_sanitizers(emulated, sharing):
    for name in ("Q8_0", "Q4_K"):
        test_every_layout(emulated, name, (37, 512), 8)
    test_add(emulated, sharing, 12)
    test_gate_and_up(emulated, sharing, "silu", 4, CODES, slow_producer=False)


TYPES, EPILOGUES = tile_types(*EXACT_TYPES), ("STORE", "ADD", "GLU")


# The instances that the plan uses.
@pytest.mark.parametrize(
    ("arch", "stages"), [("sm_80", 2), ("sm_80", 3), ("sm_90a", 3), ("sm_120", 2)]
)
def test_nothing_spills(nvrtc, arch, stages):
    """sm_120 has too little shared memory for three stages; on sm_90a CTAs that share no x have
    three.
    """
    names = [f"{t}, {n}, GLU" for t in TYPES for n in (4, 8)]
    names += [f"{TYPES[0]}, 8, {e}" for e in ("STORE", "ADD")]
    of_16 = TYPES[:2] if arch == "sm_90a" else TYPES[1:2]
    names += [f"{t}, 16, {e}" for t in of_16 for e in EPILOGUES]
    check_nothing_spills(arch, stages, 1, [f"{name}, 1, 1" for name in names])
    four = [f"{t}, 4, {e}, 1, 1" for t in TYPES[:2] for e in EPILOGUES]
    check_nothing_spills(arch, stages, 4, four)


@pytest.mark.parametrize(("stages", "types"), [(2, TYPES[1:]), (3, TYPES[:1])])
def test_nothing_spills_in_ctas_that_share_x(nvrtc, stages, types):
    each = [f"{t}, {n}, {e}" for t in types for n in (8, 16) for e in EPILOGUES]
    names = [f"{one}, {sharing}" for one in each for sharing in ("2, 1", "1, 4")]
    check_nothing_spills("sm_90a", stages, 1, names)


@pytest.mark.parametrize(("name", "stages"), [("Q4_K", 3), ("Q6_K", 2)])
def test_few_bytes_spill_with_sums_of_activations(nvrtc, name, stages):
    """None of them in the loop over chunks."""
    (layout,) = tile_types(name)
    each = [f"{layout}, {n}, {e}" for n, e in ((4, "ADD"), (8, "ADD"), (8, "GLU"), (8, "STORE"))]
    names = [f"{one}, {sharing}" for one in each for sharing in ("1, 1", "2, 1", "1, 4")]
    check_nothing_spills("sm_90a", stages, 1, names, few=64)


def check_nothing_spills(arch, stages, batch, instances, few=0):
    names = [f"gemm_skinny<{instance}>" for instance in instances]
    defines = {"WARPS": 16, "STAGES": stages, "BATCH": batch}
    found = compile_cubin("gemm/gemm_skinny.cu", arch, expressions=names, defines=defines).resources
    for name, r in found.items():
        assert r.shared <= STATIC_SHARED, f"{name} has {r.shared} bytes of its own"
        assert max(r.spill_loads, r.spill_stores) <= few, f"{name} spills: {r}"
    assert set(found) == set(names)


@pytest.mark.parametrize(
    ("name", "columns", "n", "tokens", "batch"),
    [
        ("Q8_0", 14336, 4, 4, 1),
        ("Q8_0", 4096, 4, 4, 4),
        ("Q8_0", 4096, 5, 8, 2),
        ("F16", 4096, 9, 16, 1),
        ("Q8_0", 14336, 5, 8, 1),  # x does not fit in one CTA; a quarter does
        ("Q8_0", 14336, 16, 16, 1),
        ("Q8_0", 14336 + 128, 16, None, None),  # no quarter of these columns has whole chunks
        ("Q8_0", 576, 5, None, None),  # packed rows have more columns
        ("Q8_0", 256, 17, None, None),
    ],
)
def test_config_by_shared_memory(emulator, monkeypatch, name, columns, n, tokens, batch):
    monkeypatch.setattr(emulator, "shared_bytes", 227 << 10, raising=False)
    config = skinny(emulator).config_for(Weights(name, 1, columns).tiled(emulator), n)
    assert (config and config.tokens) == tokens and (config and config.batch) == batch


@pytest.mark.parametrize(
    ("columns", "blocks", "stages"), [(4096, 1, 3), (8192, 2, 3), (14336, 2, 2)]
)
def test_two_ctas_are_preferred_to_two_stages(emulator, monkeypatch, columns, blocks, stages):
    weights = Weights("Q8_0", 1, columns).tiled(emulator)
    monkeypatch.setattr(emulator, "shared_bytes", 227 << 10, raising=False)
    monkeypatch.setattr(emulator, "arch", "sm_90a")
    config = skinny(emulator).config_for(weights, 8)
    assert config is not None and (config.cluster, config.stages) == (blocks, stages)


def test_x_that_does_not_fit_is_an_error(emulator):
    w, x = Weights("Q8_0", 16, 576).tiled(emulator), emulator.alloc(16, "x")
    with pytest.raises(ValueError, match="9 tokens of 576 columns"):
        skinny(emulator).launch([w], x, [x], 9)
