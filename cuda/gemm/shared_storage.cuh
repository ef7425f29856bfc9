// How the shared memory of a product for few tokens is cut behind its ring, and how a block deals out chunks.
//
// Chunk c of the block's i-th tile row belongs to warp (c + i * n_chunk) mod WARPS. A warp leaves its partial sums of
// each tile row in shared memory, and the threads add them up. Knows no arithmetic.
#pragma once
#include "norm/norm.cuh"
#include "layout/tile.cuh"

// What belongs to x's columns of one group of weights: see fixed_point.cuh.
struct __align__(8) XScale {
    float scale;
    union {
        int start;  // what the codes' zero point adds to the sum of products
        float sum;  // scaled: what minimums are multiplied by
    };
};

// Partial sums [2][BATCH][WARPS][16][COLS], of two batches in turns; where x does not lie there in whole, instead of them
// sums that go on in the next slab [BATCH][WARPS][float][lane], whose place the partial sums take in the last one. Then of
// each token scales of x, then x.
template <class T, int COLS>
struct Room {
    static constexpr int BATCH = COLS == 8 ? 2 : 8 / COLS;  // tile rows between two barriers
    static constexpr int FLOATS = T::SCALED ? COLS * 2 : 4;  // sums of a lane
    // Behind each token's x, so that what the tokens' lanes read together lies on different banks.
    static constexpr int PAD = COLS == 1 ? 0 : !T::SCALED ? 64 : T::CHUNK_K / (COLS == 8 ? 4 : 2);

    float* sums;
    XScale* scales;
    uint8_t* x;
    int x_stride, scale_stride, n_tokens, part_stride, parities;  // parities: 1 or 2

    __device__ __forceinline__ Room(uint8_t* memory, int slab, int n_tokens_, bool whole) : n_tokens(n_tokens_) {
        sums = reinterpret_cast<float*>(memory);
        part_stride = whole ? TILE_ROWS * COLS : FLOATS * 32;
        parities = whole ? 2 : 1;  // barriers between slabs keep batches apart, too
        scale_stride = T::SCALED ? slab / T::GROUP : 0;
        scales = reinterpret_cast<XScale*>(sums + parities * BATCH * WARPS * part_stride);
        x = reinterpret_cast<uint8_t*>(scales + n_tokens * scale_stride);
        x_stride = 2 * slab + PAD;
    }
    // The token whose x a column of the mma takes: columns without a token repeat the last one's.
    __device__ __forceinline__ int token_of(int column) const { return COLS == 1 ? 0 : min(column, n_tokens - 1); }
    // x of a token from a column on, that of a chunk where x is fixed point.
    __device__ __forceinline__ uint8_t* x_of(int token, int column) const { return x + token * x_stride + 2 * column; }
    __device__ __forceinline__ XScale* scales_of(int token, int column) const {
        return scales + token * scale_stride + static_cast<uint32_t>(column) / T::GROUP;
    }
    // The partial sums of (batch parity, tile row in the batch, warp): [16][COLS]; the next warp's are part_stride on.
    __device__ __forceinline__ float* partial_of(int parity, int tile, int warp) const {
        return sums + (((parity & (parities - 1)) * BATCH + tile) * WARPS + warp) * part_stride;
    }
    __device__ __forceinline__ float* carried_of(int tile, int warp) const { return partial_of(0, tile, warp); }
};

// What a lane finds in it for each chunk anew.
template <class T, int COLS>
struct LaneOfRoom {
    const Room<T, COLS>& room;
    int lane;
};

// The first chunk that a warp takes of a slab of the block's i-th tile row.
__device__ __forceinline__ int first_chunk(int n_chunk, int warp, int i) {
    return (warp - i * (n_chunk % WARPS)) & (WARPS - 1);
}

// A lane's words from shared memory, 8 or 16 bytes at a time.
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

// The scales of N adjacent groups.
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
