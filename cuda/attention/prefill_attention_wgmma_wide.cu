// Prefill attention with wgmma for heads of 512 elements, for Hopper. It computes what prefill_attention_wgmma.cu does
// for smaller heads; prefill_attention.cuh has the softmax and the output.
//
// Grid (2 G * head groups per KV head, tiles), clusters of two CTAs along x. A tile is up to 128 rows of (token, query
// head) that share a KV head, and a CTA takes 64 of them: O of 64 rows is half of an SM's registers. Both CTAs take all
// pages that the tile sees, and each copies one half of them to both (multicast): with 64 rows for each read of K and V
// the kernel would be limited by L2.
//
// A CTA is warp-specialised: one producer thread, and two consumer warpgroups that have the same 64 rows. Pages come in
// pairs. A warpgroup computes S = Q K^T and P of one page of a pair, and O += P V of both pages for its half of the
// columns of O. The warpgroups exchange maxima and P through shared memory; thread i of one has the rows and columns of
// thread i of the other, so only pairs of warps wait for each other. If the number of pages is odd, the last page comes
// twice, the second time with positions that no row sees.
//
// Shared memory:
//
//    Q        [8 boxes][64][64] f16    64 KB
//    chunks   [9] of 16 KB             pipeline; a chunk is 64 elements of both pages of K, or 16 positions of a page
//                                      of V
//    P        [2][4][128] 16 bytes     of both pages, as A operands
//    maxima   [2][128] float2          of rows g and g + 8
//    mbarriers                         full and free, per chunk
//
// Chunks come in the order of their use: K of a pair, then V of the pair before it. A consumer multiplies S of the next
// pair together with O += P V of the current one, and computes the softmax of the next pair while P V runs, in two
// halves, so that at most four chunks of V are in use.
#include "attention/prefill_attention.cuh"
#include "lib/cluster.cuh"
#include "lib/wgmma.cuh"

constexpr int WIDE_CLUSTER = 2;  // CTAs that share K and V
constexpr int WIDE_GROUPS = 2;   // consumer warpgroups, and pages of a pair
constexpr int WIDE_ROWS = 64;    // rows of a CTA
constexpr int WIDE_WARPS = 4 * WIDE_GROUPS;
constexpr int WIDE_THREADS = 128 * (WIDE_GROUPS + 1);

// Shared-memory layout.
template <int ROW>
struct PrefillWideStorage {
    static constexpr int BOXES = ROW / 64, STAGES = 9;
    static constexpr int CHUNK = WIDE_GROUPS * KEY_BOX, COPY = CHUNK / WIDE_CLUSTER;
    static_assert(COPY == KEY_BOX && CHUNK == 16 * ROW * 2, "a CTA copies one page's box of K, or half a chunk of V");

    uint8_t *q, *chunks;
    uint4* weights;
    float2* maxima;
    uint64_t *full, *free;

    __device__ __forceinline__ PrefillWideStorage(uint8_t* shared) {
        q = shared;
        chunks = q + BOXES * KEY_BOX;
        weights = reinterpret_cast<uint4*>(chunks + STAGES * CHUNK);
        maxima = reinterpret_cast<float2*>(weights + WIDE_GROUPS * 4 * 128);
        full = reinterpret_cast<uint64_t*>(maxima + WIDE_GROUPS * 128);
        free = full + STAGES;
    }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < STAGES; ++i) mbarrier_init(full + i, 1), mbarrier_init(free + i, WIDE_CLUSTER * WIDE_WARPS);
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
        for (int i = 0; i < R::BOXES; ++i, state.next()) {
            uint8_t* dst = begin_chunk();
            tensor_copy_to_all<WIDE_CLUSTER>(dst, keys, head * PAGE_SIZE, 64 * i, storage.full + state.stage);
        }
    }
    __device__ __forceinline__ void copy_values(const __half* pages, int head) {
        const __half* page = pages + static_cast<size_t>(head) * (ROW * PAGE_SIZE);
        const uint8_t* src = reinterpret_cast<const uint8_t*>(page) + rank * R::COPY;
#pragma unroll 1
        for (int i = 0; i < PAGE_SIZE / 16; ++i, state.next()) {
            uint8_t* dst = begin_chunk();
            bulk_copy_to_all<WIDE_CLUSTER>(dst, src + i * R::CHUNK, R::COPY, storage.full + state.stage);
        }
    }
    __device__ __forceinline__ void run(const AttentionArgs& p, const TensorMap& keys, const Span& span,
                                        const AttentionTile& tile, int kv_head) {
        const int* table = p.rope.page_tables + p.rope.sequences[tile.first_token] * p.rope.table_stride;
        int pair[2] = {};
        for (int page = span.first; page < span.end; page += 2) {
            const int first = table[page] * p.rope.n_head_kv + kv_head;
            const int second = table[min(page + 1, span.end - 1)] * p.rope.n_head_kv + kv_head;
            copy_keys(keys, rank == 0 ? first : second);
            if (page > span.first) copy_values(p.rope.v_pages, pair[0]), copy_values(p.rope.v_pages, pair[1]);
            pair[0] = first, pair[1] = second;
        }
        copy_values(p.rope.v_pages, pair[0]), copy_values(p.rope.v_pages, pair[1]);
    }
};

