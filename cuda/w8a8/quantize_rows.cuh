// One CTA quantises one row of activations x[K] to 8-bit codes with one scale. The caller stores the codes.
//
//        int8    scale = max|x| / 127    q = x / scale, rounded to even
//        E4M3    scale = max|x| / 448    q = the E4M3 nearest to x / scale
//
// The results equal numpy's bit by bit for finite x. A row of zeros has scale 0. If x has a NaN or an infinity, the
// scale is NaN or infinite and every output of the row becomes NaN, so errors stay visible.
#pragma once
#include "w8a8/w8a8.cuh"

__device__ __forceinline__ void load_eight(float (&v)[8], const float* src) { read_floats(v, src); }
__device__ __forceinline__ void load_eight(float (&v)[8], const __half* src) {
    const uint4 eight = __ldcg(reinterpret_cast<const uint4*>(src));
    const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = half2_to_float2(words[i]);
        v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
    }
}

// Returns the largest |x| of the CTA. `largest` is the thread's largest |x| as bits: the unsigned order of the bits is
// the order of magnitudes, with infinity above all numbers and NaN above infinity.
__device__ __forceinline__ float cta_largest(uint32_t largest) {
    __shared__ uint32_t parts[WARPS];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, offset));
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; ++i) largest = max(largest, parts[i]);
    return __uint_as_float(largest);
}

// Returns v / by, correctly rounded. `by` must not be extreme, and `reciprocal` is 1 / by, correctly rounded. The fma
// computes the remainder of v * reciprocal exactly, so one correction is enough. A negative zero becomes +0.
__device__ __forceinline__ float divided(float v, float by, float reciprocal) {
    const float q = v * reciprocal;
    return fmaf(fmaf(-by, q, v), reciprocal, q);
}

// Converts four quotients to codes. Integers: adding 1.5 * 2^23 rounds to even and leaves the code in the low bits, in
// two's complement.
template <class VALUES>
__device__ __forceinline__ uint32_t codes_of(const float (&q)[4]) {
    if constexpr (!Codes8<VALUES>::EXACT) return floats_to_e4m3(q[0], q[1]) | floats_to_e4m3(q[2], q[3]) << 16;
    uint32_t bits[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) bits[e] = __float_as_uint(__fadd_rn(q[e], 12582912.0f));
    return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
}

// A row x[k], distributed over the threads of a CTA: v[i] holds columns column(i) ... column(i) + 7. Columns past k are
// 0. k is a multiple of 8.
template <class VALUES, class In, bool NORM>
struct QuantizedRow {
    float v[NORM_PIECES][8];
    float scale;

    static __device__ __forceinline__ int column(int i) { return RmsNorm::column(i); }

    // Loads x and computes the scale. NORM: loads norm(x), rounded to f16; x is float, and `norm` already holds the
    // weight of the norm. Calls `meanwhile` after issuing the loads. If `valid` is false, the row is 0.
    template <class Function>
    __device__ __forceinline__ void load(RmsNorm& norm, const In* x, int k, float eps, bool valid, Function meanwhile) {
        if constexpr (NORM) norm.load(x, k);
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i) {
#pragma unroll
            for (int e = 0; e < 8; ++e) v[i][e] = 0.0f;
            if (!NORM && valid && column(i) < k) load_eight(v[i], x + column(i));
        }
        meanwhile();
        if constexpr (NORM) norm.scale(k, eps);
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i)
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                if constexpr (NORM)
                    if (valid && column(i) < k) v[i][e] = __half2float(saturated_half(norm.value(i, e)));
                largest = max(largest, __float_as_uint(v[i][e]) & 0x7fffffffu);
            }
        scale = __fdiv_rn(cta_largest(largest), Codes8<VALUES>::LARGEST);
    }
    // Returns the eight codes of v[i]. If the scale is NaN, the codes do not matter.
    __device__ __forceinline__ uint2 codes(int i) const {
        constexpr float LARGEST = Codes8<VALUES>::LARGEST;
        const bool usual = scale > 1e-18f && scale < 1e18f;
        const float reciprocal = __frcp_rn(scale);
        float q[2][4];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            float& dst = q[e / 4][e % 4];
            if (usual) {
                dst = divided(v[i][e], scale, reciprocal);
                if (!Codes8<VALUES>::EXACT) dst = copysignf(dst, v[i][e]);
            } else {  // a subnormal scale is rounded coarsely and may be too small, so the quotient is clamped
                dst = scale > 0.0f && !isinf(scale) ? __fdiv_rn(v[i][e], scale) : 0.0f;
                dst = fminf(fmaxf(dst, -LARGEST), LARGEST);
            }
        }
        return make_uint2(codes_of<VALUES>(q[0]), codes_of<VALUES>(q[1]));
    }
};

// Exchanges the codes of 32 columns j among four lanes. Before: lane t holds columns 8 t ... 8 t + 7. The words make
// the 16-byte pieces (j, 0) and (j, 1). After: lane t holds words 2 (t % 2) and 2 (t % 2) + 1 of piece (j, t / 2).
__device__ __forceinline__ uint2 exchange_codes(const uint2& words) {
    const int t = threadIdx.x % 4;
    uint32_t out[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int src = threadIdx.x % 32 / 4 * 4 + 2 * (t % 2) + r;
        const uint32_t first = __shfl_sync(~0u, words.x, src), second = __shfl_sync(~0u, words.y, src);
        out[r] = t / 2 ? second : first;
    }
    return make_uint2(out[0], out[1]);
}

// The byte offset, in a packed row of 128 columns, of the words that exchange_codes returned for columns 8 i ... 8 i +
// 7 of a token.
__device__ __forceinline__ int codes_offset(int i, int token) {
    const int j = i / 4 % 4, t = i % 4;
    return (((2 * j + t / 2) ^ (token & 7)) << 4) + t % 2 * 8;
}
