// How the output of a product is shared out among blocks that stay: tiles of output, and stretches of K of the last ones.
//
// Blocks take whole tiles for some rounds, in turn. The tiles that are left are cut into stages of K, all in a row, of
// which each block takes an equal stretch: blocks that share a tile leave their sums to each other, and each adds up a
// part of them in the order of K. So runs repeat bit by bit. Nothing here knows what is multiplied.
#pragma once
#include "lib/common.cuh"

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
    int paired;  // tiles 2 i and 2 i + 1 are of the same tokens, of rows that are neighbours
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
    __device__ __forceinline__ bool whole() const { return begins() && ends(); }
    // Goes on with the tiles that are cut.
    __device__ __forceinline__ void pass_rounds() { round = dealt.rounds; }
    // The first of the blocks that share the tile, and behind the last one.
    __device__ __forceinline__ int from() const {
        const int tile_begin = (tile - first_cut()) * dealt.stages;
        int b = blockIdx.x;
        while (begin(b) > tile_begin) --b;
        return b;
    }
    __device__ __forceinline__ int behind() const {
        const int tile_end = (tile - first_cut() + 1) * dealt.stages;
        int b = blockIdx.x + 1;
        while (b < gridDim.x && begin(b) < tile_end) ++b;
        return b;
    }
    __device__ __forceinline__ int row_blocks() const { return dealt.n_tiles / dealt.token_blocks; }
    __device__ __forceinline__ int row_block() const {
        if (dealt.paired) return 2 * divided(tile / 2, dealt.by_token_blocks) + tile % 2;
        return ROWS_FIRST ? tile % row_blocks() : divided(tile, dealt.by_token_blocks);
    }
    __device__ __forceinline__ int token_block() const {
        if (dealt.paired) return tile / 2 - row_block() / 2 * dealt.token_blocks;
        return ROWS_FIRST ? tile / row_blocks() : tile - row_block() * dealt.token_blocks;
    }
};

// Sums of tiles that blocks share: of N sums of each of THREADS threads, [slot][sum / 4][thread][4]. Few are left to the
// block that began the tile, which adds them to its own. Many, of which it would take one part after the other, all
// blocks leave; then each takes a part of the pieces (sums 4 i ... 4 i + 3 of each thread). A word of this memory is
// EMPTY until a sum is there, and between launches, so that a sum needs no flag.
template <class Sum, int N, int THREADS>
struct LeftSums {
    // As a float -1e-38, for which 0 does as well; no sum of products of 8 bits comes to that (MAX_K).
    static constexpr uint32_t EMPTY = 0x80808080u;
    static constexpr int PIECES = N / 4;
    static constexpr bool FEW = PIECES <= 2;
    using Piece = Four<Sum>;
    float* memory;

