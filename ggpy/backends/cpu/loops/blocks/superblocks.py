"""Blocks of 256 weights whose codes are numbers: the K types, IQ4_XS, and ternary digits."""

from __future__ import annotations

from numba import njit

from .. import simd
from .declared import (
    Declaration,
    either,
    f16,
    joined,
    load4,
    load16,
    load32,
    load64,
    nibbles,
    splat8,
    splat16,
)
from .pairs import by_group, iq4_values

one, and3, and4, and15 = (simd.with_number("and_", n) for n in (1, 3, 4, 15))
shr1, shr2, shr3, shr4, shr5, shr6, shr7 = (simd.with_number("lshr", n) for n in range(1, 8))
shl2, shl4 = (simd.with_number("shl", n) for n in (2, 4))

MINUS_32 = 0xC2000000  # -32 as the bits of an f32


@njit
def two_bits(v):
    """u8x32 -> two u8x64: bits 0-1 then 2-3, and bits 4-5 then 6-7."""
    return and3(joined(v, shr2(v))), and3(joined(shr4(v), shr6(v)))


@njit
def six_bits(low, high, spare):
    """Four numbers of 6 bits in `low`, and four of nibbles in `high` and spare bits -> f32x8."""
    second = (high & 0x0F0F0F0F) | ((spare >> 6) & 0x03030303) << 4
    return simd.u8_to_f32(simd.bytes_of((low & 0x3F3F3F3F) | second << 32))


@njit
def k_scales(p):
    """d * scale of Q4_K and Q5_K (formats/k_scales.py), f32x8."""
    first, third = simd.load_u32(p + 4), simd.load_u32(p + 12)
    return simd.mul(splat8(f16(p)), six_bits(first, third, first))


@njit
def k_minimums(p):
    """-dmin * minimum, f32x8."""
    second, third = simd.load_u32(p + 8), simd.load_u32(p + 12)
    return simd.mul(splat8(-f16(p + 2)), six_bits(second, third >> 4, second))


@njit
def q4_k_codes(p):
    a, b = nibbles(load32(p + 16)), nibbles(load32(p + 48))
    return a, b, nibbles(load32(p + 80)), nibbles(load32(p + 112))


@njit
def q5_k_codes(p):
    a, b, c, d = q4_k_codes(p + 32)
    h = load32(p + 16)
    a = either(a, shl4(one(joined(h, shr1(h)))))
    b = either(b, shl4(one(joined(shr2(h), shr3(h)))))
    c = either(c, shl4(one(joined(shr4(h), shr5(h)))))
    d = either(d, shl4(one(joined(shr6(h), shr7(h)))))
    return a, b, c, d


@njit
def q6_k_codes(p):
    u, v = load64(p), load64(p + 64)
    a, b = two_bits(load32(p + 128))
    c, d = two_bits(load32(p + 160))
    low = either(and15(u), shl4(a)), either(shr4(u), shl4(b))
    return low[0], low[1], either(and15(v), shl4(c)), either(shr4(v), shl4(d))


@njit
def q6_k_scales(p):
    return simd.mul(splat16(f16(p + 208)), simd.i8_to_f32(load16(p + 192)))


@njit
def q3_k_codes(p):
    a, b = two_bits(load32(p + 32))
    c, d = two_bits(load32(p + 64))
    h = load32(p)
    a = either(a, and4(joined(shl2(h), simd.add_whole(h, h))))
    b = either(b, and4(joined(h, shr1(h))))
    c = either(c, and4(joined(shr2(h), shr3(h))))
    d = either(d, and4(joined(shr4(h), shr5(h))))
    return a, b, c, d


