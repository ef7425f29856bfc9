"""Products of few columns with the blocks of a file, as kernels of the pool.

A kernel computes items begin..end of a job: kernel(arguments, begin, end, out, scratch), all of
them addresses or counts; the result of item `begin` goes to out. Products of few columns are
computed row by row: dot products of codes with activations that are rounded to whole numbers (see
sizes.py), or, in gemm.py, of the dequantised row with float32. gemm.py also has the products of
many columns. Each number is summed in one order, whichever thread computes it.
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
each_twice = simd.lanes(0, 0, 1, 1)
of_32 = [simd.lanes(*[2 * j] * 8, *[2 * j + 1] * 8) for j in range(4)]
of_16 = [simd.lanes(*[4 * j + i // 4 for i in range(16)]) for j in range(4)]
of_four = simd.lanes(*[i // 4 for i in range(16)])
twice = simd.lanes(*[i // 2 for i in range(16)])
fma, mul, add, total, to_f32 = simd.fma, simd.mul, simd.add, simd.total, simd.to_f32
zeros4 = simd.zeros_of(4)
zeros16 = simd.zeros

# Bytes ahead that are prefetched to the L2 cache, and to L1. L1 alone can have too few requests in
# flight to hide the latency of memory.
FAR, NEAR = 16384, 1024
prefetch_far, prefetch_near = simd.prefetch(2), simd.prefetch(3)

# Columns of whole numbers; sizes.py describes their layout.


@njit
def quantize_32(x, limit, q, padded, sums, scale_at, below):
    """32 numbers at x -> whole numbers up to limit, their sums, and a scale."""
    a, b = load16(x), load16(x + 64)
    largest = simd.greatest(simd.larger(simd.absolute(a), simd.absolute(b)))
    none = simd.zeros()  # 0 * x makes the scale NaN if x has NaN or infinity
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
    """Writes 16 whole numbers as bytes, or as high bytes and low bytes (-64..63)."""
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
                at = scratch  # the rest of x, then zeros
                for j in range(32 * i, 32 * i + 32):
                    simd.store(scratch + 4 * (j - 32 * i), rest_of(source, j, k))
            below = scales + padded // 8 + 8 * i
            quantize_32(at, limit, out + 32 * i, padded, sums + 32 * i, scales + 4 * i, below)
        out += load_i64(arguments + 40)


@njit
def rest_of(x, i, n):
    """x[i] if i < n, else 0."""
    return simd.load_f32(x + 4 * i) if i < n else F32(0)


# One row times one column of bytes


def prefetching(nbytes: int) -> Any:
    """fetch(p): prefetches the memory of later rows; the processor's own prefetcher is too late."""

    @njit
    def fetch(p):
        for at in range(0, nbytes, 64):
            prefetch_far(p + FAR + at)
            prefetch_near(p + NEAR + at)

    return fetch


fetch_two_lines = prefetching(128)


def multiplied(offset: int, activations: str) -> Any:
    """dot(codes, x, padded, sums) -> i32x16: (64 codes - offset) times 64 whole numbers at x."""
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
            q = min(p + nbytes, last)  # if the last block has no neighbour, x has zeros there
            fetch(p)
            products = dot(codes(p, q), x + 64 * i, padded, sums + 64 * i)
            scale = mul(scales(p, q), load2(s + 8 * i))
            acc = fma(to_f32(products), pair_lanes(scale), acc)
            if has_minimum:
                below = fma(each_twice(minimums(p, q)), load4(m + 16 * i), below)
        return total(acc) + total(below) if has_minimum else total(acc)

    return row_dot


