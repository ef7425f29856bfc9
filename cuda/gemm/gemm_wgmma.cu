// Hopper prefill GEMM: y[T, N] = x[T, K] W[N, K]^T with W in tiles (tile.cuh), x packed f16 (packed.cuh) and f32
// accumulation. A work tile is 128 rows x TOKENS (8 to 256) tokens.
//
// Launch: resident CTAs only (one or two per SM) of 384 threads: two consumer warpgroups that multiply and one producer
// warpgroup. tile_scheduler.cuh assigns stages of work tiles to CTAs.
//
// | warps              | task                                                                      |
// | 0 ... 7, consumers | multiply 16 rows each: a warpgroup has the 64 rows of a wgmma             |
// | 8                  | copies weights, a chunk of eight tile rows per stage; does not wait for x |
// | 9 (one thread)     | copies x, 64 columns of TOKENS tokens per step                            |
// | 10                 | computes the factors of a deferred norm (deferred_norm.cuh)               |
//
// A consumer warp converts codes to scaled f16 in registers, in the order of the A operand, as in gemm_prefill.cu, 64
// columns ahead of the wgmma that runs meanwhile. Shared memory holds two pipelines, of weights and of x, which bulk
// copies fill, because wgmma reads B from shared memory and several warps use the same x.
//
// With many tokens the GEMM is limited by the power of the GPU, so energy costs time: two CTAs of a cluster (CLUSTER =
// 2) multiply the same x by adjacent rows of weights, and each copies half of x to both CTAs.
//
// | epilogue | output                                                                        |
// | STORE    | f32 out = y                                                                   |
// | ADD      | f32 out += y                                                                  |
// | GLU      | f16 out = act(gate) * up, as rows or packed for the next GEMM                 |
// | QKV      | the segments are q, k and v: rotated, then f16 rows of q and pages of k and v |
//
// gemm_wgmma_two has two GEMMs of the same tokens with tiles of two layouts, on disjoint CTAs.
//
// GLU: a warp has rows 8 h ... 8 h + 7 of a tile row of gate and the same rows of up, so a thread has both factors of
// an output.
#include "lib/activation.cuh"
#include "lib/cluster.cuh"
#include "norm/deferred_norm.cuh"
#include "layout/packed.cuh"
#include "gemm/gemm.cuh"
#include "gemm/tile_scheduler.cuh"
#include "layout/tile.cuh"
#include "gemm/rope_epilogue.cuh"
#include "lib/wgmma.cuh"

constexpr int GROUPS = 2;          // consumer warpgroups
constexpr int TILES = 4 * GROUPS;  // tile rows of a CTA
constexpr int W_THREADS = 128 * (GROUPS + 1);
constexpr int STEP = PACKED_STEP;  // columns of a row of x in shared memory
constexpr int ROW = PACKED_ROW;    // bytes of such a row
constexpr int BARRIERS = 1024;     // bytes of the mbarriers, factors and squares

// With few tokens two CTAs fit on an SM, so that the next kernel's copies begin while this kernel ends.
template <int TOKENS>
constexpr int CTAS_PER_SM = TOKENS <= 64 ? 2 : 1;
// Bytes of dynamic shared memory; the launch uses the same numbers.
template <int TOKENS>
constexpr int SHARED = TOKENS <= 64 ? 112 << 10 : 226 << 10;

// Whether the norm may be deferred: only with the smallest tile.
template <int TOKENS>
constexpr bool HAS_DEFERRED_NORM = TOKENS == 8;

struct GemmWgmmaArgs : GemmArgs {
    const uint8_t* x;  // packed f16
    float* partial;    // split-K workspace of tiles that several CTAs share
    TileSchedulerArgs scheduler;
    // TOKENS = 8: ADD defers the norm to the next GEMM; other epilogues apply a norm that the previous GEMM deferred
    DeferredNormArgs deferred_norm;
    int order;                       // GLU: enum Order of the output
    int prefetch_stages;             // stages of weights that a CTA requests before the kernel that makes x has ended
    RopeEpilogueArgs rope_epilogue;  // QKV
};

// A stage of the weight pipeline: one chunk of each of the CTA's tile rows; two if a chunk has 64 columns (f16).
template <class T>
struct WeightStage {
    static constexpr int CHUNKS = T::CHUNK_K == STEP ? 2 : 1;
    static constexpr int STEPS = CHUNKS * T::CHUNK_K / STEP;
    static constexpr int TILE_BYTES = CHUNKS * T::BYTES, COPIED = TILES * CHUNKS * T::USED;
    static constexpr int BYTES = TILES * TILE_BYTES;
};

