// IQ3_S: 256 weights as 64 points of a 512-point grid with 4 sign bits each; 32 weights share a 4-bit scale.
#pragma once
#include "formats/format.cuh"
#include "grids/iq3_s.cuh"

struct block_iq3_s {
    half d;
    uint8_t qs[64];  // low bytes of the indices
    uint8_t qh[8];   // one high bit per index
    uint8_t signs[32];
    uint8_t scales[4];  // two scales per byte; d * (1 + 2 * scale)
};

template <>
struct Format<block_iq3_s> {
    static constexpr int weights = 256, group = 32;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ Codes codes8(const block_iq3_s* row, unsigned i) {
        const block_iq3_s& block = row[i / 32];
        i %= 32;
        const uint32_t high = block.qh[i / 4] >> i % 4 * 2, signs = block.signs[i];
        Codes c;
        c.q[0] = apply_signs(grid_iq3_s[block.qs[2 * i] | (high & 1) << 8], signs & 15);
        c.q[1] = apply_signs(grid_iq3_s[block.qs[2 * i + 1] | (high >> 1 & 1) << 8], signs >> 4);
        c.d = __half2float(block.d) * float(1 + 2 * (block.scales[i / 8] >> i / 4 % 2 * 4 & 15));
        c.m = 0.0f;
        return c;
    }
};
