"""The decode GEMM against float64, and bitwise tests of what it promises."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import ACTIVATIONS, nmse, silu
from counting_device import LaunchesOnHopper
from hypothesis import given
from hypothesis import strategies as st
from kernel_buffers import Output, upload
from tile_cases import (
    EXACT,
    FIXED_POINT,
    HALF,
    HALF_OF_THEM,
    NORMED,
    TWO,
    TWO_NORMED,
    Weights,
    bound,
    energy,
    exact,
    f16_activations,
    layouts,
    limits,
    multiply,
)

from ggpy.device import Ptr
from ggpy.kernels.gemm import gemm_decode as gemm_decode
from ggpy.kernels.gemm.gemm import INPUT_RANGE, STATIC_SHARED
from ggpy.kernels.gemm.gemm_decode import (
    COLUMNS,
    NORM_TOKENS,
    GemmDecode,
    Limits,
    PostNorm,
    ctas_of_first,
    shared_bytes,
    warps_for,
)
from ggpy.kernels.layout.tile import TiledMatrix
from ggpy.kernels.norm.rms_norm import RmsNorm

TOKENS = (1, 2, 5, 8, 9)
SOME = ["Q8_0", "Q4_0"]  # formats that are compiled with every epilogue


def segments(name: str, columns: int = 1056, rows=(37, 16, 7)) -> list[Weights]:
    return [Weights(name, r, columns, seed) for seed, r in enumerate(rows)]


def normalised(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm of f32 x[tokens, n], in float64."""
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps) * weight


# Values


@pytest.mark.parametrize("n_tokens", TOKENS)
@pytest.mark.parametrize("w", layouts().values(), ids=str)
def test_every_layout(machine, w, n_tokens):
    x = f16_activations(n_tokens, w.columns)
    (y,) = multiply(machine, [w.tiled(machine)], x)
    assert nmse(y, exact(w, x)) <= bound(w)


