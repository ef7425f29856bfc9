// y[T, N] = x[T, K] W[N, K]^T on Hopper: tiles (tile.cuh) x packed f16 activations (packed.cuh), 8 to 256 tokens of a
// block at a time.
//
// A block has two warpgroups that multiply and one that copies. Each warp that multiplies has 16 rows, so that a
// warpgroup has the 64 rows of a wgmma: its codes become scaled halves in registers in the order of the A operand, as
// in gemm_prefill.cu, 64 columns ahead of the products that run meanwhile. Weights, a chunk of eight tile rows at a time,
// and activations, 64 columns of TOKENS tokens, lie in two rings in shared memory; one warp each fills them with bulk
// copies, that of the weights without waiting for the kernel that makes x. Where the norm of x was handed on
// (deferred_norm.cuh), a third one finds what sums are multiplied by.
//
// Products of many tokens take all the power that the GPU may have, so that what costs energy costs time: two blocks as a
// cluster (SHARERS) multiply the same activations by neighbouring rows of weights, and each copies half of them to both.
//
// tile_scheduler.cuh says which stages of which tiles of output (128 rows, TOKENS tokens) are this block's.
//
// Epilogues: STORE (float out = y), ADD (float out += y), GLU (half out = act(gate) * up). There a warp has rows 8 h
// ... 8 h + 7 of a tile row of gate and the same of up, so a thread has both factors. It writes rows of halves, or
// packed for the next product. QKV: the segments are q, k and v, which go rotated to rows of halves, and to pages.
#include "lib/activation.cuh"
#include "lib/cluster.cuh"
#include "norm/deferred_norm.cuh"
#include "layout/packed.cuh"
#include "gemm/gemm.cuh"
#include "gemm/tile_scheduler.cuh"
#include "layout/tile.cuh"
#include "gemm/rope_epilogue.cuh"
#include "lib/wgmma.cuh"

constexpr int GROUPS = 2;                 // warpgroups that multiply
constexpr int TILES = 4 * GROUPS;         // tile rows of a block
constexpr int W_THREADS = 128 * (GROUPS + 1);
constexpr int STEP = PACKED_STEP;         // columns of a row of x in shared memory
constexpr int ROW = PACKED_ROW;           // its bytes
constexpr int BARRIERS = 1024;            // bytes

// Few tokens: two blocks fit on a multiprocessor, so that the next kernel's copies begin while this one ends.
template <int TOKENS>
constexpr int BLOCKS = TOKENS <= 64 ? 2 : 1;
// Bytes of shared memory, as the launch has them.
template <int TOKENS>
constexpr int SHARED = TOKENS <= 64 ? 112 << 10 : 226 << 10;

// So few tokens that a norm may be handed on.
template <int TOKENS>
constexpr bool HANDS = TOKENS == 8;

struct Product : Matrices {
    const uint8_t* x;       // packed
    float* partial;         // of tiles that are cut: LeftSums
    Dealt dealt;
    Handed handed;          // of few tokens: by ADD to the product behind, to others by the one before
    int order;              // GLU: of the output
    int early;              // stages of weights that a block asks for before the kernel that makes x has ended
    Turning turning;        // QKV
};

// A stage of the ring of weights: a chunk of each tile row; of halves, two.
template <class T>
struct Stage {
    static constexpr int CHUNKS = T::CHUNK_K == STEP ? 2 : 1;
    static constexpr int STEPS = CHUNKS * T::CHUNK_K / STEP;
    static constexpr int TILE_BYTES = CHUNKS * T::BYTES, COPIED = TILES * CHUNKS * T::USED;
    static constexpr int BYTES = TILES * TILE_BYTES;
};

