// GEMM of 8-bit weights and 8-bit activations (w8a8.cuh) on Hopper, with wgmma:
//
//        y[T, N] = (q[T, K] W[N, K]^T) * x_scale[T] * row_scale[N]
//
// Launch: persistent CTAs of three warpgroups, one CTA per SM. tile_scheduler.cuh assigns work tiles of 128 rows x
// TOKENS tokens (16 to 256) and their stages of K to the CTAs; CTAs that share a work tile wait for each other, so all
// CTAs must be resident.
//
// Two consumer warpgroups multiply, one producer warpgroup copies. A consumer warp has 16 rows, so a warpgroup has the
// 64 rows of a wgmma. A consumer loads the A operand of a stage from shared memory into registers while the wgmma
// instructions of the stage before run. A stage of the pipeline holds 128 columns: one chunk of each of eight tile
// rows, and x of TOKENS tokens. One producer warp copies the chunks (bulk copies) without waiting for the kernel that
// computes x; one thread of another producer warp waits for that kernel and copies x.
//
//        STORE   float out = y
//        ADD     float out += y
//        GLU     f16 out = act(gate) * up. A warp has rows 8 h ... 8 h + 7 of a tile row of gate and the same rows of
//                up, so a thread has both factors.
//        QKV     the segments are q, k and v. RoPE rotates q and k; q goes to f16 rows, k and v go to pages of the KV
//                cache (rope_epilogue.cuh).
#include "gemm/rope_epilogue.cuh"
#include "w8a8/wgmma_8bit.cuh"

constexpr int GROUPS = 2;                       // consumer warpgroups
constexpr int TILES = 4 * GROUPS;               // tile rows per CTA
constexpr int CONSUMER_THREADS = 128 * GROUPS;  // threads of the consumer warpgroups
constexpr int W_THREADS = CONSUMER_THREADS + 128;
constexpr int W_BYTES = TILES * CODES_CHUNK;  // bytes of weights per stage
constexpr int BARRIERS = 1024;                // bytes of the mbarriers

// The layout of shared memory: x of all stages, staged outputs (GLU, or heads of q and k), weights of all stages,
// mbarriers.
template <int TOKENS, int EPILOGUE>
struct W8A8WgmmaSharedStorage {
    static constexpr int SHARED = 226 << 10;  // bytes; the launch requests the same number
    static constexpr int X_BYTES = TOKENS * CODES_STEP;
    static constexpr int OUT_BYTES = EPILOGUE == GLU ? TOKENS * 128 : EPILOGUE == QKV ? STAGED_HEADS_BYTES : 0;
    static constexpr int STAGES = (SHARED - BARRIERS - OUT_BYTES) / (W_BYTES + X_BYTES);
    static_assert(STAGES >= 3 && 16 * STAGES <= BARRIERS, "");

    uint8_t *x, *out, *w;
    uint64_t *full, *free;

