// Deferred RMS norm between two GEMMs of at most 16 tokens, instead of a norm kernel. x [T, k] is the residual stream,
// w [k] the weight of the norm, r [T] a prescale:
//
//    first GEMM:  x += ...;  normed = f16(x * w * r);  squares = partial sums of x^2
//    second GEMM: y = (normed W^T) / (r * rms(x))       rms(x) = sqrt(mean(x^2) + eps)
//
// r is HEADROOM / rms of the previous norm, so normed is near HEADROOM: far below the f16 limit even if x grows between
// the two norms, and far above f16 subnormals. This header has no kernel; the GEMMs call its functions.
#pragma once
#include "layout/packed.cuh"

constexpr float HEADROOM = 1.0f / 16;

// Row pitch of DeferredNormArgs::squares: 8 tokens per partial sum, or 16 when the GEMM takes more than 8.
template <int TOKENS>
constexpr int DEFERRED_NORM_PITCH = TOKENS <= 8 ? 8 : 16;

struct DeferredNormArgs {
    float* squares;         // [parts][DEFERRED_NORM_PITCH], each over k / parts columns; null: no norm is deferred
    const float* prescale;  // r [T]
    // Of the first GEMM:
    const float* weight;  // [k], read
    __half* normed;       // f16 [T, k], packed in `order`, written
    // Of the second GEMM:
    float* next_prescale;  // r of the next norm [T], written
    float eps;
    int parts;
    int order;
};

// Stores v = x * w * r of one column of a token.
__device__ __forceinline__ void store_deferred(const DeferredNormArgs& deferred_norm, float v, int column, int token,
                                               int n_tokens) {
    deferred_norm.normed[packed_half(deferred_norm.order, column, token, n_tokens)] = saturated_half(v);
}

// factors[token] = 1 / (r * rms(x)), the factor of the second GEMM's outputs; k columns of x. One warp.
template <int TOKENS>
__device__ __forceinline__ void compute_factors(const DeferredNormArgs& deferred_norm, int k, int n_tokens,
                                                float* factors, int lane) {
    constexpr int PITCH = DEFERRED_NORM_PITCH<TOKENS>;
    const int token = lane % PITCH;
    const float prescale = token < n_tokens ? __ldcg(deferred_norm.prescale + token) : 1.0f;
    float sum = 0.0f;
#pragma unroll 8
    for (int i = lane; i < deferred_norm.parts * PITCH; i += 32) sum += __ldcg(deferred_norm.squares + i);
#pragma unroll
    for (int offset = PITCH; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane >= n_tokens) return;
    const float inverse = rsqrtf(fmaf(sum, fast_reciprocal(static_cast<float>(k)), deferred_norm.eps));
    factors[token] = inverse / prescale;
    if (blockIdx.x == 0) deferred_norm.next_prescale[token] = inverse * HEADROOM;
}
