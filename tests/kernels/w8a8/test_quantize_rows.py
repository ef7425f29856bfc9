"""quantize_rows.cu: 8-bit codes with one scale per token, equal to numpy bit by bit."""

import ml_dtypes
import numpy as np
import pytest
from kernel_buffers import upload
from w8a8_cases import FORMATS, KINDS, activations, quantize, quantized, unpacked

from ggpy.kernels.norm.rms_norm import RmsNorm
from ggpy.kernels.w8a8.quantize_rows import QuantizedRows, QuantizeRows, codes_bytes

SHAPES = [(1, 32), (1, 1056), (9, 128), (3, 8), (2, 14336)]


def read(device, rows):
    """(codes [T rounded up to 8, K rounded up to 128] in row order, scales[T])."""
    packed = device.download(rows.codes, np.uint8, codes_bytes(rows.n_tokens, rows.k))
    scales = device.download(rows.scales, np.float32, rows.n_tokens)
    return unpacked(packed, rows.n_tokens, rows.k), scales


def check(device, rows, x):
    codes, scales = read(device, rows)
    expected, expected_scales = quantized(x, rows.kind)
    n, k = x.shape
    assert np.array_equal(scales, expected_scales)
    assert np.array_equal(codes[:n, :k], expected)
    assert not codes[n:].any() and not codes[:, k:].any(), "what follows is 0"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_every_bit(machine, kind, dtype, shape):
    x = activations(*shape).astype(dtype)
    if dtype == np.float32:
        x *= np.float32(1.0001)
    check(machine, quantize(machine, x, kind), x)


@pytest.mark.parametrize("kind", KINDS)
def test_ties_go_to_even(machine, kind):
    """Values halfway between all codes, with scale 1."""
    largest = 127 if kind == "int8" else 448
    grid = (
        np.arange(-127, 128)
        if kind == "int8"
        else FORMATS["e4m3"].dequantize(np.delete(np.arange(256), [127, 255]).astype(np.uint8))
    )
    grid = np.sort(grid).astype(np.float32)
    values = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])
    x = np.resize(np.concatenate([values, [largest]]), (1, 512)).astype(np.float32)
    rows = quantize(machine, x, kind)
    assert read(machine, rows)[1] == 1
    check(machine, rows, x)


@pytest.mark.parametrize("kind", KINDS)
def test_quotients_are_rounded_once(machine, kind):
    """Multiplication by the reciprocal would round one number in some thousands wrongly."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((16, 8192)).astype(np.float32)
    x *= np.float32(10.0) ** np.linspace(-25, 25, 16, dtype=np.float32)[:, None]
    codes, scales = quantized(x, kind)
    values, others = (FORMATS[kind].dequantize(c) for c in (codes, codes ^ 1))
    halfway = (values + others) / 2 * scales[:, None]
    inside = np.abs(halfway) < 0.99 * np.abs(x).max(axis=1, keepdims=True)
    near = np.nextafter(halfway, rng.choice([-np.inf, np.inf], x.shape), dtype=np.float32)
    x = np.where(inside & (np.abs(values) < 0.9 * np.abs(values).max()), near, x)
    check(machine, quantize(machine, x, kind), x)


def test_floats_are_those_of_ml_dtypes(machine):
    """Values of all magnitudes, including subnormal codes, with scale 1."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(4096) * 2.0 ** rng.integers(-12, 10, 4096)).astype(np.float32)[None]
    x[0, 0] = 448
    x = np.clip(x, -448, 448)
    codes, _ = read(machine, quantize(machine, x, "e4m3"))
    assert np.array_equal(codes[:1], x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    assert len(np.unique(codes[0] & 127)) == 127, "every magnitude came up"


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_what_is_no_number(machine, kind):
    x = activations(5, 136)
    x[1] = 0
    x[2, 7], x[3, 9] = np.nan, np.inf
    codes, scales = read(machine, quantize(machine, x, kind))
    expected, expected_scales = quantized(x[[0, 1, 4]], kind)
    assert np.array_equal(codes[[0, 1, 4], :136], expected)
    assert np.array_equal(scales[[0, 1, 4]], expected_scales) and scales[1] == 0
    assert np.isnan(scales[2]) and np.isinf(scales[3])
    assert not codes[2:4].any(), "0 times infinity is NaN"


@pytest.mark.parametrize("kind", KINDS)
def test_normalised(machine, kind):
    """With a norm, the codes equal those of the f16 output of the norm kernel; with `rows` too."""
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((4, 1056)) * 3).astype(np.float32)
    weight, which = rng.uniform(0.5, 2, 1056).astype(np.float32), np.array([2, 0, 3], np.int32)
    buffers = upload(machine, x), upload(machine, which), upload(machine, weight)
    normed = machine.alloc(2 * 3 * 1056)
    RmsNorm(machine).to_f16(*buffers, normed, 3, 1056, 1e-5)
    codes, scales = machine.alloc(codes_bytes(3, 1056)), machine.alloc(12)
    rows = QuantizedRows(kind, 3, 1056, codes, scales)
    launch = QuantizeRows(machine).launch
    launch(buffers[0], rows, x_type="float", rows=buffers[1], norm=buffers[2], eps=1e-5)
    check(machine, rows, machine.download(normed, np.float16, (3, 1056)))


@pytest.mark.parametrize("kind", KINDS)
def test_under_sanitizers(emulated, kind):
    x = activations(3, 1064)
    check(emulated, quantize(emulated, x, kind), x)


def test_what_cannot_be_quantised(emulator):
    x = emulator.alloc(64, "x")
    rows = QuantizedRows("int8", 1, 12, x, x)
    with pytest.raises(ValueError, match="12 columns"):
        QuantizeRows(emulator).launch(x, rows)
    with pytest.raises(ValueError, match="float, not half"):
        QuantizeRows(emulator).launch(x, rows, norm=x)
