// Prefill attention with wgmma, for Hopper (prefill_attention.cuh has the softmax and the output):
//
//    o[t, h] = softmax(mask(cap(q[t, h] K[kv(h)]^T * scale))) V[kv(h)]
//
// with q [T, H, E], K and V in the f16 pages of rope.cuh, and o [T, H, E].
//
// Grid (G * head groups per KV head, tiles). A tile is up to 128 rows of (token, query head) that share a KV head: the
// query heads of a group, and as many tokens of one sequence as fit, so that the CTA reads K and V once for all of
// them. A CTA is warp-specialised: two consumer warpgroups have 64 rows each, and one producer thread copies pages into
// shared memory (TMA for K, bulk copy for V).
//
// Shared memory:
//
//    Q      [2][E / 64 boxes][64][64] f16    only for ROW > 128: registers are needed for O
//    K, V   [stages] pages                   pipeline of 4 stages, 2 for ROW > 128
//    mbarriers                               full and free, per stage, for K and V
//
// A page of K, [position][E], and a page of V, 16 positions at a time (transposed), are both B operands as they lie.
// Otherwise Q is in registers. A consumer multiplies S = Q K^T of the next page together with O += P V of the current
// page, and computes the softmax of the next page while P V runs.
#include "attention/prefill_attention.cuh"
#include "lib/wgmma.cuh"

constexpr int GROUPS = 2;            // consumer warpgroups
constexpr int GROUP_ROWS = 64;       // rows of a warpgroup
constexpr int P_WARPS = 4 * GROUPS;  // consumer warps
constexpr int P_THREADS = 128 * (GROUPS + 1);

// Shared-memory layout.
template <int ROW>
struct PrefillSharedStorage {
    static constexpr bool Q_SHARED = ROW > 128;  // Q in shared memory: the registers hold O
    static constexpr int BOXES = (ROW + 63) / 64;
    static constexpr int K_BYTES = BOXES * KEY_BOX, V_BYTES = ROW * PACKED_ROW;
    static constexpr int Q_BYTES = Q_SHARED ? GROUPS * BOXES * KEY_BOX : 0;
    static constexpr int STAGES = ROW > 128 ? 2 : 4;

    uint8_t *q, *k, *v;
    uint64_t *k_full, *k_free, *v_full, *v_free;

    __device__ __forceinline__ PrefillSharedStorage(uint8_t* shared) {
        q = shared;
        k = q + Q_BYTES;
        v = k + STAGES * K_BYTES;
        k_full = reinterpret_cast<uint64_t*>(v + STAGES * V_BYTES);
        k_free = k_full + STAGES;
        v_full = k_free + STAGES;
        v_free = v_full + STAGES;
    }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(k_full + i, 1), mbarrier_init(k_free + i, P_WARPS);
            mbarrier_init(v_full + i, 1), mbarrier_init(v_free + i, P_WARPS);
        }
        mbarrier_init_fence();
    }
};

// Producer, one thread: copies the pages of the span, as stages become free.
template <int ROW>
__device__ __forceinline__ void copy_pages(const AttentionArgs& p, const TensorMap& keys,
                                           const PrefillSharedStorage<ROW>& storage, const Span& span,
                                           const AttentionTile& tile, int kv_head) {
    using R = PrefillSharedStorage<ROW>;
    const int* table = p.rope.page_tables + p.rope.sequences[tile.first_token] * p.rope.table_stride;
    PipelineState<R::STAGES> state;
    for (int page = span.first; page < span.end; ++page, state.next()) {
        const int head = table[page] * p.rope.n_head_kv + kv_head, i = state.stage;
        mbarrier_wait(storage.k_free + i, state.parity ^ 1);
        mbarrier_arrive_expect(storage.k_full + i, R::K_BYTES);
#pragma unroll
        for (int box = 0; box < R::BOXES; ++box)
            tensor_copy(storage.k + i * R::K_BYTES + box * KEY_BOX, keys, head * PAGE_SIZE, 64 * box,
                        storage.k_full + i);
        mbarrier_wait(storage.v_free + i, state.parity ^ 1);
        mbarrier_arrive_expect(storage.v_full + i, R::V_BYTES);
        const __half* values = p.rope.v_pages + static_cast<size_t>(head) * (ROW * PAGE_SIZE);
        bulk_copy(storage.v + i * R::V_BYTES, values, R::V_BYTES, storage.v_full + i);
    }
}

template <int ROW>
struct PrefillConsumer {
    using R = PrefillSharedStorage<ROW>;
    static constexpr int STEPS = ROW / 16;
    const R& storage;
    PrefillRows<ROW> rows;
    int group;
    PipelineState<R::STAGES> k, v;
    uint32_t q[R::Q_SHARED ? 1 : STEPS][4];

