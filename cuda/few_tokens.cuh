// Tiles times the few tokens of a decode step: the arithmetic of mul_mat_tile.cu.
//
// Chunk c of the block's i-th tile row belongs to warp (c + i * n_chunk) mod WARPS. A warp leaves its partial sums of
// each tile row in shared memory, and the threads add them up, warp 0 first. Nothing here knows how chunks and x come
// into shared memory, or what becomes of the sums.
#pragma once
#include "norm.cuh"
#include "tile.cuh"

// How the shared memory behind the ring is cut: partial sums [2][BATCH][WARPS][16][COLS], sums of x, x.
template <class T, int COLS>
struct Room {
    static constexpr int BATCH = COLS == 1 ? 8 : COLS == 8 ? 2 : 1;  // tile rows between two barriers
    static constexpr int PARTIAL = BATCH * WARPS * TILE_ROWS * COLS;
    static constexpr int SUM_GROUP = T::GROUP == 16 ? 16 : 32;
    static constexpr int PAD = COLS > 1 ? 32 : 0;  // 64 bytes, so that eight tokens' rows lie on different banks

    float* partial;
    float* sums;
    __half* x;
    int x_stride, sum_stride, n_tokens;

    __device__ __forceinline__ Room(uint8_t* memory, int slab, int n_tokens_) : n_tokens(n_tokens_) {
        partial = reinterpret_cast<float*>(memory);
        sums = partial + 2 * PARTIAL;
        sum_stride = T::SCALED ? slab / SUM_GROUP : 0;
        x = reinterpret_cast<__half*>(sums + n_tokens * sum_stride);
        x_stride = slab + PAD;
    }
    // The token whose x a column of the mma takes: columns without a token repeat the last one's.
    __device__ __forceinline__ int token_of(int column) const { return COLS == 1 ? 0 : min(column, n_tokens - 1); }
    // The partial sums of (batch parity, tile row in the batch, warp): [16][COLS].
    __device__ __forceinline__ float* partial_of(int parity, int tile, int warp) const {
        return partial + parity * PARTIAL + (tile * WARPS + warp) * TILE_ROWS * COLS;
    }
};

// The first chunk that a warp takes of a slab of the block's i-th tile row.
__device__ __forceinline__ int first_chunk(int n_chunk, int warp, int i) {
    return (warp - i * (n_chunk % WARPS)) & (WARPS - 1);
}

// Eight halves of a token go to shared memory, and the sum of their group, in units of a code, beside them. Every lane
// of the warp calls it, since sums pass between lanes; those that are not `valid` write nothing.
template <class T, int COLS>
__device__ __forceinline__ void put_x(const Room<T, COLS>& room, bool valid, int token, int column,
                                      const uint4& halves) {
    if (valid) *reinterpret_cast<uint4*>(room.x + token * room.x_stride + column) = halves;
    if constexpr (T::SCALED) {
        const float2 a = half2_to_float2(halves.x), b = half2_to_float2(halves.y);
        const float2 c = half2_to_float2(halves.z), d = half2_to_float2(halves.w);
        float sum = ((a.x + a.y) + (b.x + b.y)) + ((c.x + c.y) + (d.x + d.y));
        constexpr int lanes = Room<T, COLS>::SUM_GROUP / 8;
#pragma unroll
        for (int offset = 1; offset < lanes; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (valid && threadIdx.x % lanes == 0) room.sums[token * room.sum_stride + column / (8 * lanes)] = sum * CODE_UNIT;
    }
}

// acc += d * (codes . x - zero * sum(x)) + m * sum(x), all in units of a code; acc rows g, g + 8, columns 2t, 2t + 1.
template <class T, int COLS>
__device__ __forceinline__ void add_scaled(float (&acc)[4], const float (&c)[4], const RowScales& s,
                                           const float (&shift)[2], float sum0, float sum1) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float d = s.d[row] * (1.0f / shift[row]);
        acc[2 * row] = fmaf(c[2 * row], d, acc[2 * row]);
        if (COLS > 1) acc[2 * row + 1] = fmaf(c[2 * row + 1], d, acc[2 * row + 1]);
        if (T::MIN) {
            acc[2 * row] = fmaf(s.m[row], sum0, acc[2 * row]);
            if (COLS > 1) acc[2 * row + 1] = fmaf(s.m[row], sum1, acc[2 * row + 1]);
        }
    }
}

// The sums of x over the groups of a chunk, of columns 2t and 2t + 1.
template <class T, int COLS>
struct ChunkSums {
    static constexpr int N = T::SCALED ? T::CHUNK_K / Room<T, COLS>::SUM_GROUP : 4;
    float of[COLS > 1 ? 2 : 1][N];

