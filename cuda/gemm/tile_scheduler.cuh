// Tile scheduler of persistent GEMMs: assigns work tiles to resident CTAs as whole waves, then splits the remaining
// tiles along K (stream-K or split-K).
//
// For the first `waves` waves CTA b takes the whole tiles b, b + gridDim.x, ... The remaining tiles are divided into
// stages of K, all in one sequence. Stream-K: each CTA takes an equal range of that sequence, up to a stage. Split-K:
// as many CTAs for each tile take equal ranges of it, up to a stage. CTAs that share a tile pass
// their sums through the split-K workspace (below), which are added in the order of K, so repeated runs are bitwise
// equal. This file does not depend on what is multiplied.
#pragma once
#include "lib/common.cuh"

#ifndef ROWS_FIRST
#define ROWS_FIRST 0  // 1: adjacent CTAs have the same tokens and different rows; 0: the reverse
#endif

// Parameters of a schedule (ggpy/kernels/gemm/hopper.py). A CTA's first copies wait for the schedule and an integer
// division takes long, so the host computes quotients and inverses.
struct TileSchedulerArgs {
    int n_tiles;        // work tiles of the output
    int token_blocks;   // tiles along the tokens: this many consecutive tiles share rows of weights
    int waves, stages;  // waves of whole tiles; stages of K per tile
    // CTAs that share a split tile (a team), or 0 with stream-K. Stages of each of them, or of all CTAs; the first
    // `remainder` have one more.
    int team, stages_per_cta, remainder;
    uint32_t inverse_stages, inverse_token_blocks, inverse_team;  // see divided
    int paired;  // tiles 2 i and 2 i + 1 have the same tokens and adjacent rows
};

// x / d by multiplication, for x * d < 2^32. `inverse` is floor(2^32 / d) + 1, or 0 for d = 1.
__device__ __forceinline__ int divided(int x, uint32_t inverse) {
    return inverse == 0 ? x : static_cast<int>(__umulhi(static_cast<uint32_t>(x), inverse));
}

// Iterates over the work tiles of this CTA. After next() returns true, the CTA multiplies stages first ... last - 1 of
// `tile`.
struct TileScheduler {
    const TileSchedulerArgs& args;
    int tile, first, last, wave, position, end;

    __device__ __forceinline__ TileScheduler(const TileSchedulerArgs& d) : args(d), wave(0) {
        position = begin(blockIdx.x), end = begin(blockIdx.x + 1);
    }
    // First stage of CTA b in the sequence of all stages of split tiles: with stream-K, or in its team; and in general.
    __device__ __forceinline__ int begin_in_team(int b) const {
        return b * args.stages_per_cta + min(b, args.remainder);
    }
    __device__ __forceinline__ int begin(int b) const {
        if (args.team == 0) return begin_in_team(b);
        const int team = divided(b, args.inverse_team);
        return team * args.stages + begin_in_team(b - team * args.team);
    }
    __device__ __forceinline__ int first_split_tile() const { return args.waves * gridDim.x; }
    __device__ __forceinline__ bool next() {
        if (wave < args.waves) {
            tile = blockIdx.x + wave++ * gridDim.x, first = 0, last = args.stages;
            return tile < args.n_tiles;
        }
        if (position >= end) return false;
        const int split_tile = divided(position, args.inverse_stages);
        tile = first_split_tile() + split_tile, first = position - split_tile * args.stages,
        last = min(args.stages, first + end - position);
        position += last - first;
        return true;
    }
    __device__ __forceinline__ bool starts_tile() const { return first == 0; }
    __device__ __forceinline__ bool ends_tile() const { return last == args.stages; }
    __device__ __forceinline__ bool is_whole() const { return starts_tile() && ends_tile(); }
    // Skips to the split tiles.
    __device__ __forceinline__ void skip_waves() { wave = args.waves; }
    // first_cta ... end_cta - 1 are the CTAs that share the tile.
    __device__ __forceinline__ int first_cta() const {
        if (args.team > 0) return divided(blockIdx.x, args.inverse_team) * args.team;
        const int tile_begin = (tile - first_split_tile()) * args.stages;
        int b = blockIdx.x;
        while (begin_in_team(b) > tile_begin) --b;
        return b;
    }
    __device__ __forceinline__ int end_cta() const {
        if (args.team > 0) return first_cta() + args.team;
        const int tile_end = (tile - first_split_tile() + 1) * args.stages;
        int b = blockIdx.x + 1;
        while (b < gridDim.x && begin_in_team(b) < tile_end) ++b;
        return b;
    }
    __device__ __forceinline__ int row_blocks() const { return args.n_tiles / args.token_blocks; }
    __device__ __forceinline__ int row_block() const {
        if (args.paired) return 2 * divided(tile / 2, args.inverse_token_blocks) + tile % 2;
        return ROWS_FIRST ? tile % row_blocks() : divided(tile, args.inverse_token_blocks);
    }
    __device__ __forceinline__ int token_block() const {
        if (args.paired) return tile / 2 - row_block() / 2 * args.token_blocks;
        return ROWS_FIRST ? tile / row_blocks() : tile - row_block() * args.token_blocks;
    }
};

