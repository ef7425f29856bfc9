// Q1_0: 128 signs and one scale; w = d or -d.
#pragma once
#include "formats/format.cuh"

struct block_q1_0 {
    half d;
    uint8_t qs[16];  // byte j: weights 8 * j and up; 1 stands for plus
};

template <>
struct Format<block_q1_0> {
    static constexpr int weights = 128, group = 128;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ Codes codes8(const block_q1_0* row, unsigned i) {
        const block_q1_0& block = row[i / 16];
        const uint32_t signs = block.qs[i % 16];
        Codes c;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint32_t ones = spread_bits(signs >> 4 * k & 15);
            c.q[k] = subtract_bytes(ones << 1, repeat_byte(1));
        }
        c.d = __half2float(block.d);
        c.m = 0.0f;
        return c;
    }
};