// Shared memory: x, staged outputs, weights, mbarriers. Both pipelines hold about the same number of columns. A stage
// of x has X_STEPS steps of 64 columns: more with few tokens, where the fixed cost of a stage matters.
template <class T, int TOKENS, int EPILOGUE>
struct WgmmaSharedStorage {
    static constexpr int X_STEPS = TOKENS <= 32 ? WeightStage<T>::STEPS : TOKENS <= 64 ? 2 : 1;
    static constexpr int X_STEP_BYTES = TOKENS * ROW, X_BYTES = X_STEPS * X_STEP_BYTES;
    static constexpr int OUT_BYTES = EPILOGUE == GLU ? X_STEP_BYTES : EPILOGUE == QKV ? STAGED_HEADS_BYTES : 0;
    static constexpr int FREE = SHARED<TOKENS> - BARRIERS - OUT_BYTES;
    static constexpr int STEPS = FREE / (X_STEP_BYTES + WeightStage<T>::BYTES / WeightStage<T>::STEPS);
    static constexpr int WANTED = (STEPS + (TOKENS <= 64 ? 0 : WeightStage<T>::STEPS - 1)) / WeightStage<T>::STEPS;
    static constexpr int W_STAGES = WANTED < 2 ? 2 : WANTED;
    static constexpr int X_STAGES = (FREE - W_STAGES * WeightStage<T>::BYTES) / X_BYTES;
    static_assert(X_STAGES >= 2 && W_STAGES >= 2, "");
    static_assert(16 * (X_STAGES + W_STAGES) + 8 + 4 * TOKENS * (HAS_DEFERRED_NORM<TOKENS> ? TILES + 1 : 0) <= BARRIERS,
                  "");

    uint8_t *x, *out, *w;
    uint64_t *x_full, *x_free, *w_full, *w_free, *factors_ready;
    float* factors;  // see compute_factors; factors_ready completes when they are stored
    float* squares;  // [TILES][TOKENS]

    __device__ __forceinline__ WgmmaSharedStorage(uint8_t* shared) {
        x = shared;
        out = x + X_STAGES * X_BYTES;
        w = out + OUT_BYTES;
        x_full = reinterpret_cast<uint64_t*>(w + W_STAGES * WeightStage<T>::BYTES);
        x_free = x_full + X_STAGES;
        w_full = x_free + X_STAGES;
        w_free = w_full + W_STAGES;
        factors_ready = w_free + W_STAGES;
        factors = reinterpret_cast<float*>(factors_ready + 1);
        squares = factors + TOKENS;
    }
    __device__ __forceinline__ void init(int cluster) const {
        for (int i = 0; i < X_STAGES; ++i) mbarrier_init(x_full + i, 1), mbarrier_init(x_free + i, cluster * TILES);
        for (int i = 0; i < W_STAGES; ++i) mbarrier_init(w_full + i, 1), mbarrier_init(w_free + i, 32 * TILES);
        mbarrier_init(factors_ready, 32);
        mbarrier_init_fence();
    }
};

// The weight producer, one warp: lane i copies tile row i of each stage.
template <class T, int TOKENS, int EPILOGUE>
__device__ __forceinline__ void copy_weights(const GemmWgmmaArgs& p,
                                             const WgmmaSharedStorage<T, TOKENS, EPILOGUE>& storage, int lane) {
    using S = WeightStage<T>;
    PipelineState<WgmmaSharedStorage<T, TOKENS, EPILOGUE>::W_STAGES> state;
    for (TileScheduler work(p.scheduler); work.next();) {
        const TileRow tile = TileRow::of<EPILOGUE, TILES>(p, work.row_block(), lane % TILES, T::BYTES);
#pragma unroll 1  // unrolling would need more registers than a producer warp has
        for (int stage = work.first; stage < work.last; ++stage, state.next()) {
            // Waits again each time the pipeline wraps around, which costs nothing; a counter of stages would cost a
            // register.
            if (CTAS_PER_SM<TOKENS> > 1 && state.stage == p.prefetch_stages) grid_dependency_wait();
            mbarrier_wait(storage.w_free + state.stage, state.parity ^ 1);
            if (lane == 0) mbarrier_arrive_expect(storage.w_full + state.stage, S::COPIED);
            __syncwarp();
            uint8_t* dst = storage.w + state.stage * S::BYTES + lane * S::TILE_BYTES;
            if (lane < TILES)
#pragma unroll
                for (int i = 0; i < S::CHUNKS; ++i) {
                    // chunks past the last repeat it; x is 0 there
                    const int chunk = min(stage * S::CHUNKS + i, p.n_chunk - 1);
                    const uint8_t* src = tile.chunks + static_cast<size_t>(chunk) * T::BYTES;
                    if constexpr (CTAS_PER_SM<TOKENS> > 1)  // with few tokens each weight is read once
                        bulk_copy_streaming(dst + i * T::BYTES, src, T::USED, storage.w_full + state.stage,
                                            p.streaming);
                    else
                        bulk_copy(dst + i * T::BYTES, src, T::USED, storage.w_full + state.stage);
                }
        }
    }
}

// The producer of x, one thread, which first waits for the kernel that makes x. It copies the CTA's part of x to all
// CTAs of the cluster.
template <int CLUSTER, class T, int TOKENS, int EPILOGUE>
__device__ __forceinline__ void copy_x(const GemmWgmmaArgs& p, const WgmmaSharedStorage<T, TOKENS, EPILOGUE>& storage) {
    using R = WgmmaSharedStorage<T, TOKENS, EPILOGUE>;
    constexpr int PART = TOKENS / CLUSTER * ROW;
    const int first = cluster_rank<CLUSTER>() * PART;  // first byte of the CTA's part of a step
    PipelineState<R::X_STAGES> state;
    const int n_tokens = packed_tokens(p.n_tokens), next = n_tokens * ROW;
    for (TileScheduler work(p.scheduler); work.next();) {
        const int token = work.token_block() * TOKENS, bytes = min(TOKENS, n_tokens - token) * ROW;
        const int end = work.last * WeightStage<T>::STEPS;
        int step = work.first * WeightStage<T>::STEPS;
        const int part = min(PART, bytes - first);  // zero or negative with few tokens
        const uint8_t* src = p.x + (static_cast<size_t>(step) * n_tokens + token) * ROW + first;
        grid_dependency_wait(made_of(src) | bytes);
#pragma unroll 1
        for (; step < end; step += R::X_STEPS, state.next()) {
            mbarrier_wait(storage.x_free + state.stage, state.parity ^ 1);
            mbarrier_arrive_expect(storage.x_full + state.stage, R::X_STEPS * bytes);
#pragma unroll
            for (int i = 0; i < R::X_STEPS; ++i, src += next)
                if (CLUSTER == 1 || part > 0)
                    bulk_copy_to_all<CLUSTER>(storage.x + state.stage * R::X_BYTES + i * R::X_STEP_BYTES + first, src,
                                              part, storage.x_full + state.stage);
        }
    }
}