// The shared memory: both rings hold about as many columns. A stage of x has X_STEPS times 64 columns: more of them
// where tokens are few, since what every stage costs counts then.
template <class T, int TOKENS, int EPILOGUE>
struct Room {
    static constexpr int X_STEPS = TOKENS <= 32 ? Stage<T>::STEPS : TOKENS <= 64 ? 2 : 1;
    static constexpr int X_STEP_BYTES = TOKENS * ROW, X_BYTES = X_STEPS * X_STEP_BYTES;
    static constexpr int OUT_BYTES = EPILOGUE == GLU ? X_STEP_BYTES : EPILOGUE == QKV ? STAGED_HEADS_BYTES : 0;
    static constexpr int FREE = SHARED<TOKENS> - BARRIERS - OUT_BYTES;
    static constexpr int STEPS = FREE / (X_STEP_BYTES + Stage<T>::BYTES / Stage<T>::STEPS);
    static constexpr int WANTED = (STEPS + (TOKENS <= 64 ? 0 : Stage<T>::STEPS - 1)) / Stage<T>::STEPS;
    static constexpr int W_STAGES = WANTED < 2 ? 2 : WANTED;
    static constexpr int X_STAGES = (FREE - W_STAGES * Stage<T>::BYTES) / X_BYTES;
    static_assert(X_STAGES >= 2 && W_STAGES >= 2, "");
    static_assert(16 * (X_STAGES + W_STAGES) + 8 + 4 * TOKENS * (HANDS<TOKENS> ? TILES + 1 : 0) <= BARRIERS, "");

    uint8_t *x, *out, *w;
    uint64_t *x_full, *x_free, *w_full, *w_free, *found;
    float* factors;  // see find_factors; `found` when they are there
    float* squares;  // [TILES][TOKENS]

    __device__ __forceinline__ Room(uint8_t* shared) {
        x = shared;
        out = x + X_STAGES * X_BYTES;
        w = out + OUT_BYTES;
        x_full = reinterpret_cast<uint64_t*>(w + W_STAGES * Stage<T>::BYTES);
        x_free = x_full + X_STAGES;
        w_full = x_free + X_STAGES;
        w_free = w_full + W_STAGES;
        found = w_free + W_STAGES;
        factors = reinterpret_cast<float*>(found + 1);
        squares = factors + TOKENS;
    }
    __device__ __forceinline__ void init(int sharers) const {
        for (int i = 0; i < X_STAGES; ++i) mbarrier_init(x_full + i, 1), mbarrier_init(x_free + i, sharers * TILES);
        for (int i = 0; i < W_STAGES; ++i) mbarrier_init(w_full + i, 1), mbarrier_init(w_free + i, 32 * TILES);
        mbarrier_init(found, 32);
        mbarrier_init_fence();
    }
};

// One warp: lane i copies tile row i.
template <class T, int TOKENS, int EPILOGUE>
__device__ __forceinline__ void copy_weights(const Product& p, const Room<T, TOKENS, EPILOGUE>& room, int lane) {
    using S = Stage<T>;
    Place<Room<T, TOKENS, EPILOGUE>::W_STAGES> place;
    for (Shares share(p.dealt); share.next();) {
        const TileRow tile = TileRow::of<EPILOGUE, TILES>(p, share.row_block(), lane % TILES, T::BYTES);
#pragma unroll 1  // the few registers of a warp that copies are enough for one turn
        for (int stage = share.first; stage < share.last; ++stage, place.next()) {
            // Waiting again, in later turns of the ring, costs nothing: what would count the stages costs registers.
            if (BLOCKS<TOKENS> > 1 && place.stage == p.early) grid_dependency_wait();
            mbarrier_wait(room.w_free + place.stage, place.parity ^ 1);
            if (lane == 0) mbarrier_arrive_expect(room.w_full + place.stage, S::COPIED);
            __syncwarp();
            uint8_t* to = room.w + place.stage * S::BYTES + lane * S::TILE_BYTES;
            if (lane < TILES)
#pragma unroll
                for (int i = 0; i < S::CHUNKS; ++i) {
                    const int chunk = min(stage * S::CHUNKS + i, p.n_chunk - 1);  // of the last, x is 0
                    const uint8_t* from = tile.chunks + static_cast<size_t>(chunk) * T::BYTES;
                    if constexpr (BLOCKS<TOKENS> > 1)  // so few tokens that weights are read once
                        bulk_copy_streaming(to + i * T::BYTES, from, T::USED, room.w_full + place.stage, p.streaming);
                    else
                        bulk_copy(to + i * T::BYTES, from, T::USED, room.w_full + place.stage);
                }
        }
    }
}