@njit
def q3_k_scales(p):
    low, high = simd.load_i64(p + 96), simd.load_u32(p + 104)
    first = (low & 0x0F0F0F0F0F0F0F0F) | spread_pairs(high) << 4
    second = ((low >> 4) & 0x0F0F0F0F0F0F0F0F) | spread_pairs(high >> 4) << 4
    levels = simd.u8_to_f32(joined(simd.bytes_of(first), simd.bytes_of(second)))
    return simd.mul(splat16(f16(p + 108)), simd.add(levels, splat16(simd.f32_of(MINUS_32))))


@njit
def spread_pairs(word):
    """Bits 0-1 of four bytes, then bits 2-3 of them, as eight bytes."""
    return (word & 0x03030303) | ((word >> 2) & 0x03030303) << 32


@njit
def q2_k_codes(p):
    a, b = two_bits(load32(p + 16))
    c, d = two_bits(load32(p + 48))
    return a, b, c, d


@njit
def q2_k_scales(p):
    return simd.mul(splat16(f16(p + 80)), simd.u8_to_f32(and15(load16(p))))


@njit
def q2_k_minimums(p):
    return simd.mul(splat16(-f16(p + 82)), simd.u8_to_f32(shr4(load16(p))))


@njit
def iq4_xs_codes(p):
    p += 8
    a, b = iq4_64(p), iq4_64(p + 32)
    return a, b, iq4_64(p + 64), iq4_64(p + 96)


@njit
def iq4_64(p):
    return iq4_values(by_group(nibbles(load32(p))))


@njit
def iq4_xs_scales(p):
    low, high = simd.load_u32(p + 4), simd.load_u16(p + 2)
    levels = 0
    for g in range(8):
        levels |= (((low >> 4 * g) & 15) | ((high >> 2 * g) & 3) << 4) << 8 * g
    whole = simd.add(simd.u8_to_f32(simd.bytes_of(levels)), splat8(simd.f32_of(MINUS_32)))
    return simd.mul(splat8(f16(p)), whole)


@njit
def tq2_0_codes(p):
    a, b = two_bits(load32(p))
    c, d = two_bits(load32(p + 32))
    return a, b, c, d


@njit
def tq2_0_scales(p):
    return splat8(f16(p + 64))


from_86, from_171 = simd.at_least(86), simd.at_least(171)


@njit
def digit(v):
    """The first digit (0-2) after the point of v / 256 in base 3."""
    return simd.add_whole(from_86(v), from_171(v))


@njit
def times_3(v):
    """3 v modulo 256, whose first digit is the next one of v."""
    return simd.add_whole(simd.add_whole(v, v), v)


@njit
def tq1_0_codes(p):
    v, w, x = load32(p), load16(p + 32), load4(p + 48)
    v1, w1, x1 = times_3(v), times_3(w), times_3(x)
    v2, w2, x2 = times_3(v1), times_3(w1), times_3(x1)
    v3, w3, x3 = times_3(v2), times_3(w2), times_3(x2)
    third = joined(times_3(v3), joined(w, w1))
    last = joined(times_3(w3), joined(joined(x, x1), joined(x2, x3)))
    fourth = joined(joined(w2, w3), last)
    return digit(joined(v, v1)), digit(joined(v2, v3)), digit(third), digit(fourth)


@njit
def tq1_0_scales(p):
    return splat8(f16(p + 52))


DECLARED = {
    "Q2_K": Declaration(q2_k_codes, q2_k_scales, q2_k_minimums, group=16),
    "Q3_K": Declaration(q3_k_codes, q3_k_scales, offset=4, group=16),
    "Q4_K": Declaration(q4_k_codes, k_scales, k_minimums),
    "Q5_K": Declaration(q5_k_codes, k_scales, k_minimums),
    "Q6_K": Declaration(q6_k_codes, q6_k_scales, offset=32, group=16),
    "IQ4_XS": Declaration(iq4_xs_codes, iq4_xs_scales, offset=128),
    "TQ1_0": Declaration(tq1_0_codes, tq1_0_scales, offset=1),
    "TQ2_0": Declaration(tq2_0_codes, tq2_0_scales, offset=1),
}
