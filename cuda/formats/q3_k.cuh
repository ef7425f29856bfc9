// Q3_K: 256 3-bit codes; 16 weights share a 6-bit scale; w = d * (scale - 32) * (q - 4).
#pragma once
#include "formats/format.cuh"

struct block_q3_K {
    uint8_t hmask[32];   // bit i of byte j: the third bit of weight 32 * i + j
    uint8_t qs[64];      // byte 32 * h + j: weights 128 * h + j + (0, 32, 64, 96)
    uint8_t scales[12];  // four low bits in the first 8 bytes, two high bits in the last 4
    half d;
};

template <>
struct Format<block_q3_K> {
    static constexpr int weights = 256, group = 16;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ int scale(const block_q3_K& block, int s) {
        const int low = block.scales[s % 8] >> s / 8 * 4 & 15;
        const int high = block.scales[8 + s % 4] >> s / 4 * 2 & 3;
        return (low | high << 4) - 32;
    }

    static __device__ __forceinline__ Codes codes8(const block_q3_K* row, unsigned i) {
        const block_q3_K& block = row[i / 32];
        i %= 32;
        Codes c;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint32_t low = fields<2>(load4<2>(block.qs + i / 16 * 32 + i % 4 * 8 + 4 * k), i % 16 / 4);
            const uint32_t high = bit_of_bytes(load4<2>(block.hmask + i % 4 * 8 + 4 * k), i / 4, 2);
            c.q[k] = subtract_bytes(low | high, repeat_byte(4));
        }
        c.d = __half2float(block.d) * float(scale(block, i / 2));
        c.m = 0.0f;
        return c;
    }
};
