// RMS norm of one row by one CTA: y[k] = x / sqrt(mean(x^2) + eps) * weight.
//
// A CTA has WARPS warps. A thread keeps NORM_PIECES pieces of 8 columns in registers; shared memory holds only the
// partial sums of the warps. The order of summation is fixed, so the bits do not depend on the kernel: the pieces of a
// thread in order, lanes by butterfly shuffles, then four sums over every fourth warp.
#pragma once
#include "lib/common.cuh"

#ifndef WARPS
#define WARPS 16
#endif
#ifndef NORM_PIECES
#define NORM_PIECES 2
#endif

constexpr int THREADS = WARPS * 32;

// Loads eight floats that an earlier kernel wrote. __ldcg bypasses L1, which may hold stale lines from that kernel's
// time on the same SM.
__device__ __forceinline__ void read_floats(float (&dst)[8], const float* src) {
    const float4 low = __ldcg(reinterpret_cast<const float4*>(src));
    const float4 high = __ldcg(reinterpret_cast<const float4*>(src) + 1);
    dst[0] = low.x, dst[1] = low.y, dst[2] = low.z, dst[3] = low.w;
    dst[4] = high.x, dst[5] = high.y, dst[6] = high.z, dst[7] = high.w;
}

__device__ __forceinline__ float2 half2_to_float2(uint32_t bits) {
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

// Sum over the CTA's warps, whose parts lie `stride` apart. Four accumulators shorten the chain of dependent additions.
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

// Sums N values over the CTA; every thread gets the result. Consecutive calls alternate `parity`, so that one buffer is
// written while the other is read. AGAIN: consecutive calls may use the same parity, so a barrier comes first.
template <bool AGAIN = true, int N>
__device__ __forceinline__ void cta_sums(float (&values)[N], int parity = 0) {
    __shared__ float parts[2][N][WARPS];
#pragma unroll
    for (int n = 0; n < N; ++n) values[n] = warp_sum(values[n]);
    if (AGAIN) __syncthreads();  // other threads may still read an earlier sum
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int n = 0; n < N; ++n) parts[parity][n][threadIdx.x / 32] = values[n];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) values[n] = sum_of_parts(parts[parity][n], 1);
}

// A row of up to NORM_PIECES * 8 * THREADS columns; the number of columns is a multiple of 8.
struct RmsNorm {
    float x[NORM_PIECES][8];
    float weight[NORM_PIECES][8];
    float inverse;

    static __device__ __forceinline__ int column(int i) { return (i * THREADS + threadIdx.x) * 8; }

    __device__ __forceinline__ void load_weight(const float* src, int k) {
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i)
            if (column(i) < k) read_floats(weight[i], src + column(i));
    }
    __device__ __forceinline__ void load(const float* src, int k) {
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i)
            if (column(i) < k) read_floats(x[i], src + column(i));
    }
    // Copies the weights of a row that has the same norm.
    __device__ __forceinline__ void copy_weight(const RmsNorm& other) {
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) weight[i][j] = other.weight[i][j];
    }
    // The thread's part of the sum of squares.
    __device__ __forceinline__ float squares(int k) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i)
            if (column(i) < k)
#pragma unroll
                for (int j = 0; j < 8; ++j) sum = fmaf(x[i][j], x[i][j], sum);
        return sum;
    }
    // 1 / rms from the sum of squares of a row.
    static __device__ __forceinline__ float inverse_of(float sum, int k, float eps) {
        return rsqrtf(fmaf(sum, fast_reciprocal(static_cast<float>(k)), eps));
    }
    __device__ __forceinline__ void scale_by(float sum, int k, float eps) { inverse = inverse_of(sum, k, eps); }
    template <bool AGAIN = true>
    __device__ __forceinline__ void scale(int k, float eps, int parity = 0) {
        float sum[1] = {squares(k)};
        cta_sums<AGAIN>(sum, parity);
        scale_by(sum[0], k, eps);
    }
    __device__ __forceinline__ float value(int i, int j) const { return x[i][j] * inverse * weight[i][j]; }
    // old + norm(x), rounded after the product and after the sum, so that all kernels that add give the same bits.
    __device__ __forceinline__ float added_to(float old, int i, int j) const { return __fadd_rn(old, value(i, j)); }

    // x * weight of elements j and j + 1, without 1 / rms.
    __device__ __forceinline__ float2 weighted(int i, int j) const {
        return make_float2(x[i][j] * weight[i][j], x[i][j + 1] * weight[i][j + 1]);
    }
    __device__ __forceinline__ uint4 f16x8(int i) const {
        return make_uint4(saturated_half2(value(i, 0), value(i, 1)), saturated_half2(value(i, 2), value(i, 3)),
                          saturated_half2(value(i, 4), value(i, 5)), saturated_half2(value(i, 6), value(i, 7)));
    }
};
