"""Kernels of the pool that write keys and values to their pages, with the bytes that
numpy/kv_pages.py defines.

Types are f32, f16 and q8_0. With q8_0, `spread` applies a Hadamard transform to keys and queries
first. Nothing here knows layers.
"""

from __future__ import annotations

from numba import njit, types

from . import simd

F32 = types.float32
load_i64, load_f32, store, f32_of = simd.load_i64, simd.load_f32, simd.store, simd.f32_of
load16, splat = simd.load("f32", 16), simd.splat

NORM = simd.f32_bits(32**-0.5)
HALF_LIMIT, BLOCK_LIMIT = simd.f32_bits(65504.0), simd.f32_bits(65408.0)
NEARLY_HALF = simd.f32_bits(0.49999997)


@njit
def clipped(x, limit):
    """x clipped to -limit..limit; NaN stays NaN."""
    x = limit if x > limit else x
    return -limit if x < -limit else x


@njit
def spread_32(x):
    """Multiplies 32 numbers at x by the orthonormal Hadamard matrix, in place."""
    limit, norm = f32_of(BLOCK_LIMIT), f32_of(NORM)
    for i in range(32):
        store(x + 4 * i, clipped(load_f32(x + 4 * i), limit))
    step = 1
    while step < 32:
        for i in range(32):
            if i & step == 0:
                low, high = x + 4 * i, x + 4 * (i + step)
                a, b = load_f32(low), load_f32(high)
                store(low, a + b)
                store(high, a - b)
        step *= 2
    for i in range(32):
        store(x + 4 * i, load_f32(x + 4 * i) * norm)


@njit
def spread(arguments, begin, end, out, scratch):
    """Arguments: x. An item is 32 neighbouring numbers, changed in place."""
    for item in range(begin, end):
        spread_32(load_i64(arguments) + 128 * item)


@njit
def write_block(x, to):
    """Writes 32 numbers at x as block_q8_0: d = amax / 127, numbers rounded half away from zero."""
    limit, largest = f32_of(BLOCK_LIMIT), F32(0)
    for i in range(32):
        value = clipped(load_f32(x + 4 * i), limit)
        largest = max(largest, abs(value))
        if value != value:
            largest = value
    d = largest / F32(127)
    inverse = F32(1) / d if d != F32(0) else F32(0)
    if inverse > F32(3.4028235e38):
        inverse = F32(0)
    simd.store(to, simd.narrowed(simd.one_lane(d)))
    half = f32_of(NEARLY_HALF)
    for i in range(32):
        value = clipped(load_f32(x + 4 * i), limit) * inverse
        value += half if value >= F32(0) else -half
        simd.store(to + 2 + i, simd.as_byte(int(value)))


@njit
def write_numbers(x, n, is_half, to):
    """Writes n numbers in f32 or f16."""
    low, high = splat(-f32_of(HALF_LIMIT)), splat(f32_of(HALF_LIMIT))
    for i in range(n // 16):
        v = load16(x + 64 * i)
        if is_half:
            store(to + 32 * i, simd.narrowed(simd.clamped(v, low, high)))
        else:
            store(to + 64 * i, v)
    for i in range(n // 16 * 16, n):
        value = load_f32(x + 4 * i)
        if is_half:
            value = clipped(value, f32_of(HALF_LIMIT))
            store(to + 2 * i, simd.narrowed(simd.one_lane(value)))
        else:
            store(to + 4 * i, value)


@njit
def write_pages(arguments, begin, end, out, scratch):
    """Arguments: x f32 [T, G, size], G, size, kind, the layer's first page, bytes of a page, of a
    position, of a head; int64 [T] pages, and offsets in them. An item is a token.
    """
    x, heads, size = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    kind, pages = load_i64(arguments + 24), load_i64(arguments + 32)
    page_bytes, step = load_i64(arguments + 40), load_i64(arguments + 48)
    head_bytes = load_i64(arguments + 56)
    numbers, offsets = load_i64(arguments + 64), load_i64(arguments + 72)
    for token in range(begin, end):
        to = pages + load_i64(numbers + 8 * token) * page_bytes
        to += load_i64(offsets + 8 * token) * step
        for head in range(heads):
            source = x + 4 * size * (token * heads + head)
            if kind == 2:
                for i in range(size // 32):
                    write_block(source + 128 * i, to + 34 * i)
            else:
                write_numbers(source, size, kind == 1, to)
            to += head_bytes
