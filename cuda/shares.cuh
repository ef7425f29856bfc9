// How the output of a product is shared out among blocks that stay: tiles of output, and stretches of K of the last ones.
//
// Blocks take whole tiles for some rounds, in turn. The tiles that are left are cut into stages of K, all in a row, of
// which each block takes an equal stretch: one that begins inside a tile leaves its sums to the block that began the
// tile, which adds them in the order of K. So runs repeat bit by bit. Nothing here knows what is multiplied.
#pragma once
#include "common.cuh"

#ifndef ROWS_FIRST
#define ROWS_FIRST 0  // neighbouring blocks have the same tokens and other rows, instead of the reverse: SCHEDULES.md
#endif

// How a launch deals out its work (kernels/hopper.py). Division takes long where everything waits for a block's first
// copies: what it would give comes from the host.
struct Dealt {
    int n_tiles;        // of output
    int token_blocks;   // of which so many in a row are of the same rows of weights
    int rounds, stages; // of whole tiles; of a tile
    int each, more;     // stages of a block, of the tiles that are cut; the first `more` blocks have one more
    uint32_t by_stages, by_token_blocks;  // inverses: see divided
};

// x / d, where the inverse is 2^32 / d, rounded down, and one; or 0 for d = 1. For x * d < 2^32.
__device__ __forceinline__ int divided(int x, uint32_t inverse) {
    return inverse == 0 ? x : static_cast<int>(__umulhi(static_cast<uint32_t>(x), inverse));
}

// The shares of this block, one after the other: stages first ... last - 1 of a tile.
struct Shares {
    const Dealt& dealt;
    int tile, first, last, round, at, end;

    __device__ __forceinline__ Shares(const Dealt& d) : dealt(d), round(0) {
        at = begin(blockIdx.x), end = begin(blockIdx.x + 1);
    }
    // Where block b begins, in stages over the tiles that are cut.
    __device__ __forceinline__ int begin(int b) const { return b * dealt.each + min(b, dealt.more); }
    __device__ __forceinline__ int first_cut() const { return dealt.rounds * gridDim.x; }
    __device__ __forceinline__ bool next() {
        if (round < dealt.rounds) {
            tile = blockIdx.x + round++ * gridDim.x, first = 0, last = dealt.stages;
            return tile < dealt.n_tiles;
        }
        if (at >= end) return false;
        const int cut = divided(at, dealt.by_stages);
        tile = first_cut() + cut, first = at - cut * dealt.stages, last = min(dealt.stages, first + end - at);
        at += last - first;
        return true;
    }
    __device__ __forceinline__ bool begins() const { return first == 0; }
    __device__ __forceinline__ bool ends() const { return last == dealt.stages; }
    // The last of the blocks that share the tile, and one. This one began it.
    __device__ __forceinline__ int behind() const {
        const int tile_end = (tile - first_cut() + 1) * dealt.stages;
        int b = blockIdx.x + 1;
        while (b < gridDim.x && begin(b) < tile_end) ++b;
        return b;
    }
    __device__ __forceinline__ int row_blocks() const { return dealt.n_tiles / dealt.token_blocks; }
    __device__ __forceinline__ int row_block() const {
        return ROWS_FIRST ? tile % row_blocks() : divided(tile, dealt.by_token_blocks);
    }
    __device__ __forceinline__ int token_block() const {
        return ROWS_FIRST ? tile / row_blocks() : tile - row_block() * dealt.token_blocks;
    }
};

// Sums that blocks leave to others: of N sums of each of THREADS threads, [block][sum / 4][thread][4]. A word of this
// memory is EMPTY until a sum is there, and between launches, so that a sum needs no flag, and nobody waits until it has
// arrived but who takes it.
template <class Sum, int N, int THREADS>
struct LeftSums {
    // As a float -1e-38, for which 0 does as well; no sum of products of 8 bits comes to that (MAX_K).
    static constexpr uint32_t EMPTY = 0x80808080u;
    static constexpr int PIECES = N < 16 ? N / 4 : N == 32 || N == 64 ? 2 : 4;  // of 16 bytes, of a block at once
    static constexpr int BLOCKS = N < 16 ? 32 / N : 1;  // at once
    float* memory;

    __device__ __forceinline__ Four<Sum>* of(int block) const {
        return reinterpret_cast<Four<Sum>*>(memory) + static_cast<size_t>(block) * (N / 4) * THREADS + threadIdx.x;
    }
    static __device__ __forceinline__ bool empty(int sum) { return sum == static_cast<int>(EMPTY); }
    static __device__ __forceinline__ bool empty(float sum) { return __float_as_uint(sum) == EMPTY; }
    static __device__ __forceinline__ bool full(const Four<Sum>& v) {
        return !empty(v.x) && !empty(v.y) && !empty(v.z) && !empty(v.w);
    }
    static __device__ __forceinline__ Sum not_empty(Sum sum) { return empty(sum) ? Sum(0) : sum; }

    __device__ __forceinline__ void leave(const Sum (&sums)[N]) const {
        Four<Sum>* to = of(blockIdx.x);
#pragma unroll
        for (int i = 0; i < N; i += 4)
            store_relaxed(to + i / 4 * THREADS, {not_empty(sums[i]), not_empty(sums[i + 1]), not_empty(sums[i + 2]),
                                                 not_empty(sums[i + 3])});
    }
    // Adds what blocks blockIdx.x + 1 ... behind - 1 leave.
    __device__ __forceinline__ void collect(Sum (&sums)[N], int behind) const {
        for (int b = blockIdx.x + 1; b < behind; b += BLOCKS) {
            Four<Sum>* from = of(b);
#pragma unroll
            for (int first = 0; first < N / 4; first += PIECES) {
                Four<Sum> v[BLOCKS][PIECES];
                take(v, from + first * THREADS, behind - b);
#pragma unroll
                for (int j = 0; j < BLOCKS; ++j)
#pragma unroll
                    for (int i = 0; i < PIECES; ++i)
                        if (j < behind - b) {
                            Sum* to = sums + 4 * (first + i);
                            to[0] += v[j][i].x, to[1] += v[j][i].y, to[2] += v[j][i].z, to[3] += v[j][i].w;
                        }
            }
        }
        __syncwarp();
    }
    // Pieces of `blocks` blocks, as soon as all are there; what they lay in is empty then.
    __device__ __forceinline__ void take(Four<Sum> (&v)[BLOCKS][PIECES], Four<Sum>* from, int blocks) const {
        for (bool all = false; !all;) {
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j)
#pragma unroll
                for (int i = 0; i < PIECES; ++i)
                    if (j < blocks) v[j][i] = load_relaxed(from + (j * (N / 4) + i) * THREADS);
            all = true;
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j)
#pragma unroll
                for (int i = 0; i < PIECES; ++i)
                    if (j < blocks) all = all && full(v[j][i]);
            if (!all) spin_wait();
        }
        constexpr int nothing = static_cast<int>(EMPTY);
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j)
#pragma unroll
            for (int i = 0; i < PIECES; ++i)
                if (j < blocks)
                    store_relaxed(reinterpret_cast<int4*>(from + (j * (N / 4) + i) * THREADS),
                                  make_int4(nothing, nothing, nothing, nothing));
    }
};