    __device__ __forceinline__ PrefillConsumer(const AttentionArgs& p, const R& r, const Rows& tile_rows)
        : storage(r), rows(p, tile_rows), group(threadIdx.x / 128) {}

    __device__ __forceinline__ void load_q() {
        if constexpr (R::Q_SHARED) {
            uint8_t* q_shared = storage.q + group * R::BOXES * KEY_BOX;
            for (int i = threadIdx.x % 128; i < GROUP_ROWS * ROW / 8; i += 128) {
                const int r = i / (ROW / 8), piece = i % (ROW / 8), src = group * GROUP_ROWS + r;
                uint4 value = make_uint4(0, 0, 0, 0);
                if (src < rows.rows.n_rows) value = reinterpret_cast<const uint4*>(rows.query(src))[piece];
                *reinterpret_cast<uint4*>(q_shared + swizzled(r, piece)) = value;
            }
            async_fence();
            named_barrier_sync(1 + group, 128);
        } else {
            rows.load_q(q);
            wgmma_hold(q);
        }
    }

    // Starts S = Q K^T of the page in stage `k`.
    __device__ __forceinline__ void begin_scores(float (&s)[32]) {
        mbarrier_wait(storage.k_full + k.stage, k.parity);
        const uint32_t keys = wgmma_operand(storage.k + k.stage * R::K_BYTES);
        const uint32_t q_operand = R::Q_SHARED ? wgmma_operand(storage.q + group * R::BOXES * KEY_BOX) : 0;
        wgmma_hold(s);
        wgmma_fence();
        step<0>(s, keys, q_operand);
        wgmma_commit();
    }
    template <int I>
    __device__ __forceinline__ void step(float (&s)[32], uint32_t keys, uint32_t q_operand) {
        if constexpr (I < STEPS) {
            constexpr int offset = I / 4 * (KEY_BOX / 16) + I % 4 * 2;
            if constexpr (R::Q_SHARED)
                wgmma_f16<(I > 0)>(s, q_operand + offset, keys + offset);
            else
                wgmma_f16<64, (I > 0)>(s, q[I], keys + offset);
            step<I + 1>(s, keys, q_operand);
        }
    }
    // Starts O += P V of the page in stage `v`.
    __device__ __forceinline__ void begin_values() {
        mbarrier_wait(storage.v_full + v.stage, v.parity);
        const uint32_t values = wgmma_operand(storage.v + v.stage * R::V_BYTES);
        wgmma_hold(rows.o);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            wgmma_f16<ROW, true, LINES_OF_32>(rows.o, rows.weights[i], values + i * (ROW * 32 / 16));
        wgmma_commit();
    }
    __device__ __forceinline__ void release(uint64_t* free, PipelineState<R::STAGES>& state) {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(free + state.stage);
        state.next();
    }
    __device__ __forceinline__ void set_weights(const float (&s)[32]) {
        rows.set_weights(s);
        wgmma_hold(rows.weights);
    }

    __device__ __forceinline__ void run(const Span& span) {
        float s[32];
        begin_scores(s);
        wgmma_wait<0>();
        wgmma_hold(s);
        release(storage.k_free, k);
        rows.soften(s, span.first);
        set_weights(s);
        for (int page = span.first + 1; page < span.end; ++page) {
            begin_scores(s);
            begin_values();
            wgmma_wait<1>();
            wgmma_hold(s);
            release(storage.k_free, k);
            rows.soften(s, page);
            wgmma_wait<0>();
            wgmma_hold(rows.o);
            release(storage.v_free, v);
            rows.rescale();
            set_weights(s);
        }
        begin_values();
        wgmma_wait<0>();
        wgmma_hold(rows.o);
        rows.write();
    }
};

// Grid (G * head groups per KV head, tiles).
template <int ROW>
__global__ void __launch_bounds__(P_THREADS, 1)
    prefill_attention_wgmma(const __grid_constant__ AttentionArgs p, const __grid_constant__ TensorMap keys) {
#if EMULATED
    SHARED_DYNAMIC(uint8_t, shared);
#else
    extern __shared__ __align__(1024) uint8_t shared[];
#endif
    const PrefillSharedStorage<ROW> storage(shared);
    if (threadIdx.x == 0) storage.init();
    grid_dependency_launch();
    const AttentionTile tile = p.tiles[blockIdx.y];
    const Rows rows(p, tile, blockIdx.x);
    const Span span(p, tile);
    __syncthreads();
    if (threadIdx.x >= 128 * GROUPS) {
        give_registers<24>();
        if (threadIdx.x == 128 * GROUPS) {
            grid_dependency_wait();
            copy_pages<ROW>(p, keys, storage, span, tile, rows.kv_head);
        }
    } else {
        take_registers<240>();
        PrefillConsumer<ROW> consumer(p, storage, rows);
        grid_dependency_wait();
        consumer.load_q();
        consumer.run(span);
    }
}
