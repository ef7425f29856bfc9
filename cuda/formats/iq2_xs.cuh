// IQ2_XS: 256 weights as 32 points of a 512-point grid with 7 sign bits each; 16 weights share a 4-bit scale.
#pragma once
#include "formats/format.cuh"
#include "grids/iq2_xs.cuh"

struct block_iq2_xs {
    half d;
    uint16_t qs[32];    // nine bits of index, seven sign bits
    uint8_t scales[8];  // two scales per byte
};

template <>
struct Format<block_iq2_xs> {
    static constexpr int weights = 256, group = 16;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ Codes codes8(const block_iq2_xs* row, unsigned i) {
        const block_iq2_xs& block = row[i / 32];
        i %= 32;
        const uint32_t code = block.qs[i], signs = even_signs(code >> 9);
        const uint2 point = grid_iq2_xs[code & 511];
        Codes c;
        c.q[0] = apply_signs(point.x, signs & 15);
        c.q[1] = apply_signs(point.y, signs >> 4);
        c.d = __half2float(block.d) * (0.5f + float(block.scales[i / 4] >> i % 4 / 2 * 4 & 15)) * 0.25f;
        c.m = 0.0f;
        return c;
    }
};
