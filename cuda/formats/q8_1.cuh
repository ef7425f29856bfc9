// Q8_1: 32 signed bytes, one scale and s = d * sum(q); w = d * q. The format of quantised activations.
#pragma once
#include "formats/format.cuh"

struct block_q8_1 {
    half d, s;
    int8_t qs[32];
};

template <>
struct Format<block_q8_1> {
    static constexpr int weights = 32, group = 32;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ Codes codes8(const block_q8_1* row, unsigned i) {
        const block_q8_1& block = row[i / 4];
        const int8_t* qs = block.qs + i % 4 * 8;
        return {{int(load4<4>(qs)), int(load4<4>(qs + 4))}, __half2float(block.d), 0.0f};
    }
};
