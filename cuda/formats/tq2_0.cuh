// TQ2_0: 256 ternary digits, two bits each, and one scale; w = d * (q - 1).
#pragma once
#include "formats/format.cuh"

struct block_tq2_0 {
    uint8_t qs[64];  // byte 32 * h + j: weights 128 * h + j + (0, 32, 64, 96)
    half d;
};

template <>
struct Format<block_tq2_0> {
    static constexpr int weights = 256, group = 256;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ Codes codes8(const block_tq2_0* row, unsigned i) {
        const block_tq2_0& block = row[i / 32];
        i %= 32;
        Codes c;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint32_t packed = load4<2>(block.qs + i / 16 * 32 + i % 4 * 8 + 4 * k);
            c.q[k] = subtract_bytes(fields<2>(packed, i % 16 / 4), repeat_byte(1));
        }
        c.d = __half2float(block.d);
        c.m = 0.0f;
        return c;
    }
};