// Codes of a table with scales that are powers of two: the upper byte makes a code u 128 + u / 8 in f16, and that times
// 8 d, plus a constant, is exact in one instruction.
template <class T>
constexpr bool POWERS = T::VALUES::TABLE && T::SCALES == Scales::E8;
constexpr int UPPER_BYTE = 0x58;

// Scale and offset of one group for rows g (low) and g + 8 (high), as f16: d * 512 (POWERS: d * 8 / T::VALUES::SCALE),
// and the constant added to d * u.
struct GroupScales {
    __half2 d, shift;
};
template <class T, int GROUP_INDEX>
__device__ __forceinline__ GroupScales group_scales(const ChunkScales<T>& s) {
    const __half2 up = __float2half2_rn(512.0f), zero = __float2half2_rn(-T::ZERO), one = __float2half2_rn(1.0f / 512);
    if constexpr (T::SCALES == Scales::D) {
        const __half2 d = as_half2(s.dd[GROUP_INDEX]);
        return {__hmul2(d, up), __hmul2(d, zero)};
    } else if constexpr (T::SCALES == Scales::DM) {
        const uint32_t low = s.dd[2 * GROUP_INDEX], high = s.dd[2 * GROUP_INDEX + 1];
        return {__hmul2(as_half2(__byte_perm(low, high, 0x5410)), up), as_half2(__byte_perm(low, high, 0x7632))};
    } else if constexpr (T::SIGNED_SUB) {
        const __half2 scale = sub_scales<T, GROUP_INDEX & 1>(s.sc[GROUP_INDEX / 2]);
        const __half2 d = __hmul2(__hmul2(as_half2(s.dd[0]), up), scale);
        return {d, __hmul2(d, __hmul2(zero, one))};
    } else if constexpr (T::SCALES == Scales::E8) {
        const uint32_t word = s.sc[GROUP_INDEX / 2];
        constexpr int from_bit = 16 * (GROUP_INDEX & 1);
        constexpr float factor = 0.5f * (POWERS<T> ? 8.0f / T::VALUES::SCALE : 512.0f);
        constexpr float offset =
            POWERS<T> ? 128.0f + T::VALUES::zero(T::BITS) * T::VALUES::SCALE / 8.0f : T::ZERO / 512.0f;
        const __half2 d =
            __floats2half2_rn(power_bits<from_bit>(word) * factor, power_bits<from_bit + 8>(word) * factor);
        return {d, __hmul2(d, __float2half2_rn(-offset))};
    } else {
        const __half2 d = as_half2(__byte_perm(s.dd[0], s.dd[1], 0x5410));
        const __half2 m = __hneg2(as_half2(__byte_perm(s.dd[0], s.dd[1], 0x7632)));
        const uint32_t both = s.template scales_and_mins<GROUP_INDEX>();
        return {__hmul2(__hmul2(d, up), bytes_to_half2<0>(both, 0.0f)), __hmul2(m, bytes_to_half2<1>(both, 0.0f))};
    }
}

// Scales the codes of one MMA. unpack() returns shift * u * 2^-24 as f16, where shift is 16 for odd groups of nibbles.
// Multiplying by 2^15 / shift gives u * 2^-9, and d * 512 gives d * u.
template <class T, int J>
__device__ __forceinline__ void scale_codes(uint32_t (&a)[4], const GroupScales& s) {
    constexpr float shift_of[2] = {T::template shift<J, 0>(), T::template shift<J, 1>()};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __half2 d = i & 1 ? __high2half2(s.d) : __low2half2(s.d);
        const __half2 shift = i & 1 ? __high2half2(s.shift) : __low2half2(s.shift);
        __half2 code = as_half2(a[i]);
        if constexpr (!POWERS<T>) code = __hmul2(code, __float2half2_rn(32768.0f / shift_of[i & 1]));
        a[i] = as_bits(__hfma2(code, d, shift));
    }
}