// One thread, which waits for the kernel that makes x. It copies what its block has to copy to all that share x.
template <int SHARERS, class T, int TOKENS, int EPILOGUE>
__device__ __forceinline__ void copy_x(const Product& p, const Room<T, TOKENS, EPILOGUE>& room) {
    using R = Room<T, TOKENS, EPILOGUE>;
    constexpr int PART = TOKENS / SHARERS * ROW;
    const int first = cluster_rank<SHARERS>() * PART;  // byte of a step
    Place<R::X_STAGES> place;
    const int n_tokens = packed_tokens(p.n_tokens), next = n_tokens * ROW;
    for (Shares share(p.dealt); share.next();) {
        const int token = share.token_block() * TOKENS, bytes = min(TOKENS, n_tokens - token) * ROW;
        const int end = share.last * Stage<T>::STEPS;
        int step = share.first * Stage<T>::STEPS;
        const int part = min(PART, bytes - first);  // not positive where there are few tokens
        const uint8_t* from = p.x + (static_cast<size_t>(step) * n_tokens + token) * ROW + first;
        grid_dependency_wait(made_of(from) | bytes);
#pragma unroll 1
        for (; step < end; step += R::X_STEPS, place.next()) {
            mbarrier_wait(room.x_free + place.stage, place.parity ^ 1);
            mbarrier_arrive_expect(room.x_full + place.stage, R::X_STEPS * bytes);
#pragma unroll
            for (int i = 0; i < R::X_STEPS; ++i, from += next)
                if (SHARERS == 1 || part > 0)
                    bulk_copy_to_all<SHARERS>(room.x + place.stage * R::X_BYTES + i * R::X_STEP_BYTES + first, from, part,
                                              room.x_full + place.stage);
        }
    }
}

// What codes u of one group become halves with, for rows g and g + 8: d * 512, and what is added to d * u.
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
        constexpr int from = 16 * (GROUP_INDEX & 1);
        const __half2 d =
            __floats2half2_rn(half_power_of_two<from>(word) * 512.0f, half_power_of_two<from + 8>(word) * 512.0f);
        return {d, __hmul2(d, __hmul2(zero, one))};
    } else {
        const __half2 d = as_half2(__byte_perm(s.dd[0], s.dd[1], 0x5410));
        const __half2 m = __hneg2(as_half2(__byte_perm(s.dd[0], s.dd[1], 0x7632)));
        const uint32_t both = s.template scales_and_mins<GROUP_INDEX>();
        return {__hmul2(__hmul2(d, up), bytes_to_half2<0>(both, 0.0f)), __hmul2(m, bytes_to_half2<1>(both, 0.0f))};
    }
}

// Codes of one product as scaled halves. They come as shift * u * 2^-24 (odd groups of nibbles with a shift of 16): times
// 2^15 / shift they are u * 2^-9, and d * 512 brings them to size.
template <class T, int J>
__device__ __forceinline__ void scale_codes(uint32_t (&a)[4], const GroupScales& s) {
    constexpr float shift_of[2] = {T::template shift<J, 0>(), T::template shift<J, 1>()};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __half2 up = __float2half2_rn(32768.0f / shift_of[i & 1]);
        const __half2 d = i & 1 ? __high2half2(s.d) : __low2half2(s.d);
        const __half2 shift = i & 1 ? __high2half2(s.shift) : __low2half2(s.shift);
        a[i] = as_bits(__hfma2(__hmul2(as_half2(a[i]), up), d, shift));
    }
}

