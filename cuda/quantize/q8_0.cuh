// The quantiser to Q8_0. It ignores the importance.
#pragma once
#include "formats/q8_0.cuh"
#include "quantize/small.cuh"

template <>
struct Encoder<block_q8_0> {
    static constexpr int group = 32;

    template <bool WEIGHTED>
    static __device__ bool encode(const SmallGroup& group, block_q8_0& block, uint8_t* codes) {
        const float d = fabsf(first_extreme(group.x)) / 127.0f, reciprocal = inverse_or_zero(d);
        const float inverse = isinf(reciprocal) ? 0.0f : reciprocal;
#pragma unroll
        for (int j = 0; j < 32; ++j) codes[j] = uint8_t(round_half_away(group.x[j] * inverse));
        block.d = __float2half_rn(d);
        return is_number(block.d);
    }
    static __device__ __forceinline__ void pack(const uint8_t* codes, block_q8_0& block, int) {
#pragma unroll
        for (int j = 0; j < 32; ++j) block.qs[j] = int8_t(codes[j]);
    }
};