// GLU: joins rows 8 h ... 8 h + 7 of two tile rows (gate and up) into codes and scales that unpack like those of a
// single tile row.
template <class Step>
__device__ __forceinline__ void load_half_tiles(ChunkCodes<Step>& dst, const uint8_t* (&main)[2],
                                                const uint8_t* (&extra)[2], int h, int lane) {
    constexpr int EXTRA = ChunkCodes<Step>::EXTRA;
    if constexpr (Step::BASE_BITS == 2) {  // rows g and rows g + 8 of a tile share words
        const uint2 first = reinterpret_cast<const uint2*>(main[0])[lane];
        const uint2 second = reinterpret_cast<const uint2*>(main[1])[lane];
        dst.main[0] = (first.x >> 2 * h & 0x33333333u) | (second.x >> 2 * h & 0x33333333u) << 2;
        dst.main[1] = (first.y >> 2 * h & 0x33333333u) | (second.y >> 2 * h & 0x33333333u) << 2;
    }
#pragma unroll
    for (int i = 0; i < Step::BASE_BYTES / 512; ++i) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const uint32_t* src = reinterpret_cast<const uint32_t*>(main[m] + (32 * i + lane) * 16);
            if constexpr (Step::FLOAT || TileOffset<Step>::OPERANDS) {
                dst.main[4 * i + m] = src[h], dst.main[4 * i + 2 + m] = src[2 + h];
            } else {
                const uint2 v = reinterpret_cast<const uint2*>(src)[h];
                dst.main[4 * i + 2 * m] = v.x, dst.main[4 * i + 2 * m + 1] = v.y;
            }
        }
    }
    if constexpr (EXTRA > 0) {
        constexpr uint32_t mask = EXTRA == 1 ? 0x33333333u : 0x0f0f0f0fu;
        uint32_t words[2][EXTRA];
#pragma unroll
        for (int m = 0; m < 2; ++m) dst.load_extra(words[m], extra[m] + lane * EXTRA * 4);
#pragma unroll
        for (int i = 0; i < EXTRA; ++i) {
            const uint32_t first = words[0][i] >> 2 * EXTRA * h, second = words[1][i] >> 2 * EXTRA * h;
            dst.extra[i] = (first & mask) | (second & mask) << 2 * EXTRA;
        }
    }
}
template <class T>
__device__ __forceinline__ void join_half_tiles(ChunkScales<T>& a, const ChunkScales<T>& b, int h) {
    const uint32_t selector = h ? 0x7632 : 0x5410, bytes = h ? 0x7351 : 0x6240;
    if constexpr (T::SCALES == Scales::D) {
#pragma unroll
        for (int i = 0; i < T::GROUPS; ++i) a.dd[i] = __byte_perm(a.dd[i], b.dd[i], selector);
    } else if constexpr (T::SCALES == Scales::DM) {
#pragma unroll
        for (int i = 0; i < 2 * T::GROUPS; i += 2) {
            a.dd[i] = h ? a.dd[i + 1] : a.dd[i];
            a.dd[i + 1] = h ? b.dd[i + 1] : b.dd[i];
        }
    } else {
        if constexpr (T::SIGNED_SUB)
            a.dd[0] = __byte_perm(a.dd[0], b.dd[0], selector);
        else if constexpr (T::PACKED_SUB)
            a.dd[0] = h ? a.dd[1] : a.dd[0], a.dd[1] = h ? b.dd[1] : b.dd[0];
#pragma unroll
        for (int i = 0; i < T::GROUPS / 2; ++i) {
            // Bytes alternate between rows g and rows g + 8; takes the bytes of half h of both tile rows, gate first.
            a.sc[i] = __byte_perm(a.sc[i], b.sc[i], bytes);
            if (T::TWOS && i < T::GROUPS / 4) a.twos[i] = __byte_perm(a.twos[i], b.twos[i], bytes);
        }
    }
}

// wgmmas of all tokens of a work tile.
template <int TOKENS>
struct AllTokens {
    __device__ __forceinline__ void multiply(float (&acc)[TOKENS / 2], const uint32_t (&a)[4][4], uint32_t x) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_f16<TOKENS>(acc, a[i], x + 2 * i);
        wgmma_commit();
    }
};

// A consumer warp.
template <class T, int TOKENS, int EPILOGUE, int CLUSTER>
struct GemmWgmmaConsumer {
    using Sum = float;
    using S = WeightStage<T>;
    using R = WgmmaSharedStorage<T, TOKENS, EPILOGUE>;
    using Step = Tile<T::BITS, T::GROUP, T::SCALES, STEP, typename T::VALUES>;
    const R& storage;
    int warp, lane;  // warp 0 ... TILES - 1
    PipelineState<R::W_STAGES> w;
    PipelineState<R::X_STAGES> x;
    uint32_t operand_x;  // wgmma descriptor of the current stage of x
    int used;            // the previous stage of x, which wgmmas in flight may still read, or -1
    ChunkScales<T> scales;
    typename T::VALUES::Words words;
    uint32_t a[2][4][4];
    float acc[TOKENS / 2];

    __device__ __forceinline__ GemmWgmmaConsumer(const R& r)
        : storage(r), warp(threadIdx.x / 32), lane(threadIdx.x % 32), words(T::VALUES::Words::kept(lane)) {}

    // Tile row i of the current weight stage.
    __device__ __forceinline__ const uint8_t* tile(int i) const {
        return storage.w + w.stage * S::BYTES + i * S::TILE_BYTES;
    }
    // GLU: the warp's tile row of gate, and which half (rows g or g + 8) of it; up is TILES / 2 tile rows further on.
    __device__ __forceinline__ int gate() const { return warp / 2; }
    __device__ __forceinline__ int half() const { return warp % 2; }

