"""The W8A8 decode and prefill GEMMs: integers bit by bit, floats against float64."""

import numpy as np
import pytest
from cases import ACTIVATIONS, nmse
from kernel_buffers import upload
from tile_cases import limits
from w8a8_cases import KINDS, ByteMatrix, activations, agrees, exact, multiply, quantize

from ggpy.device.compile import compile_cubin
from ggpy.kernels.gemm.gemm import STATIC_SHARED
from ggpy.kernels.w8a8.w8a8_decode import Row, W8A8Decode, shared_bytes
from ggpy.kernels.w8a8.w8a8_prefill import W8A8Prefill, runs_on

# Bounds of the normalised mean square error. Tensor cores of a GPU drop bits of float sums.
HALF = 2e-7  # outputs that are rounded to f16
EXACT, TENSOR_CORES = 1e-10, 1e-6  # float sums: exact, and by tensor cores
PRODUCTS = ("few", "many")
FEW = ("1, NORM, GLU", "8, CODES, ADD")
ARCHITECTURES = ["75", "80", "89", "90a", "100", "120"]


def product_on(device, which, **changes):
    """The decode GEMM ("few") with a small number of SMs, or the prefill GEMM ("many")."""
    if which == "many":
        return W8A8Prefill(device)
    return W8A8Decode(device, limits(device, **changes))


def tolerance_on(device):
    """The error bound of float sums on a device; the emulator rounds once per 32 columns."""
    return EXACT if hasattr(device, "unprepared") else TENSOR_CORES


def skip_unless(device, kind):
    arch = getattr(device, "arch", "sm_90a")
    if not runs_on(kind, arch):
        pytest.skip(f"{arch} has no tensor cores for {kind}")


# Values