// Split-K workspace: the partial sums of tiles that several CTAs share, N sums of each of THREADS threads per slot:
// [slot][sum / 4][thread][4]. A piece is the four sums 4 i ... 4 i + 3 of each thread.
//
// | N                      | reduction                                                                    |
// | N <= 8 (OWNER_REDUCES) | the CTA that begins the tile adds the sums of the others to its accumulators |
// | N > 8                  | all CTAs of the tile store their sums, and each reduces a part of the pieces |
//
// A word of the workspace is EMPTY until its sum has been stored, and EMPTY again between launches, so sums need no
// separate flags.
template <class Sum, int N, int THREADS>
struct SplitKWorkspace {
    // As a float it is -1.2e-38; not_empty() stores 0 instead of a sum with these bits. As an int it is less than any
    // sum of 8-bit products (MAX_K).
    static constexpr uint32_t EMPTY = 0x80808080u;
    static constexpr int PIECES = N / 4;
    static constexpr bool OWNER_REDUCES = PIECES <= 2;
    using Piece = Four<Sum>;
    float* memory;

    __device__ __forceinline__ Piece* address(int slot, int piece) const {
        return reinterpret_cast<Piece*>(memory) + (static_cast<size_t>(slot) * PIECES + piece) * THREADS + threadIdx.x;
    }
    static __device__ __forceinline__ bool is_empty(int sum) { return sum == static_cast<int>(EMPTY); }
    static __device__ __forceinline__ bool is_empty(float sum) { return __float_as_uint(sum) == EMPTY; }
    static __device__ __forceinline__ bool is_full(const Piece& v) {
        return !is_empty(v.x) && !is_empty(v.y) && !is_empty(v.z) && !is_empty(v.w);
    }
    static __device__ __forceinline__ Sum not_empty(Sum sum) { return is_empty(sum) ? Sum(0) : sum; }
    static __device__ __forceinline__ void clear(Piece* piece) {
        constexpr int nothing = static_cast<int>(EMPTY);
        store_relaxed(reinterpret_cast<int4*>(piece), make_int4(nothing, nothing, nothing, nothing));
    }
    static __device__ __forceinline__ Piece piece_of(const Sum (&sums)[N], int i) {
        return {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
    }

    // Stores this CTA's sums of a tile.
    __device__ __forceinline__ void store(const Sum (&sums)[N], int slot) const {
        Piece* dst = address(slot, 0);
#pragma unroll
        for (int i = 0; i < N; i += 4)
            store_relaxed(dst + i / 4 * THREADS,
                          {not_empty(sums[i]), not_empty(sums[i + 1]), not_empty(sums[i + 2]), not_empty(sums[i + 3])});
    }
    // Adds the sums of slots first ... last - 1 to `acc`.
    __device__ __forceinline__ void add_to(Sum (&acc)[N], int first, int last) const {
        Piece sums[PIECES];
#pragma unroll
        for (int i = 0; i < PIECES; ++i) sums[i] = piece_of(acc, i);
        collect<8 / PIECES>(sums, address(first, 0), PIECES, 1, last - first);
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
            acc[4 * i] = sums[i].x, acc[4 * i + 1] = sums[i].y, acc[4 * i + 2] = sums[i].z, acc[4 * i + 3] = sums[i].w;
    }
    // Reduces pieces first, first + n, ... over n slots, and calls out.put(i, sum) for each.
    template <class Out>
    __device__ __forceinline__ void reduce(Out& out, int first, int slot, int n) const {
        if (n == 2)
            reduce<2, 2>(out, first, slot, n);
        else
            reduce<1, 4>(out, first, slot, n);
    }
    template <int COUNT, int AT_ONCE, class Out>
    __device__ __forceinline__ void reduce(Out& out, int piece, int slot, int n) const {
#pragma unroll 1
        for (; piece < PIECES; piece += COUNT * n) {
            Piece sums[COUNT] = {};
            collect<AT_ONCE>(sums, address(slot, piece), PIECES - piece, n, n);
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (i * n < PIECES - piece) out.put(piece + i * n, sums[i]);
        }
    }
    // sums[i] += piece i * step (while i * step < pieces) from `src` on of n slots, in the order of the slots. Polls
    // AT_ONCE slots at a time until all their words are full, then resets them to EMPTY.
    template <int AT_ONCE, int COUNT>
    static __device__ __forceinline__ void collect(Piece (&sums)[COUNT], Piece* src, int pieces, int step, int n) {
#pragma unroll 1
        for (; n > 0; n -= AT_ONCE, src += AT_ONCE * PIECES * THREADS) {
            Piece v[COUNT][AT_ONCE];
            for (bool complete = false; !complete;) {
                complete = true;
#pragma unroll
                for (int i = 0; i < COUNT; ++i)
#pragma unroll
                    for (int j = 0; j < AT_ONCE; ++j)
                        if (i * step < pieces && j < n) v[i][j] = load_relaxed(src + (j * PIECES + i * step) * THREADS);
#pragma unroll
                for (int i = 0; i < COUNT; ++i)
#pragma unroll
                    for (int j = 0; j < AT_ONCE; ++j)
                        if (i * step < pieces && j < n) complete = complete && is_full(v[i][j]);
                if (!complete) spin_wait();
            }
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j)
                    if (i * step < pieces && j < n) {
                        sums[i].x += v[i][j].x, sums[i].y += v[i][j].y, sums[i].z += v[i][j].z, sums[i].w += v[i][j].w;
                        clear(src + (j * PIECES + i * step) * THREADS);
                    }
        }
        __syncwarp();
    }
};

