// Logits with their indices as integers in the order in which tokens are chosen: larger logits are larger, and among
// equals the lower index is.
#pragma once
#include "lib/common.cuh"

// No two keys are equal, and none is 0. NaN is larger than all numbers.
__device__ __forceinline__ uint64_t ranking_key(float v, int index) {
    uint32_t bits = isnan(v) ? 0x7fffffffu : __float_as_uint(v + 0.0f);  // -0 is 0
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t(bits) << 32 | (0xffffffffu - uint32_t(index));
}

__device__ __forceinline__ float logit_of(uint64_t key) {
    const uint32_t bits = uint32_t(key >> 32);
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

__device__ __forceinline__ int index_of(uint64_t key) { return int(0xffffffffu - uint32_t(key)); }

// ids[row] is always an index that the next step can use; results[row] is what the host reads, -1 where the best logit
// is NaN or infinite, so that no token can be chosen.
__device__ __forceinline__ void store_token(int* ids, int* results, int row, uint64_t best, int token) {
    ids[row] = token;
    results[row] = isfinite(logit_of(best)) ? token : -1;
}
