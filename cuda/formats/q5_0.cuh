// Q5_0: 32 5-bit codes and one scale; w = d * (q - 16).
#pragma once
#include "formats/format.cuh"

struct block_q5_0 {
    half d;
    uint8_t qh[4];   // bit j: the fifth bit of weight j
    uint8_t qs[16];  // byte j: weights j and j + 16
};

template <>
struct Format<block_q5_0> {
    static constexpr int weights = 32, group = 32;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ Codes codes8(const block_q5_0* row, unsigned i) {
        const block_q5_0& block = row[i / 4];
        const uint32_t high = block.qh[i % 4];
        Codes c;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint32_t low = fields<4>(load4<2>(block.qs + i % 2 * 8 + 4 * k), i % 4 / 2);
            c.q[k] = subtract_bytes(low | spread_bits(high >> 4 * k & 15) << 4, repeat_byte(16));
        }
        c.d = __half2float(block.d);
        c.m = 0.0f;
        return c;
    }
};
