// The quantiser to Q5_K.
#pragma once
#include "formats/q5_k.cuh"
#include "quantize/k_scales.cuh"

template <>
struct Encoder<block_q5_K> : KScalesEncoder<block_q5_K, 31, -5, 15> {
    static __device__ __forceinline__ void pack(const uint8_t* codes, block_q5_K& block, int lane) {
        for (int b = lane; b < 128; b += 8) block.qs[b] = packed_byte<4>(codes, b / 32 * 64 + b % 32, 32);
        for (int b = lane; b < 32; b += 8) block.qh[b] = packed_byte<1, 4>(codes, b, 32);
    }
};