template <int ROW>
struct PrefillWideConsumer {
    using R = PrefillWideStorage<ROW>;
    static constexpr int COLUMNS = ROW / WIDE_GROUPS;  // of O
    const R& storage;
    PrefillRows<ROW, WIDE_GROUPS> rows;
    int group, thread;               // thread of the warpgroup
    PipelineState<R::STAGES> state;  // of the next chunk
    int used = 0;                    // stage of the first chunk that is not released
    uint32_t weights[WIDE_GROUPS][4][4];

    __device__ __forceinline__ PrefillWideConsumer(const AttentionArgs& p, const R& r, const Rows& tile_rows)
        : storage(r), rows(p, tile_rows, cluster_rank<WIDE_CLUSTER>() * 4 + threadIdx.x % 128 / 32),
          group(threadIdx.x / 128), thread(threadIdx.x % 128) {}

    __device__ __forceinline__ void load_q() {
        for (int i = threadIdx.x; i < WIDE_ROWS * ROW / 8; i += 128 * WIDE_GROUPS) {
            const int r = i / (ROW / 8), piece = i % (ROW / 8);
            const int src = cluster_rank<WIDE_CLUSTER>() * WIDE_ROWS + r;
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
        mbarrier_arrive_at_all<WIDE_CLUSTER>(storage.free + used, thread % 32);
        used = used + 1 == R::STAGES ? 0 : used + 1;
    }

    // Starts S = Q K^T of this warpgroup's page of the next pair, a group of wgmmas for each chunk; the last may be in
    // flight on return.
    __device__ __forceinline__ void begin_scores(float (&s)[32]) {
        const uint32_t queries = wgmma_operand(storage.q);
        wgmma_hold(s);
        multiply_box<0>(s, queries);
    }
    template <int I>
    __device__ __forceinline__ void multiply_box(float (&s)[32], uint32_t queries) {
        if constexpr (I < R::BOXES) {
            const uint32_t q = queries + I * (KEY_BOX / 16), k = next_chunk() + group * (KEY_BOX / 16);
            wgmma_fence();
            wgmma_f16<(I > 0)>(s, q, k);
            wgmma_f16(s, q + 2, k + 2);
            wgmma_f16(s, q + 4, k + 4);
            wgmma_f16(s, q + 6, k + 6);
            wgmma_commit();
            if constexpr (I > 0) {
                wgmma_wait<1>();
                release();
            }
            multiply_box<I + 1>(s, queries);
        }
    }
    // Starts O += P V of a page of the current pair, for this warpgroup's columns: four groups of wgmmas.
    template <int PAGE>
    __device__ __forceinline__ void begin_values() {
        wgmma_hold(rows.o);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t values = next_chunk() + group * (COLUMNS * 32 / 16);
            wgmma_fence();
            wgmma_f16<COLUMNS, true, LINES_OF_32>(rows.o, weights[PAGE][i], values);
            wgmma_commit();
        }
    }
    __device__ __forceinline__ void end_values() {
        wgmma_wait<0>();
        wgmma_hold(rows.o);
#pragma unroll
        for (int i = 0; i < 4; ++i) release();
    }

    // Waits until the warp with the same rows, of the other warpgroup, is here, too.
    __device__ __forceinline__ void sync_pair() const { named_barrier_sync(2 + thread / 32, 64); }
    // A value of the thread with the same rows and columns. The next exchange must be another sync_pair later.
    __device__ __forceinline__ float2 exchange(float x, float y) const {
        storage.maxima[group * 128 + thread] = make_float2(x, y);
        sync_pair();
        return storage.maxima[(group ^ 1) * 128 + thread];
    }
    // The new maximum of each row, of both pages.
    __device__ __forceinline__ float2 highest_scores(const float (&s)[32]) const {
        const float x = rows.highest_score(s, 0), y = rows.highest_score(s, 1);
        const float2 other = exchange(x, y);
        return make_float2(fmaxf(x, other.x), fmaxf(y, other.y));
    }
    // Stores P for both warpgroups.
    __device__ __forceinline__ void store_weights(float (&s)[32], float2 top, float unit) {
        rows.weigh_scores(s, 0, top.x, unit);
        rows.weigh_scores(s, 1, top.y, unit);
        rows.set_weights(s);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t (&w)[4] = rows.weights[i];
            storage.weights[(group * 4 + i) * 128 + thread] = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
    __device__ __forceinline__ void load_weights() {
        sync_pair();
#pragma unroll
        for (int page = 0; page < WIDE_GROUPS; ++page) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 v = storage.weights[(page * 4 + i) * 128 + thread];
                weights[page][i][0] = v.x, weights[page][i][1] = v.y, weights[page][i][2] = v.z;
                weights[page][i][3] = v.w;
            }
            wgmma_hold(weights[page]);
        }
    }

    __device__ __forceinline__ void run(const Span& span) {
        float s[32];
        begin_scores(s);
        wgmma_wait<0>();
        wgmma_hold(s);
        release();
        float unit = rows.mask_scores(s, span.first + group);
        store_weights(s, highest_scores(s), unit);
        load_weights();
        for (int page = span.first + 2; page < span.end; page += 2) {
            begin_scores(s);
            begin_values<0>();
            wgmma_wait<4>();
            wgmma_hold(s);
            release();
            unit = rows.mask_scores(s, page + group);
            const float2 top = highest_scores(s);
            end_values();
            begin_values<1>();
            store_weights(s, top, unit);
            end_values();
            load_weights();
            rows.rescale();
        }
        begin_values<0>();
        end_values();
        begin_values<1>();
        end_values();
        const float2 other = exchange(rows.sum[0], rows.sum[1]);
        rows.sum[0] += other.x, rows.sum[1] += other.y;
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