// Rows 8 h ... 8 h + 7 of two tile rows as one: codes and scales that unpack as if they were one tile's.
template <class Step>
__device__ __forceinline__ void load_halves(ChunkCodes<Step>& to, const uint8_t* (&main)[2], const uint8_t* (&extra)[2],
                                            int h, int lane) {
    constexpr int EXTRA = ChunkCodes<Step>::EXTRA;
    if constexpr (Step::BASE_BITS == 2) {  // both halves of a tile share words
        const uint2 first = reinterpret_cast<const uint2*>(main[0])[lane];
        const uint2 second = reinterpret_cast<const uint2*>(main[1])[lane];
        to.main[0] = (first.x >> 2 * h & 0x33333333u) | (second.x >> 2 * h & 0x33333333u) << 2;
        to.main[1] = (first.y >> 2 * h & 0x33333333u) | (second.y >> 2 * h & 0x33333333u) << 2;
    }
#pragma unroll
    for (int i = 0; i < Step::BASE_BYTES / 512; ++i) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const uint32_t* from = reinterpret_cast<const uint32_t*>(main[m] + (32 * i + lane) * 16);
            if constexpr (Step::FLOAT || TilePlace<Step>::OPERANDS) {
                to.main[4 * i + m] = from[h], to.main[4 * i + 2 + m] = from[2 + h];
            } else {
                const uint2 v = reinterpret_cast<const uint2*>(from)[h];
                to.main[4 * i + 2 * m] = v.x, to.main[4 * i + 2 * m + 1] = v.y;
            }
        }
    }
    if constexpr (EXTRA > 0) {
        constexpr uint32_t mask = EXTRA == 1 ? 0x33333333u : 0x0f0f0f0fu;
        uint32_t words[2][EXTRA];
#pragma unroll
        for (int m = 0; m < 2; ++m) to.load_extra(words[m], extra[m] + lane * EXTRA * 4);
#pragma unroll
        for (int i = 0; i < EXTRA; ++i) {
            const uint32_t first = words[0][i] >> 2 * EXTRA * h, second = words[1][i] >> 2 * EXTRA * h;
            to.extra[i] = (first & mask) | (second & mask) << 2 * EXTRA;
        }
    }
}
template <class T>
__device__ __forceinline__ void join_halves(ChunkScales<T>& a, const ChunkScales<T>& b, int h) {
    const uint32_t halves = h ? 0x7632 : 0x5410, bytes = h ? 0x7351 : 0x6240;
    if constexpr (T::SCALES == Scales::D) {
#pragma unroll
        for (int i = 0; i < T::GROUPS; ++i) a.dd[i] = __byte_perm(a.dd[i], b.dd[i], halves);
    } else if constexpr (T::SCALES == Scales::DM) {
#pragma unroll
        for (int i = 0; i < 2 * T::GROUPS; i += 2) {
            a.dd[i] = h ? a.dd[i + 1] : a.dd[i];
            a.dd[i + 1] = h ? b.dd[i + 1] : b.dd[i];
        }
    } else {
        if constexpr (T::SIGNED_SUB)
            a.dd[0] = __byte_perm(a.dd[0], b.dd[0], halves);
        else if constexpr (T::PACKED_SUB)
            a.dd[0] = h ? a.dd[1] : a.dd[0], a.dd[1] = h ? b.dd[1] : b.dd[0];
#pragma unroll
        for (int i = 0; i < T::GROUPS / 2; ++i) {
            // Bytes are of one half after the other: the same half of both, gate first.
            a.sc[i] = __byte_perm(a.sc[i], b.sc[i], bytes);
            if (T::TWOS && i < T::GROUPS / 4) a.twos[i] = __byte_perm(a.twos[i], b.twos[i], bytes);
        }
    }
}

// A warp that multiplies.
template <class T, int TOKENS, int EPILOGUE, int SHARERS>
struct Consumer {
    using Sum = float;
    using S = Stage<T>;
    using R = Room<T, TOKENS, EPILOGUE>;
    using Step = Tile<T::BITS, T::GROUP, T::SCALES, STEP, typename T::VALUES>;
    const Product& p;
    const R& room;
    int warp, lane;  // warp 0 ... TILES - 1
    Place<R::W_STAGES> w;
    Place<R::X_STAGES> x;
    uint32_t operand_x;  // what describes the stage of x at `x`
    int used;  // the stage of x before the one at `x`, or -1: the last products under way may still take it
    ChunkScales<T> scales;
    uint32_t a[2][4][4];
    float acc[TOKENS / 2];

    __device__ __forceinline__ Consumer(const Product& product, const R& r)
        : p(product), room(r), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

    // Tile row i of the stage at `w`.
    __device__ __forceinline__ const uint8_t* tile(int i) const {
        return room.w + w.stage * S::BYTES + i * S::TILE_BYTES;
    }
    // GLU: the warp's tile row of gate, which of its halves; up lies TILES / 2 further on.
    __device__ __forceinline__ int gate() const { return warp / 2; }
    __device__ __forceinline__ int half() const { return warp % 2; }

