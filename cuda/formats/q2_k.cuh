// Q2_K: 256 2-bit codes; 16 weights share a 4-bit scale and a 4-bit minimum; w = d * scale * q - dmin * minimum.
#pragma once
#include "formats/format.cuh"

struct block_q2_K {
    uint8_t scales[16];  // scale, and above it the minimum
    uint8_t qs[64];      // byte 32 * h + j: weights 128 * h + j + (0, 32, 64, 96)
    half d, dmin;
};

template <>
struct Format<block_q2_K> {
    static constexpr int weights = 256, group = 16;
    static constexpr bool quantized = true, shifted = true;

    static __device__ __forceinline__ Codes codes8(const block_q2_K* row, unsigned i) {
        const block_q2_K& block = row[i / 32];
        i %= 32;
        Codes c;
#pragma unroll
        for (int k = 0; k < 2; ++k)
            c.q[k] = fields<2>(load4<4>(block.qs + i / 16 * 32 + i % 4 * 8 + 4 * k), i % 16 / 4);
        const uint32_t packed = block.scales[i / 2];
        c.d = __half2float(block.d) * float(packed & 15);
        c.m = -(__half2float(block.dmin) * float(packed >> 4));
        return c;
    }
};
