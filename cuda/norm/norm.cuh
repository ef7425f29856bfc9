// RMS norm of one row by one block, kept in registers: y = x / sqrt(mean(x^2) + eps) * weight.
//
// The order of the sum is fixed: a thread's eight-wide pieces in order, lanes by butterfly, every fourth warp in order.
#pragma once
#include "lib/common.cuh"

#ifndef WARPS
#define WARPS 16
#endif
#ifndef NORM_PIECES
#define NORM_PIECES 2
#endif

constexpr int THREADS = WARPS * 32;

// Eight floats that an earlier kernel wrote: past the first-level cache, which that kernel's blocks may have filled.
__device__ __forceinline__ void read_floats(float (&to)[8], const float* from) {
    const float4 low = __ldcg(reinterpret_cast<const float4*>(from));
    const float4 high = __ldcg(reinterpret_cast<const float4*>(from) + 1);
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

__device__ __forceinline__ float2 half2_to_float2(uint32_t bits) {
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

// What the block's warps have, `stride` apart. Four sums of every fourth, so that one is not awaited by all others.
template <class Sum>
__device__ __forceinline__ Sum sum_of_parts(const Sum* part, int stride) {
    Sum sums[4] = {};
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sums[warp % 4] += part[warp * stride];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
    return v;
}

// The sums of N values over the block, the same in every thread. Sums that follow each other alternate between two
// `turn`s, so that one is written while the other is read; AGAIN: the same turn may come twice.
template <bool AGAIN = true, int N>
__device__ __forceinline__ void block_sums(float (&values)[N], int turn = 0) {
    __shared__ float parts[2][N][WARPS];
#pragma unroll
    for (int n = 0; n < N; ++n) values[n] = warp_sum(values[n]);
    if (AGAIN) __syncthreads();  // an earlier sum may still be read
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int n = 0; n < N; ++n) parts[turn][n][threadIdx.x / 32] = values[n];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) values[n] = sum_of_parts(parts[turn][n], 1);
}

// A row of up to NORM_PIECES * 8 * THREADS columns, a multiple of 8.
struct RmsNorm {
    float x[NORM_PIECES][8];
    float weight[NORM_PIECES][8];
    float inverse;

    static __device__ __forceinline__ int column(int i) { return (i * THREADS + threadIdx.x) * 8; }

    __device__ __forceinline__ void load_weight(const float* from, int k) {
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i)
            if (column(i) < k) read_floats(weight[i], from + column(i));
    }
    __device__ __forceinline__ void load(const float* from, int k) {
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i)
            if (column(i) < k) read_floats(x[i], from + column(i));
    }
    // Of a row with the same weights.
    __device__ __forceinline__ void take_weight(const RmsNorm& other) {
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) weight[i][j] = other.weight[i][j];
    }
    // This thread's part of the sum of squares.
    __device__ __forceinline__ float squares(int k) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i)
            if (column(i) < k)
#pragma unroll
                for (int j = 0; j < 8; ++j) sum = fmaf(x[i][j], x[i][j], sum);
        return sum;
    }
    // Of a row's sum of squares.
    static __device__ __forceinline__ float inverse_of(float sum, int k, float eps) {
        return rsqrtf(fmaf(sum, fast_reciprocal(static_cast<float>(k)), eps));
    }
    __device__ __forceinline__ void scale_by(float sum, int k, float eps) { inverse = inverse_of(sum, k, eps); }
    template <bool AGAIN = true>
    __device__ __forceinline__ void scale(int k, float eps, int turn = 0) {
        float sum[1] = {squares(k)};
        block_sums<AGAIN>(sum, turn);
        scale_by(sum[0], k, eps);
    }
    __device__ __forceinline__ float value(int i, int j) const { return x[i][j] * inverse * weight[i][j]; }
    // What x becomes by it, rounded twice, so that all kernels that add give the same bits.
    __device__ __forceinline__ float added_to(float old, int i, int j) const { return __fadd_rn(old, value(i, j)); }

    // Times the weights only.
    __device__ __forceinline__ float2 weighted(int i, int j) const {
        return make_float2(x[i][j] * weight[i][j], x[i][j + 1] * weight[i][j + 1]);
    }
    __device__ __forceinline__ uint4 halves(int i) const {
        return make_uint4(saturated_half2(value(i, 0), value(i, 1)), saturated_half2(value(i, 2), value(i, 3)),
                          saturated_half2(value(i, 4), value(i, 5)), saturated_half2(value(i, 6), value(i, 7)));
    }
};
