// Q6_K: 256 6-bit codes; 16 weights share a signed 8-bit scale; w = d * scale * (q - 32).
#pragma once
#include "formats/format.cuh"

struct block_q6_K {
    uint8_t ql[128];  // byte 64 * h + j: weights 128 * h + j + (0, 64)
    uint8_t qh[64];   // byte 32 * h + j: weights 128 * h + j + (0, 32, 64, 96)
    int8_t scales[16];
    half d;
};

template <>
struct Format<block_q6_K> {
    static constexpr int weights = 256, group = 16;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ Codes codes8(const block_q6_K* row, unsigned i) {
        const block_q6_K& block = row[i / 32];
        i %= 32;
        const int half_block = i / 16;
        Codes c;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint32_t low = fields<4>(load4<2>(block.ql + half_block * 64 + i % 8 * 8 + 4 * k), i % 16 / 8);
            const uint32_t high = fields<2>(load4<2>(block.qh + half_block * 32 + i % 4 * 8 + 4 * k), i % 16 / 4);
            c.q[k] = subtract_bytes(low | high << 4, repeat_byte(32));
        }
        c.d = __half2float(block.d) * float(block.scales[i / 2]);
        c.m = 0.0f;
        return c;
    }
};
