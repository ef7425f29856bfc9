"""What numba must know of each block format: where codes, scales and minimums lie in a block.

A format is declared once, by two functions of the addresses of its blocks, and every loop is made
from them: w = scale * (code - offset) + minimum, for 64 codes at a time. Formats of 32 weights give
two neighbouring blocks p and q; those of 256 give one. Vectors are as in simd.py; formats that are
missing here are dequantised by ggpy.formats. Nothing here knows activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import njit

from ...formats.base import Format
from ...formats.iq4_nl import VALUES
from ...formats.mxfp4 import E2M1_DOUBLED
from . import simd

load16, load32, load64 = (simd.load("u8", n) for n in (16, 32, 64))
and3, and15, and4 = (simd.with_number("and_", n) for n in (3, 15, 4))
shr2, shr4, shr6 = (simd.with_number("lshr", n) for n in (2, 4, 6))
shl2, shl4 = (simd.with_number("shl", n) for n in (2, 4))
flip = simd.with_number("xor", 128)
either, joined, nibbles = simd.bit_or, simd.joined, simd.nibbles
f16 = simd.load_f16
bits_as_16 = simd.bits_as(16)
splat8, splat16 = simd.splat_of(8), simd.splat_of(16)


@dataclass(frozen=True)
class Declaration:
    """How the blocks of a format are read.

    codes: of 32 weights: (p, q) -> u8x64; of 256: p -> four u8x64, or 16-bit numbers for floats.
    scales: (p, q) -> f32x2, or p -> f32x8 or f32x16: a scale for each 32 or 16 weights.
    minimums: the same, of what is added; None for nothing.
    """

    codes: Callable[..., Any]
    scales: Callable[..., Any]
    minimums: Callable[..., Any] | None = None
    offset: int = 0


DECLARATIONS: dict[str, Declaration] = {}


def declaration(format: Format) -> Declaration | None:
    """The format's declaration, or None."""
    return DECLARATIONS.get(format.name)


# Two blocks of 32 weights


@njit
def d_pair(p, q):
    """f16 at the start of two blocks -> f32x2."""
    return simd.pair(f16(p), f16(q))


@njit
def m_pair(p, q):
    """f16 behind the scale of two blocks -> f32x2."""
    return simd.pair(f16(p + 2), f16(q + 2))


# Nibbles of bytes 0-15 are weights 0-15 and 16-31, of bytes 16-31 those of the next group.
by_group = simd.lanes(*range(16), *range(32, 48), *range(16, 32), *range(48, 64))


@njit
def nibbles_pair(p, q):
    """16 bytes at p and at q, in each the low nibbles first -> u8x64."""
    return by_group(nibbles(joined(load16(p), load16(q))))


@njit
def q8_0_codes(p, q):
    return flip(joined(load32(p + 2), load32(q + 2)))


@njit
def q4_0_codes(p, q):
    return nibbles_pair(p + 2, q + 2)


@njit
def q4_1_codes(p, q):
    return nibbles_pair(p + 4, q + 4)


@njit
def fifth_bits(p, q):
    """32 bits at p and at q -> u8x64 of 0 and 16."""
    return joined(bits_as_16(simd.load_u32(p)), bits_as_16(simd.load_u32(q)))


@njit
def q5_0_codes(p, q):
    return either(nibbles_pair(p + 6, q + 6), fifth_bits(p + 2, q + 2))


@njit
def q5_1_codes(p, q):
    return either(nibbles_pair(p + 8, q + 8), fifth_bits(p + 4, q + 4))


iq4_values = simd.lookup([int(v) + 128 for v in VALUES])
e2m1_values = simd.lookup([int(v) + 16 for v in E2M1_DOUBLED])


@njit
def iq4_nl_codes(p, q):
    return iq4_values(nibbles_pair(p + 2, q + 2))


@njit
def mxfp4_codes(p, q):
    return e2m1_values(nibbles_pair(p + 1, q + 1))


@njit
def power_of_two(e):
    """2^(e - 128), which is subnormal where e is 0 or 1."""
    return simd.f32_of((e - 1) << 23 if e > 1 else 0x200000 << e)


@njit
def e8_pair(p, q):
    return simd.pair(power_of_two(simd.load_u8(p)), power_of_two(simd.load_u8(q)))


# A block of 256 weights


@njit
def six_bits(low, high, spare):
    """Four bytes of 6 bits, and four more from nibbles and spare bits -> f32x8."""
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


one = simd.with_number("and_", 1)
shr1, shr3, shr5, shr7 = (simd.with_number("lshr", n) for n in (1, 3, 5, 7))


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
def two_bits(v):
    """u8x32 -> two u8x64: bits 0-1 then 2-3, and bits 4-5 then 6-7."""
    return and3(joined(v, shr2(v))), and3(joined(shr4(v), shr6(v)))


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


MINUS_32 = 0xC2000000  # -32 as the bits of an f32


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


DECLARATIONS |= {
    "Q8_0": Declaration(q8_0_codes, d_pair, offset=128),
    "Q4_0": Declaration(q4_0_codes, d_pair, offset=8),
    "Q4_1": Declaration(q4_1_codes, d_pair, m_pair),
    "Q5_0": Declaration(q5_0_codes, d_pair, offset=16),
    "Q5_1": Declaration(q5_1_codes, d_pair, m_pair),
    "IQ4_NL": Declaration(iq4_nl_codes, d_pair, offset=128),
    "MXFP4": Declaration(mxfp4_codes, e8_pair, offset=16),
    "Q2_K": Declaration(q2_k_codes, q2_k_scales, q2_k_minimums),
    "Q3_K": Declaration(q3_k_codes, q3_k_scales, offset=4),
    "Q4_K": Declaration(q4_k_codes, k_scales, k_minimums),
    "Q5_K": Declaration(q5_k_codes, k_scales, k_minimums),
    "Q6_K": Declaration(q6_k_codes, q6_k_scales, offset=32),
    "IQ4_XS": Declaration(iq4_xs_codes, iq4_xs_scales, offset=128),
}
