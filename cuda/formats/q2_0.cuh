// Q2_0: 64 codes of two bits and one scale; w = d * (q - 1).
#pragma once
#include "formats/format.cuh"

struct block_q2_0 {
    half d;
    uint8_t qs[16];  // byte j: weights 4 * j to 4 * j + 3
};

template <>
struct Format<block_q2_0> {
    static constexpr int weights = 64, group = 64;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ Codes codes8(const block_q2_0* row, unsigned i) {
        const block_q2_0& block = row[i / 8];
        Codes c;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint32_t byte = block.qs[i % 8 * 2 + k];
            // the fields of a byte, one in each byte of a word
            const uint32_t spread = (byte | byte << 6 | byte << 12 | byte << 18) & repeat_byte(3);
            c.q[k] = subtract_bytes(spread, repeat_byte(1));
        }
        c.d = __half2float(block.d);
        c.m = 0.0f;
        return c;
    }
};