// Puts all N pieces of a tile.
template <int N, class Out, class Sums>
__device__ __forceinline__ void put_all(Out& out, Sums sums) {
#pragma unroll
    for (int i = 0; i < N; ++i) out.put(i, sums(i));
}

// The work loop of the THREADS threads that multiply. consumer.run(work) computes consumer.acc for one work tile.
// Out(p, storage, work) receives the results of a tile: put(i, sums 4 i ... 4 i + 3) for pieces i = first, first +
// step, ... (the same pieces in all threads), then end(first, step).
template <class Out, int THREADS, class Args, class Storage, class Consumer>
__device__ __forceinline__ void run_work_tiles(const Args& p, const Storage& storage, Consumer& consumer) {
    constexpr int N = sizeof(consumer.acc) / sizeof(consumer.acc[0]);
    using Workspace = SplitKWorkspace<typename Consumer::Sum, N, THREADS>;
    const Workspace workspace{p.partial};
    for (TileScheduler work(p.scheduler); work.next();) {
        consumer.run(work);
        if (Workspace::OWNER_REDUCES ? work.starts_tile() : work.is_whole()) {
            Out out(p, storage, work);
            if constexpr (Workspace::OWNER_REDUCES) workspace.add_to(consumer.acc, blockIdx.x + 1, work.end_cta());
            put_all<N / 4>(out, [&](int i) { return Workspace::piece_of(consumer.acc, i); });
            out.end(0, 1);
        } else {
            // If every CTA stores its sums, the slots of a tile are consecutive, and no other tile uses them.
            workspace.store(consumer.acc, Workspace::OWNER_REDUCES ? blockIdx.x : work.first_cta() + blockIdx.x);
        }
    }
    if constexpr (!Workspace::OWNER_REDUCES) {
        TileScheduler split(p.scheduler);
        for (split.skip_waves(); split.next();) {
            const int owner = split.first_cta(), first = blockIdx.x - owner;
            if (split.is_whole() || first >= N / 4) continue;
            Out out(p, storage, split);
            const int n_ctas = split.end_cta() - owner;
            workspace.reduce(out, first, 2 * owner, n_ctas);
            out.end(first, n_ctas);
        }
    }
}
