// Tiles of 8 bits x 8-bit activations (w8a8.cuh) on Hopper, 16 to 256 tokens of a block at a time.
//
// A block has two warpgroups that multiply and one that copies. Each warp that multiplies has 16 rows, so that a
// warpgroup has the 64 rows of a wgmma; its A operands come from shared memory into registers, 128 columns ahead of the
// products that run meanwhile. A stage of the ring holds 128 columns: a chunk of eight tile rows, and of TOKENS tokens.
// One warp brings the chunks by bulk copies, without waiting for the kernel that makes x; a thread of another one x.
// tile_scheduler.cuh says which stages of which tiles of output (128 rows, TOKENS tokens) are this block's.
//
// Epilogues: STORE (float out = y), ADD (float out += y), GLU (half out = act(gate) * up). There a warp has rows 8 h
// ... 8 h + 7 of a tile row of gate and the same of up, so a thread has both factors. QKV: the segments are q, k and v, which
// go rotated to rows of halves, and to pages.
#include "gemm/rope_epilogue.cuh"
#include "w8a8/wgmma_8bit.cuh"

constexpr int GROUPS = 2;                      // warpgroups that multiply
constexpr int TILES = 4 * GROUPS;              // tile rows of a block
constexpr int MULTIPLIERS = 128 * GROUPS;      // threads that multiply
constexpr int W_THREADS = MULTIPLIERS + 128;
constexpr int W_BYTES = TILES * CODES_CHUNK;   // of a stage
constexpr int BARRIERS = 1024;                 // bytes

// The shared memory: x of all stages, outputs of a GLU or some of q and k, weights of all stages, barriers.
template <int TOKENS, int EPILOGUE>
struct Room {
    static constexpr int SHARED = 226 << 10;  // as the launch has it
    static constexpr int X_BYTES = TOKENS * CODES_STEP;
    static constexpr int OUT_BYTES = EPILOGUE == GLU ? TOKENS * 128 : EPILOGUE == QKV ? STAGED_HEADS_BYTES : 0;
    static constexpr int STAGES = (SHARED - BARRIERS - OUT_BYTES) / (W_BYTES + X_BYTES);
    static_assert(STAGES >= 3 && 16 * STAGES <= BARRIERS, "");

    uint8_t *x, *out, *w;
    uint64_t *full, *free;

    __device__ __forceinline__ Room(uint8_t* shared) {
        x = shared;
        out = x + STAGES * X_BYTES;
        w = out + OUT_BYTES;
        full = reinterpret_cast<uint64_t*>(w + STAGES * W_BYTES);
        free = full + STAGES;
    }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < STAGES; ++i) mbarrier_init(full + i, 2), mbarrier_init(free + i, 32 * TILES);
        mbarrier_init_fence();
    }
};

// One warp: lane i copies tile row i.
template <int TOKENS, int EPILOGUE>
__device__ __forceinline__ void copy_weights(const Product& p, const Room<TOKENS, EPILOGUE>& room, int lane) {
    Place<Room<TOKENS, EPILOGUE>::STAGES> place;
    for (Shares share(p.dealt); share.next();) {
        const TileRow tile = TileRow::of<EPILOGUE, TILES>(p, share.row_block(), lane % TILES, CODES_CHUNK);
        for (int stage = share.first; stage < share.last; ++stage, place.next()) {
            uint64_t* full = room.full + place.stage;
            mbarrier_wait(room.free + place.stage, place.parity ^ 1);
            if (lane == 0) mbarrier_arrive_expect(full, W_BYTES);
            __syncwarp();
            if (lane >= TILES) continue;
            uint8_t* to = room.w + place.stage * W_BYTES + lane * CODES_CHUNK;
            const uint8_t* from = tile.chunks + static_cast<size_t>(stage) * CODES_CHUNK;
            if constexpr (TOKENS <= 64)  // so few that weights are read once
                bulk_copy_streaming(to, from, CODES_CHUNK, full, p.streaming);
            else
                bulk_copy(to, from, CODES_CHUNK, full);
        }
    }
}