    __device__ __forceinline__ W8A8WgmmaSharedStorage(uint8_t* shared) {
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

// The producer warp of the weights: lane i copies the chunks of tile row i.
template <int TOKENS, int EPILOGUE>
__device__ __forceinline__ void copy_weights(const W8A8Args& p, const W8A8WgmmaSharedStorage<TOKENS, EPILOGUE>& storage,
                                             int lane) {
    PipelineState<W8A8WgmmaSharedStorage<TOKENS, EPILOGUE>::STAGES> state;
    for (TileScheduler work(p.scheduler); work.next();) {
        const TileRow tile = TileRow::of<EPILOGUE, TILES>(p, work.row_block(), lane % TILES, CODES_CHUNK);
        for (int stage = work.first; stage < work.last; ++stage, state.next()) {
            uint64_t* full = storage.full + state.stage;
            mbarrier_wait(storage.free + state.stage, state.parity ^ 1);
            if (lane == 0) mbarrier_arrive_expect(full, W_BYTES);
            __syncwarp();
            if (lane >= TILES) continue;
            uint8_t* dst = storage.w + state.stage * W_BYTES + lane * CODES_CHUNK;
            const uint8_t* src = tile.chunks + static_cast<size_t>(stage) * CODES_CHUNK;
            if constexpr (TOKENS <= 64)  // weights are read once: streaming L2 policy
                bulk_copy_streaming(dst, src, CODES_CHUNK, full, p.streaming);
            else
                bulk_copy(dst, src, CODES_CHUNK, full);
        }
    }
}

// The producer thread of x: waits for the kernel that computes x (PDL), then copies x.
template <int TOKENS, int EPILOGUE>
__device__ __forceinline__ void copy_x(const W8A8Args& p, const W8A8WgmmaSharedStorage<TOKENS, EPILOGUE>& storage) {
    using R = W8A8WgmmaSharedStorage<TOKENS, EPILOGUE>;
    PipelineState<R::STAGES> state;
    for (TileScheduler work(p.scheduler); work.next();) {
        const int token = work.token_block() * TOKENS;
        const int bytes = min(TOKENS, codes_tokens(p.n_tokens) - token) * CODES_STEP;
        grid_dependency_wait(made_of(p.x + codes_row(work.first, token, p.n_tokens)) | bytes);
        for (int stage = work.first; stage < work.last; ++stage, state.next()) {
            mbarrier_wait(storage.free + state.stage, state.parity ^ 1);
            mbarrier_arrive_expect(storage.full + state.stage, bytes);
            bulk_copy(storage.x + state.stage * R::X_BYTES, p.x + codes_row(stage, token, p.n_tokens), bytes,
                      storage.full + state.stage);
        }
    }
}

// A consumer warp.
template <class VALUES, int TOKENS, int EPILOGUE>
struct W8A8WgmmaConsumer {
    using C = Codes8<VALUES>;
    using Sum = typename C::Sum;
    using R = W8A8WgmmaSharedStorage<TOKENS, EPILOGUE>;
    const W8A8Args& p;
    const R& storage;
    int warp, lane;                       // warp 0 ... TILES - 1
    PipelineState<R::STAGES> ahead, now;  // the next stage to load operands from, and the next stage to multiply
    int used;                             // the stage before `now`, which wgmma may still read, or -1
    uint32_t a[2][4][4];
    Sum acc[TOKENS / 2];

    __device__ __forceinline__ W8A8WgmmaConsumer(const W8A8Args& args, const R& r)
        : p(args), storage(r), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

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
        mbarrier_wait(storage.full + ahead.stage, ahead.parity);
        const uint8_t* w = storage.w + ahead.stage * W_BYTES;
#pragma unroll
        for (int j = 0; j < 4; ++j) operand8<VALUES>(a[P][j], words(w, j));
        ahead.next();
    }
    __device__ __forceinline__ void release(int stage) const {  // every lane arrives, as in gemm_wgmma.cu
        if (stage >= 0) mbarrier_arrive(storage.free + stage);
    }
    // Issues the wgmma instructions of stage `now`. While they run, loads the operands of the next stage.
    template <int P>
    __device__ __forceinline__ void step(bool more) {
        const uint32_t b = wgmma_operand(storage.x + now.stage * R::X_BYTES);
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
    __device__ __forceinline__ void run(const TileScheduler& work) {
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) acc[i] = 0;
        used = -1;
        load<0>();
        int n_left = work.last - work.first;
        for (; n_left > 1; n_left -= 2) {
            step<0>(true);
            step<1>(n_left > 2);
        }
        if (n_left > 0) step<0>(false);
        wgmma_wait<0>();
        wgmma_hold_codes(acc);
        release(used);
    }
};

// The scales of tokens `token` and `token` + 1; 0 past the last token.
__device__ __forceinline__ float2 x_scales(const W8A8Args& p, int token) {
    return make_float2(token < p.n_tokens ? __ldcg(p.x_scale + token) : 0.0f,
                       token + 1 < p.n_tokens ? __ldcg(p.x_scale + token + 1) : 0.0f);
}

// The epilogue of a work tile: put() writes one piece of sums. Sums e = 0 ... 3 of piece i belong to row g + 8 (e / 2)
// of the warp and to token 8 i + 2 t + e % 2 of the CTA.
template <class VALUES, int TOKENS, int EPILOGUE>
struct W8A8WgmmaOutput {
    const W8A8Args& p;
    const Segment* segment;
    int row, token;  // the first row and token of the thread
    float scale[2];
    bool valid[2];

