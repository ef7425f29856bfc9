// The quantiser to Q4_K.
#pragma once
#include "formats/q4_k.cuh"
#include "quantize/k_scales.cuh"

template <>
struct Encoder<block_q4_K> : KScalesEncoder<block_q4_K, 15, -10, 20> {
    static __device__ __forceinline__ void pack(const uint8_t* codes, block_q4_K& block, int lane) {
        for (int b = lane; b < 128; b += 8) block.qs[b] = packed_byte<4>(codes, b / 32 * 64 + b % 32, 32);
    }
};
