// A row of activations as 8-bit codes with one scale, by a block of threads; where the codes go is for others.
//
// INT8: scale = max|x| / 127, q = x / scale rounded to even. E4M3: scale = max|x| / 448, q the nearest E4M3 of
// x / scale. Bit-equal to numpy on finite numbers; a row of zeros has scale 0. NaN or infinity makes the scale NaN or
// infinite and so every product with the row NaN: nothing is hidden.
#pragma once
#include "w8a8/w8a8.cuh"

__device__ __forceinline__ void load_eight(float (&v)[8], const float* from) { read_floats(v, from); }
__device__ __forceinline__ void load_eight(float (&v)[8], const __half* from) {
    const uint4 halves = __ldcg(reinterpret_cast<const uint4*>(from));
    const uint32_t words[4] = {halves.x, halves.y, halves.z, halves.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = half2_to_float2(words[i]);
        v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
    }
}

// The largest |x| of the block, as bits: unsigned order is that of magnitudes, with infinity and then NaN above all.
__device__ __forceinline__ float block_largest(uint32_t largest) {
    __shared__ uint32_t parts[WARPS];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, offset));
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; ++i) largest = max(largest, parts[i]);
    return __uint_as_float(largest);
}

// v / by, correctly rounded, of a divisor that is not extreme and its correctly rounded reciprocal: the remainder is
// exact, and what it corrects is off by little. That loses a negative zero.
__device__ __forceinline__ float divided(float v, float by, float reciprocal) {
    const float q = v * reciprocal;
    return fmaf(fmaf(-by, q, v), reciprocal, q);
}

// Four codes. Integers: adding 1.5 * 2^23 rounds to even and leaves them in the low bits, two's complement.
template <class VALUES>
__device__ __forceinline__ uint32_t codes_of(const float (&q)[4]) {
    if constexpr (!Codes8<VALUES>::EXACT) return floats_to_e4m3(q[0], q[1]) | floats_to_e4m3(q[2], q[3]) << 16;
    uint32_t bits[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) bits[e] = __float_as_uint(__fadd_rn(q[e], 12582912.0f));
    return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
}

// Columns column(i) ... + 7 of a row of k, a multiple of 8, in v[i]; what lies behind k is 0.
template <class VALUES, class In, bool NORM>
struct QuantizedRow {
    float v[NORM_PIECES][8];
    float scale;

    static __device__ __forceinline__ int column(int i) { return RmsNorm::column(i); }

    // Of x, or of norm(x) rounded to halves: `norm` has its weights then, and x is float. `meanwhile` is called when
    // the loads are under way. `there`: the row exists, else it is 0.
    template <class Function>
    __device__ __forceinline__ void load(RmsNorm& norm, const In* x, int k, float eps, bool there, Function meanwhile) {
        if constexpr (NORM) norm.load(x, k);
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i) {
#pragma unroll
            for (int e = 0; e < 8; ++e) v[i][e] = 0.0f;
            if (!NORM && there && column(i) < k) load_eight(v[i], x + column(i));
        }
        meanwhile();
        if constexpr (NORM) norm.scale(k, eps);
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i)
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                if constexpr (NORM)
                    if (there && column(i) < k) v[i][e] = __half2float(saturated_half(norm.value(i, e)));
                largest = max(largest, __float_as_uint(v[i][e]) & 0x7fffffffu);
            }
        scale = __fdiv_rn(block_largest(largest), Codes8<VALUES>::LARGEST);
    }
    // The codes of v[i]: four and four. Where the scale is no number codes do not matter.
    __device__ __forceinline__ uint2 codes(int i) const {
        constexpr float LARGEST = Codes8<VALUES>::LARGEST;
        const bool usual = scale > 1e-18f && scale < 1e18f;
        const float reciprocal = __frcp_rn(scale);
        float q[2][4];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            float& to = q[e / 4][e % 4];
            if (usual) {
                to = divided(v[i][e], scale, reciprocal);
                if (!Codes8<VALUES>::EXACT) to = copysignf(to, v[i][e]);
            } else {  // a scale that itself is rounded coarsely may be too small
                to = scale > 0.0f && !isinf(scale) ? __fdiv_rn(v[i][e], scale) : 0.0f;
                to = fminf(fmaxf(to, -LARGEST), LARGEST);
            }
        }
        return make_uint2(codes_of<VALUES>(q[0]), codes_of<VALUES>(q[1]));
    }
};

// Four lanes have columns 8 t ... 8 t + 7 of 32; their words make the pieces (j, 0) and (j, 1) of 16 bytes. Each lane
// receives half of one: of piece t / 2, words 2 (t % 2) and the next.
__device__ __forceinline__ uint2 exchange_codes(const uint2& words) {
    const int t = threadIdx.x % 4;
    uint32_t out[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int from = threadIdx.x % 32 / 4 * 4 + 2 * (t % 2) + r;
        const uint32_t first = __shfl_sync(~0u, words.x, from), second = __shfl_sync(~0u, words.y, from);
        out[r] = t / 2 ? second : first;
    }
    return make_uint2(out[0], out[1]);
}

// Where that goes, from the beginning of the row's 128 columns: columns 8 i ... 8 i + 7 of token `token`.
__device__ __forceinline__ int codes_place(int i, int token) {
    const int j = i / 4 % 4, t = i % 4;
    return (((2 * j + t / 2) ^ (token & 7)) << 4) + t % 2 * 8;
}