    __device__ __forceinline__ void load_scales() {
        if constexpr (EPILOGUE == GLU) {
            ChunkScales<T> up;
            scales.load(tile(gate()), lane / 4);
            up.load(tile(gate() + TILES / 2), lane / 4);
            join_half_tiles(scales, up, half());
        } else {
            scales.load(tile(warp), lane / 4);
        }
    }
    // Makes the A operands of step P of the current weight stage.
    template <int P>
    __device__ __forceinline__ void convert() {
        // index of the step in its chunk
        constexpr int STEP_IN_CHUNK = S::CHUNKS > 1 ? 0 : P, CHUNK = S::CHUNKS > 1 ? P : 0;
        constexpr int MAIN = CHUNK * T::BYTES + T::SCALE_BYTES + STEP_IN_CHUNK * Step::BASE_BYTES;
        constexpr int MORE = CHUNK * T::BYTES + T::SCALE_BYTES + T::BASE_BYTES + STEP_IN_CHUNK * Step::EXTRA_BYTES;
        if constexpr (P == 0) {
            mbarrier_wait(storage.w_full + w.stage, w.parity);
            if constexpr (T::SCALED) load_scales();
        }
        ChunkCodes<Step> codes;
        if constexpr (EPILOGUE == GLU) {
            const uint8_t *first = tile(gate()), *second = tile(gate() + TILES / 2);
            const uint8_t *main[2] = {first + MAIN, second + MAIN}, *extra[2] = {first + MORE, second + MORE};
            load_half_tiles(codes, main, extra, half(), lane);
        } else {
            codes.load(tile(warp) + MAIN, tile(warp) + MORE, lane);
        }
        operand<P, STEP_IN_CHUNK, 0, 0>(codes);
        operand<P, STEP_IN_CHUNK, 0, 1>(codes);
        operand<P, STEP_IN_CHUNK, 1, 0>(codes);
        operand<P, STEP_IN_CHUNK, 1, 1>(codes);
    }
    template <int P, int STEP_IN_CHUNK, int J, int S_>
    __device__ __forceinline__ void operand(const ChunkCodes<Step>& codes) {
        uint32_t (&dst)[4] = a[P & 1][2 * J + S_];
        codes.template unpack<J, S_, POWERS<T> ? UPPER_BYTE : 0>(dst, words);
        if constexpr (T::SCALED) {
            constexpr int group = T::GROUP == 16 ? 2 * (2 * STEP_IN_CHUNK + J) + S_ : 2 * STEP_IN_CHUNK + J;
            scale_codes<T, J>(dst, group_scales<T, group>(scales));
        }
    }
    // Every lane arrives for itself, because race detectors do not follow one lane that arrives for the warp.
    __device__ __forceinline__ void release_w() {
        mbarrier_arrive(storage.w_free + w.stage);
        w.next();
    }
    __device__ __forceinline__ void release_x() {
        if (used >= 0) mbarrier_arrive_at_all<CLUSTER>(storage.x_free + used, lane);
    }
    // Steps P, P + 1, ... of a stage: issues the wgmmas of a step, then makes the operands of the next step while they
    // run.
    template <int P, class Tokens>
    __device__ __forceinline__ void steps(const Tokens& tokens, bool more) {
        if constexpr (P < S::STEPS) {
            constexpr int X_STEP = P % R::X_STEPS;  // index of the step in the stage of x
            if constexpr (X_STEP == 0) {
                mbarrier_wait(storage.x_full + x.stage, x.parity);
                operand_x = wgmma_operand(storage.x + x.stage * R::X_BYTES);
            }
            wgmma_fence();
            tokens.multiply(acc, a[P & 1], operand_x + X_STEP * (R::X_STEP_BYTES / 16));
            wgmma_wait<1>();
            if constexpr (X_STEP == 0) release_x();
            if constexpr (X_STEP == R::X_STEPS - 1) used = x.stage, x.next();
            if constexpr (P + 1 < S::STEPS) {
                convert<P + 1>();
                if (P + 2 == S::STEPS) release_w();
                steps<P + 1>(tokens, more);
            } else if (more) {
                convert<0>();
            }
        }
    }
    // Computes the sums of a work tile over stages first ... last - 1.
    template <class Tokens>
    __device__ __forceinline__ void multiply(const Tokens& tokens, int first, int last) {
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) acc[i] = 0.0f;
        used = -1;
        convert<0>();
        for (int stage = first; stage < last; ++stage) steps<0>(tokens, stage + 1 < last);
        wgmma_wait<0>();
        release_x();
    }
    __device__ __forceinline__ void run(const TileScheduler& work) {
        multiply(AllTokens<TOKENS>(), work.first, work.last);
    }
};

template <int TOKENS>
__device__ __forceinline__ bool has_factors(const GemmWgmmaArgs& p) {
    return HAS_DEFERRED_NORM<TOKENS> && p.deferred_norm.squares != nullptr;
}
// Factors of the sums of a piece, for the thread's two tokens.
template <class T, int TOKENS, int EPILOGUE>
__device__ __forceinline__ float2 factors_of(const GemmWgmmaArgs& p,
                                             const WgmmaSharedStorage<T, TOKENS, EPILOGUE>& storage, int piece) {
    if (EPILOGUE == ADD || !has_factors<TOKENS>(p)) return make_float2(1.0f, 1.0f);
    return *reinterpret_cast<const float2*>(storage.factors + 8 * piece + threadIdx.x % 4 * 2);
}