SHAPES = [(r, k) for r in (1, 7, 16, 4097) for k in (32, 33 * 32, 14336)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", sorted({w.name for w in layouts().values()}))
def test_gpu(gpu, name, shape):
    """Of 1, 9 and 64 tokens, which share the matrix and its reference."""
    rows, columns = shape
    unit = max(8, Weights(name, 1, 256).format.block_size)
    w = Weights(name, rows, -(-columns // unit) * unit)
    few = f16_activations(16, w.columns)
    wanted, tiles, bounds = exact(w, few), [w.tiled(gpu)], limits(gpu, gpu.sm_count)
    for n_tokens in (1, 9, 64):
        x = np.resize(few, (n_tokens, w.columns))
        (y,) = multiply(gpu, tiles, x, bounds=bounds)
        assert nmse(y, np.resize(wanted, y.shape), energy(w, x)) <= bound(w), n_tokens


@pytest.mark.parametrize("name", SOME)
def test_rounding_activations_to_half_costs_little(machine, name):
    w = Weights(name, 37, 1056)
    x = np.random.default_rng(0).standard_normal((2, w.columns))
    (y,) = multiply(machine, [w.tiled(machine)], x.astype(np.float16))
    assert nmse(y, exact(w, x)) <= 1e-6


@pytest.mark.parametrize("n_tokens", [1, 2, 9])
@pytest.mark.parametrize("n_sms", [1, 2, 4, 40])
def test_segments_of_several_sizes(machine, n_sms, n_tokens):
    """7 tile rows on fewer and on more SMs."""
    weights = segments("Q8_0", 96, rows=(37, 16, 7, 21))
    x = f16_activations(n_tokens, 96)
    tiles = [w.tiled(machine) for w in weights]
    outs = multiply(machine, tiles, x, bounds=limits(machine, n_sms))
    for w, y in zip(weights, outs, strict=True):
        assert nmse(y, exact(w, x)) <= bound(w)


@pytest.mark.parametrize("n_tokens", [1, 8, 9])
@pytest.mark.parametrize("name", [*SOME, "F16"])
def test_residual(machine, name, n_tokens):
    w = Weights(name, 37, 1056)
    x, residual = (
        f16_activations(n_tokens, 1056),
        f16_activations(n_tokens, 37, 1).astype(np.float32) * 10,
    )
    tiles = w.tiled(machine)
    (plain,) = multiply(machine, [tiles], x)
    (y,) = multiply(machine, [tiles], x, epilogue="ADD", residual=residual)
    assert np.array_equal(y, residual + plain)
    bias = np.random.default_rng(2).standard_normal(37, np.float32)
    (y,) = multiply(machine, [tiles], x, epilogue="ADD", residual=residual, bias=bias)
    assert np.array_equal(y, residual + plain + bias)


@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize("name", ["I8", *SOME])
def test_scales_of_rows(machine, name, n_tokens):
    """The row scale is applied before the residual and the soft cap; the adjacent matrix has
    none.
    """
    first, second = segments(name, rows=(37, 16))
    x, residual = (
        f16_activations(n_tokens, 1056),
        f16_activations(n_tokens, 37, 1).astype(np.float32),
    )
    tiles = first.scaled(machine)
    y, other = multiply(machine, [tiles, second.tiled(machine)], x)
    assert nmse(y, exact(first, x) * first.row_scales) <= bound(first)
    assert nmse(other, exact(second, x)) <= bound(second)
    (post_norm,) = multiply(machine, [tiles], x, epilogue="ADD", residual=residual)
    assert np.array_equal(post_norm, residual + y)
    (capped,) = multiply(machine, [tiles], x, soft_cap=30.0)
    assert nmse(capped, 30 * np.tanh(y / 30)) <= EXACT


@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize("name", ["I8", *SOME])
def test_scales_of_gated_rows(machine, name, n_tokens):
    gate, up = segments(name, rows=(37, 37))
    up = Weights(name, 37, 1056, seed=5)
    x = f16_activations(n_tokens, 1056) / np.float16(2048 if name == "I8" else 8)
    (h,) = multiply(machine, [gate.scaled(machine), up.scaled(machine)], x, epilogue="GLU")
    g, u = (exact(w, x) * w.row_scales for w in (gate, up))
    assert nmse(h, silu(g) * u) <= HALF


def test_residual_may_be_the_output(machine):
    w = Weights("Q8_0", 37, 96)
    x, residual = f16_activations(9, 96), f16_activations(9, 37, 1).astype(np.float32)
    tiles, y = w.tiled(machine), upload(machine, residual)
    product = GemmDecode(machine, limits(machine, 2))
    for _ in range(2):
        product.launch([tiles], upload(machine, x), [y], 9, epilogue="ADD", residual=y)
    (once,) = multiply(machine, [tiles], x)
    assert np.array_equal(machine.download(y, np.float32, (9, 37)), residual + once + once)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize("name", SOME)
def test_gated(machine, name, n_tokens, activation):
    gate, up = segments(name, rows=(37, 37))
    x = f16_activations(n_tokens, 1056) / np.float16(8)
    tiles = [gate.tiled(machine), up.tiled(machine)]
    options = {"epilogue": "GLU", "activation": activation}
    (h,) = multiply(machine, tiles, x, bounds=limits(machine, 2), **options)
    assert nmse(h, ACTIVATIONS[activation](exact(gate, x)) * exact(up, x)) <= HALF


@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize("name", [*SOME, "F16"])
def test_gate_of_a_layers_input(machine, name, n_tokens):
    w = Weights(name, 37, 1056)
    x, factors = f16_activations(n_tokens, 1056) / np.float16(512), f16_activations(n_tokens, 37, 1)
    options = {"epilogue": "INPUT", "activation": "gelu_tanh", "residual": factors}
    (h,) = multiply(machine, [w.tiled(machine)], x, bounds=limits(machine, 2), **options)
    y = INPUT_RANGE * exact(w, x)
    assert nmse(h, ACTIVATIONS["gelu_tanh"](y) * factors.astype(np.float64)) <= HALF


def test_gated_does_not_become_infinite(machine):
    gate, up = segments("Q8_0", 96, rows=(16, 16))
    x = np.full((1, 96), 3000, np.float16)
    (h,) = multiply(machine, [gate.tiled(machine), up.tiled(machine)], x, epilogue="GLU")
    expected = silu(np.maximum(exact(gate, x), -700)) * exact(up, x)
    assert np.abs(expected).max() > 65504
    np.testing.assert_allclose(h, np.clip(expected, -65504, 65504), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("n_tokens", [1, 2])
def test_soft_cap(machine, n_tokens):
    w = Weights("Q8_0", 37, 1056)
    x = f16_activations(n_tokens, 1056)
    (y,) = multiply(machine, [w.tiled(machine)], x, soft_cap=30.0)
    assert nmse(y, 30 * np.tanh(exact(w, x) / 30)) <= bound(w)


@pytest.mark.parametrize("epilogue", ["STORE", "GLU"])
@pytest.mark.parametrize("name", SOME)
def test_normalised_input(machine, name, epilogue):
    """x is f32; in some columns 500 and -500 cancel."""
    weights = segments(name, rows=(37, 37) if epilogue == "GLU" else (37, 16, 7))
    rng = np.random.default_rng(5)
    x, weight = rng.standard_normal((1, 1056)) * 50, rng.uniform(0.5, 2, 1056)
    x[0, :2] = 500, -500
    tiles = [w.tiled(machine) for w in weights]
    x = x.astype(np.float32)
    outs = multiply(machine, tiles, x, norm=weight, eps=1e-5, epilogue=epilogue)
    n = normalised(x, weight.astype(np.float32), 1e-5)
    expected = [exact(w, n) for w in weights]
    if epilogue == "GLU":
        expected = [silu(expected[0]) * expected[1]]
    for y, e in zip(outs, expected, strict=True):
        assert nmse(y, e) <= (HALF if epilogue == "GLU" else FIXED_POINT)


@pytest.mark.parametrize("size", [1e-14, 1e14])
def test_normalised_input_of_any_size(machine, size):
    """Values beyond the range of f16, before the norm and, since eps is large then, after it."""
    w = Weights("Q8_0", 37, 1056)
    x = (np.random.default_rng(5).standard_normal((2, 1056)) * size).astype(np.float32)
    weight = np.linspace(0.5, 2, 1056).astype(np.float32)
    (y,) = multiply(machine, [w.tiled(machine)], x, norm=weight, eps=1e-6)
    assert nmse(y, exact(w, normalised(x, weight, 1e-6))) <= FIXED_POINT


def test_nan_of_what_is_normalised_stays_with_its_token(machine):
    w = Weights("Q8_0", 37, 1056)
    x = np.random.default_rng(5).standard_normal((2, 1056)).astype(np.float32)
    for strange in (np.nan, np.inf, -np.inf):
        x[1, 7] = strange
        (y,) = multiply(machine, [w.tiled(machine)], x, norm=np.ones(1056), eps=1e-6)
        assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()


def test_nan_stays_with_its_token(machine):
    w = Weights("Q8_0", 37, 1056)
    x = f16_activations(3, 1056)
    x[1, 7] = np.nan
    (y,) = multiply(machine, [w.tiled(machine)], x)
    assert np.isfinite(y[[0, 2]]).all() and np.isnan(y[1]).all()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q6_K"])
def test_large_activations(machine, name):
    """Sums of the largest f16 values times the largest codes are finite."""
    w = Weights(name, 7, 256)
    x = np.where(np.arange(256) % 3, 65504, -65504).astype(np.float16)[None]
    (y,) = multiply(machine, [w.tiled(machine)], x)
    assert nmse(y, exact(w, x)) <= 1e-8


def test_small_activations(machine):
    """Subnormal f16 values are not flushed to zero."""
    w = Weights("Q8_0", 7, 256)
    x = np.full((2, 256), 6e-8, np.float16)
    (y,) = multiply(machine, [w.tiled(machine)], x)
    assert nmse(y, exact(w, x)) <= bound(w)


# Bits


@pytest.mark.parametrize("w", layouts().values(), ids=str)
def test_a_token_does_not_depend_on_the_others(machine, w):
    x, tiles = f16_activations(9, w.columns), w.tiled(machine)
    (together,) = multiply(machine, [tiles], x)
    for n in TOKENS[:-1]:
        (some,) = multiply(machine, [tiles], x[9 - n :])
        assert np.array_equal(some, together[9 - n :]), f"{n} tokens"


@pytest.mark.parametrize("n_tokens", [1, 8])
@pytest.mark.parametrize("name, columns", [("Q8_0", 4512), ("Q4_0", 4512), ("F16", 2504)])
def test_slabs_of_columns(machine, name, columns, n_tokens):
    """With little shared memory x is read in slabs; the outputs are bitwise equal."""
    w = Weights(name, 37, columns)
    x, tiles, layout = f16_activations(n_tokens, columns), w.tiled(machine), w.layout
    warps = limits(machine).warps
    row = layout.chunks(columns) * layout.chunk_k
    whole = shared_bytes(layout, 1, row, columns, 3, 1, warps)
    rows = [
        multiply(machine, [tiles], x[i : i + 1], bounds=limits(machine, 3, shared=whole))[0]
        for i in range(n_tokens)
    ]
    assert nmse(np.concatenate(rows), exact(w, x)) <= bound(w)
    for units in (1, 2):
        columns_at_once = units * warps * layout.chunk_k
        assert columns_at_once < columns
        at_once = 1 if n_tokens == 1 else 8
        shared = shared_bytes(layout, at_once, columns_at_once, columns, 1, n_tokens, warps)
        (y,) = multiply(machine, [tiles], x, bounds=limits(machine, 3, shared=shared, stages=1))
        assert np.array_equal(y, np.concatenate(rows)), f"{columns_at_once} columns at a time"


@pytest.mark.parametrize("kilobytes", [64, 100])
def test_fewer_stages_give_the_same_bits(machine, kilobytes):
    """With the shared memory of older GPUs."""
    w = Weights("Q8_0", 150, 1056)
    x, tiles = f16_activations(1, 1056), w.tiled(machine)
    (y,) = multiply(machine, [tiles], x)
    small = limits(machine, shared=kilobytes << 10)
    assert np.array_equal(multiply(machine, [tiles], x, bounds=small)[0], y)


def test_tokens_that_do_not_fit_take_several_launches(machine):
    """Eight tokens in launches of three are bitwise equal to eight tokens in one launch."""
    w = Weights("Q4_K", 37, 4608)
    x, tiles = f16_activations(8, 4608), w.tiled(machine)
    (y,) = multiply(machine, [tiles], x)
    warps = limits(machine).warps
    shared = shared_bytes(w.layout, 8, warps * w.layout.chunk_k, 4608, 1, 3, warps)
    bounds = limits(machine, shared=shared, stages=1)
    assert np.array_equal(multiply(machine, [tiles], x, bounds=bounds)[0], y)


@pytest.mark.parametrize("kilobytes", [227, 163, 99, 64])
def test_every_layout_fits_in_shared_memory(emulator, kilobytes):
    """On every GPU, for the largest k of any model."""
    warps = warps_for(kilobytes << 10)
    for w in layouts().values():
        data = TiledMatrix(w.layout, 16, 53248, emulator.alloc(16, "none"))
        product = GemmDecode(emulator, limits(emulator, shared=kilobytes << 10, warps=warps))
        assert product.tokens_per_launch(data, 8, False, product.limits.warps) >= 2, w.name


def test_a_norm_needs_the_whole_row(emulator):
    """A norm of a row that does not fit in shared memory is refused, because the result would be
    wrong.
    """
    w = Weights("Q8_0", 16, 4512)
    shared = shared_bytes(w.layout, 1, 4096, 4096, 1, 1)
    product = GemmDecode(emulator, limits(emulator, shared=shared))
    x = emulator.alloc(4 * 4512, "x")
    with pytest.raises(ValueError, match="4512 columns needs more than"):
        product.launch([w.tiled(emulator)], x, [x], 1, norm=x)


@pytest.mark.parametrize("n_tokens", [1, 2])
def test_more_tile_rows_than_a_batch(machine, n_tokens):
    """20 tile rows for one CTA; two runs are bitwise equal."""
    weights = segments("Q8_0", 96, rows=(37, 250, 7))
    x, tiles = f16_activations(n_tokens, 96), [w.tiled(machine) for w in weights]
    outs, again = (multiply(machine, tiles, x, bounds=limits(machine, 1)) for _ in range(2))
    for w, y, z in zip(weights, outs, again, strict=True):
        assert nmse(y, exact(w, x)) <= bound(w) and np.array_equal(y, z)


def some_rows(n_tokens: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """f32 x[n_tokens, columns] with rows of different magnitudes, and a norm's weight."""
    rng = np.random.default_rng(columns)
    size = 3 + np.arange(n_tokens)[:, None]
    x = (rng.standard_normal((n_tokens, columns)) * size).astype(np.float32)
    return x, rng.uniform(0.5, 2, columns).astype(np.float32)


@pytest.mark.parametrize("n_tokens", [1, NORM_TOKENS])
@pytest.mark.parametrize("columns", [96, 1056, 4512])
@pytest.mark.parametrize("name", SOME)
def test_norm_prologue_does_not_round_x_to_f16(machine, name, columns, n_tokens):
    """Also, a token does not depend on the other one."""
    w, (x, weight) = Weights(name, 37, columns), some_rows(n_tokens, columns)
    tiles = w.tiled(machine)
    (y,) = multiply(machine, [tiles], x, norm=weight, eps=1e-6)
    assert nmse(y, exact(w, normalised(x, weight, 1e-6))) <= FIXED_POINT
    (single,) = multiply(machine, [tiles], x[-1:], norm=weight, eps=1e-6)
    assert np.array_equal(single, y[-1:])


@pytest.mark.parametrize("n_tokens", [1, NORM_TOKENS])
def test_norm_prologue_equals_norm_kernel_for_f16_weights(machine, n_tokens):
    columns = 1064
    tiles, (x, weight) = Weights("F16", 37, columns).tiled(machine), some_rows(n_tokens, columns)
    (inside,) = multiply(machine, [tiles], x, norm=weight, eps=1e-6)
    half = Output(machine, 2 * n_tokens * columns)
    args = upload(machine, x), None, upload(machine, weight), half.buffer, n_tokens, columns, 1e-6
    RmsNorm(machine, limits(machine).warps).to_f16(*args)
    (before,) = multiply(machine, [tiles], half.read(np.float16, (n_tokens, columns)))
    assert np.array_equal(inside, before)


@pytest.mark.parametrize("n_tokens", [1, NORM_TOKENS])
@pytest.mark.parametrize("columns", [96, 1056, 4512])
@pytest.mark.parametrize("name", SOME[:1])
def test_post_norm_prologue_equals_norm_kernels(machine, name, columns, n_tokens):
    """The sum of x and a norm's output: CTA 0 stores it, and every CTA multiplies it."""
    rng = np.random.default_rng(columns)
    x, y = (rng.standard_normal((n_tokens, columns)).astype(np.float32) * s for s in (3, 50))
    weight, post = (rng.uniform(0.5, 2, columns).astype(np.float32) for _ in range(2))
    tiles = Weights(name, 37, columns).tiled(machine)
    before = upload(machine, x)
    RmsNorm(machine, limits(machine).warps).add(
        before, upload(machine, y), upload(machine, post), n_tokens, columns, 1e-3
    )
    expected = machine.download(before, np.float32, x.shape)
    (apart,) = multiply(machine, [tiles], expected, norm=weight, eps=1e-6)
    out = Output(machine, x.nbytes)
    post_norm = PostNorm(upload(machine, y), upload(machine, post), 1e-3, out.buffer)
    (inside,) = multiply(machine, [tiles], x, norm=weight, eps=1e-6, post_norm=post_norm)
    assert np.array_equal(out.read(np.float32, x.shape), expected)
    assert np.array_equal(inside, apart)


@pytest.mark.parametrize("n_tokens", [1, 9])
def test_order_of_ctas_and_warps(emulator, n_tokens, monkeypatch):
    weights = segments("Q8_0", 1056)
    x, tiles = f16_activations(n_tokens, 1056), [w.tiled(emulator) for w in weights]
    usual = multiply(emulator, tiles, x)
    for order in (1, 2, 3):
        monkeypatch.setattr(emulator.unprepared, "order", order)
        for a, b in zip(multiply(emulator, tiles, x), usual, strict=True):
            assert np.array_equal(a, b), f"order {order}"


# CTAs of half as many warps


@pytest.mark.parametrize("n_tokens", [1, 8])
@pytest.mark.parametrize("name", ["Q8_0", "Q6_K"])
def test_half_of_the_warps(machine, name, n_tokens):
    w = Weights(name, 150, 1280)
    x, bounds = f16_activations(n_tokens, 1280), limits(machine, **HALF_OF_THEM)
    residual = np.random.default_rng(1).standard_normal((n_tokens, 150)).astype(np.float32)
    options = {"residual": residual, "epilogue": "ADD", "bounds": bounds}
    (y,) = multiply(machine, [w.tiled(machine)], x, **options)
    assert nmse(y, residual + exact(w, x), energy(w, x)) <= bound(w)


@pytest.mark.parametrize("n_tokens", NORMED)
@pytest.mark.parametrize("name", ["Q8_0", "Q6_K"])
def test_half_of_the_warps_with_a_norm(machine, name, n_tokens):
    gate, up = (Weights(name, 150, 1280, seed) for seed in (0, 1))
    (x, weight), bounds = some_rows(n_tokens, 1280), limits(machine, **HALF_OF_THEM)
    options = {"norm": weight / 300, "eps": 1e-6, "epilogue": "GLU", "bounds": bounds}
    (y,) = multiply(machine, [gate.tiled(machine), up.tiled(machine)], x, **options)
    n = normalised(x, weight / 300, 1e-6)
    assert nmse(y, silu(exact(gate, n)) * exact(up, n)) <= HALF


def test_half_of_the_warps_with_two_layouts(machine):
    weights, (x, weight) = of_two(TWO), some_rows(1, 1280)
    tiles, bounds = [w.tiled(machine) for w in weights], limits(machine, **HALF_OF_THEM)
    outs = multiply(machine, tiles, x, norm=weight, eps=1e-6, bounds=bounds)
    for w, y in zip(weights, outs, strict=True):
        assert nmse(y, exact(w, normalised(x, weight, 1e-6))) <= FIXED_POINT


@pytest.mark.parametrize(
    ("rows", "columns", "norm", "warps"),
    [
        (16, 12 * 128, False, 8),
        (16, 13 * 128, False, 16),
        (3 * 16 + 1, 6 * 128, False, 8),
        (6 * 16 + 1, 6 * 128, False, 16),
        (16, 64 * 128, True, 8),
        (3 * 16 + 1, 33 * 128, True, 16),
    ],
)
def test_a_cta_of_few_chunks_has_half_of_the_warps(emulator, rows, columns, norm, warps):
    """One tile row for one CTA, or so many of three that a CTA has two or three."""
    options = {"norm": Ptr(0)} if norm else {}
    (threads, _) = launched(emulator, rows, columns, **options)
    assert threads == 32 * warps


def launched(emulator: Any, rows: int, columns: int, **options: Any) -> tuple[int, Any]:
    """Threads and parameters of the launch on Hopper for one token times Q8_0 weights."""
    seen = []

    def launch(_grid: Any, threads: int, parameters: Any, **_: Any) -> None:
        seen.append((threads, *parameters))

    device = SimpleNamespace(
        arch="sm_90a",
        shared_bytes=emulator.shared_bytes,
        kernel=lambda *_, **__: SimpleNamespace(launch=launch),
    )
    tiles = TiledMatrix(Weights("Q8_0", rows, columns).layout, rows, columns, Ptr(0))
    product = GemmDecode(device, Limits(device.shared_bytes - STATIC_SHARED, 3))
    product.launch([tiles], Ptr(0), [Ptr(0)], 1, **options)
    (only,) = seen
    return only


# Chunks that are requested before x


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_chunks_before_x_change_no_bits(machine, stages, monkeypatch):
    w = Weights("Q8_0", 150, 2560)
    x, residual = f16_activations(1, 2560), f16_activations(1, 150, 1)
    options = {"epilogue": "ADD", "residual": residual, "bounds": limits(machine, stages=stages)}
    tiles = [w.tiled(machine)]
    (one,) = multiply(machine, tiles, x, **options)
    (slow,) = multiply(machine, tiles, x, slow_producer=True, **options)
    monkeypatch.setattr(gemm_decode, "PREFETCH_BYTES", 0)
    (early,) = multiply(machine, tiles, x, **options)
    assert np.array_equal(slow, one)
    assert np.array_equal(early, one)


@pytest.mark.parametrize(
    ("rows", "options", "prefetch_two"),
    [
        (4096, {"epilogue": "ADD"}, 1),
        (1024, {"epilogue": "ADD"}, 0),
        (4096, {"epilogue": "ADD", "slow_producer": True}, 0),
        (4096, {}, 0),
    ],
)
def test_large_weights_after_a_glu_are_prefetched(emulator, rows, options, prefetch_two):
    _, product = launched(emulator, rows, 14336, **options)
    assert product.prefetch_two == prefetch_two


# Two layouts


def of_two(pair: tuple[str, str]) -> list[Weights]:
    """Two matrices of the first layout, with more tile rows than a batch, and two of the second."""
    first, second = pair
    firsts = [Weights(first, 250, 1280), Weights(first, 37, 1280, 1)]
    return [*firsts, Weights(second, 53, 1280), Weights(second, 5, 1280, 1)]


@pytest.mark.parametrize("n_sms", [2, 5, 132])
@pytest.mark.parametrize("n_tokens", [1, 3])
def test_two_layouts(machine, n_tokens, n_sms):
    weights, x = of_two(TWO), f16_activations(n_tokens, 1280)
    tiles, bounds = [w.tiled(machine) for w in weights], limits(machine, n_sms)
    assert GemmDecode(machine, bounds).supports_two_layouts(tiles, n_tokens)
    for w, y in zip(weights, multiply(machine, tiles, x, bounds=bounds), strict=True):
        assert nmse(y, exact(w, x)) <= bound(w)


@pytest.mark.parametrize("adds", [False, True], ids=["norm", "sum"])
def test_two_layouts_with_a_norm(machine, adds):
    """As separate launches with the norm; the sum is stored once."""
    rng = np.random.default_rng(5)
    x, y = (rng.standard_normal((1, 1280)).astype(np.float32) * s for s in (3, 50))
    weight, post = (rng.uniform(0.5, 2, 1280).astype(np.float32) for _ in range(2))
    tiles = [w.tiled(machine) for w in of_two(TWO_NORMED)]
    options, outs = {"norm": weight, "eps": 1e-6}, [Output(machine, x.nbytes) for _ in range(2)]
    post_norm = [
        PostNorm(upload(machine, y), upload(machine, post), 1e-3, out.buffer) if adds else None
        for out in outs
    ]
    together = multiply(machine, tiles, x, post_norm=post_norm[0], **options)
    apart = multiply(machine, tiles[:2], x, post_norm=post_norm[1], **options)
    apart += multiply(machine, tiles[2:], x, post_norm=post_norm[1], **options)
    for a, b in zip(together, apart, strict=True):
        assert nmse(a, b) <= EXACT
    if adds:
        one, other = (out.read(np.float32, x.shape) for out in outs)
        assert np.array_equal(one, other)


def test_which_layouts_a_launch_takes(emulator):
    q4, q6, q8 = (Weights(name, 32, 256).tiled(emulator) for name in ("Q4_K", "Q6_K", "Q8_0"))
    product = GemmDecode(emulator, limits(emulator))
    assert product.supports_two_layouts([q4, q4, q6], 1) and product.supports_two_layouts(
        [q8, q6], COLUMNS[-1]
    )
    for others in ([q4, q4], [q4, q6, q4], [q4, q6, q8], [q4]):
        assert not product.supports_two_layouts(others, 1)
    assert not product.supports_two_layouts([q4, q6], COLUMNS[-1] + 1), "they are several launches"
    with pytest.raises(ValueError, match="one layout"):
        product.launch([q4, q6, q4], Ptr(0), [Ptr(0)] * 3, 1)


@given(
    st.tuples(st.integers(1, 500), st.integers(1, 500)),
    st.tuples(st.integers(16, 4096), st.integers(16, 4096)),
    st.integers(2, 132),
)
def test_ctas_of_two_layouts(tile_rows, nbytes, ctas):
    """Each layout has at least one CTA and at most one per tile row, and no other division gives
    the CTA with the most bytes fewer.
    """
    ctas = min(ctas, sum(tile_rows))
    first = ctas_of_first(tile_rows, nbytes, ctas)

    def fullest(first):
        return max(
            -(-tile_rows[0] // first) * nbytes[0],
            -(-tile_rows[1] // (ctas - first)) * nbytes[1],
        )

    choices = [i for i in range(1, ctas) if i <= tile_rows[0] and ctas - i <= tile_rows[1]]
    assert first in choices and fullest(first) == min(map(fullest, choices))


# Limits and errors


@pytest.mark.parametrize("epilogue", ["STORE", "ADD"])
def test_under_sanitizers(emulated, epilogue):
    w = Weights("Q4_0", 37, 1056)
    x = f16_activations(3, 1056)
    post_norm = {"residual": np.zeros((3, 37))} if epilogue == "ADD" else {}
    (y,) = multiply(emulated, [w.tiled(emulated)], x, epilogue=epilogue, **post_norm)
    assert nmse(y, exact(w, x)) <= bound(w)


@pytest.mark.parametrize(("arch", "one_cta"), [("sm_90a", True), ("sm_80", False)])
def test_one_cta_per_sm_with_pdl(arch, one_cta):
    device, asked, at = LaunchesOnHopper(), [], Ptr(0)
    kernel = SimpleNamespace(launch=lambda *_, smem, **__: asked.append(smem))
    device.arch, device.kernel = arch, lambda *_, **__: kernel
    w = TiledMatrix(Weights("Q5_0", 1, 4096).layout, 4096, 4096, at)
    GemmDecode(device, limits(device, device.sm_count)).launch([w], at, [at], 1)
    assert (2 * asked[0] + 2048 > 228 << 10) is one_cta, "the driver takes 1 KB per CTA"


def test_sizes_are_checked(emulator):
    a, b = (Weights("Q8_0", 16, k).tiled(emulator) for k in (96, 64))
    out = emulator.alloc(4 * 16, "out")
    x = emulator.alloc(2 * 96, "x")
    product = GemmDecode(emulator, limits(emulator))
    with pytest.raises(ValueError, match="one layout and one number of columns"):
        product.launch([a, b], x, [out, out], 1)
    with pytest.raises(ValueError, match="3 tokens are too many: a GEMM normalises 2"):
        product.launch([a], x, [out], 3, norm=x)
    with pytest.raises(ValueError, match="post_norm needs norm"):
        product.launch([a], x, [out], 1, post_norm=PostNorm(x, x, 1e-6, out))
    with pytest.raises(ValueError, match="a GLU GEMM cannot have"):
        product.launch([a, a], x, [out, out], 1, epilogue="GLU")
    with pytest.raises(ValueError, match="more than 10000 bytes of shared memory"):
        GemmDecode(emulator, limits(emulator, shared=10000)).launch([a], x, [out], 1)


def test_limits_beyond_the_device_are_refused(emulator):
    bounds = replace(limits(emulator), shared=emulator.shared_bytes - STATIC_SHARED + 1)
    with pytest.raises(ValueError, match="more than the 232448 that a CTA may have on sm_80"):
        GemmDecode(emulator, bounds)
