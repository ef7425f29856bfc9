"""Blocks of 256 weights whose codes are points of a codebook: IQ1, IQ2 and IQ3.

A point is 8 or 4 bytes of a table. Where a block stores signs, a set bit reflects its byte about
the offset. Bit fields of a block are spread and packed in integers of 64 bits.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from .....formats.grids import grid
from .. import simd
from .declared import Declaration, f16, joined, splat8, splat16

load_u8, load_u16, load_u32, load_i64 = simd.load_u8, simd.load_u16, simd.load_u32, simd.load_i64
chosen, less_2 = simd.chosen, simd.with_number("sub", 2)
QUARTER, HALF, TWO = (simd.f32_bits(x) for x in (0.25, 0.5, 2.0))


def magnitudes(name: str, offset: int) -> Any:
    """pick(u, v) for a grid of magnitudes, with `offset` added to each."""
    return simd.points(lambda: (grid(name).astype(int) + offset).tolist())


def shifted_digits(name: str) -> Any:
    """pick(u, v) for a grid of digits -1, 0, 1 plus 1/8, in eighths, with the offset 16 added."""
    return simd.points(lambda: (8 * grid(name).astype(int) + 17).tolist())


def reflected(offset: int) -> Any:
    """signed(codes, bits): 2 * offset - code where a bit is set."""
    beyond, flip = simd.with_number("add", 2 * offset + 1), simd.with_number("xor", 255)

    @njit
    def signed(codes, bits):
        return chosen(bits, beyond(flip(codes)), codes)

    return signed


def spread(bits: int) -> Any:
    """apart(word): four neighbouring fields of `bits` bits -> one in each 16 bits of an int64."""
    two, field = (1 << 2 * bits) - 1, (1 << bits) - 1
    by_two, by_one = 32 - 2 * bits, 16 - bits
    pairs = two | two << 32
    singles = field | field << 16 | field << 32 | field << 48

    @njit
    def apart(word):
        word = (word | word << by_two) & pairs
        return (word | word << by_one) & singles

    return apart


spread1, spread2, spread3, spread4 = (spread(bits) for bits in (1, 2, 3, 4))
spread7, spread8 = spread(7), spread(8)


@njit
def packed(word):
    """Four bytes, one in each 16 bits -> 32 bits."""
    word = (word | word >> 8) & 0x0000FFFF0000FFFF
    return (word | word >> 16) & 0xFFFFFFFF


@njit
def even_signs(codes):
    """Four codes of 7 bits, one in each 16 -> 32 signs: the eighth bit makes each 8 even."""
    parity = codes ^ codes >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return packed(codes | (parity & 0x0001000100010001) << 7)


@njit
def both(low, high):
    """Two numbers of 32 bits as one of 64."""
    return low | high << 32


@njit
def scaled8(d, factor, levels):
    """(level + 1/2) * factor * d of eight bytes."""
    whole = simd.add(simd.u8_to_f32(simd.bytes_of(levels)), splat8(simd.f32_of(HALF)))
    return simd.mul(splat8(d * simd.f32_of(factor)), whole)


@njit
def scaled16(d, factor, low, high):
    """(level + 1/2) * factor * d of sixteen bytes."""
    levels = joined(simd.bytes_of(low), simd.bytes_of(high))
    whole = simd.add(simd.u8_to_f32(levels), splat16(simd.f32_of(HALF)))
    return simd.mul(splat16(d * simd.f32_of(factor)), whole)


@njit
def in_bytes(word):
    """Eight nibbles -> eight bytes."""
    return both(packed(spread4(word & 0xFFFF)), packed(spread4(word >> 16)))


# IQ2_XXS and IQ3_XXS: four codes of 7 bits, and above them a scale of 4

xxs_points, xxs_signed = magnitudes("IQ2_XXS", 64), reflected(64)


@njit
def signs_below_scales(a, b):
    """64 signs of two words."""
    return both(even_signs(spread7(a & 0xFFFFFFF)), even_signs(spread7(b & 0xFFFFFFF)))


@njit
def iq2_xxs_64(p):
    codes = xxs_points(spread8(load_u32(p)), spread8(load_u32(p + 8)))
    return xxs_signed(codes, signs_below_scales(load_u32(p + 4), load_u32(p + 12)))


@njit
def iq2_xxs_codes(p):
    p += 2
    return iq2_xxs_64(p), iq2_xxs_64(p + 16), iq2_xxs_64(p + 32), iq2_xxs_64(p + 48)


@njit
def levels_above_signs(p, step):
    """The scales of eight words, as bytes."""
    levels = 0
    for i in range(8):
        levels |= (load_u32(p + step * i) >> 28) << 8 * i
    return levels


@njit
def iq2_xxs_scales(p):
    return scaled8(f16(p), QUARTER, levels_above_signs(p + 6, 8))


iq3_xxs_points = magnitudes("IQ3_XXS", 64)


@njit
def iq3_xxs_64(p, words):
    a = iq3_xxs_points(spread8(load_u32(p)), spread8(load_u32(p + 4)))
    b = iq3_xxs_points(spread8(load_u32(p + 8)), spread8(load_u32(p + 12)))
    return xxs_signed(joined(a, b), signs_below_scales(load_u32(words), load_u32(words + 4)))


@njit
def iq3_xxs_codes(p):
    p, w = p + 2, p + 66
    a, b = iq3_xxs_64(p, w), iq3_xxs_64(p + 16, w + 8)
    return a, b, iq3_xxs_64(p + 32, w + 16), iq3_xxs_64(p + 48, w + 24)


@njit
def iq3_xxs_scales(p):
    return scaled8(f16(p), HALF, levels_above_signs(p + 66, 4))


# IQ2_XS: 9 bits of an index below a code of 7

xs_points = magnitudes("IQ2_XS", 64)


@njit
def iq2_xs_64(p):
    u, v = load_i64(p), load_i64(p + 8)
    codes = xs_points(u & 0x01FF01FF01FF01FF, v & 0x01FF01FF01FF01FF)
    low, high = (u >> 9) & 0x007F007F007F007F, (v >> 9) & 0x007F007F007F007F
    return xxs_signed(codes, both(even_signs(low), even_signs(high)))


@njit
def iq2_xs_codes(p):
    p += 2
    return iq2_xs_64(p), iq2_xs_64(p + 16), iq2_xs_64(p + 32), iq2_xs_64(p + 48)


@njit
def iq2_xs_scales(p):
    return by_16(f16(p), p + 66)


@njit
def by_16(d, p):
    """d * (0.5 + scale) / 4 of the 16 nibbles at p."""
    return scaled16(d, QUARTER, in_bytes(load_u32(p)), in_bytes(load_u32(p + 4)))


# IQ2_S and IQ3_S: low bytes of indices, signs, and high bits of indices

s_points = magnitudes("IQ2_S", 64)


@njit
def iq2_s_64(p, high):
    u = spread8(load_u32(p)) | spread2(load_u8(high)) << 8
    v = spread8(load_u32(p + 4)) | spread2(load_u8(high + 1)) << 8
    return xxs_signed(s_points(u, v), load_i64(p + 32))


@njit
def iq2_s_codes(p):
    p, h = p + 2, p + 66
    a, b = iq2_s_64(p, h), iq2_s_64(p + 8, h + 2)
    return a, b, iq2_s_64(p + 16, h + 4), iq2_s_64(p + 24, h + 6)


@njit
def iq2_s_scales(p):
    return by_16(f16(p), p + 74)


iq3_s_points, iq3_s_signed = magnitudes("IQ3_S", 16), reflected(16)


@njit
def iq3_s_32(p, high):
    """Eight points."""
    u = spread8(load_u32(p)) | spread1(high & 15) << 8
    return iq3_s_points(u, spread8(load_u32(p + 4)) | spread1(high >> 4) << 8)


@njit
def iq3_s_64(p, high, signs):
    codes = joined(iq3_s_32(p, load_u8(high)), iq3_s_32(p + 8, load_u8(high + 1)))
    return iq3_s_signed(codes, load_i64(signs))


@njit
def iq3_s_codes(p):
    p, h, s = p + 2, p + 66, p + 74
    a, b = iq3_s_64(p, h, s), iq3_s_64(p + 16, h + 2, s + 8)
    return a, b, iq3_s_64(p + 32, h + 4, s + 16), iq3_s_64(p + 48, h + 6, s + 24)


@njit
def iq3_s_scales(p):
    """d * (1 + 2 * scale)."""
    return scaled8(f16(p), TWO, in_bytes(load_u32(p + 106)))


# IQ1_S and IQ1_M: digits that are shifted by an eighth, up or down

iq1_s_points, iq1_m_points = shifted_digits("IQ1_S"), shifted_digits("IQ1_M")


@njit
def iq1_s_64(p, high):
    h, g = load_u16(high), load_u16(high + 2)
    u = spread8(load_u32(p)) | spread3(h & 0xFFF) << 8
    v = spread8(load_u32(p + 4)) | spread3(g & 0xFFF) << 8
    down = both((h >> 15) * 0xFFFFFFFF, (g >> 15) * 0xFFFFFFFF)
    codes = iq1_s_points(u, v)
    return chosen(down, less_2(codes), codes)


@njit
def iq1_s_codes(p):
    p, h = p + 2, p + 34
    a, b = iq1_s_64(p, h), iq1_s_64(p + 8, h + 4)
    return a, b, iq1_s_64(p + 16, h + 8), iq1_s_64(p + 24, h + 12)


@njit
def iq1_s_scales(p):
    levels = 0
    for i in range(8):
        levels |= ((load_u16(p + 34 + 2 * i) >> 12) & 7) << 8 * i
    return scaled8(f16(p), QUARTER, levels)


@njit
def iq1_m_64(p, high):
    h, g = spread4(load_u16(high)), spread4(load_u16(high + 2))
    u = spread8(load_u32(p)) | (h & 0x0007000700070007) << 8
    v = spread8(load_u32(p + 4)) | (g & 0x0007000700070007) << 8
    a, b = packed((h >> 3) & 0x0001000100010001), packed((g >> 3) & 0x0001000100010001)
    codes = iq1_m_points(u, v)
    return chosen(both(a * 255, b * 255), less_2(codes), codes)


@njit
def iq1_m_codes(p):
    h = p + 32
    a, b = iq1_m_64(p, h), iq1_m_64(p + 8, h + 4)
    return a, b, iq1_m_64(p + 16, h + 8), iq1_m_64(p + 24, h + 12)


@njit
def iq1_m_scales(p):
    """The highest nibble of each of four words is a part of d; below it are four scales."""
    words = load_i64(p + 48)
    low = both(thirds(words & 0xFFF), thirds((words >> 16) & 0xFFF))
    high = both(thirds((words >> 32) & 0xFFF), thirds((words >> 48) & 0xFFF))
    d = packed_nibbles((words >> 12) & 0x000F000F000F000F)
    return scaled16(simd.f16_of(d), QUARTER, low, high)


@njit
def thirds(word):
    """Four fields of 3 bits -> four bytes."""
    return packed(spread3(word))


@njit
def packed_nibbles(word):
    """Four nibbles, one in each 16 bits -> 16 bits."""
    word = (word | word >> 12) & 0x000000FF000000FF
    return (word | word >> 24) & 0xFFFF


DECLARED = {
    "IQ1_S": Declaration(iq1_s_codes, iq1_s_scales, offset=16),
    "IQ1_M": Declaration(iq1_m_codes, iq1_m_scales, offset=16, group=16),
    "IQ2_XXS": Declaration(iq2_xxs_codes, iq2_xxs_scales, offset=64),
    "IQ2_XS": Declaration(iq2_xs_codes, iq2_xs_scales, offset=64, group=16),
    "IQ2_S": Declaration(iq2_s_codes, iq2_s_scales, offset=64, group=16),
    "IQ3_XXS": Declaration(iq3_xxs_codes, iq3_xxs_scales, offset=64),
    "IQ3_S": Declaration(iq3_s_codes, iq3_s_scales, offset=16),
}
