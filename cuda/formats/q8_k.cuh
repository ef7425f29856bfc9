// Q8_K: 256 signed bytes, one f32 scale, and the sum of each 16 bytes; w = d * q.
#pragma once
#include "formats/format.cuh"

struct block_q8_K {
    float d;
    int8_t qs[256];
    int16_t bsums[16];
};

template <>
struct Format<block_q8_K> {
    static constexpr int weights = 256, group = 256;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ Codes codes8(const block_q8_K* row, unsigned i) {
        const block_q8_K& block = row[i / 32];
        const int8_t* qs = block.qs + i % 32 * 8;
        return {{int(load4<4>(qs)), int(load4<4>(qs + 4))}, block.d, 0.0f};
    }
};