    __device__ __forceinline__ void load(const Room<T, COLS>& room, int n, int column, int t) {
        if constexpr (T::SCALED) {
#pragma unroll
            for (int c = 0; c < (COLS > 1 ? 2 : 1); ++c) {
                const float* from = room.sums + room.token_of(n * 8 + 2 * t + c) * room.sum_stride +
                                    column / Room<T, COLS>::SUM_GROUP;
#pragma unroll
                for (int i = 0; i < N; i += 4) {
                    const float4 v = *reinterpret_cast<const float4*>(from + i);
                    of[c][i] = v.x, of[c][i + 1] = v.y, of[c][i + 2] = v.z, of[c][i + 3] = v.w;
                }
            }
        }
    }
};

// Group J (32 columns) of a chunk times eight tokens: two mma, and the scales. `x` is the lane's token's.
template <class T, int COLS, int J>
__device__ __forceinline__ void multiply_group(const ChunkCodes<T>& codes, const ChunkScales<T>& scales,
                                               const ChunkSums<T, COLS>& sums, const __half* x, int t,
                                               float (&acc)[4]) {
    uint32_t a0[4], a1[4];
    codes.template unpack<J, 0>(a0);
    codes.template unpack<J, 1>(a1);
    uint4 b;
    if constexpr (T::GROUP == 16 || T::FLOAT) {
        const uint2 low = *reinterpret_cast<const uint2*>(x + J * 32 + 4 * t);
        const uint2 high = *reinterpret_cast<const uint2*>(x + J * 32 + 16 + 4 * t);
        b = make_uint4(low.x, low.y, high.x, high.y);
    } else {
        b = *reinterpret_cast<const uint4*>(x + J * 32 + 8 * t);
    }
    const uint32_t b0[2] = {b.x, b.y}, b1[2] = {b.z, b.w};
    if constexpr (!T::SCALED) {
        mma_m16n8k16_f16(acc, a0, b0);
        mma_m16n8k16_f16(acc, a1, b1);
    } else {
        constexpr int per_group = T::GROUP == 16 ? 2 : 1, last = COLS > 1 ? 1 : 0;
        constexpr float shift[2] = {T::template shift<J, 0>(), T::template shift<J, 1>()};
        constexpr float zero[2] = {-T::ZERO * shift[0], -T::ZERO * shift[1]};
        const float s0 = sums.of[0][J * per_group], s1 = sums.of[last][J * per_group];
        float c[4] = {};
        if constexpr (T::ZERO != 0) c[0] = zero[0] * s0, c[1] = zero[0] * s1, c[2] = zero[1] * s0, c[3] = zero[1] * s1;
        mma_m16n8k16_f16(c, a0, b0);
        if constexpr (T::GROUP == 16) {
            add_scaled<T, COLS>(acc, c, scales.template get<2 * J>(), shift, s0, s1);
            const float r0 = sums.of[0][2 * J + 1], r1 = sums.of[last][2 * J + 1];
            float d[4] = {};
            if constexpr (T::ZERO != 0)
                d[0] = zero[0] * r0, d[1] = zero[0] * r1, d[2] = zero[1] * r0, d[3] = zero[1] * r1;
            mma_m16n8k16_f16(d, a1, b1);
            add_scaled<T, COLS>(acc, d, scales.template get<2 * J + 1>(), shift, r0, r1);
        } else {
            mma_m16n8k16_f16(c, a1, b1);
            add_scaled<T, COLS>(acc, c, scales.template get<J>(), shift, s0, s1);
        }
    }
}

template <class T, int COLS, int J>
__device__ __forceinline__ void multiply_groups(const ChunkCodes<T>& codes, const ChunkScales<T>& scales,
                                                const ChunkSums<T, COLS>& sums, const __half* x, int t,
                                                float (&acc)[4]) {
    if constexpr (J * 32 < T::CHUNK_K) {
        multiply_group<T, COLS, J>(codes, scales, sums, x, t, acc);
        multiply_groups<T, COLS, J + 1>(codes, scales, sums, x, t, acc);
    }
}

// A token's output in a row of the tile: the warps' partial sums, `part` being warp 0's.
template <class T, int COLS>
__device__ __forceinline__ float sum_of_parts(const float* part) {
    float y = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) y += part[warp * TILE_ROWS * COLS];
    return T::SCALED ? y * (1.0f / CODE_UNIT) : y;
}