    __device__ __forceinline__ void load_scales() {
        if constexpr (EPILOGUE == GLU) {
            ChunkScales<T> up;
            scales.load(tile(gate()), lane / 4);
            up.load(tile(gate() + TILES / 2), lane / 4);
            join_halves(scales, up, half());
        } else {
            scales.load(tile(warp), lane / 4);
        }
    }
    // The A operands of step P of the stage at `w`.
    template <int P>
    __device__ __forceinline__ void convert() {
        constexpr int HERE = S::CHUNKS > 1 ? 0 : P, CHUNK = S::CHUNKS > 1 ? P : 0;  // the step in its chunk
        constexpr int MAIN = CHUNK * T::BYTES + T::SCALE_BYTES + HERE * Step::BASE_BYTES;
        constexpr int MORE = CHUNK * T::BYTES + T::SCALE_BYTES + T::BASE_BYTES + HERE * Step::EXTRA_BYTES;
        if constexpr (P == 0) {
            mbarrier_wait(room.w_full + w.stage, w.parity);
            if constexpr (T::SCALED) load_scales();
        }
        ChunkCodes<Step> codes;
        if constexpr (EPILOGUE == GLU) {
            const uint8_t *first = tile(gate()), *second = tile(gate() + TILES / 2);
            const uint8_t *main[2] = {first + MAIN, second + MAIN}, *extra[2] = {first + MORE, second + MORE};
            load_halves(codes, main, extra, half(), lane);
        } else {
            codes.load(tile(warp) + MAIN, tile(warp) + MORE, lane);
        }
        operand<P, HERE, 0, 0>(codes);
        operand<P, HERE, 0, 1>(codes);
        operand<P, HERE, 1, 0>(codes);
        operand<P, HERE, 1, 1>(codes);
    }
    template <int P, int HERE, int J, int S_>
    __device__ __forceinline__ void operand(const ChunkCodes<Step>& codes) {
        uint32_t(&to)[4] = a[P & 1][2 * J + S_];
        codes.template unpack<J, S_>(to);
        if constexpr (T::SCALED) {
            constexpr int group = T::GROUP == 16 ? 2 * (2 * HERE + J) + S_ : 2 * HERE + J;
            scale_codes<T, J>(to, group_scales<T, group>(scales));
        }
    }
    // Each lane says for itself what it has read: tools that look for races do not follow one lane that speaks for all.
    __device__ __forceinline__ void release_w() {
        mbarrier_arrive(room.w_free + w.stage);
        w.next();
    }
    __device__ __forceinline__ void release_x() {
        if (used >= 0) mbarrier_arrive_at_all<SHARERS>(room.x_free + used, lane);
    }
    // Step P and those behind it: products are enqueued, then the next step's operands made while they run.
    template <int P>
    __device__ __forceinline__ void steps(bool more) {
        if constexpr (P < S::STEPS) {
            constexpr int AT = P % R::X_STEPS;  // in the stage of x
            if constexpr (AT == 0) {
                mbarrier_wait(room.x_full + x.stage, x.parity);
                operand_x = wgmma_operand(room.x + x.stage * R::X_BYTES);
            }
            const uint32_t b = operand_x + AT * (R::X_STEP_BYTES / 16);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) wgmma_f16<TOKENS>(acc, a[P & 1][i], b + 2 * i);
            wgmma_commit();
            wgmma_wait<1>();
            if constexpr (AT == 0) release_x();
            if constexpr (AT == R::X_STEPS - 1) used = x.stage, x.next();
            if constexpr (P + 1 < S::STEPS) {
                convert<P + 1>();
                if (P + 2 == S::STEPS) release_w();
                steps<P + 1>(more);
            } else if (more) {
                convert<0>();
            }
        }
    }
    __device__ __forceinline__ void run(const Shares& share) {
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) acc[i] = 0.0f;
        used = -1;
        convert<0>();
        for (int stage = share.first; stage < share.last; ++stage) steps<0>(stage + 1 < share.last);
        wgmma_wait<0>();
        release_x();
    }
};

template <int TOKENS>
__device__ __forceinline__ bool takes_factors(const Product& p) {
    return HANDS<TOKENS> && p.handed.squares != nullptr;
}
// What the sums of a piece are multiplied by, of the thread's two tokens.
template <class T, int TOKENS, int EPILOGUE>
__device__ __forceinline__ float2 factors_of(const Product& p, const Room<T, TOKENS, EPILOGUE>& room, int piece) {
    if (EPILOGUE == ADD || !takes_factors<TOKENS>(p)) return make_float2(1.0f, 1.0f);
    return *reinterpret_cast<const float2*>(room.factors + 8 * piece + threadIdx.x % 4 * 2);
}