    __device__ __forceinline__ Piece* of(int slot, int piece) const {
        return reinterpret_cast<Piece*>(memory) + (static_cast<size_t>(slot) * PIECES + piece) * THREADS + threadIdx.x;
    }
    static __device__ __forceinline__ bool empty(int sum) { return sum == static_cast<int>(EMPTY); }
    static __device__ __forceinline__ bool empty(float sum) { return __float_as_uint(sum) == EMPTY; }
    static __device__ __forceinline__ bool full(const Piece& v) {
        return !empty(v.x) && !empty(v.y) && !empty(v.z) && !empty(v.w);
    }
    static __device__ __forceinline__ Sum not_empty(Sum sum) { return empty(sum) ? Sum(0) : sum; }
    static __device__ __forceinline__ void clear(Piece* piece) {
        constexpr int nothing = static_cast<int>(EMPTY);
        store_relaxed(reinterpret_cast<int4*>(piece), make_int4(nothing, nothing, nothing, nothing));
    }
    static __device__ __forceinline__ Piece piece_of(const Sum (&sums)[N], int i) {
        return {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
    }

    // What this block has of a tile.
    __device__ __forceinline__ void leave(const Sum (&sums)[N], int slot) const {
        Piece* to = of(slot, 0);
#pragma unroll
        for (int i = 0; i < N; i += 4)
            store_relaxed(to + i / 4 * THREADS, {not_empty(sums[i]), not_empty(sums[i + 1]), not_empty(sums[i + 2]),
                                                 not_empty(sums[i + 3])});
    }
    // Adds what was left in slots first ... last - 1.
    __device__ __forceinline__ void add_to(Sum (&own)[N], int first, int last) const {
        Piece sums[PIECES];
#pragma unroll
        for (int i = 0; i < PIECES; ++i) sums[i] = piece_of(own, i);
        collect<8 / PIECES>(sums, of(first, 0), PIECES, 1, last - first);
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
            own[4 * i] = sums[i].x, own[4 * i + 1] = sums[i].y, own[4 * i + 2] = sums[i].z, own[4 * i + 3] = sums[i].w;
    }
    // out.put(i, sum) for pieces i = first, first + n, ...: of what was left in n slots.
    template <class Out>
    __device__ __forceinline__ void take(Out& out, int first, int slot, int n) const {
        if (n == 2)
            take<2, 2>(out, first, slot, n);
        else
            take<1, 4>(out, first, slot, n);
    }
    template <int COUNT, int AT_ONCE, class Out>
    __device__ __forceinline__ void take(Out& out, int piece, int slot, int n) const {
#pragma unroll 1
        for (; piece < PIECES; piece += COUNT * n) {
            Piece sums[COUNT] = {};
            collect<AT_ONCE>(sums, of(slot, piece), PIECES - piece, n, n);
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (i * n < PIECES - piece) out.put(piece + i * n, sums[i]);
        }
    }
    // sums[i] += the pieces i * step < pieces from `from` on of n slots, in their order, so many slots at once as soon as
    // all their pieces are there; leaves them EMPTY.
    template <int AT_ONCE, int COUNT>
    static __device__ __forceinline__ void collect(Piece (&sums)[COUNT], Piece* from, int pieces, int step, int n) {
#pragma unroll 1
        for (; n > 0; n -= AT_ONCE, from += AT_ONCE * PIECES * THREADS) {
            Piece v[COUNT][AT_ONCE];
            for (bool all = false; !all;) {
                all = true;
#pragma unroll
                for (int i = 0; i < COUNT; ++i)
#pragma unroll
                    for (int j = 0; j < AT_ONCE; ++j)
                        if (i * step < pieces && j < n) v[i][j] = load_relaxed(from + (j * PIECES + i * step) * THREADS);
#pragma unroll
                for (int i = 0; i < COUNT; ++i)
#pragma unroll
                    for (int j = 0; j < AT_ONCE; ++j)
                        if (i * step < pieces && j < n) all = all && full(v[i][j]);
                if (!all) spin_wait();
            }
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j)
                    if (i * step < pieces && j < n) {
                        sums[i].x += v[i][j].x, sums[i].y += v[i][j].y, sums[i].z += v[i][j].z, sums[i].w += v[i][j].w;
                        clear(from + (j * PIECES + i * step) * THREADS);
                    }
        }
        __syncwarp();
    }
};

// All N pieces of a tile.
template <int N, class Out, class Sums>
__device__ __forceinline__ void put_all(Out& out, Sums sums) {
#pragma unroll
    for (int i = 0; i < N; ++i) out.put(i, sums(i));
}

// What the THREADS threads that multiply do with the shares of their block: consumer.run(share) makes consumer.acc. An
// Out(p, room, share) takes what a tile comes to: put(i, sums 4 i ... 4 i + 3) for pieces i = first, first + step, ...,
// which all threads have the same of, then end(first, step).
template <class Out, int THREADS, class Product, class Room, class Consumer>
__device__ __forceinline__ void make_shares(const Product& p, const Room& room, Consumer& consumer) {
    constexpr int N = sizeof(consumer.acc) / sizeof(consumer.acc[0]);
    using Left = LeftSums<typename Consumer::Sum, N, THREADS>;
    const Left left{p.partial};
    for (Shares share(p.dealt); share.next();) {
        consumer.run(share);
        if (Left::FEW ? share.begins() : share.whole()) {
            Out out(p, room, share);
            if constexpr (Left::FEW) left.add_to(consumer.acc, blockIdx.x + 1, share.behind());
            put_all<N / 4>(out, [&](int i) { return Left::piece_of(consumer.acc, i); });
            out.end(0, 1);
        } else {
            // Of many, those of a tile follow each other; no other tile's lie there.
            left.leave(consumer.acc, Left::FEW ? blockIdx.x : share.from() + blockIdx.x);
        }
    }
    if constexpr (!Left::FEW) {
        Shares shared(p.dealt);
        for (shared.pass_rounds(); shared.next();) {
            const int begun_by = shared.from(), first = blockIdx.x - begun_by;
            if (shared.whole() || first >= N / 4) continue;
            Out out(p, room, shared);
            const int blocks = shared.behind() - begun_by;
            left.take(out, first, 2 * begun_by, blocks);
            out.end(first, blocks);
        }
    }
}