// Stores the sums of a work tile, a piece at a time: sum e = 0 ... 3 of piece i belongs to row g + 8 (e / 2) of the
// warp and token 8 i + 2 t + e % 2 of the CTA.
template <class T, int TOKENS, int EPILOGUE>
struct GemmWgmmaOutput {
    const GemmWgmmaArgs& p;
    const WgmmaSharedStorage<T, TOKENS, EPILOGUE>& storage;
    const Segment* segment;
    float* out;
    float scale[2];
    bool valid[2];
    int tokens;  // tokens from the thread's first token to the end

    __device__ __forceinline__ GemmWgmmaOutput(const GemmWgmmaArgs& args,
                                               const WgmmaSharedStorage<T, TOKENS, EPILOGUE>& storage_,
                                               const TileScheduler& work)
        : p(args), storage(storage_) {
        const int lane = threadIdx.x % 32, token = work.token_block() * TOKENS + lane % 4 * 2;
        const TileRow tile_row = TileRow::of<EPILOGUE, TILES>(p, work.row_block(), threadIdx.x / 32, T::BYTES);
        const int row = tile_row.row + lane / 4;
        segment = p.segment + tile_row.segment;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            valid[h] = tile_row.valid && row + 8 * h < segment->n_rows;
            scale[h] = valid[h] ? scaled_row(*segment, row + 8 * h, 1.0f) : 1.0f;
        }
        out = static_cast<float*>(segment->out) + static_cast<size_t>(token) * segment->n_rows + row;
        tokens = p.n_tokens - token;
        if (has_factors<TOKENS>(p)) mbarrier_wait(storage.factors_ready, 0);
    }
    __device__ __forceinline__ void put(int piece, const float4& sums) const {
        const float2 factor = factors_of(p, storage, piece);
        const float y[4] = {sums.x * factor.x, sums.y * factor.y, sums.z * factor.x, sums.w * factor.y};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int token = 8 * piece + e % 2;
            if (!valid[e / 2] || token >= tokens) continue;
            float* dst = out + static_cast<size_t>(token) * segment->n_rows + e / 2 * 8;
            if (EPILOGUE == ADD)
                // no other thread adds to this element; atomicAdd is used because no result has to be loaded or awaited
                atomicAdd(dst, y[e] * scale[e / 2]);
            else
                *dst = y[e] * scale[e / 2];
        }
    }
    __device__ __forceinline__ void end(int, int) const {}
};

// ADD with at most eight tokens. If a norm is deferred (deferred_norm.cuh), it also stores the next GEMM's x and the
// sums of squares.
template <class T>
struct GemmWgmmaOutput<T, 8, ADD> {
    static constexpr int TOKENS = 8;
    const GemmWgmmaArgs& p;
    float* squares;  // shared memory, [TILES][TOKENS]
    bool is_deferred;
    int row_block, row, token;  // row_block of the CTA; first row and first token of the thread
    float* x;                   // output at (token, row)
    float scale[2], weight[2];  // of the thread's two rows
    float old[4], prescale[2];  // of the four sums; of the two tokens

    __device__ __forceinline__ GemmWgmmaOutput(const GemmWgmmaArgs& args,
                                               const WgmmaSharedStorage<T, TOKENS, ADD>& storage,
                                               const TileScheduler& work)
        : p(args), squares(storage.squares), is_deferred(args.deferred_norm.squares != nullptr),
          row_block(work.row_block()) {
        const TileRow tile_row = TileRow::of<ADD, TILES>(p, row_block, threadIdx.x / 32, T::BYTES);
        row = tile_row.valid ? tile_row.row + threadIdx.x % 32 / 4 : p.segment[0].n_rows;
        token = work.token_block() * TOKENS + threadIdx.x % 4 * 2;
        x = static_cast<float*>(p.segment[0].out) + static_cast<size_t>(token) * p.segment[0].n_rows + row;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            scale[h] = has_row(h) ? scaled_row(p.segment[0], row + 8 * h, 1.0f) : 1.0f;
            weight[h] = is_deferred && has_row(h) ? __ldg(p.deferred_norm.weight + row + 8 * h) : 0.0f;
        }
        if (!is_deferred) return;
#pragma unroll
        for (int e = 0; e < 4; ++e) old[e] = has(e) ? __ldcg(address(e)) : 0.0f;
#pragma unroll
        for (int e = 0; e < 2; ++e)
            prescale[e] = token + e < p.n_tokens ? __ldcg(p.deferred_norm.prescale + token + e) : 0.0f;
    }
    __device__ __forceinline__ bool has_row(int h) const { return row + 8 * h < p.segment[0].n_rows; }
    __device__ __forceinline__ bool has(int e) const { return has_row(e / 2) && token + e % 2 < p.n_tokens; }
    __device__ __forceinline__ float* address(int e) const { return x + e % 2 * p.segment[0].n_rows + e / 2 * 8; }
    __device__ __forceinline__ void put(int, const float4& sums) const {
        const float y[4] = {sums.x * scale[0], sums.y * scale[0], sums.z * scale[1], sums.w * scale[1]};
        float sum[2] = {};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (!has(e)) continue;
            if (!is_deferred) {
                atomicAdd(address(e), y[e]);  // as in GemmWgmmaOutput
                continue;
            }
            const float v = old[e] + y[e];
            *address(e) = v;
            sum[e % 2] = fmaf(v, v, sum[e % 2]);
            store_deferred(p.deferred_norm, v * weight[e / 2] * prescale[e % 2], row + e / 2 * 8, token + e % 2,
                           p.n_tokens);
        }
        if (!is_deferred) return;
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2)
#pragma unroll
            for (int e = 0; e < 2; ++e) sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], offset);
        if (threadIdx.x % 32 < 4)
            *reinterpret_cast<float2*>(squares + threadIdx.x / 32 * TOKENS + threadIdx.x % 4 * 2) =
                make_float2(sum[0], sum[1]);
    }
    __device__ __forceinline__ void end(int, int) const {
        if (!is_deferred) return;
        named_barrier_sync(1, 128 * GROUPS);
        if (threadIdx.x < TOKENS) {
            float sum = 0.0f;
#pragma unroll
            for (int warp = 0; warp < TILES; ++warp) sum += squares[warp * TOKENS + threadIdx.x];
            p.deferred_norm.squares[row_block * TOKENS + threadIdx.x] = sum;
        }
        named_barrier_sync(1, 128 * GROUPS);  // before the squares of the next tile are stored
    }
};