// Where the sums of a tile of output go, a piece at a time: sums e = 0 ... 3 of piece i are of row g + 8 (e / 2) of the
// warp and token 8 i + 2 t + e % 2 of the block.
template <class T, int TOKENS, int EPILOGUE>
struct Out {
    const Product& p;
    const Room<T, TOKENS, EPILOGUE>& room;
    const Segment* segment;
    float* to;
    float scale[2];
    bool there[2];
    int tokens;  // from the thread's first one on

    __device__ __forceinline__ Out(const Product& product, const Room<T, TOKENS, EPILOGUE>& room_, const Shares& share)
        : p(product), room(room_) {
        const int lane = threadIdx.x % 32, token = share.token_block() * TOKENS + lane % 4 * 2;
        const TileRow mine = TileRow::of<EPILOGUE, TILES>(p, share.row_block(), threadIdx.x / 32, T::BYTES);
        const int row = mine.row + lane / 4;
        segment = p.segment + mine.segment;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            there[h] = mine.valid && row + 8 * h < segment->n_rows;
            scale[h] = there[h] ? scaled_row(*segment, row + 8 * h, 1.0f) : 1.0f;
        }
        to = static_cast<float*>(segment->out) + static_cast<size_t>(token) * segment->n_rows + row;
        tokens = p.n_tokens - token;
        if (takes_factors<TOKENS>(p)) mbarrier_wait(room.found, 0);
    }
    __device__ __forceinline__ void put(int piece, const float4& sums) const {
        const float2 factor = factors_of(p, room, piece);
        const float y[4] = {sums.x * factor.x, sums.y * factor.y, sums.z * factor.x, sums.w * factor.y};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int token = 8 * piece + e % 2;
            if (!there[e / 2] || token >= tokens) continue;
            float* at = to + static_cast<size_t>(token) * segment->n_rows + e / 2 * 8;
            if (EPILOGUE == ADD)
                atomicAdd(at, y[e] * scale[e / 2]);  // nobody else does: it is there to need no answer
            else
                *at = y[e] * scale[e / 2];
        }
    }
    __device__ __forceinline__ void end(int, int) const {}
};

// ADD of eight tokens or fewer, where that is asked for with x handed on (deferred_norm.cuh).
template <class T>
struct Out<T, 8, ADD> {
    static constexpr int TOKENS = 8;
    const Product& p;
    float* squares;  // in shared memory, [TILES][TOKENS]
    bool handed;
    int row_block, row, token;  // the thread's first ones
    float* x;                   // there
    float scale[2], weight[2];  // of rows
    float old[4], before[2];    // of sums; of tokens

