"""A program of test_compiled.py: vectors against numpy; prints the level of the processor."""

import ctypes

import numpy as np
from numba import njit

from ggpy.backends.cpu import kernels
from ggpy.backends.cpu.loops import simd
from ggpy.formats import by_name
from ggpy.formats.random_blocks import random_blocks

load64, load16 = simd.load("u8", 64), simd.load("i32", 16)
dots = [simd.dot(n) for n in (0, 64, 128)]
wide = [simd.wide_dot(n) for n in (0, 64, 128)]
dot0, dot64, dot128 = dots
wide0, wide64, wide128 = wide
low_bits = simd.with_number("and_", 15)
triple = simd.lookup([3 * i for i in range(16)])
f32x16, f16x16 = simd.load("f32", 16), simd.load("f16", 16)


@njit
def run(codes, high, low, sums, both, numbers, halves, singles, out):
    small, large = load64(codes), load64(codes + 64)
    fours = low_bits(small)
    simd.store(out, dot0(small, load64(high), load16(sums)))
    simd.store(out + 64, dot64(small, load64(high), load16(sums)))
    simd.store(out + 128, dot128(large, load64(high), load16(sums)))
    simd.store(out + 192, wide0(small, load64(high), load64(low), load16(both)))
    simd.store(out + 256, wide64(small, load64(high), load64(low), load16(both)))
    simd.store(out + 320, wide128(large, load64(high), load64(low), load16(both)))
    simd.store(out + 384, triple(fours))
    simd.store(out + 448, simd.exp(f32x16(numbers)))
    simd.store(out + 512, simd.widened(f16x16(halves)))
    simd.store(out + 576, simd.narrowed(f32x16(singles)))


def fours(x):
    return x.astype(np.int32).reshape(16, 4).sum(1, dtype=np.int32)


rng = np.random.default_rng(0)
codes = np.concatenate([rng.integers(0, 128, 64), rng.integers(0, 256, 64)]).astype(np.uint8)
high = rng.integers(-127, 128, 64).astype(np.int8)
low = rng.integers(-64, 64, 64).astype(np.int8)
x = 128 * high.astype(np.int32) + low
numbers = np.array([-np.inf, -90, -87.5, -20, -1, -0.1, 0, 1e-8, 0.5, 1, 3, 20, 80, -5, 2, -2])
numbers = numbers.astype(np.float32)
halves = np.array([0, -0.0, 1, -1.5, 65504, 6e-8, -6e-5, 1e-4, np.inf, -np.inf] + [0.1] * 6)
halves = halves.astype(np.float16)
singles = np.array(
    [0, -0.0, 1, 1 + 2**-11, 1 + 3 * 2**-11, 65504, 65519.9, 65520, 6e-8, 2e-8, -6.1e-5]
)
singles = np.append(singles, [1e-4, np.inf, -np.nan, -1e30, -0.1]).astype(np.float32)
given = [codes, high, low, -128 * fours(high), -128 * fours(x), numbers, halves, singles]
out = np.zeros(640, np.uint8)
run(*(a.__array_interface__["data"][0] for a in (*given, out)))
found = out.view(np.int32).reshape(-1, 16)
small, large = codes[:64].astype(np.int32), codes[64:].astype(np.int32) - 128
expected = [fours(c * y) for y in (high.astype(np.int32), x) for c in (small, small - 64, large)]
assert (found[:6] == expected).all()
assert (out[384:448] == 3 * (codes[:64] & 15)).all()
with np.errstate(all="ignore"):
    exact = np.where(numbers > -87, np.exp(numbers.astype(np.float64)), 0)
assert np.allclose(out[448:512].view(np.float32), exact, rtol=2e-7, atol=0)
assert (out[512:576].view(np.float32) == halves.astype(np.float32)).all()
with np.errstate(all="ignore"):
    nearest = singles.astype(np.float16)
assert np.array_equal(out[576:608].view(np.float16), nearest, equal_nan=True)
for name in ("IQ1_M", "IQ2_XS", "IQ3_S", "TQ1_0", "NVFP4", "Q1_0", "Q2_0"):
    format = by_name(name)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(kernels.expand(format))
    blocks = random_blocks(format, 256 // format.block_size, rng).view(np.uint8)
    row = np.zeros(256, np.float32)
    call(*(blocks.ctypes.data, 0, 256, row.ctypes.data))
    assert (row == format.dequantize(blocks.reshape(1, -1))[0]).all(), name
print(simd.dot_level())
