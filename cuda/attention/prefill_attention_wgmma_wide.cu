// Prefill attention with wgmma for heads of 512 elements, for Hopper. It computes what prefill_attention_wgmma.cu does
// for smaller heads; prefill_attention.cuh has the softmax and the output.
//
// Grid (2 G * head groups per KV head, tiles), clusters of two CTAs along x. A tile is up to 128 rows of (token, query
// head) that share a KV head, and a CTA takes 64 of them: a row of O is 2 KB, so that O of 64 rows is half of an SM's
// registers. Both CTAs see the pages of the whole tile. Each copies one half of them to both (multicast), because with
// 64 rows for each read of K and V the kernel would be limited by L2.
//
// A CTA is warp-specialised: one producer thread, and two consumer warpgroups with the same 64 rows. Each consumer
// computes all of S = Q K^T and its softmax, and multiplies P by its half of the columns of V.
//
// Shared memory:
//
//    Q        [8 boxes][64][64] f16    64 KB
//    chunks   [10] of 16 KB            pipeline; a chunk is a quarter of a page of K (all positions, 128 elements) or
//                                      of V (16 positions, all elements)
//    mbarriers                         full and free, per chunk
//
// Chunks come in the order of their use: K of a page, then V of the page before it.
#include "attention/prefill_attention.cuh"
#include "lib/cluster.cuh"
#include "lib/wgmma.cuh"

constexpr int WIDE_CLUSTER = 2;  // CTAs that share K and V
constexpr int WIDE_GROUPS = 2;   // consumer warpgroups
constexpr int WIDE_ROWS = 64;    // rows of a CTA
constexpr int WIDE_WARPS = 4 * WIDE_GROUPS;
constexpr int WIDE_THREADS = 128 * (WIDE_GROUPS + 1);

// Shared-memory layout.
template <int ROW>
struct PrefillWideStorage {
    static constexpr int PARTS = 4;  // chunks of a page of K, and of V
    static constexpr int CHUNK = PAGE_SIZE * ROW * 2 / PARTS, COPY = CHUNK / WIDE_CLUSTER;
    static constexpr int Q_BYTES = ROW / 64 * KEY_BOX, STAGES = 10;
    static_assert(COPY == KEY_BOX, "a CTA copies one box of a chunk of K");

    uint8_t *q, *chunks;
    uint64_t *full, *free;

    __device__ __forceinline__ PrefillWideStorage(uint8_t* shared) {
        q = shared;
        chunks = q + Q_BYTES;
        full = reinterpret_cast<uint64_t*>(chunks + STAGES * CHUNK);
        free = full + STAGES;
    }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < STAGES; ++i)
            mbarrier_init(full + i, 1), mbarrier_init(free + i, WIDE_CLUSTER * WIDE_WARPS);
        mbarrier_init_fence();
    }
};

// Producer, one thread: copies this CTA's half of each chunk to both CTAs, as stages become free in both.
template <int ROW>
struct PrefillWideProducer {
    using R = PrefillWideStorage<ROW>;
    const R& storage;
    int rank;
    PipelineState<R::STAGES> state;

    __device__ __forceinline__ PrefillWideProducer(const R& r) : storage(r), rank(cluster_rank<WIDE_CLUSTER>()) {}

    // Returns where this CTA's half of the next chunk goes.
    __device__ __forceinline__ uint8_t* begin_chunk() {
        mbarrier_wait(storage.free + state.stage, state.parity ^ 1);
        mbarrier_arrive_expect(storage.full + state.stage, R::CHUNK);
        return storage.chunks + state.stage * R::CHUNK + rank * R::COPY;
    }
    __device__ __forceinline__ void copy_keys(const TensorMap& keys, int head) {
#pragma unroll 1
        for (int i = 0; i < R::PARTS; ++i, state.next())
            tensor_copy_to_all<WIDE_CLUSTER>(begin_chunk(), keys, head * PAGE_SIZE, (i * WIDE_CLUSTER + rank) * 64,
                                             storage.full + state.stage);
    }
    __device__ __forceinline__ void copy_values(const __half* pages, int head) {
        const uint8_t* src = reinterpret_cast<const uint8_t*>(pages + static_cast<size_t>(head) * (ROW * PAGE_SIZE));
#pragma unroll 1
        for (int i = 0; i < R::PARTS; ++i, state.next())
            bulk_copy_to_all<WIDE_CLUSTER>(begin_chunk(), src + i * R::CHUNK + rank * R::COPY, R::COPY,
                                           storage.full + state.stage);
    }
    __device__ __forceinline__ void run(const AttentionArgs& p, const TensorMap& keys, const Span& span,
                                        const AttentionTile& tile, int kv_head) {
        const int* table = p.rope.page_tables + p.rope.sequences[tile.first_token] * p.rope.table_stride;
        int previous = 0;
        for (int page = span.first; page < span.end; ++page) {
            const int head = table[page] * p.rope.n_head_kv + kv_head;
            copy_keys(keys, head);
            if (page > span.first) copy_values(p.rope.v_pages, previous);
            previous = head;
        }
        copy_values(p.rope.v_pages, previous);
    }
};

template <int ROW>
struct PrefillWideConsumer {
    using R = PrefillWideStorage<ROW>;
    using Tile = PrefillRows<ROW, WIDE_GROUPS>;
    static constexpr int STEPS = ROW / 16 / R::PARTS;  // of a chunk of K
    const R& storage;
    Tile rows;
    int first_row, group;
    PipelineState<R::STAGES> state;  // of the next chunk
    int used = 0;                    // stage of the first chunk that is not released

