// Attention of prompts on Hopper (prefill_attention.cuh), with wgmma.
//
// A tile is up to 128 rows of (token, query head) that share a key/value head, as in paged_attention.cu: the heads of one group
// and as many tokens of one sequence as fit, so that keys and values are read once for all heads of the group. A block
// has two warpgroups that attend, 64 rows each, and a thread that copies pages into a ring in shared memory.
//
// A page of keys, [position][E], and a page of values, 16 positions at a time (they lie transposed), are both B operands as
// they are. Q stays in registers, or in shared memory where E is large. The scores of the next page are multiplied while
// this page's values are, and softened meanwhile.
#include "attention/prefill_attention.cuh"
#include "lib/wgmma.cuh"

constexpr int GROUPS = 2;            // warpgroups that attend
constexpr int GROUP_ROWS = 64;       // of each
constexpr int P_WARPS = 4 * GROUPS;  // that attend
constexpr int P_THREADS = 128 * (GROUPS + 1);

// Shared memory.
template <int ROW>
struct Room {
    static constexpr bool Q_SHARED = ROW > 128;  // registers are for the sums
    static constexpr int BOXES = (ROW + 63) / 64;
    static constexpr int K_BYTES = BOXES * KEY_BOX, V_BYTES = ROW * PACKED_ROW;
    static constexpr int Q_BYTES = Q_SHARED ? GROUPS * BOXES * KEY_BOX : 0;
    static constexpr int STAGES = ROW > 128 ? 2 : 4;

    uint8_t *q, *k, *v;
    uint64_t *k_full, *k_free, *v_full, *v_free;