// One thread, which waits for the kernel that makes x.
template <int TOKENS, int EPILOGUE>
__device__ __forceinline__ void copy_x(const Product& p, const Room<TOKENS, EPILOGUE>& room) {
    using R = Room<TOKENS, EPILOGUE>;
    Place<R::STAGES> place;
    for (Shares share(p.dealt); share.next();) {
        const int token = share.token_block() * TOKENS;
        const int bytes = min(TOKENS, codes_tokens(p.n_tokens) - token) * CODES_STEP;
        grid_dependency_wait(made_of(p.x + codes_row(share.first, token, p.n_tokens)) | bytes);
        for (int stage = share.first; stage < share.last; ++stage, place.next()) {
            mbarrier_wait(room.free + place.stage, place.parity ^ 1);
            mbarrier_arrive_expect(room.full + place.stage, bytes);
            bulk_copy(room.x + place.stage * R::X_BYTES, p.x + codes_row(stage, token, p.n_tokens), bytes,
                      room.full + place.stage);
        }
    }
}

// A warp that multiplies.
template <class VALUES, int TOKENS, int EPILOGUE>
struct Consumer {
    using C = Codes8<VALUES>;
    using Sum = typename C::Sum;
    using R = Room<TOKENS, EPILOGUE>;
    const Product& p;
    const R& room;
    int warp, lane;                     // warp 0 ... TILES - 1
    Place<R::STAGES> ahead, now;    // the stage whose operands come next, and that is multiplied next
    int used;                           // the stage before it, or -1: products under way may still take it
    uint32_t a[2][4][4];
    Sum acc[TOKENS / 2];

    __device__ __forceinline__ Consumer(const Product& product, const R& r)
        : p(product), room(r), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

    __device__ __forceinline__ uint4 words(const uint8_t* w, int j) const {
        if constexpr (EPILOGUE == GLU) {
            const uint8_t* gate = w + warp / 2 * CODES_CHUNK + (32 * j + lane) * 16 + warp % 2 * 8;
            const uint2 first = *reinterpret_cast<const uint2*>(gate);
            const uint2 second = *reinterpret_cast<const uint2*>(gate + TILES / 2 * CODES_CHUNK);
            return make_uint4(first.x, first.y, second.x, second.y);
        } else {
            return *reinterpret_cast<const uint4*>(w + warp * CODES_CHUNK + (32 * j + lane) * 16);
        }
    }
    template <int P>
    __device__ __forceinline__ void load() {
        mbarrier_wait(room.full + ahead.stage, ahead.parity);
        const uint8_t* w = room.w + ahead.stage * W_BYTES;
#pragma unroll
        for (int j = 0; j < 4; ++j) operand8<VALUES>(a[P][j], words(w, j));
        ahead.next();
    }
    __device__ __forceinline__ void release(int stage) const {  // each lane for itself, as in gemm_wgmma.cu
        if (stage >= 0) mbarrier_arrive(room.free + stage);
    }
    // Enqueues the products of the stage at `now`; while they run, makes the next operands.
    template <int P>
    __device__ __forceinline__ void step(bool more) {
        const uint32_t b = wgmma_operand(room.x + now.stage * R::X_BYTES);
        if constexpr (C::EXACT) {
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; ++j) wgmma_codes<VALUES, TOKENS>(acc, a[P][j], b + 2 * j);
            wgmma_commit();
            wgmma_wait<1>();
            release(used);
            used = now.stage;
            if (more) load<P ^ 1>();
        } else {
            Sum part[TOKENS / 2];
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) part[i] = 0.0f;
            wgmma_fence();
            wgmma_codes<VALUES, TOKENS, false>(part, a[P][0], b);
#pragma unroll
            for (int j = 1; j < 4; ++j) wgmma_codes<VALUES, TOKENS>(part, a[P][j], b + 2 * j);
            wgmma_commit();
            if (more) load<P ^ 1>();
            wgmma_wait<0>();
            wgmma_hold_codes(part);
            release(now.stage);
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) acc[i] += part[i];
        }
        now.next();
    }
    __device__ __forceinline__ void run(const Shares& share) {
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) acc[i] = 0;
        used = -1;
        load<0>();
        int left = share.last - share.first;
        for (; left > 1; left -= 2) {
            step<0>(true);
            step<1>(left > 2);
        }
        if (left > 0) step<0>(false);
        wgmma_wait<0>();
        wgmma_hold_codes(acc);
        release(used);
    }
};

