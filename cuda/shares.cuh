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

// Sums that blocks leave to others: of N sums of each of THREADS threads, [block][sum / 4][thread][4] in `memory`, and
// whether they are there, [block][warp] in `ready`, 0 between launches.
template <class Sum, int N, int THREADS>
struct LeftSums {
    float* memory;
    uint32_t* ready;

    __device__ __forceinline__ uint4* of(int block) const {
        return reinterpret_cast<uint4*>(memory) + static_cast<size_t>(block) * (N / 4) * THREADS + threadIdx.x;
    }
    __device__ __forceinline__ uint32_t* flag(int block) const {
        return ready + block * (THREADS / 32) + threadIdx.x / 32;
    }
    // Sums as what they are: as bits they would be copied, for which a kernel may have no registers.
    static __device__ __forceinline__ void store(uint4* to, int a, int b, int c, int d) {
        __stcg(reinterpret_cast<int4*>(to), make_int4(a, b, c, d));
    }
    static __device__ __forceinline__ void store(uint4* to, float a, float b, float c, float d) {
        __stcg(reinterpret_cast<float4*>(to), make_float4(a, b, c, d));
    }
    static __device__ __forceinline__ void add(int& to, uint32_t from) { to += static_cast<int>(from); }
    static __device__ __forceinline__ void add(float& to, uint32_t from) { to += __uint_as_float(from); }

    __device__ __forceinline__ void leave(const Sum (&sums)[N]) const {
        uint4* to = of(blockIdx.x);
#pragma unroll
        for (int i = 0; i < N; i += 4)
            store(to + i / 4 * THREADS, sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
        __syncwarp();
        if (threadIdx.x % 32 == 0) store_release(flag(blockIdx.x), 1);
    }
    // Adds what blocks blockIdx.x + 1 ... behind - 1 leave, and takes their flags down.
    __device__ __forceinline__ void collect(Sum (&sums)[N], int behind) const {
        for (int b = blockIdx.x + 1 + threadIdx.x % 32; b < behind; b += 32) {
            while (load_acquire(flag(b)) == 0) spin_wait();
            *flag(b) = 0;
        }
        __syncwarp();
        constexpr int AT_ONCE = N >= 32 ? 1 : 32 / N;
        for (int b = blockIdx.x + 1; b < behind; b += AT_ONCE) {
            uint4 v[AT_ONCE][N / 4];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
                for (int i = 0; i < N / 4; ++i)
                    if (b + j < behind) v[j][i] = __ldcg(of(b + j) + i * THREADS);
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
                for (int i = 0; i < N / 4; ++i)
                    if (b + j < behind)
                        add(sums[4 * i], v[j][i].x), add(sums[4 * i + 1], v[j][i].y), add(sums[4 * i + 2], v[j][i].z),
                            add(sums[4 * i + 3], v[j][i].w);
        }
    }
};
