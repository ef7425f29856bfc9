// Q4_K: 256 4-bit codes; 32 weights share a 6-bit scale and a 6-bit minimum; w = d * scale * q - dmin * minimum.
#pragma once
#include "formats/k_scales.cuh"

struct block_q4_K {
    half d, dmin;
    uint8_t scales[12];  // k_scales.cuh
    uint8_t qs[128];     // byte 32 * h + j: weights 64 * h + j + (0, 32)
};

template <>
struct Format<block_q4_K> {
    static constexpr int weights = 256, group = 32;
    static constexpr bool quantized = true, shifted = true;

    static __device__ __forceinline__ Codes codes8(const block_q4_K* row, unsigned i) {
        const block_q4_K& block = row[i / 32];
        i %= 32;
        Codes c;
#pragma unroll
        for (int k = 0; k < 2; ++k) c.q[k] = fields<4>(load4<4>(block.qs + i / 8 * 32 + i % 4 * 8 + 4 * k), i % 8 / 4);
        set_scale_and_minimum(block, i / 4, c);
        return c;
    }
};