// The scales of tokens `token` and the one behind it, which may be past the end.
__device__ __forceinline__ float2 x_scales(const Product& p, int token) {
    return make_float2(token < p.n_tokens ? __ldcg(p.x_scale + token) : 0.0f,
                       token + 1 < p.n_tokens ? __ldcg(p.x_scale + token + 1) : 0.0f);
}

// Where the sums of a tile of output go, a piece at a time: sums e = 0 ... 3 of piece i are of row g + 8 (e / 2) of the
// warp and token 8 i + 2 t + e % 2 of the block.
template <class VALUES, int TOKENS, int EPILOGUE>
struct Out {
    const Product& p;
    const Segment* segment;
    int row, token;  // the thread's first ones
    float scale[2];
    bool there[2];

    __device__ __forceinline__ Out(const Product& product, const Room<TOKENS, EPILOGUE>&, const Shares& share)
        : p(product) {
        const int lane = threadIdx.x % 32;
        const TileRow mine = TileRow::of<EPILOGUE, TILES>(p, share.row_block(), threadIdx.x / 32, CODES_CHUNK);
        segment = p.segment + mine.segment;
        row = mine.row + lane / 4, token = share.token_block() * TOKENS + lane % 4 * 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            there[h] = mine.valid && row + 8 * h < segment->n_rows;
            scale[h] = there[h] ? row_scale_of(*segment, row + 8 * h) : 0.0f;
        }
    }
    __device__ __forceinline__ void put(int piece, const Four<typename Codes8<VALUES>::Sum>& sums) const {
        const typename Codes8<VALUES>::Sum sum[4] = {sums.x, sums.y, sums.z, sums.w};
        const float2 x = x_scales(p, token + 8 * piece);
        float* to = static_cast<float*>(segment->out) + static_cast<size_t>(token + 8 * piece) * segment->n_rows + row;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (!there[e / 2] || token + 8 * piece + e % 2 >= p.n_tokens) continue;
            float* at = to + (e % 2 ? segment->n_rows : 0) + e / 2 * 8;
            const float y = scaled(sum[e], e % 2 ? x.y : x.x, scale[e / 2]);
            if (EPILOGUE == ADD)
                atomicAdd(at, y);  // nobody else does: it is there to need no answer
            else
                *at = y;
        }
    }
    __device__ __forceinline__ void end(int, int) const {}
};

// Sums 0 and 1 are of gate, 2 and 3 of up. The outputs of 64 rows go through shared memory, 128 bytes for each token,
// whose 16-byte pieces are swizzled like those of x.
template <class VALUES, int TOKENS>
struct Out<VALUES, TOKENS, GLU> {
    const Product& p;
    uint8_t* out;  // in shared memory
    int row_in_block, first_row, first_token;
    float gate, up;