def row_of_64s(d: Declaration, nbytes: int, activations: str) -> Any:
    """dot(row, n_blocks, x, padded) of blocks of 64 weights with 4 scales."""
    codes, scales = d.codes, d.scales
    dot = multiplied(d.offset, activations)
    fetch = prefetching(nbytes)

    @njit
    def row_dot(row, n_blocks, x, padded):
        acc = zeros16()
        sums, s = x + 2 * padded, x + 3 * padded
        for i in range(n_blocks):
            p = row + nbytes * i
            fetch(p)
            products = dot(codes(p), x + 64 * i, padded, sums + 64 * i)
            scale = mul(scales(p), each_twice(load2(s + 8 * i)))
            acc = fma(to_f32(products), of_four(scale), acc)
        return total(acc)

    return row_dot


def row_of_128s(d: Declaration, nbytes: int, activations: str) -> Any:
    """dot(row, n_blocks, x, padded) of blocks of 128 weights with one scale."""
    codes, scales = d.codes, d.scales
    dot = multiplied(d.offset, activations)
    fetch = prefetching(nbytes)

    @njit
    def row_dot(row, n_blocks, x, padded):
        acc, more = zeros16(), zeros16()
        sums, s = x + 2 * padded, x + 3 * padded
        for i in range(n_blocks):
            p, u, v = row + nbytes * i, x + 128 * i, sums + 128 * i
            fetch(p)
            a, b = codes(p)
            of_w = scales(p)
            low = mul(of_w, each_twice(load2(s + 16 * i)))
            high = mul(of_w, each_twice(load2(s + 16 * i + 8)))
            acc = fma(to_f32(dot(a, u, padded, v)), of_four(low), acc)
            more = fma(to_f32(dot(b, u + 64, padded, v + 64)), of_four(high), more)
        return total(add(acc, more))

    return row_dot


def row_of_superblocks(d: Declaration, nbytes: int, activations: str) -> Any:
    """dot(row, n_blocks, x, padded) of blocks of 256 weights with 8 or 16 scales."""
    codes, scales, minimums = d.codes, d.scales, d.minimums
    dot = multiplied(d.offset, activations)
    has_minimum = minimums is not None
    minimums = minimums or scales
    s0, s1, s2, s3 = of_32 if d.group == 32 else of_16
    by_32 = d.group == 32
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
    """Arguments: w's rows, bytes of one, its blocks, columns, bytes of one, K rounded up, their
    data, N, ids (i32) or 0, pairs that share a column. An item is a row: out[row, column]. For
    experts w[X, N, K], items are the rows of the expert ids[pair] for each pair, times its column.
    """

    @njit
    def kernel(arguments, begin, end, out, scratch):
        row_bytes, n_blocks = simd.load_i64(arguments + 8), simd.load_i64(arguments + 16)
        columns, pitch = simd.load_i64(arguments + 24), simd.load_i64(arguments + 32)
        padded, n_rows = simd.load_i64(arguments + 40), simd.load_i64(arguments + 56)
        while begin < end:
            pair = begin // n_rows
            first = begin - pair * n_rows
            rows = simd.load_i64(arguments) + expert_of(arguments + 64, pair) * n_rows * row_bytes
            x = simd.load_i64(arguments + 48) + pair // simd.load_i64(arguments + 72) * pitch
            last = min(n_rows, first + end - begin)
            for r in range(first, last):
                for c in range(columns):
                    value = row_dot(rows + r * row_bytes, n_blocks, x + c * pitch, padded)
                    simd.store(out, value)
                    out += 4
            begin += last - first

    return kernel


@njit
def expert_of(at, pair):
    """ids[pair], where the address of ids is stored at `at`; 0 if that address is 0."""
    ids = load_i64(at)
    return simd.load_i32(ids + 4 * pair) if ids != 0 else 0


@njit
def add_up(arguments, begin, end, out, scratch):
    """Arguments: memory. An item is 4 KB of it; out: its sum in f32. Measures memory bandwidth."""
    for item in range(begin, end):
        acc, more = zeros16(), zeros16()
        at = load_i64(arguments) + 4096 * item
        for i in range(0, 4096, 128):
            fetch_two_lines(at + i)
            acc, more = add(acc, load16(at + i)), add(more, load16(at + i + 64))
        simd.store(out, total(add(acc, more)))
        out += 4
