// Q5_1: 32 5-bit codes, one scale and one minimum; w = d * q + m.
#pragma once
#include "formats/format.cuh"

struct block_q5_1 {
    half d, m;
    uint8_t qh[4];   // bit j: the fifth bit of weight j
    uint8_t qs[16];  // byte j: weights j and j + 16
};

template <>
struct Format<block_q5_1> {
    static constexpr int weights = 32, group = 32;
    static constexpr bool quantized = true, shifted = true;

    static __device__ __forceinline__ Codes codes8(const block_q5_1* row, unsigned i) {
        const block_q5_1& block = row[i / 4];
        const uint32_t high = block.qh[i % 4];
        Codes c;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint32_t low = fields<4>(load4<4>(block.qs + i % 2 * 8 + 4 * k), i % 4 / 2);
            c.q[k] = low | spread_bits(high >> 4 * k & 15) << 4;
        }
        c.d = __half2float(block.d);
        c.m = __half2float(block.m);
        return c;
    }
};