    __device__ __forceinline__ Out(const Product& product, const Room<T, TOKENS, ADD>& room, const Shares& share)
        : p(product), squares(room.squares), handed(product.handed.squares != nullptr), row_block(share.row_block()) {
        const TileRow mine = TileRow::of<ADD, TILES>(p, row_block, threadIdx.x / 32, T::BYTES);
        row = mine.valid ? mine.row + threadIdx.x % 32 / 4 : p.segment[0].n_rows;
        token = share.token_block() * TOKENS + threadIdx.x % 4 * 2;
        x = static_cast<float*>(p.segment[0].out) + static_cast<size_t>(token) * p.segment[0].n_rows + row;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            scale[h] = has_row(h) ? scaled_row(p.segment[0], row + 8 * h, 1.0f) : 1.0f;
            weight[h] = handed && has_row(h) ? __ldg(p.handed.weight + row + 8 * h) : 0.0f;
        }
        if (!handed) return;
#pragma unroll
        for (int e = 0; e < 4; ++e) old[e] = has(e) ? __ldcg(at(e)) : 0.0f;
#pragma unroll
        for (int e = 0; e < 2; ++e) before[e] = token + e < p.n_tokens ? __ldcg(p.handed.before + token + e) : 0.0f;
    }
    __device__ __forceinline__ bool has_row(int h) const { return row + 8 * h < p.segment[0].n_rows; }
    __device__ __forceinline__ bool has(int e) const { return has_row(e / 2) && token + e % 2 < p.n_tokens; }
    __device__ __forceinline__ float* at(int e) const { return x + e % 2 * p.segment[0].n_rows + e / 2 * 8; }
    __device__ __forceinline__ void put(int, const float4& sums) const {
        const float y[4] = {sums.x * scale[0], sums.y * scale[0], sums.z * scale[1], sums.w * scale[1]};
        float sum[2] = {};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (!has(e)) continue;
            if (!handed) {
                atomicAdd(at(e), y[e]);  // as in Out
                continue;
            }
            const float v = old[e] + y[e];
            *at(e) = v;
            sum[e % 2] = fmaf(v, v, sum[e % 2]);
            hand_on(p.handed, v * weight[e / 2] * before[e % 2], row + e / 2 * 8, token + e % 2, p.n_tokens);
        }
        if (!handed) return;
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2)
#pragma unroll
            for (int e = 0; e < 2; ++e) sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], offset);
        if (threadIdx.x % 32 < 4)
            *reinterpret_cast<float2*>(squares + threadIdx.x / 32 * TOKENS + threadIdx.x % 4 * 2) =
                make_float2(sum[0], sum[1]);
    }
    __device__ __forceinline__ void end(int, int) const {
        if (!handed) return;
        named_barrier_sync(1, 128 * GROUPS);
        if (threadIdx.x < TOKENS) {
            float sum = 0.0f;
#pragma unroll
            for (int warp = 0; warp < TILES; ++warp) sum += squares[warp * TOKENS + threadIdx.x];
            p.handed.squares[row_block * TOKENS + threadIdx.x] = sum;
        }
        named_barrier_sync(1, 128 * GROUPS);  // before those of another tile
    }
};

// Sums 0 and 1 are of gate, 2 and 3 of up. The outputs go through shared memory, 128 bytes of 64 rows for each token, and
// from there, eight tokens as one copy, to where they are packed.
template <class T, int TOKENS>
struct Out<T, TOKENS, GLU> {
    static constexpr int PIECES = TOKENS / 8, PIECE_BYTES = 8 * ROW;
    const Product& p;
    const Room<T, TOKENS, GLU>& room;
    uint8_t* out;  // in shared memory
    int row_block, first_token;
    uint8_t* to[2];
    float gate_scale, up_scale;
    bool valid;

    __device__ __forceinline__ Out(const Product& product, const Room<T, TOKENS, GLU>& room_, const Shares& share)
        : p(product), room(room_), out(room.out), row_block(share.row_block()), first_token(share.token_block() * TOKENS) {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 8 + lane / 4;
        if (threadIdx.x < PIECES) bulk_store_wait<true>();
        named_barrier_sync(1, 128 * GROUPS);
        const int in_matrix = row_block * (TILES / 2 * TILE_ROWS) + row;
        valid = in_matrix < p.segment[0].n_rows;
        gate_scale = valid ? scaled_row(p.segment[0], in_matrix, 1.0f) : 1.0f;
        up_scale = valid ? scaled_row(p.segment[1], in_matrix, 1.0f) : 1.0f;
        const int column = packed_column(p.order, row), token = lane % 4 * 2;
        if (takes_factors<TOKENS>(p)) mbarrier_wait(room.found, 0);
#pragma unroll
        for (int e = 0; e < 2; ++e)
            to[e] = out + (token + e) * ROW + (((column / 8) ^ (token + e)) << 4) + column % 8 * 2;
    }
    __device__ __forceinline__ void put(int piece, const float4& sums) const {
        const float2 factor = factors_of(p, room, piece);
        const __half first = gated(p.activation, sums.x * gate_scale * factor.x, sums.z * up_scale * factor.x);
        const __half second = gated(p.activation, sums.y * gate_scale * factor.y, sums.w * up_scale * factor.y);
        *reinterpret_cast<__half*>(to[0] + piece * PIECE_BYTES) = valid ? first : __half(0.0f);
        *reinterpret_cast<__half*>(to[1] + piece * PIECE_BYTES) = valid ? second : __half(0.0f);
    }
    // All warps have put pieces first, first + step, ...
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
                bulk_store(static_cast<uint8_t*>(p.segment[0].out) +
                               (static_cast<size_t>(row_block) * n_tokens + token) * ROW,
                           out + piece * PIECE_BYTES, PIECE_BYTES);
        }
    }
    // What lies in shared memory, to rows of halves.
    __device__ __forceinline__ void write_rows(int piece) const {
        const Segment& segment = p.segment[0];
        for (int i = threadIdx.x; i < 8 * 64; i += 128 * GROUPS) {
            const int in_piece = i / 64, column = i % 64, row = row_block * 64 + column;
            const int token = first_token + 8 * piece + in_piece;
            const uint8_t* from = out + piece * PIECE_BYTES + in_piece * ROW + (((column / 8) ^ in_piece) << 4);
            if (token < p.n_tokens && row < segment.n_rows)
                static_cast<__half*>(segment.out)[static_cast<size_t>(token) * segment.n_rows + row] =
                    *reinterpret_cast<const __half*>(from + column % 8 * 2);
        }
    }
};

