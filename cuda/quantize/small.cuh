// The quantisers of blocks of 32 weights with an f16 scale, or with an f16 scale and an f16 minimum: Q4_0, Q4_1, Q5_0,
// Q5_1. A lane holds a whole block.
#pragma once
#include "quantize/encoder.cuh"

using SmallGroup = Group<32, 1>;

// Returns 1 / x; 0 if x is 0; infinity if 1 / x overflows.
__device__ __forceinline__ float inverse_or_zero(float x) { return x == 0.0f ? 0.0f : 1.0f / x; }

// w = d * (q - OFFSET). The weight of the largest magnitude gets q = 0. Returns d.
template <int OFFSET, bool WEIGHTED>
__device__ __forceinline__ float quantize_by_extreme(const SmallGroup& group, uint8_t* codes) {
    if constexpr (WEIGHTED) {
        float weights[32];
        group.error_weights(group.row_mean_square, weights);
        const ScaleFit fit = search_scale(group.x, weights, OFFSET);
#pragma unroll
        for (int j = 0; j < 32; ++j) codes[j] = uint8_t(fit.level(group.x[j], OFFSET) + OFFSET);
        return fit.scale;
    } else {
        const float d = first_extreme(group.x) / -float(OFFSET), inverse = inverse_or_zero(d);
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            const float q = fminf(group.x[j] * inverse + (float(OFFSET) + 0.5f), 2.0f * OFFSET - 1.0f);
            codes[j] = isinf(inverse) ? 0 : uint8_t(int(q));
        }
        return d;
    }
}

struct ScaleAndMinimum {
    float d, m;
};

// w = d * q + m with q from 0 to N_MAX.
template <int N_MAX, bool WEIGHTED>
__device__ __forceinline__ ScaleAndMinimum quantize_by_range(const SmallGroup& group, uint8_t* codes) {
    if constexpr (WEIGHTED) {
        float weights[32];
        group.error_weights(group.row_mean_square, weights);
        const LineFit fit = search_line<N_MAX, Errors::WEIGHTED>(group.x, weights, -0.9f, 0.05f, 36);
#pragma unroll
        for (int j = 0; j < 32; ++j)
            codes[j] = uint8_t(level_of<N_MAX, Errors::WEIGHTED>((group.x[j] - fit.origin) * fit.inverse));
        return {fit.scale, fit.minimum};
    } else {
        float lowest = group.x[0], highest = group.x[0];
#pragma unroll
        for (int j = 1; j < 32; ++j) {
            lowest = group.x[j] < lowest ? group.x[j] : lowest;
            highest = group.x[j] > highest ? group.x[j] : highest;
        }
        const float d = fabsf(highest - lowest) / float(N_MAX), inverse = inverse_or_zero(d);
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            const float q = fminf((group.x[j] - lowest) * inverse + 0.5f, float(N_MAX));
            codes[j] = isinf(inverse) ? 0 : uint8_t(int(q));
        }
        return {d, lowest};
    }
}

// Packs the low four bits: byte j holds weights j and j + 16.
template <typename Block>
__device__ __forceinline__ void pack_nibbles(const uint8_t* codes, Block& block) {
#pragma unroll
    for (int j = 0; j < 16; ++j) block.qs[j] = packed_byte<4>(codes, j, 16);
}

// Packs the fifth bits: bit j of the 32 bits belongs to weight j.
template <typename Block>
__device__ __forceinline__ void pack_fifth_bits(const uint8_t* codes, Block& block) {
#pragma unroll
    for (int j = 0; j < 4; ++j) block.qh[j] = packed_byte<1, 4>(codes, 8 * j, 1);
}

// w = d * (q - OFFSET) with BITS = 4 or 5 bits per code: Q4_0 and Q5_0.
template <typename Block, int BITS>
struct ExtremeEncoder {
    static constexpr int group = 32;

    template <bool WEIGHTED>
    static __device__ bool encode(const SmallGroup& group, Block& block, uint8_t* codes) {
        block.d = __float2half_rn(quantize_by_extreme<1 << (BITS - 1), WEIGHTED>(group, codes));
        return is_number(block.d);
    }
    static __device__ __forceinline__ void pack(const uint8_t* codes, Block& block, int) {
        pack_nibbles(codes, block);
        if constexpr (BITS == 5) pack_fifth_bits(codes, block);
    }
};

// w = d * q + m with BITS = 4 or 5 bits per code: Q4_1 and Q5_1.
template <typename Block, int BITS>
struct RangeEncoder {
    static constexpr int group = 32;

    template <bool WEIGHTED>
    static __device__ bool encode(const SmallGroup& group, Block& block, uint8_t* codes) {
        const ScaleAndMinimum found = quantize_by_range<(1 << BITS) - 1, WEIGHTED>(group, codes);
        block.d = __float2half_rn(found.d);
        block.m = __float2half_rn(found.m);
        return is_number(block.d) && is_number(block.m);
    }
    static __device__ __forceinline__ void pack(const uint8_t* codes, Block& block, int) {
        pack_nibbles(codes, block);
        if constexpr (BITS == 5) pack_fifth_bits(codes, block);
    }
};