    __device__ __forceinline__ Out(const Product& product, const Room<TOKENS, GLU>& room, const Shares& share)
        : p(product), out(room.out), row_in_block(threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4),
          first_row(share.row_block() * 64), first_token(share.token_block() * TOKENS) {
        const int row = first_row + row_in_block;
        const bool there = row < p.segment[0].n_rows;
        gate = there ? row_scale_of(p.segment[0], row) : 0.0f;
        up = there ? row_scale_of(p.segment[1], row) : 0.0f;
        named_barrier_sync(1, MULTIPLIERS);
    }
    __device__ __forceinline__ void put(int piece, const Four<typename Codes8<VALUES>::Sum>& sums) const {
        const int token = threadIdx.x % 4 * 2;
        const float2 x = x_scales(p, first_token + 8 * piece + token);
        const __half first = gated(p.activation, scaled(sums.x, x.x, gate), scaled(sums.z, x.x, up));
        const __half second = gated(p.activation, scaled(sums.y, x.y, gate), scaled(sums.w, x.y, up));
        put_one(8 * piece + token, first), put_one(8 * piece + token + 1, second);
    }
    __device__ __forceinline__ void put_one(int token, __half y) const {
        const int at = (row_in_block / 8) ^ (token & 7);
        reinterpret_cast<__half*>(out + token * 128 + at * 16)[row_in_block % 8] = y;
    }
    // All warps have put pieces first, first + step, ... They go to rows of halves: eight at a time where they lie on 16
    // bytes.
    __device__ __forceinline__ void end(int first, int step) const {
        named_barrier_sync(1, MULTIPLIERS);
        const int n_rows = p.segment[0].n_rows, pieces = (TOKENS / 8 - first + step - 1) / step;
        for (int i = threadIdx.x; i < pieces * 64; i += MULTIPLIERS) {
            const int token = 8 * (first + i / 64 * step) + i / 8 % 8, row = first_row + i % 8 * 8;
            if (first_token + token >= p.n_tokens) continue;
            const uint4 halves = *reinterpret_cast<const uint4*>(out + token * 128 + ((i % 8) ^ (token & 7)) * 16);
            const __half* from = reinterpret_cast<const __half*>(&halves);
            __half* to = static_cast<__half*>(p.segment[0].out) + static_cast<size_t>(first_token + token) * n_rows + row;
            if (n_rows % 8 == 0) {
                if (row < n_rows) *reinterpret_cast<uint4*>(to) = halves;
            } else {
                for (int e = 0; e < 8; ++e)
                    if (row + e < n_rows) to[e] = from[e];
            }
        }
    }
};

// What sums of two rows are multiplied by, as TurnedHeads wants to know it.
struct ScalesOfBoth {
    using OfTokens = float2;
    const Product& p;
    float of[2];

    __device__ __forceinline__ ScalesOfBoth(const Product& product, const Segment& segment, int row)
        : p(product), of{row_scale_of(segment, row), row_scale_of(segment, row + 8)} {}
    __device__ __forceinline__ float2 of_tokens(int token) const { return x_scales(p, token); }
    template <class Sums>
    __device__ __forceinline__ float4 scaled(const Sums& sums, float2 x) const {
        return make_float4(::scaled(sums.x, x.x, of[0]), ::scaled(sums.y, x.y, of[0]), ::scaled(sums.z, x.x, of[1]),
                           ::scaled(sums.w, x.y, of[1]));
    }
};
template <class VALUES, int TOKENS>
struct Out<VALUES, TOKENS, QKV> : TurnedHeads<ScalesOfBoth, MULTIPLIERS> {
    __device__ __forceinline__ Out(const Product& p, const Room<TOKENS, QKV>& room, const Shares& share)
        : TurnedHeads<ScalesOfBoth, MULTIPLIERS>(p, TileRow::of<QKV, TILES>(p, share.row_block(), 0, CODES_CHUNK),
                                                 share.token_block() * TOKENS, room.out) {}
};
template <int N, class VALUES, int TOKENS, class Sums>
__device__ __forceinline__ void put_all(Out<VALUES, TOKENS, QKV>& out, Sums sums) {
    out.template put_pieces<N>(sums);
}

// grid: no more blocks than run at the same time, since some wait for others.
template <class VALUES, int TOKENS, int EPILOGUE>
__global__ void __launch_bounds__(W_THREADS, 1) w8a8_wgmma(const Product p) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const Room<TOKENS, EPILOGUE> room(shared);
    if (threadIdx.x == 0) room.init();
    if (EPILOGUE != QKV) grid_dependency_launch();  // as in gemm_wgmma.cu
    __syncthreads();
    if (threadIdx.x >= MULTIPLIERS) {
        give_registers<40>();
        const int warp = threadIdx.x / 32 - TILES, lane = threadIdx.x % 32;
        if (warp == 0) {
            copy_weights(p, room, lane);
        } else if (warp == 1 && lane == 0) {
            copy_x(p, room);
        }
    } else {
        take_registers<232>();
        grid_dependency_wait();
        Consumer<VALUES, TOKENS, EPILOGUE> consumer(p, room);
        make_shares<Out<VALUES, TOKENS, EPILOGUE>, MULTIPLIERS>(p, room, consumer);
    }
}
