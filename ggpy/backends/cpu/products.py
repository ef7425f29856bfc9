"""BlockRows products from the blocks of a file, as kernels of the pool.

A kernel computes items begin..end of a job: kernel(arguments, begin, end, out, scratch), all of
them addresses or counts; out is where item `begin` goes. Products of few columns are row by row:
dot products of bytes with activations of 8 bits (`Columns`), or of the row in float32. Products of
many columns are GEMMs of float32: a panel of rows is dequantised, 256 columns at a time, and
multiplied from the first cache. Each number is summed in one order, whichever thread sums.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from . import simd
from .blocks import Declaration

F32 = types.float32
load_i64 = simd.load_i64

load_u8x64, load_i32x16 = simd.load("u8", 64), simd.load("i32", 16)
load2, load4, load8, load16 = (simd.load("f32", n) for n in (2, 4, 8, 16))
pair_lanes = simd.lanes(*[0] * 8, *[1] * 8)
minimum_lanes = simd.lanes(0, 0, 1, 1)
of_32 = [simd.lanes(*[2 * j] * 8, *[2 * j + 1] * 8) for j in range(4)]
of_16 = [simd.lanes(*[4 * j + i // 4 for i in range(16)]) for j in range(4)]
twice = simd.lanes(*[i // 2 for i in range(16)])
quarters = [simd.lanes(*range(16 * j, 16 * j + 16)) for j in range(4)]
fma, mul, add, total, to_f32 = simd.fma, simd.mul, simd.add, simd.total, simd.to_f32
zeros4 = simd.zeros_of(4)
zeros16 = simd.zeros

AHEAD = 4096  # bytes

# Activations as whole numbers with a scale for each 32, of 8 bits ("q8") or of 15 ("q16": 128 times
# one byte and another). A column, with K rounded up to 256, is K bytes, which are the high ones of
# q16; its low bytes; K/4 int32, -128 times the sum of 4 neighbours; K/32 scales f32; and K/16 sums
# of 16 neighbours, times the scale, f32.
LARGEST = {"q8": 127, "q16": 127 * 128}


def column_bytes(padded: int) -> int:
    """Bytes of a column."""
    return 3 * padded + padded // 8 + padded // 4


@njit
def quantize_32(x, limit, q, padded, sums, scale_at, below):
    """32 numbers at x -> whole numbers up to limit, their sums, and a scale."""
    a, b = load16(x), load16(x + 64)
    largest = simd.greatest(simd.larger(simd.absolute(a), simd.absolute(b)))
    none = simd.zeros()  # times x, which is NaN where x is no number
    scale = largest / limit + total(add(mul(a, none), mul(b, none)))
    inverse = F32(1) / scale if scale > F32(0) else F32(0)
    if inverse > F32(3e38):
        inverse = F32(0)
    wide = simd.splat(inverse)
    u, v = simd.rounded(mul(a, wide)), simd.rounded(mul(b, wide))
    write_bytes(u, limit, q, padded)
    write_bytes(v, limit, q + 16, padded)
    simd.store(sums, simd.sums_of_fours(u))
    simd.store(sums + 16, simd.sums_of_fours(v))
    simd.store(scale_at, scale)
    simd.store(below, total(to_f32(u)) * scale)
    simd.store(below + 4, total(to_f32(v)) * scale)


plus_64, by_128, times_128 = (
    simd.with_number(name, n) for name, n in (("add", 64), ("ashr", 7), ("shl", 7))
)
difference = simd.binary("sub")


@njit
def write_bytes(u, limit, q, padded):
    """16 whole numbers as bytes, or as high and low bytes, -64..63."""
    if limit == F32(127):
        simd.store(q, simd.low_bytes(u))
    else:
        high = by_128(plus_64(u))
        simd.store(q, simd.low_bytes(high))
        simd.store(q + padded, simd.low_bytes(difference(u, times_128(high))))


@njit
def quantize_columns(arguments, begin, end, out, scratch):
    """Arguments: x f32, bytes between its columns, K, K rounded up, the largest number, bytes of a
    column. An item is a column.
    """
    x, pitch, k = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    padded, limit = load_i64(arguments + 24), F32(load_i64(arguments + 32))
    for column in range(begin, end):
        source = x + column * pitch
        sums, scales = out + 2 * padded, out + 3 * padded
        for i in range(padded // 32):
            at = source + 128 * i
            if i * 32 + 32 > k:
                at = scratch  # what is left of x, then zeros
                for j in range(32 * i, 32 * i + 32):
                    simd.store(scratch + 4 * (j - 32 * i), rest_of(source, j, k))
            below = scales + padded // 8 + 8 * i
            quantize_32(at, limit, out + 32 * i, padded, sums + 32 * i, scales + 4 * i, below)
        out += load_i64(arguments + 40)


@njit
def rest_of(x, i, n):
    """x[i], and 0 from n on."""
    return simd.load_f32(x + 4 * i) if i < n else F32(0)


# One row times one column of bytes


def prefetching(nbytes: int) -> Any:
    """fetch(p): ask for the memory of later rows, which the processor would guess too late."""
    prefetch = simd.prefetch

    @njit
    def fetch(p):
        for at in range(AHEAD, AHEAD + nbytes, 64):
            prefetch(p + at)

    return fetch


def multiplied(offset: int, activations: str) -> Any:
    """dot(codes, x, padded, sums): 64 codes less the offset times 64 numbers at x, i32x16."""
    narrow, wide = simd.dot(offset), simd.wide_dot(offset)

    @njit
    def of_bytes(codes, x, padded, sums):
        return narrow(codes, load_u8x64(x), load_i32x16(sums))

    @njit
    def of_pairs(codes, x, padded, sums):
        return wide(codes, load_u8x64(x), load_u8x64(x + padded), load_i32x16(sums))

    return of_bytes if activations == "q8" else of_pairs


def row_of_pairs(d: Declaration, nbytes: int, activations: str) -> Any:
    """dot(row, n_blocks, x, padded) of blocks of 32 weights, two at a time."""
    codes, scales, minimums = d.codes, d.scales, d.minimums
    dot = multiplied(d.offset, activations)
    has_minimum = minimums is not None
    minimums = minimums or scales
    fetch = prefetching(2 * nbytes)

    @njit
    def row_dot(row, n_blocks, x, padded):
        acc, below = zeros16(), zeros4()
        last = row + (n_blocks - 1) * nbytes
        sums, s = x + 2 * padded, x + 3 * padded
        m = s + padded // 8
        for i in range((n_blocks + 1) // 2):
            p = row + 2 * nbytes * i
            q = min(p + nbytes, last)  # where the last one has no neighbour, x is zeros
            fetch(p)
            products = dot(codes(p, q), x + 64 * i, padded, sums + 64 * i)
            scale = mul(scales(p, q), load2(s + 8 * i))
            acc = fma(to_f32(products), pair_lanes(scale), acc)
            if has_minimum:
                below = fma(minimum_lanes(minimums(p, q)), load4(m + 16 * i), below)
        return total(acc) + total(below) if has_minimum else total(acc)

    return row_dot


def row_of_superblocks(d: Declaration, nbytes: int, groups: int, activations: str) -> Any:
    """dot(row, n_blocks, x, padded) of blocks of 256 weights with 8 or 16 scales."""
    codes, scales, minimums = d.codes, d.scales, d.minimums
    dot = multiplied(d.offset, activations)
    has_minimum = minimums is not None
    minimums = minimums or scales
    s0, s1, s2, s3 = of_32 if groups == 8 else of_16
    by_32 = groups == 8
    fetch = prefetching(nbytes)

    @njit
    def row_dot(row, n_blocks, x, padded):
        acc, more, below = zeros16(), zeros16(), zeros16()
        sums, s = x + 2 * padded, x + 3 * padded
        m = s + padded // 8
        for i in range(n_blocks):
            p, u, v = row + nbytes * i, x + 256 * i, sums + 256 * i
            fetch(p)
            a, b, c, d = codes(p)
            of_x = load8(s + 32 * i)
            scale = mul(scales(p), of_x if by_32 else twice(of_x))
            acc = fma(to_f32(dot(a, u, padded, v)), s0(scale), acc)
            more = fma(to_f32(dot(b, u + 64, padded, v + 64)), s1(scale), more)
            acc = fma(to_f32(dot(c, u + 128, padded, v + 128)), s2(scale), acc)
            more = fma(to_f32(dot(d, u + 192, padded, v + 192)), s3(scale), more)
            if has_minimum:
                low = minimums(p)
                below = fma(twice(low) if by_32 else low, load16(m + 64 * i), below)
        return total(add(add(acc, more), below)) if has_minimum else total(add(acc, more))

    return row_dot


def rows_of_bytes(row_dot: Any) -> Any:
    """Arguments: rows, bytes of one, its blocks, columns, bytes of one, K rounded up, their data.
    An item is a row: out[row, column].
    """

    @njit
    def kernel(arguments, begin, end, out, scratch):
        rows, row_bytes = simd.load_i64(arguments), simd.load_i64(arguments + 8)
        n_blocks, columns = simd.load_i64(arguments + 16), simd.load_i64(arguments + 24)
        pitch, padded = simd.load_i64(arguments + 32), simd.load_i64(arguments + 40)
        x = simd.load_i64(arguments + 48)
        for r in range(begin, end):
            for c in range(columns):
                value = row_dot(rows + r * row_bytes, n_blocks, x + c * pitch, padded)
                simd.store(out, value)
                out += 4

    return kernel


# Rows in float32: expand(row, first, n, out) writes weights first..first + n of a row


def expand_pairs(d: Declaration, nbytes: int) -> Any:
    """Of blocks of 32; an odd number of them ends with what has no meaning."""
    codes, scales, minimums, offset = d.codes, d.scales, d.minimums, simd.f32_of
    has_minimum = minimums is not None
    minimums = minimums or scales
    bits = simd.f32_bits(d.offset)
    low, high = simd.lanes(*[0] * 16), simd.lanes(*[1] * 16)

    @njit
    def expand(row, first, n, out):
        last = row + ((first + n) // 32 - 1) * nbytes
        zero = simd.splat(offset(bits))
        for i in range((n + 63) // 64):
            p = row + (first // 32 + 2 * i) * nbytes
            q = min(p + nbytes, last)
            c, s, m = codes(p, q), scales(p, q), minimums(p, q)
            if has_minimum:
                expanded(c, low(s), low(s), high(s), high(s), low(m), low(m), high(m), high(m), out)
            else:
                shifted(c, low(s), low(s), high(s), high(s), zero, out)
            out += 256

    return expand


q0, q1, q2, q3 = quarters
u8_to_f32, sub = simd.u8_to_f32, simd.sub


@njit
def shifted(codes, s0, s1, s2, s3, zero, out):
    """(code - zero) * scale of 64 codes."""
    simd.store(out, mul(sub(u8_to_f32(q0(codes)), zero), s0))
    simd.store(out + 64, mul(sub(u8_to_f32(q1(codes)), zero), s1))
    simd.store(out + 128, mul(sub(u8_to_f32(q2(codes)), zero), s2))
    simd.store(out + 192, mul(sub(u8_to_f32(q3(codes)), zero), s3))


@njit
def expanded(codes, s0, s1, s2, s3, m0, m1, m2, m3, out):
    """code * scale + minimum of 64 codes, each rounded, as ggpy.formats does."""
    simd.store(out, add(mul(u8_to_f32(q0(codes)), s0), m0))
    simd.store(out + 64, add(mul(u8_to_f32(q1(codes)), s1), m1))
    simd.store(out + 128, add(mul(u8_to_f32(q2(codes)), s2), m2))
    simd.store(out + 192, add(mul(u8_to_f32(q3(codes)), s3), m3))


def expand_superblocks(d: Declaration, nbytes: int, groups: int) -> Any:
    """Of blocks of 256."""
    codes, scales, minimums, offset = d.codes, d.scales, d.minimums, simd.f32_of
    has_minimum = minimums is not None
    minimums = minimums or scales
    bits = simd.f32_bits(d.offset)
    spread = [simd.lanes(*[i * groups // 16] * 16) for i in range(16)]
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = spread

    @njit
    def four(c, s, m, zero, out, f0, f1, f2, f3):
        if has_minimum:
            expanded(c, f0(s), f1(s), f2(s), f3(s), f0(m), f1(m), f2(m), f3(m), out)
        else:
            shifted(c, f0(s), f1(s), f2(s), f3(s), zero, out)

    @njit
    def expand(row, first, n, out):
        zero = simd.splat(offset(bits))
        for i in range(n // 256):
            p = row + (first // 256 + i) * nbytes
            a, b, c, d = codes(p)
            s, m = scales(p), minimums(p)
            four(a, s, m, zero, out, a0, a1, a2, a3)
            four(b, s, m, zero, out + 256, b0, b1, b2, b3)
            four(c, s, m, zero, out + 512, c0, c1, c2, c3)
            four(d, s, m, zero, out + 768, d0, d1, d2, d3)
            out += 1024

    return expand


# Numbers without blocks


def expand_numbers(size: int, kind: str) -> Any:
    """Of F32, F16 and BF16, of `size` bytes each."""
    read, one = NUMBERS[kind]

    @njit
    def expand(row, first, n, out):
        row += first * size
        for i in range(n // 16):
            simd.store(out + 64 * i, read(row + 16 * size * i))
        for i in range(n // 16 * 16, n):
            simd.store(out + 4 * i, one(row + size * i))

    return expand


load_halves, load_words = simd.load("f16", 16), simd.load("i16", 16)


@njit
def halves(p):
    return simd.widened(load_halves(p))


@njit
def brains(p):
    return simd.from_bf16(load_words(p))


@njit
def brain(p):
    return simd.f32_of(simd.load_u16(p) << 16)


NUMBERS = {
    "F32": (load16, simd.load_f32),
    "F16": (halves, simd.load_f16),
    "BF16": (brains, brain),
}


@njit
def add_up(arguments, begin, end, out, scratch):
    """Arguments: memory. An item is 4 KB of it: out f32, their sum. What reading costs at least."""
    for item in range(begin, end):
        acc, more = zeros16(), zeros16()
        at = load_i64(arguments) + 4096 * item
        for i in range(0, 4096, 128):
            prefetch(at + i + AHEAD)
            prefetch(at + i + AHEAD + 64)
            acc, more = add(acc, load16(at + i)), add(more, load16(at + i + 64))
        simd.store(out, total(add(acc, more)))
        out += 4


prefetch = simd.prefetch