    __device__ __forceinline__ W8A8WgmmaOutput(const W8A8Args& args, const W8A8WgmmaSharedStorage<TOKENS, EPILOGUE>&,
                                               const TileScheduler& work)
        : p(args) {
        const int lane = threadIdx.x % 32;
        const TileRow tile_row = TileRow::of<EPILOGUE, TILES>(p, work.row_block(), threadIdx.x / 32, CODES_CHUNK);
        segment = p.segment + tile_row.segment;
        row = tile_row.row + lane / 4, token = work.token_block() * TOKENS + lane % 4 * 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            valid[h] = tile_row.valid && row + 8 * h < segment->n_rows;
            scale[h] = valid[h] ? row_scale_of(*segment, row + 8 * h) : 0.0f;
        }
    }
    __device__ __forceinline__ void put(int piece, const Four<typename Codes8<VALUES>::Sum>& sums) const {
        const typename Codes8<VALUES>::Sum sum[4] = {sums.x, sums.y, sums.z, sums.w};
        const float2 x = x_scales(p, token + 8 * piece);
        float* out = static_cast<float*>(segment->out) + static_cast<size_t>(token + 8 * piece) * segment->n_rows + row;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (!valid[e / 2] || token + 8 * piece + e % 2 >= p.n_tokens) continue;
            float* dst = out + (e % 2 ? segment->n_rows : 0) + e / 2 * 8;
            const float y = scaled(sum[e], e % 2 ? x.y : x.x, scale[e / 2]);
            if (EPILOGUE == ADD)
                atomicAdd(dst, y);  // no race: an atomic without a result does not wait for the old value
            else
                *dst = y;
        }
    }
    __device__ __forceinline__ void end(int, int) const {}
};

// GLU: sums 0 and 1 belong to gate, sums 2 and 3 to up. The outputs of 64 rows are staged in shared memory, 128 bytes
// per token, with the swizzle of x, so that end() stores 16 bytes at a time.
template <class VALUES, int TOKENS>
struct W8A8WgmmaOutput<VALUES, TOKENS, GLU> {
    const W8A8Args& p;
    uint8_t* out;  // the staged outputs in shared memory
    int row_in_block, first_row, first_token;
    float gate, up;

    __device__ __forceinline__ W8A8WgmmaOutput(const W8A8Args& args, const W8A8WgmmaSharedStorage<TOKENS, GLU>& storage,
                                               const TileScheduler& work)
        : p(args), out(storage.out), row_in_block(threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4),
          first_row(work.row_block() * 64), first_token(work.token_block() * TOKENS) {
        const int row = first_row + row_in_block;
        const bool valid = row < p.segment[0].n_rows;
        gate = valid ? row_scale_of(p.segment[0], row) : 0.0f;
        up = valid ? row_scale_of(p.segment[1], row) : 0.0f;
        named_barrier_sync(1, CONSUMER_THREADS);
    }
    __device__ __forceinline__ void put(int piece, const Four<typename Codes8<VALUES>::Sum>& sums) const {
        const int token = threadIdx.x % 4 * 2;
        const float2 x = x_scales(p, first_token + 8 * piece + token);
        const __half first = gated(p.activation, scaled(sums.x, x.x, gate), scaled(sums.z, x.x, up));
        const __half second = gated(p.activation, scaled(sums.y, x.y, gate), scaled(sums.w, x.y, up));
        put_one(8 * piece + token, first), put_one(8 * piece + token + 1, second);
    }
    __device__ __forceinline__ void put_one(int token, __half y) const {
        const int piece = (row_in_block / 8) ^ (token & 7);
        reinterpret_cast<__half*>(out + token * 128 + piece * 16)[row_in_block % 8] = y;
    }
    // Stores the staged pieces first, first + step, ... of all warps to f16 rows [n_tokens, n_rows]. Stores 16 bytes at
    // a time if rows are 16-byte aligned.
    __device__ __forceinline__ void end(int first, int step) const {
        named_barrier_sync(1, CONSUMER_THREADS);
        const int n_rows = p.segment[0].n_rows, pieces = (TOKENS / 8 - first + step - 1) / step;
        for (int i = threadIdx.x; i < pieces * 64; i += CONSUMER_THREADS) {
            const int token = 8 * (first + i / 64 * step) + i / 8 % 8, row = first_row + i % 8 * 8;
            if (first_token + token >= p.n_tokens) continue;
            const uint4 eight = *reinterpret_cast<const uint4*>(out + token * 128 + ((i % 8) ^ (token & 7)) * 16);
            const __half* src = reinterpret_cast<const __half*>(&eight);
            __half* dst =
                static_cast<__half*>(p.segment[0].out) + static_cast<size_t>(first_token + token) * n_rows + row;
            if (n_rows % 8 == 0) {
                if (row < n_rows) *reinterpret_cast<uint4*>(dst) = eight;
            } else {
                for (int e = 0; e < 8; ++e)
                    if (row + e < n_rows) dst[e] = src[e];
            }
        }
    }
};