    __device__ __forceinline__ Room(uint8_t* shared) {
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

// One thread: pages, as the ring has room.
template <int ROW>
__device__ __forceinline__ void copy_pages(const Attend& p, const TensorMap& keys, const Room<ROW>& room,
                                           const Span& span, const AttendTile& tile, int kv_head) {
    using R = Room<ROW>;
    const int* table = p.rope.page_tables + p.rope.sequences[tile.first_token] * p.rope.table_stride;
    Place<R::STAGES> place;
    for (int page = span.from; page < span.to; ++page, place.next()) {
        const int head = table[page] * p.rope.n_head_kv + kv_head, i = place.stage;
        mbarrier_wait(room.k_free + i, place.parity ^ 1);
        mbarrier_arrive_expect(room.k_full + i, R::K_BYTES);
#pragma unroll
        for (int box = 0; box < R::BOXES; ++box)
            tensor_copy(room.k + i * R::K_BYTES + box * KEY_BOX, keys, head * PAGE_SIZE, 64 * box, room.k_full + i);
        mbarrier_wait(room.v_free + i, place.parity ^ 1);
        mbarrier_arrive_expect(room.v_full + i, R::V_BYTES);
        const __half* values = p.rope.v_pages + static_cast<size_t>(head) * (ROW * PAGE_SIZE);
        bulk_copy(room.v + i * R::V_BYTES, values, R::V_BYTES, room.v_full + i);
    }
}

template <int ROW>
struct Attender {
    using R = Room<ROW>;
    static constexpr int STEPS = ROW / 16;
    const R& room;
    PromptRows<ROW> rows;
    int group;
    Place<R::STAGES> k, v;
    uint32_t q[R::Q_SHARED ? 1 : STEPS][4];

    __device__ __forceinline__ Attender(const Attend& p, const R& r, const Rows& tile_rows)
        : room(r), rows(p, tile_rows), group(threadIdx.x / 128) {}

    __device__ __forceinline__ void load_q() {
        if constexpr (R::Q_SHARED) {
            uint8_t* mine = room.q + group * R::BOXES * KEY_BOX;
            for (int i = threadIdx.x % 128; i < GROUP_ROWS * ROW / 8; i += 128) {
                const int r = i / (ROW / 8), piece = i % (ROW / 8), from = group * GROUP_ROWS + r;
                uint4 value = make_uint4(0, 0, 0, 0);
                if (from < rows.rows.n_rows) value = reinterpret_cast<const uint4*>(rows.query(from))[piece];
                *reinterpret_cast<uint4*>(mine + swizzled(r, piece)) = value;
            }
            async_fence();
            named_barrier_sync(1 + group, 128);
        } else {
            rows.load_q(q);
            wgmma_hold(q);
        }
    }

    // Begins S = Q K^T of the page at `k`.
    __device__ __forceinline__ void begin_scores(float (&s)[32]) {
        mbarrier_wait(room.k_full + k.stage, k.parity);
        const uint32_t keys = wgmma_operand(room.k + k.stage * R::K_BYTES);
        const uint32_t mine = R::Q_SHARED ? wgmma_operand(room.q + group * R::BOXES * KEY_BOX) : 0;
        wgmma_hold(s);
        wgmma_fence();
        step<0>(s, keys, mine);
        wgmma_commit();
    }
    template <int I>
    __device__ __forceinline__ void step(float (&s)[32], uint32_t keys, uint32_t mine) {
        if constexpr (I < STEPS) {
            constexpr int at = I / 4 * (KEY_BOX / 16) + I % 4 * 2;
            if constexpr (R::Q_SHARED)
                wgmma_f16<(I > 0)>(s, mine + at, keys + at);
            else
                wgmma_f16<64, (I > 0)>(s, q[I], keys + at);
            step<I + 1>(s, keys, mine);
        }
    }
    // Begins O += P V of the page at `v`.
    __device__ __forceinline__ void begin_values() {
        mbarrier_wait(room.v_full + v.stage, v.parity);
        const uint32_t values = wgmma_operand(room.v + v.stage * R::V_BYTES);
        wgmma_hold(rows.o);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            wgmma_f16<ROW, true, LINES_OF_32>(rows.o, rows.weights[i], values + i * (ROW * 32 / 16));
        wgmma_commit();
    }
    __device__ __forceinline__ void release(uint64_t* free, Place<R::STAGES>& place) {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(free + place.stage);
        place.next();
    }
    __device__ __forceinline__ void take_weights(const float (&s)[32]) {
        rows.take_weights(s);
        wgmma_hold(rows.weights);
    }

    __device__ __forceinline__ void run(const Span& span) {
        float s[32];
        begin_scores(s);
        wgmma_wait<0>();
        wgmma_hold(s);
        release(room.k_free, k);
        rows.soften(s, span.from);
        take_weights(s);
        for (int page = span.from + 1; page < span.to; ++page) {
            begin_scores(s);
            begin_values();
            wgmma_wait<1>();
            wgmma_hold(s);
            release(room.k_free, k);
            rows.soften(s, page);
            wgmma_wait<0>();
            wgmma_hold(rows.o);
            release(room.v_free, v);
            rows.rescale();
            take_weights(s);
        }
        begin_values();
        wgmma_wait<0>();
        wgmma_hold(rows.o);
        rows.write();
    }
};

// grid (G * tiles of a head group, tiles)
template <int ROW>
__global__ void __launch_bounds__(P_THREADS, 1)
    prefill_attention_wgmma(const __grid_constant__ Attend p, const __grid_constant__ TensorMap keys) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const Room<ROW> room(shared);
    if (threadIdx.x == 0) room.init();
    grid_dependency_launch();
    const AttendTile tile = p.tiles[blockIdx.y];
    const Rows rows(p, tile, blockIdx.x);
    const Span span(p, tile);
    __syncthreads();
    if (threadIdx.x >= 128 * GROUPS) {
        give_registers<24>();
        if (threadIdx.x == 128 * GROUPS) {
            grid_dependency_wait();
            copy_pages<ROW>(p, keys, room, span, tile, rows.kv_head);
        }
    } else {
        take_registers<240>();
        Attender<ROW> attender(p, room, rows);
        grid_dependency_wait();
        attender.load_q();
        attender.run(span);
    }
}
