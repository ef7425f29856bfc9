// IQ2_S: 256 weights as 32 points of a 1024-point grid with 8 sign bits each; 16 weights share a 4-bit scale.
#pragma once
#include "formats/format.cuh"
#include "grids/iq2_s.cuh"

struct block_iq2_s {
    half d;
    uint8_t qs[64];     // low bytes of 32 indices, then 32 bytes of signs
    uint8_t qh[8];      // two high bits per index
    uint8_t scales[8];  // two scales per byte
};

template <>
struct Format<block_iq2_s> {
    static constexpr int weights = 256, group = 16;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ Codes codes8(const block_iq2_s* row, unsigned i) {
        const block_iq2_s& block = row[i / 32];
        i %= 32;
        const uint32_t signs = block.qs[32 + i];
        const uint2 point = grid_iq2_s[block.qs[i] | (block.qh[i / 4] >> i % 4 * 2 & 3) << 8];
        Codes c;
        c.q[0] = apply_signs(point.x, signs & 15);
        c.q[1] = apply_signs(point.y, signs >> 4);
        c.d = __half2float(block.d) * (0.5f + float(block.scales[i / 4] >> i % 4 / 2 * 4 & 15)) * 0.25f;
        c.m = 0.0f;
        return c;
    }
};
