// Integer to float conversion without conversion instructions, which run at a quarter of the speed of arithmetic or
// less: the bits of an integer become the low mantissa bits of an f16 whose exponent makes each of them count as an
// integer.
//
// 0x6400 is the f16 1024, whose last mantissa bit is worth 1. So 0x6400 | u is 1024 + u, exactly, for every u < 1024,
// and subtracting the offset is exact too. Also rounding as C's roundf does. Nothing here depends on formats.
#pragma once
#include "lib/common.cuh"

__device__ __forceinline__ half2 as_half2(uint32_t bits) {
    half2 result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

// Four signed bytes to f16: bytes (0, 1) and bytes (2, 3).
__device__ __forceinline__ void int8_to_half(uint32_t bytes, half2 (&h)[2]) {
    const uint32_t biased = bytes ^ 0x80808080u;  // q + 128, unsigned
    const half2 offset = as_half2(0x64806480u);   // 1024 + 128
    h[0] = __hsub2(as_half2(__byte_perm(biased, 0x64646464u, 0x4140)), offset);
    h[1] = __hsub2(as_half2(__byte_perm(biased, 0x64646464u, 0x4342)), offset);
}

// Eight nibbles minus OFFSET (0, or 8 for two's complement with the top bit flipped) to f16: (n0, n4), (n1, n5), (n2,
// n6), (n3, n7), where n0 is the lowest. Nibbles stored as [0, 2, 4, 6, 1, 3, 5, 7] come out in order.
template <int OFFSET>
__device__ __forceinline__ void int4_to_half(uint32_t nibbles, half2 (&h)[4]) {
    static_assert(OFFSET == 0 || OFFSET == 8, "a nibble is unsigned, or biased by 8");
    constexpr int and_or = (0xf0 & 0xcc) | 0xaa;
    // A nibble four bits up counts sixteen times: (1024 + 16 n) / 16 - 64 = n.
    const half2 sixteenth = as_half2(0x2c002c00u), high_offset = as_half2(OFFSET ? 0xd480d480u : 0xd400d400u);
    const half2 low_offset = as_half2(OFFSET ? 0x64086408u : 0x64006400u);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t word = nibbles >> 8 * i;
        const half2 low = as_half2(lop3<and_or>(word, 0x000f000fu, 0x64006400u));
        const half2 high = as_half2(lop3<and_or>(word, 0x00f000f0u, 0x64006400u));
        h[2 * i] = __hsub2(low, low_offset);
        h[2 * i + 1] = __hfma2(high, sixteenth, high_offset);
    }
}

// Eight signed bytes to floats, byte 0 of q[0] first.
__device__ __forceinline__ void int8_to_float(const int (&q)[2], float (&f)[8]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        half2 h[2];
        int8_to_half(q[i], h);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float2 pair = __half22float2(h[j]);
            f[4 * i + 2 * j] = pair.x;
            f[4 * i + 2 * j + 1] = pair.y;
        }
    }
}

// C's roundf for |x| < 2^22. Adding 0.5 and truncating would round the number just below 0.5 to 1.
__device__ __forceinline__ int round_half_away(float x) {
    return __float2int_rz(__fadd_rn(x, copysignf(0.49999997f, x)));
}
