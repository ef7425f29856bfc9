// Packs a logit and its index into a 64-bit key whose integer order is the order of preference: a larger logit first,
// and among equal logits the lower index.
#pragma once
#include "lib/common.cuh"

// No two keys are equal and no key is 0. NaN compares above all numbers.
__device__ __forceinline__ uint64_t ranking_key(float v, int index) {
    uint32_t bits = isnan(v) ? 0x7fffffffu : __float_as_uint(v + 0.0f);  // +0.0f turns -0 into 0
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t(bits) << 32 | (0xffffffffu - uint32_t(index));
}

__device__ __forceinline__ float logit_of(uint64_t key) {
    const uint32_t bits = uint32_t(key >> 32);
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

__device__ __forceinline__ int index_of(uint64_t key) { return int(0xffffffffu - uint32_t(key)); }

// ids[row] is always a valid token, because the next step reads it. results[row] is for the host: -1 if the best logit
// is NaN or infinite, because no token can be sampled then.
__device__ __forceinline__ void store_token(int* ids, int* results, int row, uint64_t best, int token) {
    ids[row] = token;
    results[row] = isfinite(logit_of(best)) ? token : -1;
}