// GLU: sums 0 and 1 of a piece are of gate, 2 and 3 of up. Outputs are staged in shared memory, 128 bytes (64 rows) per
// token, and bulk stores write eight tokens at a time to the packed output.
template <class T, int TOKENS>
struct GemmWgmmaOutput<T, TOKENS, GLU> {
    static constexpr int PIECES = TOKENS / 8, PIECE_BYTES = 8 * ROW;
    const GemmWgmmaArgs& p;
    const WgmmaSharedStorage<T, TOKENS, GLU>& storage;
    uint8_t* out;  // in shared memory
    int row_block, first_token;
    uint8_t* dst[2];
    float gate_scale, up_scale;
    bool valid;

    __device__ __forceinline__ GemmWgmmaOutput(const GemmWgmmaArgs& args,
                                               const WgmmaSharedStorage<T, TOKENS, GLU>& storage_,
                                               const TileScheduler& work)
        : p(args), storage(storage_), out(storage.out), row_block(work.row_block()),
          first_token(work.token_block() * TOKENS) {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 8 + lane / 4;
        if (threadIdx.x < PIECES) bulk_store_wait<true>();
        named_barrier_sync(1, 128 * GROUPS);
        const int in_matrix = row_block * (TILES / 2 * TILE_ROWS) + row;
        valid = in_matrix < p.segment[0].n_rows;
        gate_scale = valid ? scaled_row(p.segment[0], in_matrix, 1.0f) : 1.0f;
        up_scale = valid ? scaled_row(p.segment[1], in_matrix, 1.0f) : 1.0f;
        const int column = packed_column(p.order, row), token = lane % 4 * 2;
        if (has_factors<TOKENS>(p)) mbarrier_wait(storage.factors_ready, 0);
#pragma unroll
        for (int e = 0; e < 2; ++e)
            dst[e] = out + (token + e) * ROW + (((column / 8) ^ (token + e)) << 4) + column % 8 * 2;
    }
    __device__ __forceinline__ void put(int piece, const float4& sums) const {
        const float2 factor = factors_of(p, storage, piece);
        const __half first = gated(p.activation, sums.x * gate_scale * factor.x, sums.z * up_scale * factor.x);
        const __half second = gated(p.activation, sums.y * gate_scale * factor.y, sums.w * up_scale * factor.y);
        *reinterpret_cast<__half*>(dst[0] + piece * PIECE_BYTES) = valid ? first : __half(0.0f);
        *reinterpret_cast<__half*>(dst[1] + piece * PIECE_BYTES) = valid ? second : __half(0.0f);
    }
    // Ends a tile after all warps have put pieces first, first + step, ...
    __device__ __forceinline__ void end(int first, int step) const {
        if (p.order == PLAIN_ORDER) {
            named_barrier_sync(1, 128 * GROUPS);
            for (int piece = first; piece < PIECES; piece += step) write_rows(piece);
        } else {
            async_fence();
            named_barrier_sync(1, 128 * GROUPS);
            const int n_tokens = packed_tokens(p.n_tokens), piece = first + threadIdx.x * step;
            const int token = first_token + 8 * piece;
            if (piece < PIECES && token < n_tokens)
                bulk_store(
                    static_cast<uint8_t*>(p.segment[0].out) + (static_cast<size_t>(row_block) * n_tokens + token) * ROW,
                    out + piece * PIECE_BYTES, PIECE_BYTES);
        }
    }
    // Stores a staged piece as f16 rows.
    __device__ __forceinline__ void write_rows(int piece) const {
        const Segment& segment = p.segment[0];
        for (int i = threadIdx.x; i < 8 * 64; i += 128 * GROUPS) {
            const int in_piece = i / 64, column = i % 64, row = row_block * 64 + column;
            const int token = first_token + 8 * piece + in_piece;
            const uint8_t* src = out + piece * PIECE_BYTES + in_piece * ROW + (((column / 8) ^ in_piece) << 4);
            if (token < p.n_tokens && row < segment.n_rows)
                static_cast<__half*>(segment.out)[static_cast<size_t>(token) * segment.n_rows + row] =
                    *reinterpret_cast<const __half*>(src + column % 8 * 2);
        }
    }
};

