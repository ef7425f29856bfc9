// Q4_1: 32 4-bit codes, one scale and one minimum; w = d * q + m.
#pragma once
#include "formats/format.cuh"

struct block_q4_1 {
    half d, m;
    uint8_t qs[16];  // byte j: weights j and j + 16
};

template <>
struct Format<block_q4_1> {
    static constexpr int weights = 32, group = 32;
    static constexpr bool quantized = true, shifted = true;

    static __device__ __forceinline__ Codes codes8(const block_q4_1* row, unsigned i) {
        const block_q4_1& block = row[i / 4];
        Codes c;
#pragma unroll
        for (int k = 0; k < 2; ++k) c.q[k] = fields<4>(load4<4>(block.qs + i % 2 * 8 + 4 * k), i % 4 / 2);
        c.d = __half2float(block.d);
        c.m = __half2float(block.m);
        return c;
    }
};