// What sums of two rows are multiplied by, as TurnedHeads wants to know it.
struct ScalesOfRows {
    struct OfTokens {};
    float of[2];

    __device__ __forceinline__ ScalesOfRows(const Product&, const Segment& segment, int row)
        : of{scaled_row(segment, row, 1.0f), scaled_row(segment, row + 8, 1.0f)} {}
    __device__ __forceinline__ OfTokens of_tokens(int) const { return {}; }
    __device__ __forceinline__ float4 scaled(const float4& sums, OfTokens) const {
        return make_float4(__fmul_rn(sums.x, of[0]), __fmul_rn(sums.y, of[0]), __fmul_rn(sums.z, of[1]),
                           __fmul_rn(sums.w, of[1]));
    }
};
template <class T, int TOKENS>
struct Out<T, TOKENS, QKV> : TurnedHeads<ScalesOfRows, 128 * GROUPS> {
    __device__ __forceinline__ Out(const Product& p, const Room<T, TOKENS, QKV>& room, const Shares& share)
        : TurnedHeads<ScalesOfRows, 128 * GROUPS>(p, TileRow::of<QKV, TILES>(p, share.row_block(), 0, T::BYTES),
                                                  share.token_block() * TOKENS, room.out) {}
};
template <int N, class T, int TOKENS, class Sums>
__device__ __forceinline__ void put_all(Out<T, TOKENS, QKV>& out, Sums sums) {
    out.template put_pieces<N>(sums);
}

// grid: no more blocks than run at the same time, since some wait for others. SHARERS: of whole tiles alone, that are
// `paired`.
template <class T, int TOKENS, int EPILOGUE, int SHARERS = 1>
__global__ void __launch_bounds__(W_THREADS, BLOCKS<TOKENS>) gemm_wgmma(const Product p) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const Room<T, TOKENS, EPILOGUE> room(shared);
    if (threadIdx.x == 0) room.init(SHARERS);
    // The blocks of attention behind QKV come late: they would all begin where this kernel has no blocks.
    if (EPILOGUE != QKV) grid_dependency_launch();
    cluster_arrive<SHARERS>();
    cluster_wait<SHARERS>();
    if (threadIdx.x >= 128 * GROUPS) {
        give_registers<BLOCKS<TOKENS> == 2 ? 32 : 40>();
        const int warp = threadIdx.x / 32 - 4 * GROUPS, lane = threadIdx.x % 32;
        if (warp == 0) {
            copy_weights(p, room, lane);
        } else if (warp == 1 && lane == 0) {
            copy_x<SHARERS>(p, room);
        } else if (HANDS<TOKENS> && EPILOGUE != ADD && warp == 2 && p.handed.squares != nullptr) {
            grid_dependency_wait();
            find_factors<TOKENS>(p.handed, p.k, p.n_tokens, room.factors, lane);
            mbarrier_arrive(room.found);
        }
    } else {
        take_registers<BLOCKS<TOKENS> == 2 ? 104 : 232>();
        grid_dependency_wait();
        Consumer<T, TOKENS, EPILOGUE, SHARERS> consumer(p, room);
        make_shares<Out<T, TOKENS, EPILOGUE>, 128 * GROUPS>(p, room, consumer);
        if (EPILOGUE == GLU && threadIdx.x < TOKENS / 8) bulk_store_wait<false>();
    }
    if constexpr (SHARERS > 1) {  // others arrive at this block's barriers until they have read all of x
        __syncwarp();
        cluster_arrive<SHARERS>();
        cluster_wait<SHARERS>();
    }
}
