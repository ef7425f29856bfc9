// A norm between two products of sixteen tokens or fewer without a kernel of its own. The product that adds to the residual
// stream x leaves beside x half(x * weight * r) and sums of squares of x; the product behind multiplies what it makes of
// these halves by 1 / (r * rms(x)). r is 1 / rms of the norm before, less HEADROOM, in case x grows in between: so the
// halves are neither too large nor too small.
#pragma once
#include "layout/packed.cuh"

constexpr float HEADROOM = 1.0f / 16;

// For how many tokens there is room in each part of the squares, between products of up to TOKENS.
template <int TOKENS>
constexpr int HANDED_PITCH = TOKENS <= 8 ? 8 : 16;

struct Handed {
    float* squares;       // [parts][HANDED_PITCH], of as many columns each; null: nothing is handed on
    const float* before;  // r [n_tokens]
    // Of the product that adds:
    const float* weight;  // [columns of x]
    __half* normed;       // packed in `order`
    // Of the product behind:
    float* after;  // the next r [n_tokens]
    float eps;
    int parts;
    int order;
};

// x * weight * r of a token's column.
__device__ __forceinline__ void hand_on(const Handed& handed, float v, int column, int token, int n_tokens) {
    handed.normed[packed_half(handed.order, column, token, n_tokens)] = saturated_half(v);
}

// factors[token] = what a product of x's halves is multiplied by; k columns of x. One warp.
template <int TOKENS>
__device__ __forceinline__ void find_factors(const Handed& handed, int k, int n_tokens, float* factors, int lane) {
    constexpr int PITCH = HANDED_PITCH<TOKENS>;
    const int token = lane % PITCH;
    const float before = token < n_tokens ? __ldcg(handed.before + token) : 1.0f;
    float sum = 0.0f;
#pragma unroll 8
    for (int i = lane; i < handed.parts * PITCH; i += 32) sum += __ldcg(handed.squares + i);
#pragma unroll
    for (int offset = PITCH; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane >= n_tokens) return;
    const float inverse = rsqrtf(fmaf(sum, fast_reciprocal(static_cast<float>(k)), handed.eps));
    factors[token] = inverse / before;
    if (blockIdx.x == 0) handed.after[token] = inverse * HEADROOM;
}
