// Shared memory of the decode GEMM (gemm_decode.cu) after the cp.async pipelines, and the assignment of chunks to
// warps.
//
// Chunk c of the CTA's i-th tile row belongs to warp (c + i * n_chunk) mod WARPS. Each warp stores its partial sums of
// every tile row in shared memory, and the threads of the CTA reduce them over the warps. This file contains no
// arithmetic.
#pragma once
#include "norm/norm.cuh"
#include "layout/tile.cuh"

// Scale and correction of one group of x in fixed point (the columns that share a weight scale): see fixed_point.cuh.
struct __align__(8) XScale {
    float scale;
    union {
        int start;  // formats with a zero point: -zero * sum of the integers of x, the initial value of the group's sum
        float sum;  // formats with minimums: sum of x, which the group's minimum multiplies
    };
};

// Layout, in this order:
//
// | part          | shape                                 | present                                        |
// | partial sums  | f32 [2][BATCH][WARPS][16][COLS]       | all of x fits: two batches, double-buffered    |
// | carried sums  | f32 [BATCH][WARPS][FLOATS][32 lanes]  | x comes in slabs: accumulators between slabs;  |
// |               |                                       | in the last slab, partial sums overwrite them  |
// | scales of x   | XScale [n_tokens][slab / group]       | tiles with scales                              |
// | x             | [n_tokens][2 * slab + PAD bytes]      | always                                         |
template <class T, int COLS>
struct DecodeSharedStorage {
    static constexpr int BATCH = COLS == 8 ? 2 : 8 / COLS;   // tile rows between two CTA barriers
    static constexpr int FLOATS = T::SCALED ? COLS * 2 : 4;  // accumulators of a lane
    // Bytes of padding after each token's x, which put concurrent reads of different tokens on different banks.
    static constexpr int PAD = COLS == 1 ? 0 : !T::SCALED ? 64 : T::CHUNK_K / (COLS == 8 ? 4 : 2);

    float* sums;
    XScale* scales;
    uint8_t* x;
    int x_stride, scale_stride, n_tokens, part_stride, parities;  // parities: number of buffers, 1 or 2

    __device__ __forceinline__ DecodeSharedStorage(uint8_t* memory, int slab, int n_tokens_, bool whole)
        : n_tokens(n_tokens_) {
        sums = reinterpret_cast<float*>(memory);
        part_stride = whole ? TILE_ROWS * COLS : FLOATS * 32;
        parities = whole ? 2 : 1;  // with slabs, the barriers between slabs already separate batches
        scale_stride = T::SCALED ? slab / T::GROUP : 0;
        scales = reinterpret_cast<XScale*>(sums + parities * BATCH * WARPS * part_stride);
        x = reinterpret_cast<uint8_t*>(scales + n_tokens * scale_stride);
        x_stride = 2 * slab + PAD;
    }
    // Token of a column of the MMA's B operand. Columns past n_tokens repeat the last token; their sums are never
    // stored.
    __device__ __forceinline__ int token_of(int column) const { return COLS == 1 ? 0 : min(column, n_tokens - 1); }
    // Address of x of `token` at `column`. In fixed point, `column` must be the first of a chunk.
    __device__ __forceinline__ uint8_t* x_of(int token, int column) const { return x + token * x_stride + 2 * column; }
    __device__ __forceinline__ XScale* scales_of(int token, int column) const {
        return scales + token * scale_stride + static_cast<uint32_t>(column) / T::GROUP;
    }
    // Partial sums of (batch parity, tile row of the batch, warp): [16][COLS]. Those of the next warp are part_stride
    // floats further on.
    __device__ __forceinline__ float* partial_of(int parity, int tile, int warp) const {
        return sums + (((parity & (parities - 1)) * BATCH + tile) * WARPS + warp) * part_stride;
    }
    __device__ __forceinline__ float* carried_of(int tile, int warp) const { return partial_of(0, tile, warp); }
};

// Lane state of accumulators that compute their shared-memory addresses per chunk.
template <class T, int COLS>
struct LaneStorage {
    const DecodeSharedStorage<T, COLS>& storage;
    int lane;
};

// First chunk of warp `warp` in a slab of the CTA's i-th tile row.
__device__ __forceinline__ int first_chunk(int n_chunk, int warp, int i) {
    return (warp - i * (n_chunk % WARPS)) & (WARPS - 1);
}

// Loads WORDS words from shared memory, 8 or 16 bytes per instruction.
template <int WORDS>
__device__ __forceinline__ void load_lane_words(uint32_t (&out)[WORDS], const void* from) {
    if constexpr (WORDS % 4 == 0) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            const uint4 v = static_cast<const uint4*>(from)[i / 4];
            out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
        }
    } else {
        static_assert(WORDS == 2, "");
        const uint2 v = *static_cast<const uint2*>(from);
        out[0] = v.x, out[1] = v.y;
    }
}

// Loads the scales of N adjacent groups.
template <int N>
__device__ __forceinline__ void load_x_scales(XScale (&out)[N], const XScale* from) {
    uint32_t words[2 * N];
    load_lane_words(words, from);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        out[i].scale = __uint_as_float(words[2 * i]);
        out[i].start = static_cast<int>(words[2 * i + 1]);
    }
}
