// How the output of a product is shared out among blocks that stay: tiles of output, and stretches of K of the last ones.
//
// Blocks take whole tiles for some rounds, in turn. The tiles that are left are cut into stages of K, all in a row, of
// which each block takes an equal stretch: one that begins inside a tile leaves its sums to the block that began the
// tile, which adds them in the order of K. So runs repeat bit by bit. Nothing here knows what is multiplied.
#pragma once
#include "common.cuh"

// The shares of this block, one after the other: stages first ... last - 1 of a tile.
struct Shares {
    int n_tiles, token_blocks, rounds, stages;
    int tile, first, last, round, at, end;

    // n_tiles of output, of which token_blocks in a row are of the same rows of weights.
    __device__ __forceinline__ Shares(int n_tiles_, int token_blocks_, int rounds_, int stages_)
        : n_tiles(n_tiles_), token_blocks(token_blocks_), rounds(rounds_), stages(stages_), round(0) {
        at = begin(blockIdx.x), end = begin(blockIdx.x + 1);
    }
    // Where block b begins, in stages over the tiles that are cut.
    __device__ __forceinline__ int begin(int b) const {
        const int blocks = gridDim.x, all = max(0, n_tiles - rounds * blocks) * stages;
        return b * (all / blocks) + min(b, all % blocks);
    }
    __device__ __forceinline__ int first_cut() const { return rounds * gridDim.x; }
    __device__ __forceinline__ bool next() {
        if (round < rounds) {
            tile = blockIdx.x + round++ * gridDim.x, first = 0, last = stages;
            return tile < n_tiles;
        }
        if (at >= end) return false;
        tile = first_cut() + at / stages, first = at % stages, last = min(stages, first + end - at);
        at += last - first;
        return true;
    }
    // The last of the blocks that share the tile, and one. This one began it.
    __device__ __forceinline__ int behind() const {
        const int tile_end = (tile - first_cut() + 1) * stages;
        int b = blockIdx.x + 1;
        while (b < gridDim.x && begin(b) < tile_end) ++b;
        return b;
    }
    __device__ __forceinline__ int row_block() const { return tile / token_blocks; }
    __device__ __forceinline__ int token_block() const { return tile % token_blocks; }
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
    static __device__ __forceinline__ uint32_t bits(int v) { return v; }
    static __device__ __forceinline__ uint32_t bits(float v) { return __float_as_uint(v); }
    static __device__ __forceinline__ void add(int& to, uint32_t from) { to += static_cast<int>(from); }
    static __device__ __forceinline__ void add(float& to, uint32_t from) { to += __uint_as_float(from); }

    __device__ __forceinline__ void leave(const Sum (&sums)[N]) const {
        uint4* to = of(blockIdx.x);
#pragma unroll
        for (int i = 0; i < N; i += 4)
            __stcg(to + i / 4 * THREADS,
                   make_uint4(bits(sums[i]), bits(sums[i + 1]), bits(sums[i + 2]), bits(sums[i + 3])));
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
