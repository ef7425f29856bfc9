// IQ3_XXS: 256 weights as 64 points of a 256-point grid; 32 weights share a 4-bit scale and have 4 x 7 sign bits.
#pragma once
#include "formats/format.cuh"
#include "grids/iq3_xxs.cuh"

struct block_iq3_xxs {
    half d;
    uint8_t qs[96];  // 64 indices, then eight 32-bit words with the signs and above them the scale
};

template <>
struct Format<block_iq3_xxs> {
    static constexpr int weights = 256, group = 32;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ Codes codes8(const block_iq3_xxs* row, unsigned i) {
        const block_iq3_xxs& block = row[i / 32];
        i %= 32;
        const uint32_t word = load4<2>(block.qs + 64 + i / 4 * 4), signs = even_signs(word >> 7 * (i % 4) & 127);
        Codes c;
        c.q[0] = apply_signs(grid_iq3_xxs[block.qs[2 * i]], signs & 15);
        c.q[1] = apply_signs(grid_iq3_xxs[block.qs[2 * i + 1]], signs >> 4);
        c.d = __half2float(block.d) * (0.5f + float(word >> 28)) * 0.5f;
        c.m = 0.0f;
        return c;
    }
};
