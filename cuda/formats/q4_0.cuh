// Q4_0: 32 4-bit codes and one scale; w = d * (q - 8).
#pragma once
#include "formats/format.cuh"

struct block_q4_0 {
    half d;
    uint8_t qs[16];  // byte j: weights j and j + 16
};

template <>
struct Format<block_q4_0> {
    static constexpr int weights = 32, group = 32;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ Codes codes8(const block_q4_0* row, unsigned i) {
        const block_q4_0& block = row[i / 4];
        Codes c;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint32_t packed = load4<2>(block.qs + i % 2 * 8 + 4 * k);
            c.q[k] = subtract_bytes(fields<4>(packed, i % 4 / 2), repeat_byte(8));
        }
        c.d = __half2float(block.d);
        c.m = 0.0f;
        return c;
    }
};