    __device__ __forceinline__ PrefillWideConsumer(const AttentionArgs& p, const R& r, const Rows& tile_rows)
        : storage(r), rows(p, tile_rows, cluster_rank<WIDE_CLUSTER>() * WIDE_ROWS + threadIdx.x % 128 / 32 * 16),
          first_row(cluster_rank<WIDE_CLUSTER>() * WIDE_ROWS), group(threadIdx.x / 128) {}

    __device__ __forceinline__ void load_q() {
        for (int i = threadIdx.x; i < WIDE_ROWS * ROW / 8; i += 128 * WIDE_GROUPS) {
            const int r = i / (ROW / 8), piece = i % (ROW / 8), src = first_row + r;
            uint4 value = make_uint4(0, 0, 0, 0);
            if (src < rows.rows.n_rows) value = reinterpret_cast<const uint4*>(rows.query(src))[piece];
            *reinterpret_cast<uint4*>(storage.q + swizzled(r, piece)) = value;
        }
        async_fence();
        named_barrier_sync(1, 128 * WIDE_GROUPS);
    }

    // Waits for the next chunk, and returns its descriptor.
    __device__ __forceinline__ uint32_t next_chunk() {
        mbarrier_wait(storage.full + state.stage, state.parity);
        const uint32_t operand = wgmma_operand(storage.chunks + state.stage * R::CHUNK);
        state.next();
        return operand;
    }
    // Releases the chunk that was taken first, which no wgmma reads any more.
    __device__ __forceinline__ void release() {
        mbarrier_arrive_at_all<WIDE_CLUSTER>(storage.free + used, threadIdx.x % 32);
        used = used + 1 == R::STAGES ? 0 : used + 1;
    }

    // Starts S = Q K^T of the next page; a group of wgmmas for each chunk, of which the last may be in flight.
    __device__ __forceinline__ void begin_scores(float (&s)[32]) {
        const uint32_t queries = wgmma_operand(storage.q);
        wgmma_hold(s);
        chunk<0>(s, queries);
    }
    template <int I>
    __device__ __forceinline__ void chunk(float (&s)[32], uint32_t queries) {
        if constexpr (I < R::PARTS) {
            const uint32_t keys = next_chunk();
            wgmma_fence();
            step<I, 0>(s, queries, keys);
            wgmma_commit();
            if constexpr (I > 0) {
                wgmma_wait<1>();
                release();
            }
            chunk<I + 1>(s, queries);
        }
    }
    template <int I, int J>
    __device__ __forceinline__ void step(float (&s)[32], uint32_t queries, uint32_t keys) {
        if constexpr (J < STEPS) {
            constexpr int offset = J / 4 * (KEY_BOX / 16) + J % 4 * 2;
            wgmma_f16<(I + J > 0)>(s, queries + I * (R::CHUNK / 16) + offset, keys + offset);
            step<I, J + 1>(s, queries, keys);
        }
    }
    // Starts O += P V of the next page, for this warpgroup's columns: a group of wgmmas for each chunk.
    __device__ __forceinline__ void begin_values() {
        wgmma_hold(rows.o);
#pragma unroll
        for (int i = 0; i < R::PARTS; ++i) {
            const uint32_t values = next_chunk() + group * (Tile::COLUMNS * 32 / 16);
            wgmma_fence();
            wgmma_f16<Tile::COLUMNS, true, LINES_OF_32>(rows.o, rows.weights[i], values);
            wgmma_commit();
        }
    }
    __device__ __forceinline__ void end_values() {
        wgmma_wait<0>();
        wgmma_hold(rows.o);
#pragma unroll
        for (int i = 0; i < R::PARTS; ++i) release();
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
        release();
        rows.soften(s, span.first);
        set_weights(s);
        for (int page = span.first + 1; page < span.end; ++page) {
            begin_scores(s);
            begin_values();
            wgmma_wait<R::PARTS>();
            wgmma_hold(s);
            release();
            rows.soften(s, page);
            end_values();
            rows.rescale();
            set_weights(s);
        }
        begin_values();
        end_values();
        rows.write();
    }
};

// Grid (2 G * head groups per KV head, tiles).
template <int ROW>
__global__ void __launch_bounds__(WIDE_THREADS, 1)
    prefill_attention_wgmma_wide(const __grid_constant__ AttentionArgs p, const __grid_constant__ TensorMap keys) {
#if EMULATED
    SHARED_DYNAMIC(uint8_t, shared);
#else
    extern __shared__ __align__(1024) uint8_t shared[];
#endif
    const PrefillWideStorage<ROW> storage(shared);
    if (threadIdx.x == 0) storage.init();
    grid_dependency_launch();
    cluster_arrive<WIDE_CLUSTER>();
    const AttentionTile tile = p.tiles[blockIdx.y];
    const Rows rows(p, tile, blockIdx.x / WIDE_CLUSTER);
    const Span span(p, tile);
    cluster_wait<WIDE_CLUSTER>();
    if (threadIdx.x >= 128 * WIDE_GROUPS) {
        give_registers<24>();
        if (threadIdx.x == 128 * WIDE_GROUPS) {
            grid_dependency_wait();
            PrefillWideProducer<ROW> producer(storage);
            producer.run(p, keys, span, tile, rows.kv_head);
        }
    } else {
        take_registers<240>();
        PrefillWideConsumer<ROW> consumer(p, storage, rows);
        grid_dependency_wait();
        consumer.load_q();
        consumer.run(span);
    }
    __syncwarp();
    cluster_arrive<WIDE_CLUSTER>();  // the other CTA arrives at this CTA's mbarriers and copies to its stages
    cluster_wait<WIDE_CLUSTER>();
}