// The scales of the sums of rows `row` and `row` + 8, in the interface that RopeEpilogueTile expects.
struct EpilogueScales {
    using OfTokens = float2;
    const W8A8Args& p;
    float values[2];

    __device__ __forceinline__ EpilogueScales(const W8A8Args& args, const Segment& segment, int row)
        : p(args), values{row_scale_of(segment, row), row_scale_of(segment, row + 8)} {}
    __device__ __forceinline__ float2 of_tokens(int token) const { return x_scales(p, token); }
    template <class Sums>
    __device__ __forceinline__ float4 scaled(const Sums& sums, float2 x) const {
        return make_float4(::scaled(sums.x, x.x, values[0]), ::scaled(sums.y, x.y, values[0]),
                           ::scaled(sums.z, x.x, values[1]), ::scaled(sums.w, x.y, values[1]));
    }
};
template <class VALUES, int TOKENS>
struct W8A8WgmmaOutput<VALUES, TOKENS, QKV> : RopeEpilogueTile<EpilogueScales, CONSUMER_THREADS> {
    __device__ __forceinline__ W8A8WgmmaOutput(const W8A8Args& p, const W8A8WgmmaSharedStorage<TOKENS, QKV>& storage,
                                               const TileScheduler& work)
        : RopeEpilogueTile<EpilogueScales, CONSUMER_THREADS>(
              p, TileRow::of<QKV, TILES>(p, work.row_block(), 0, CODES_CHUNK), work.token_block() * TOKENS,
              storage.out) {}
};
template <int N, class VALUES, int TOKENS, class Sums>
__device__ __forceinline__ void put_all(W8A8WgmmaOutput<VALUES, TOKENS, QKV>& out, Sums sums) {
    out.template put_pieces<N>(sums);
}

// The grid has at most one wave of CTAs: CTAs that share a work tile wait for each other.
template <class VALUES, int TOKENS, int EPILOGUE>
__global__ void __launch_bounds__(W_THREADS, 1) w8a8_wgmma(const W8A8Args p) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const W8A8WgmmaSharedStorage<TOKENS, EPILOGUE> storage(shared);
    if (threadIdx.x == 0) storage.init();
    if (EPILOGUE != QKV) grid_dependency_launch();  // as in gemm_wgmma.cu
    __syncthreads();
    if (threadIdx.x >= CONSUMER_THREADS) {
        give_registers<40>();
        const int warp = threadIdx.x / 32 - TILES, lane = threadIdx.x % 32;
        if (warp == 0) {
            copy_weights(p, storage, lane);
        } else if (warp == 1 && lane == 0) {
            copy_x(p, storage);
        }
    } else {
        take_registers<232>();
        grid_dependency_wait();
        W8A8WgmmaConsumer<VALUES, TOKENS, EPILOGUE> consumer(p, storage);
        run_work_tiles<W8A8WgmmaOutput<VALUES, TOKENS, EPILOGUE>, CONSUMER_THREADS>(p, storage, consumer);
    }
}
