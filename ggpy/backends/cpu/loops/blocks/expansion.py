"""Kernels that dequantise rows of blocks, or of numbers without blocks, to float32.

expand(row, first, n, out) writes weights first..first + n of the row at the address `row`, where
`first` is a multiple of 256. The results have the bits of ggpy.formats. Those of blocks are made
from declarations.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ...sizes import OF_MINIMUMS, OF_SCALES
from .. import simd
from .declared import Declaration

load16, u8_to_f32 = simd.load("f32", 16), simd.u8_to_f32
mul, add, sub = simd.mul, simd.add, simd.sub
q0, q1, q2, q3 = (simd.lanes(*range(16 * j, 16 * j + 16)) for j in range(4))


def of_pairs(d: Declaration, nbytes: int) -> Any:
    """expand for blocks of 32, two at a time; after an odd number, out gets 32 numbers too many."""
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


def of_64s(d: Declaration, nbytes: int) -> Any:
    """expand for blocks of 64."""
    codes, scales, offset, bits = d.codes, d.scales, simd.f32_of, simd.f32_bits(d.offset)
    f0, f1, f2, f3 = (simd.lanes(*[i] * 16) for i in range(4))

    @njit
    def expand(row, first, n, out):
        zero = simd.splat(offset(bits))
        for i in range(n // 64):
            p = row + (first // 64 + i) * nbytes
            s = scales(p)
            shifted(codes(p), f0(s), f1(s), f2(s), f3(s), zero, out)
            out += 256

    return expand


def of_128s(d: Declaration, nbytes: int) -> Any:
    """expand for blocks of 128 with one scale."""
    codes, scales, offset, bits = d.codes, d.scales, simd.f32_of, simd.f32_bits(d.offset)
    all_of_first = simd.lanes(*[0] * 16)

    @njit
    def expand(row, first, n, out):
        zero = simd.splat(offset(bits))
        for i in range(n // 128):
            p = row + (first // 128 + i) * nbytes
            s = all_of_first(scales(p))
            a, b = codes(p)
            shifted(a, s, s, s, s, zero, out)
            shifted(b, s, s, s, s, zero, out + 256)
            out += 512

    return expand


def of_superblocks(d: Declaration, nbytes: int) -> Any:
    """expand for blocks of 256."""
    codes, scales, minimums, offset = d.codes, d.scales, d.minimums, simd.f32_of
    has_minimum = minimums is not None
    minimums = minimums or scales
    bits = simd.f32_bits(d.offset)
    spread = [simd.lanes(*[16 * i // d.group] * 16) for i in range(16)]
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


# Whole numbers: a row of a panel, as sizes.py describes it.


def whole_of_pairs(d: Declaration, nbytes: int) -> Any:
    """expand for blocks of 32, two at a time."""
    codes, scales, minimums, words = d.codes, d.scales, d.minimums, simd.words(d.offset)
    has_minimum = minimums is not None
    minimums = minimums or scales

    @njit
    def expand(row, first, n, out):
        last = row + ((first + n) // 32 - 1) * nbytes
        for i in range((n + 63) // 64):
            p = row + (first // 32 + 2 * i) * nbytes
            q = min(p + nbytes, last)
            simd.store(out + 128 * i, words(codes(p, q)))
            simd.store(out + OF_SCALES + 8 * i, scales(p, q))
            if has_minimum:
                simd.store(out + OF_MINIMUMS + 8 * i, minimums(p, q))

    return expand


def whole_of_64s(d: Declaration, nbytes: int) -> Any:
    """expand for blocks of 64."""
    codes, scales, words = d.codes, d.scales, simd.words(d.offset)

    @njit
    def expand(row, first, n, out):
        for i in range(n // 64):
            p = row + (first // 64 + i) * nbytes
            simd.store(out + 128 * i, words(codes(p)))
            simd.store(out + OF_SCALES + 16 * i, scales(p))

    return expand


def whole_of_128s(d: Declaration, nbytes: int) -> Any:
    """expand for blocks of 128 with one scale."""
    codes, scales, words = d.codes, d.scales, simd.words(d.offset)
    four = simd.lanes(0, 0, 0, 0)

    @njit
    def expand(row, first, n, out):
        for i in range(n // 128):
            p = row + (first // 128 + i) * nbytes
            a, b = codes(p)
            simd.store(out + 256 * i, words(a))
            simd.store(out + 256 * i + 128, words(b))
            simd.store(out + OF_SCALES + 16 * i, four(scales(p)))

    return expand


def whole_of_superblocks(d: Declaration, nbytes: int) -> Any:
    """expand for blocks of 256."""
    codes, scales, minimums, words = d.codes, d.scales, d.minimums, simd.words(d.offset)
    has_minimum = minimums is not None
    minimums = minimums or scales

    @njit
    def expand(row, first, n, out):
        for i in range(n // 256):
            p = row + (first // 256 + i) * nbytes
            a, b, c, d = codes(p)
            simd.store(out, words(a))
            simd.store(out + 128, words(b))
            simd.store(out + 256, words(c))
            simd.store(out + 384, words(d))
            simd.store(out + OF_SCALES, scales(p))
            if has_minimum:
                simd.store(out + OF_MINIMUMS, minimums(p))

    return expand


# Numbers without blocks


def of_numbers(size: int, kind: str) -> Any:
    """expand for F32, F16 or BF16, numbers of `size` bytes."""
    read, one = NUMBERS[kind]

    @njit
    def expand(row, first, n, out):
        row += first * size
        for i in range(n // 16):
            simd.store(out + 64 * i, read(row + 16 * size * i))
        for i in range(n // 16 * 16, n):
            simd.store(out + 4 * i, one(row + size * i))

    return expand


load_f16s, load_words = simd.load("f16", 16), simd.load("i16", 16)


@njit
def f16s(p):
    return simd.widened(load_f16s(p))


@njit
def bf16s(p):
    return simd.from_bf16(load_words(p))


@njit
def bf16(p):
    return simd.f32_of(simd.load_u16(p) << 16)


NUMBERS = {
    "F32": (load16, simd.load_f32),
    "F16": (f16s, simd.load_f16),
    "BF16": (bf16s, bf16),
}