@pytest.mark.parametrize("n_tokens", [1, 2, 8, 19])
@pytest.mark.parametrize("shape", [(1, 32), (37, 1056), (7, 2560)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens(machine, kind, shape, n_tokens):
    """Rows and columns that do not fill a tile or a chunk; more tile rows than CTAs."""
    skip_unless(machine, kind)
    w, x = ByteMatrix(kind, *shape), activations(n_tokens, shape[1])
    product = product_on(machine, "few", n_sms=2)
    (y,) = multiply(product, [w.tiled(machine)], quantize(machine, x, kind))
    assert agrees(w, x, y, tolerance_on(machine))


@pytest.mark.parametrize("n_tokens", [33, 130])
@pytest.mark.parametrize("shape", [(150, 1056), (1, 32)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_many_tokens(machine, kind, shape, n_tokens):
    skip_unless(machine, kind)
    w, x = ByteMatrix(kind, *shape), activations(n_tokens, shape[1])
    (y,) = multiply(W8A8Prefill(machine), [w.tiled(machine)], quantize(machine, x, kind))
    assert agrees(w, x, y, tolerance_on(machine))


GPU_SHAPES = [(r, k) for r in (1, 7, 4097) for k in (32, 1056, 14336)]


@pytest.mark.parametrize("n_tokens", [1, 3, 8, 64, 300])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gpu(gpu, kind, shape, n_tokens):
    skip_unless(gpu, kind)
    w, x = ByteMatrix(kind, *shape), activations(n_tokens, shape[1])
    tiles, rows = w.tiled(gpu), quantize(gpu, x, kind)
    for which in PRODUCTS if n_tokens <= 64 else PRODUCTS[1:]:
        product = product_on(gpu, which, n_sms=gpu.sm_count)
        (y,) = multiply(product, [tiles], rows)
        assert agrees(w, x, y, tolerance_on(gpu)), which


def test_the_largest_sums(machine):
    """Sums that a float cannot represent are rounded once, to even."""
    w = ByteMatrix("int8", 16, 4096)
    w.codes[:] = 128  # -128
    w.codes[:, ::5] = 129
    x = np.full((3, 4096), 5, np.float16)
    x[1, 7], x[2, 3:90] = 4.5, -5
    rows = quantize(machine, x, "int8")
    for which in PRODUCTS:
        (y,) = multiply(product_on(machine, which), [w.tiled(machine)], rows)
        assert np.array_equal(y, exact(w, x))


def test_weights_without_scales_of_rows(machine):
    w, x = ByteMatrix("int8", 7, 96), activations(2, 96)
    tiles = w.tiled(machine)
    bare = type(tiles)(tiles.layout, 7, 96, tiles.data)
    for which in PRODUCTS:
        product = product_on(machine, which)
        (y,) = multiply(product, [bare], quantize(machine, x, "int8"))
        (scaled,) = multiply(product, [tiles], quantize(machine, x, "int8"))
        assert np.array_equal(y * w.scale, scaled)


@pytest.mark.parametrize("columns", [32, 1056, 4512])
@pytest.mark.parametrize("kind", KINDS)
def test_one_token_quantised_inside(machine, kind, columns):
    """Prologues F16 and NORM give the same bits as quantize_rows.cu before the GEMM."""
    skip_unless(machine, kind)
    w, x = ByteMatrix(kind, 37, columns), activations(1, columns)
    product, tiles = product_on(machine, "few", n_sms=2), w.tiled(machine)
    (expected,) = multiply(product, [tiles], quantize(machine, x, kind))
    row = Row(kind, columns, upload(machine, x))
    assert np.array_equal(multiply(product, [tiles], row)[0], expected)
    floats = x.astype(np.float32) * np.float32(1.01)
    norm = np.linspace(0.5, 2, columns, dtype=np.float32)
    weight, options = upload(machine, norm), {"eps": 1e-5}
    (expected,) = multiply(
        product, [tiles], quantize(machine, floats, kind, norm=weight, **options)
    )
    row = Row(kind, columns, upload(machine, floats), weight, **options)
    assert np.array_equal(multiply(product, [tiles], row)[0], expected)


# Epilogues


@pytest.mark.parametrize("n_sms", [1, 2, 40])
@pytest.mark.parametrize("which", PRODUCTS)
@pytest.mark.parametrize("kind", KINDS)
def test_segments(machine, kind, which, n_sms):
    """q, k and v: three matrices of different sizes, on fewer and on more CTAs."""
    skip_unless(machine, kind)
    if which == "many" and n_sms > 1:
        pytest.skip("its grid does not depend on the GPU")
    weights = [ByteMatrix(kind, rows, 96, seed) for seed, rows in enumerate((200, 37, 16))]
    x = activations(9, 96)
    product = product_on(machine, which, n_sms=n_sms)
    tiles = [w.tiled(machine) for w in weights]
    outs = multiply(product, tiles, quantize(machine, x, kind))
    assert all(agrees(w, x, y, tolerance_on(machine)) for w, y in zip(weights, outs, strict=True))


@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize("which", PRODUCTS)
@pytest.mark.parametrize("kind", KINDS)
def test_residual(machine, kind, which, n_tokens):
    """The residual may be the output. There are more tile rows than a batch holds."""
    skip_unless(machine, kind)
    w, x = ByteMatrix(kind, 300, 96), activations(n_tokens, 96)
    residual = activations(n_tokens, 300, 1).astype(np.float32)
    product, tiles = product_on(machine, which, n_sms=1), w.tiled(machine)
    rows = quantize(machine, x, kind)
    (plain,) = multiply(product, [tiles], rows)
    (y,) = multiply(product, [tiles], rows, epilogue="ADD", residual=residual)
    assert np.array_equal(y, residual + plain)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("which, n_tokens", [("few", 1), ("few", 9), ("many", 33)])
@pytest.mark.parametrize("kind", KINDS)
def test_gate_and_up(machine, kind, which, n_tokens, activation):
    skip_unless(machine, kind)
    gate, up = (ByteMatrix(kind, 150, 96, seed) for seed in (0, 1))
    x = activations(n_tokens, 96) / np.float16(64)
    options = {"epilogue": "GLU", "activation": activation}
    product = product_on(machine, which, n_sms=2)
    tiles = [gate.tiled(machine), up.tiled(machine)]
    (y,) = multiply(product, tiles, quantize(machine, x, kind), **options)
    g = exact(gate, x).astype(np.float64)
    assert nmse(y, ACTIVATIONS[activation](g) * exact(up, x)) <= (HALF if kind == "int8" else 1e-6)


@pytest.mark.parametrize("which", PRODUCTS)
def test_soft_cap(machine, which):
    w, x = ByteMatrix("int8", 37, 96), activations(2, 96)
    product, rows = product_on(machine, which), quantize(machine, x, "int8")
    (y,) = multiply(product, [w.tiled(machine)], rows, soft_cap=3.0)
    assert nmse(y, 3 * np.tanh(exact(w, x) / 3)) <= 1e-10


@pytest.mark.parametrize("which", PRODUCTS)
@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_with_its_token(machine, kind, which):
    skip_unless(machine, kind)
    w, x = ByteMatrix(kind, 37, 96), activations(3, 96)
    x[1, 7] = np.inf
    rows = quantize(machine, x, kind)
    (y,) = multiply(product_on(machine, which), [w.tiled(machine)], rows)
    assert np.isfinite(y[[0, 2]]).all() and np.isnan(y[1]).all()


# Bits


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_does_not_depend_on_the_others(machine, kind):
    """A token's bits do not depend on the other tokens or on the shared memory of the device.

    The shared memory determines how many tokens a launch takes.
    """
    skip_unless(machine, kind)
    w, x = ByteMatrix(kind, 37, 2560), activations(11, 2560)
    tiles = w.tiled(machine)
    (together,) = multiply(product_on(machine, "few"), [tiles], quantize(machine, x, kind))
    small = shared_bytes(8, 3, 2560, 1, 16)
    product = product_on(machine, "few", shared=small)
    assert np.array_equal(multiply(product, [tiles], quantize(machine, x, kind))[0], together)
    for token in (0, 9):
        rows = quantize(machine, x[token : token + 1], kind)
        (single,) = multiply(product_on(machine, "few"), [tiles], rows)
        assert np.array_equal(single[0], together[token])


@pytest.mark.parametrize("which", PRODUCTS)
def test_order_of_blocks_and_warps(emulator, which, monkeypatch):
    w, x = ByteMatrix("e4m3", 150, 1056), activations(9, 1056)
    tiles, rows = w.tiled(emulator), quantize(emulator, x, "e4m3")
    (usual,) = multiply(product_on(emulator, which), [tiles], rows)
    for order in (1, 2, 3):
        monkeypatch.setattr(emulator.unprepared, "order", order)
        assert np.array_equal(multiply(product_on(emulator, which), [tiles], rows)[0], usual)


# The rest


@pytest.mark.parametrize("which", PRODUCTS)
@pytest.mark.parametrize("kind", KINDS)
def test_under_sanitizers(emulated, kind, which):
    w, x = ByteMatrix(kind, 37, 1056), activations(3, 1056)
    options = {"epilogue": "ADD", "residual": np.zeros((3, 37))}
    product = product_on(emulated, which, n_sms=2)
    (y,) = multiply(product, [w.tiled(emulated)], quantize(emulated, x, kind), **options)
    assert agrees(w, x, y)


def test_what_does_not_go_together(emulator):
    a, b = (ByteMatrix(kind, 16, 96).tiled(emulator) for kind in KINDS)
    rows = quantize(emulator, activations(1, 96), "int8")
    for which in PRODUCTS:
        product = product_on(emulator, which)
        with pytest.raises(ValueError, match="one layout"):
            product.launch([a, b], rows, [rows.codes] * 2)
        with pytest.raises(ValueError, match="has no int8 codes"):
            product.launch([b], rows, [rows.codes])
        with pytest.raises(ValueError, match="x has 128 columns, the weights 96"):
            wide = quantize(emulator, activations(1, 128), "int8")
            product.launch([a], wide, [rows.codes])
    with pytest.raises(ValueError, match="more than 10000 bytes of shared memory"):
        product_on(emulator, "few", shared=10000).launch([a], rows, [rows.codes])


def test_which_gpus():
    assert runs_on("int8", "sm_75") and not runs_on("e4m3", "sm_86")
    assert all(runs_on("e4m3", arch) for arch in ("sm_89", "sm_90a", "sm_100a", "sm_120"))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture(arch):
    """Kernels do not spill, except slightly where E4M3 codes are converted to f16 first."""
    converts, arch = arch in ("90a", "100"), f"sm_{arch}"
    values = [v for k, v in zip(KINDS, ("Integers", "E4M3"), strict=True) if runs_on(k, arch)]
    few = [f"w8a8_decode<{v}, {i}>" for v in values for i in FEW]
    many = [f"w8a8_prefill<{v}, GLU>" for v in values]
    rows = [f"quantize_rows<{v}, float, true>" for v in values]
    sources = {
        "w8a8/w8a8_decode.cu": (few, {"WARPS": 16, "NORM_PIECES": 4}, 128),
        "w8a8/w8a8_prefill.cu": (many, {}, 255),
    }
    sources["w8a8/quantize_rows.cu"] = (rows, {"WARPS": 16, "NORM_PIECES": 4}, 128)
    for source, (names, defines, registers) in sources.items():
        found = compile_cubin(source, arch, expressions=names, defines=defines).resources
        for name, r in found.items():
            assert r.shared <= STATIC_SHARED, f"{name} has {r.shared} bytes of its own"
            bound = 128 if converts and "w8a8_prefill<E4M3" in name else 0
            assert max(r.spill_loads, r.spill_stores) <= bound, f"{name} for {arch} spills: {r}"
            assert r.registers <= registers, f"{name} takes {r.registers} registers"