// QKV: the row scales of a thread's two rows, in the form that RopeEpilogueTile expects.
struct EpilogueRowScales {
    struct OfTokens {};
    float values[2];

    __device__ __forceinline__ EpilogueRowScales(const GemmWgmmaArgs&, const Segment& segment, int row)
        : values{scaled_row(segment, row, 1.0f), scaled_row(segment, row + 8, 1.0f)} {}
    __device__ __forceinline__ OfTokens of_tokens(int) const { return {}; }
    __device__ __forceinline__ float4 scaled(const float4& sums, OfTokens) const {
        return make_float4(__fmul_rn(sums.x, values[0]), __fmul_rn(sums.y, values[0]), __fmul_rn(sums.z, values[1]),
                           __fmul_rn(sums.w, values[1]));
    }
};
template <class T, int TOKENS>
struct GemmWgmmaOutput<T, TOKENS, QKV> : RopeEpilogueTile<EpilogueRowScales, 128 * GROUPS> {
    __device__ __forceinline__ GemmWgmmaOutput(const GemmWgmmaArgs& p,
                                               const WgmmaSharedStorage<T, TOKENS, QKV>& storage,
                                               const TileScheduler& work)
        : RopeEpilogueTile<EpilogueRowScales, 128 * GROUPS>(
              p, TileRow::of<QKV, TILES>(p, work.row_block(), 0, T::BYTES), work.token_block() * TOKENS, storage.out) {}
};
template <int N, class T, int TOKENS, class Sums>
__device__ __forceinline__ void put_all(GemmWgmmaOutput<T, TOKENS, QKV>& out, Sums sums) {
    out.template put_pieces<N>(sums);
}

template <class T, int TOKENS, int EPILOGUE, int CLUSTER>
__device__ __forceinline__ void multiply_tiles(const GemmWgmmaArgs& p) {
#if EMULATED
    SHARED_DYNAMIC(uint8_t, shared);
#else
    extern __shared__ __align__(1024) uint8_t shared[];
#endif
    const WgmmaSharedStorage<T, TOKENS, EPILOGUE> storage(shared);
    if (threadIdx.x == 0) storage.init(CLUSTER);
    // Attention after QKV is launched late: its CTAs would all start on the SMs that have no CTA of this kernel.
    if (EPILOGUE != QKV) grid_dependency_launch();
    cluster_arrive<CLUSTER>();
    cluster_wait<CLUSTER>();
    if (threadIdx.x >= 128 * GROUPS) {
        give_registers<CTAS_PER_SM<TOKENS> == 2 ? 32 : 40>();
        const int warp = threadIdx.x / 32 - 4 * GROUPS, lane = threadIdx.x % 32;
        if (warp == 0) {
            copy_weights(p, storage, lane);
        } else if (warp == 1 && lane == 0) {
            copy_x<CLUSTER>(p, storage);
        } else if (HAS_DEFERRED_NORM<TOKENS> && EPILOGUE != ADD && warp == 2 && p.deferred_norm.squares != nullptr) {
            grid_dependency_wait();
            compute_factors<TOKENS>(p.deferred_norm, p.k, p.n_tokens, storage.factors, lane);
            mbarrier_arrive(storage.factors_ready);
        }
    } else {
        take_registers<CTAS_PER_SM<TOKENS> == 2 ? 104 : 232>();
        grid_dependency_wait();
        GemmWgmmaConsumer<T, TOKENS, EPILOGUE, CLUSTER> consumer(storage);
        run_work_tiles<GemmWgmmaOutput<T, TOKENS, EPILOGUE>, 128 * GROUPS>(p, storage, consumer);
        if (EPILOGUE == GLU && threadIdx.x < TOKENS / 8) bulk_store_wait<false>();
    }
    if constexpr (CLUSTER > 1) {  // CTAs of the cluster arrive at this CTA's mbarriers until they have read all of x
        __syncwarp();
        cluster_arrive<CLUSTER>();
        cluster_wait<CLUSTER>();
    }
}

// grid: only resident CTAs, since some CTAs wait for others. CLUSTER = 2: only schedules of whole tiles that are
// `paired`.
template <class T, int TOKENS, int EPILOGUE, int CLUSTER = 1>
__global__ void __launch_bounds__(W_THREADS, CTAS_PER_SM<TOKENS>) gemm_wgmma(const GemmWgmmaArgs p) {
    multiply_tiles<T, TOKENS, EPILOGUE, CLUSTER>(p);
}

// grid (CTAs of q, 2): CTAs (x, 0) are those of p, in tiles T, and CTAs (x, 1) those of q, in tiles U. p has as many
// CTAs or fewer, and one wave of whole tiles or none, so that its schedule does not depend on gridDim.x. CTAs without
// work end while the kernel before makes x.
template <class T, class U, int TOKENS>
__global__ void __launch_bounds__(W_THREADS, CTAS_PER_SM<TOKENS>)
    gemm_wgmma_two(const GemmWgmmaArgs p, const GemmWgmmaArgs q, int ctas_of_p) {
    if (blockIdx.y > 0)
        multiply_tiles<U, TOKENS, STORE, 1>(q);
    else if (static_cast<int>(blockIdx.x) < ctas_of_p)
        multiply_tiles<T, TOKENS, STORE, 1>(p);
}
