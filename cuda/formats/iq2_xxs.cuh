// IQ2_XXS: 256 weights as 32 points of a 256-point grid; 32 weights share a 4-bit scale and have 4 x 7 sign bits.
#pragma once
#include "formats/format.cuh"
#include "grids/iq2_xxs.cuh"

struct block_iq2_xxs {
    half d;
    uint16_t qs[32];  // per 32 weights: two words with four indices, two words with the signs and above them the scale
};

template <>
struct Format<block_iq2_xxs> {
    static constexpr int weights = 256, group = 32;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ Codes codes8(const block_iq2_xxs* row, unsigned i) {
        const block_iq2_xxs& block = row[i / 32];
        i %= 32;
        const uint16_t* qs = block.qs + i / 4 * 4;
        const uint32_t word = load4<2>(qs + 2), signs = even_signs(word >> 7 * (i % 4) & 127);
        const uint2 point = grid_iq2_xxs[qs[i % 4 / 2] >> i % 2 * 8 & 255];
        Codes c;
        c.q[0] = apply_signs(point.x, signs & 15);
        c.q[1] = apply_signs(point.y, signs >> 4);
        c.d = __half2float(block.d) * (0.5f + float(word >> 28)) * 0.25f;
        c.m = 0.0f;
        return c;
    }
};
