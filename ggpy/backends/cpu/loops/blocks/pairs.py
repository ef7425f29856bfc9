"""Blocks of 32 weights, read two at a time; of 64 weights, NVFP4 and Q2_0; and of 128, Q1_0."""

from __future__ import annotations

from numba import njit

from .....formats.iq4_nl import VALUES
from .....formats.mxfp4 import E2M1_DOUBLED
from .....formats.nvfp4 import half_scale_table
from .. import simd
from .declared import Declaration, either, f16, joined, load16, load32, nibbles

flip = simd.with_number("xor", 128)
bits_as_16 = simd.bits_as(16)


@njit
def d_pair(p, q):
    """f16 at the start of two blocks -> f32x2."""
    return simd.pair(f16(p), f16(q))


@njit
def m_pair(p, q):
    """f16 after the scale of two blocks -> f32x2."""
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


# 64 weights

# Eight low nibbles, then the same bytes' high ones
by_eighth = simd.lanes(*(32 * h + 8 * g + i for g in range(4) for h in range(2) for i in range(8)))
half_scale = simd.number_of(lambda: half_scale_table().tolist())


@njit
def nvfp4_codes(p):
    return e2m1_values(by_eighth(nibbles(load32(p + 4))))


@njit
def nvfp4_scales(p):
    a = simd.pair(half_scale(simd.load_u8(p)), half_scale(simd.load_u8(p + 1)))
    b = simd.pair(half_scale(simd.load_u8(p + 2)), half_scale(simd.load_u8(p + 3)))
    return joined(a, b)


# Four codes of 2 bits of each of 16 bytes: all first ones, all second ones, ...
by_fourth = simd.lanes(*(16 * k + j for j in range(16) for k in range(4)))
shr2, shr4, shr6 = (simd.with_number("lshr", n) for n in (2, 4, 6))
and3 = simd.with_number("and_", 3)


@njit
def q2_0_codes(p):
    v = load16(p + 2)
    return by_fourth(and3(joined(joined(v, shr2(v)), joined(shr4(v), shr6(v)))))


@njit
def d_of_four(p):
    """f16 at the start of a block -> f32x4."""
    d = simd.pair(f16(p), f16(p))
    return joined(d, d)


# 128 weights

bits_as_2 = simd.bits_as(2)


@njit
def signs(p):
    """64 bits at p -> u8x64 of 0 and 2."""
    return joined(bits_as_2(simd.load_u32(p)), bits_as_2(simd.load_u32(p + 4)))


@njit
def q1_0_codes(p):
    return signs(p + 2), signs(p + 10)


DECLARED = {
    "Q8_0": Declaration(q8_0_codes, d_pair, offset=128),
    "Q4_0": Declaration(q4_0_codes, d_pair, offset=8),
    "Q4_1": Declaration(q4_1_codes, d_pair, m_pair),
    "Q5_0": Declaration(q5_0_codes, d_pair, offset=16),
    "Q5_1": Declaration(q5_1_codes, d_pair, m_pair),
    "IQ4_NL": Declaration(iq4_nl_codes, d_pair, offset=128),
    "MXFP4": Declaration(mxfp4_codes, e8_pair, offset=16),
    "NVFP4": Declaration(nvfp4_codes, nvfp4_scales, offset=16, group=16),
    "Q2_0": Declaration(q2_0_codes, d_of_four, offset=1, group=16),
    "Q1_0": Declaration(q1_0_codes, d_of_four, offset=1, group=16),
}
