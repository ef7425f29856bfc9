// Grouped GEMM on Hopper, for many rows of each expert: rows of x that are sorted by expert (sort.cu) and packed
// (pack_pairs.cu), each times the matrix of its expert, with the main loop of gemm_wgmma.cu. A work tile is 128 rows of
// weights x up to TOKENS (64, 256 or 288) rows of x. A tile of fewer rows multiplies only as many as it has, rounded up
// to a multiple of 32. 288: an expert with 256 rows on average seldom has more.
//
// Launch: resident CTAs as of gemm_wgmma.cu, in clusters of CLUSTER CTAs, which have the same rows of x and adjacent rows
// of weights. Which work tiles there are is known on the device alone, so each cluster takes every gridDim / CLUSTER-th
// one; adjacent clusters share rows of x. sort.cu puts large tiles first, so that the last ones are short.
//
// | epilogue | output                                                                                       |
// | STORE    | f32 rows of y                                                                                |
// | GLU      | f16 act(gate + its bias, up + its bias), packed for the next GEMM; padding rows are computed |
#include "gemm/gemm_wgmma.cu"
#include "moe/expert_act.cuh"

struct ExpertWgmmaArgs : GemmArgs {  // n_tokens: rows of x and of the output, a multiple of 8
    const uint8_t* x;                // packed f16
    const int4* work;                // [n_work] (expert, first row, end row, 0); expert -1: no more work
    const float* bias[2];            // GLU: of gate and up [n_expert, n_rows], or null
    uint64_t expert_bytes;           // from the tiles of one expert to those of the next
    int n_work, n_stages;            // stages of K of a work tile
    int row_blocks;                  // rows of weights in parts of 128 CLUSTER (GLU: 64 CLUSTER)
    int next_work, next_block;       // from a cluster's tile to its next one
    int order;                       // GLU: enum Order of the output
};

// Iterates over the work tiles of this CTA. The next one is requested while one is multiplied.
template <int CLUSTER>
struct ExpertTiles {
    const ExpertWgmmaArgs& p;
    int index, block;
    int4 upcoming;
    int expert, first_row, n_rows, row_block;

    __device__ __forceinline__ ExpertTiles(const ExpertWgmmaArgs& args) : p(args) {
        const int position = blockIdx.x / CLUSTER;
        index = position / p.row_blocks, block = position % p.row_blocks;
        request();
    }
    __device__ __forceinline__ void request() {
        upcoming = index < p.n_work ? load_of_line(p.work + index) : make_int4(-1, 0, 0, 0);
    }
    __device__ __forceinline__ bool next() {
        if (upcoming.x < 0) return false;
        expert = upcoming.x, first_row = upcoming.y, n_rows = upcoming.z - upcoming.y;
        row_block = block * CLUSTER + cluster_rank<CLUSTER>();
        index += p.next_work, block += p.next_block;
        if (block >= p.row_blocks) block -= p.row_blocks, ++index;
        request();
        return true;
    }
    // Pieces of eight rows, the last one with padding rows.
    __device__ __forceinline__ int pieces() const { return (n_rows + 7) / 8; }
};

// The weight producer, one warp: lane i copies tile row i of each stage.
template <int CLUSTER, class T, int TOKENS, int EPILOGUE>
__device__ __forceinline__ void copy_expert_weights(const ExpertWgmmaArgs& p,
                                                    const WgmmaSharedStorage<T, TOKENS, EPILOGUE>& storage, int lane) {
    using S = WeightStage<T>;
    PipelineState<WgmmaSharedStorage<T, TOKENS, EPILOGUE>::W_STAGES> state;
    for (ExpertTiles<CLUSTER> work(p); work.next();) {
        const TileRow tile = TileRow::of<EPILOGUE, TILES>(p, work.row_block, lane % TILES, T::BYTES);
        const uint8_t* chunks = tile.chunks + work.expert * p.expert_bytes;
#pragma unroll 1
        for (int stage = 0; stage < p.n_stages; ++stage, state.next()) {
            mbarrier_wait(storage.w_free + state.stage, state.parity ^ 1);
            if (lane == 0) mbarrier_arrive_expect(storage.w_full + state.stage, S::COPIED);
            __syncwarp();
            uint8_t* dst = storage.w + state.stage * S::BYTES + lane * S::TILE_BYTES;
            if (lane < TILES)
#pragma unroll
                for (int i = 0; i < S::CHUNKS; ++i) {
                    // chunks past the last repeat it; x is 0 there
                    const int chunk = min(stage * S::CHUNKS + i, p.n_chunk - 1);
                    bulk_copy_streaming(dst + i * T::BYTES, chunks + static_cast<size_t>(chunk) * T::BYTES, T::USED,
                                        storage.w_full + state.stage, p.streaming);
                }
        }
    }
}

// The producer of x, one thread. It copies the CTA's part of x to all CTAs of the cluster.
template <int CLUSTER, class T, int TOKENS, int EPILOGUE>
__device__ __forceinline__ void copy_expert_rows(const ExpertWgmmaArgs& p,
                                                 const WgmmaSharedStorage<T, TOKENS, EPILOGUE>& storage) {
    using R = WgmmaSharedStorage<T, TOKENS, EPILOGUE>;
    constexpr int PIECE = 8 * ROW;
    PipelineState<R::X_STAGES> state;
    const int next = p.n_tokens * ROW, n_steps = p.n_stages * WeightStage<T>::STEPS;
    for (ExpertTiles<CLUSTER> work(p); work.next();) {
        const int bytes = work.pieces() * PIECE, most = (work.pieces() + CLUSTER - 1) / CLUSTER * PIECE;
        const int first = cluster_rank<CLUSTER>() * most, part = min(most, bytes - first);  // 0 of a single piece
        const uint8_t* src = p.x + static_cast<size_t>(work.first_row) * ROW + first;
#pragma unroll 1
        for (int step = 0; step < n_steps; step += R::X_STEPS, state.next()) {
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

// Stores the sums of a work tile, QUAD pieces at a time: sum e = 0 ... 3 of piece i belongs to row g + 8 (e / 2) of the
// warp's weights and row 8 i + 2 t + e % 2 of the tile.
constexpr int QUAD = 4;
template <class T, int TOKENS, int EPILOGUE>
struct ExpertOutput {
    const Segment& segment;
    float *out, scale;
    bool valid[2];
    int rows;  // rows from the thread's first row to the end

    template <class Work>
    __device__ __forceinline__ ExpertOutput(const ExpertWgmmaArgs& p, const WgmmaSharedStorage<T, TOKENS, EPILOGUE>&,
                                            const Work& work)
        : segment(p.segment[0]), scale(scaled_expert(segment, work.expert, 1.0f)) {
        const int lane = threadIdx.x % 32, first = work.first_row + lane % 4 * 2;
        const int column = (work.row_block * TILES + threadIdx.x / 32) * TILE_ROWS + lane / 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) valid[h] = column + 8 * h < segment.n_rows;
        out = static_cast<float*>(segment.out) + static_cast<size_t>(first) * segment.n_rows + column;
        rows = work.n_rows - lane % 4 * 2;
    }
    __device__ __forceinline__ void put(int first, const float (&sums)[TOKENS / 2]) const {
#pragma unroll
        for (int i = 4 * first; i < 4 * (first + QUAD); ++i) {
            const int e = i % 4, row = i / 4 * 8 + e % 2;
            if (valid[e / 2] && row < rows)
                out[static_cast<size_t>(row) * segment.n_rows + e / 2 * 8] = scale * sums[i];
        }
    }
    __device__ __forceinline__ void end() const {}
};

// GLU: sums 0 and 1 of a piece are of gate, 2 and 3 of up. As in gemm_wgmma.cu, outputs are staged in shared memory, and
// bulk stores write eight rows at a time.
template <class T, int TOKENS>
struct ExpertOutput<T, TOKENS, GLU> {
    static constexpr int PIECES = TOKENS / 8, PIECE_BYTES = 8 * ROW;
    const ExpertWgmmaArgs& p;
    uint8_t *staged, *dst[2];  // in shared memory: the tile, and outputs of the thread
    uint8_t* out;              // of the tile
    int pieces;
    float scale[2], bias[2];
    bool valid;
    ExpertGated gated;

    template <class Work>
    __device__ __forceinline__ ExpertOutput(const ExpertWgmmaArgs& args,
                                            const WgmmaSharedStorage<T, TOKENS, GLU>& storage, const Work& work)
        : p(args), staged(storage.out), pieces(work.pieces()), gated(args.activation) {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 8 + lane / 4;
        const int column = packed_column(p.order, row), in_piece = lane % 4 * 2;
        const int in_matrix = work.row_block * (TILES / 2 * TILE_ROWS) + row, n_rows = p.segment[0].n_rows;
        valid = in_matrix < n_rows;
        const size_t at = static_cast<size_t>(work.expert) * n_rows + in_matrix;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            scale[i] = scaled_expert(p.segment[i], work.expert, 1.0f);
            bias[i] = valid && p.bias[i] ? __ldg(p.bias[i] + at) : 0.0f;
        }
#pragma unroll
        for (int e = 0; e < 2; ++e)
            dst[e] = staged + (in_piece + e) * ROW + (((column / 8) ^ (in_piece + e)) << 4) + column % 8 * 2;
        out = static_cast<uint8_t*>(p.segment[0].out) +
              (static_cast<size_t>(work.row_block) * p.n_tokens + work.first_row) * ROW;
        if (threadIdx.x < PIECES) bulk_store_wait<true>();
        named_barrier_sync(1, 128 * GROUPS);
    }
    __device__ __forceinline__ void put(int first, const float (&sums)[TOKENS / 2]) const {
        float h[2 * QUAD];
#pragma unroll
        for (int i = 0; i < 2 * QUAD; ++i) {
            const int at = 4 * (first + i / 2) + i % 2;
            h[i] = gated(fmaf(scale[0], sums[at], bias[0]), fmaf(scale[1], sums[at + 2], bias[1]));
        }
#pragma unroll
        for (int i = 0; i < QUAD; ++i) {
            const uint32_t pair = valid ? saturated_half2(h[2 * i], h[2 * i + 1]) : 0;
#pragma unroll
            for (int e = 0; e < 2; ++e)
                *reinterpret_cast<uint16_t*>(dst[e] + (first + i) * PIECE_BYTES) =
                    static_cast<uint16_t>(pair >> 16 * e);
        }
    }
    __device__ __forceinline__ void end() const {
        async_fence();
        named_barrier_sync(1, 128 * GROUPS);
        if (threadIdx.x < pieces)
            bulk_store(out + threadIdx.x * PIECE_BYTES, staged + threadIdx.x * PIECE_BYTES, PIECE_BYTES);
    }
};

constexpr int WGMMA_ROWS = 256;  // most rows of x of a wgmma

// wgmmas of the first n_rows rows of a work tile, or up to 31 more.
template <int TOKENS>
struct FirstRows {
    int n_rows;

    // One of LEAST, LEAST + 32, ... MOST rows. All take their sums from the same registers, so that the loop over K need
    // not be there once for each number of rows.
    template <int LEAST = 32, int MOST = TOKENS>
    __device__ __forceinline__ void multiply(float (&acc)[TOKENS / 2], const uint32_t (&a)[4][4], uint32_t x) const {
        constexpr int HALF = (LEAST + MOST) / 64 * 32;
        if constexpr (LEAST == MOST) {
            constexpr int FIRST = MOST > WGMMA_ROWS ? WGMMA_ROWS : MOST, SECOND = MOST - FIRST;
            float (&sums)[FIRST / 2] = reinterpret_cast<float (&)[FIRST / 2]>(acc);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                wgmma_f16<FIRST>(sums, a[i], x + 2 * i);
                if constexpr (SECOND > 0)
                    wgmma_f16<SECOND>(reinterpret_cast<float (&)[SECOND / 2]>(acc[FIRST / 2]), a[i],
                                      x + FIRST * ROW / 16 + 2 * i);
            }
            wgmma_commit();  // here, for ptxas would end a second group where the ways meet
        } else if (n_rows > HALF) {
            multiply<HALF + 32, MOST>(acc, a, x);
        } else {
            multiply<LEAST, HALF>(acc, a, x);
        }
    }
};

template <class T, int TOKENS, int EPILOGUE, int CLUSTER>
__global__ void __launch_bounds__(W_THREADS, CTAS_PER_SM<TOKENS>) expert_wgmma(const ExpertWgmmaArgs p) {
#if EMULATED
    SHARED_DYNAMIC(uint8_t, shared);
#else
    extern __shared__ __align__(1024) uint8_t shared[];
#endif
    const WgmmaSharedStorage<T, TOKENS, EPILOGUE> storage(shared);
    if (threadIdx.x == 0) storage.init(CLUSTER);
    grid_dependency_launch();
    cluster_arrive<CLUSTER>();
    cluster_wait<CLUSTER>();
    grid_dependency_wait();
    if (threadIdx.x >= 128 * GROUPS) {
        give_registers<CTAS_PER_SM<TOKENS> == 2 ? 32 : 40>();
        const int warp = threadIdx.x / 32 - 4 * GROUPS, lane = threadIdx.x % 32;
        if (warp == 0) {
            copy_expert_weights<CLUSTER>(p, storage, lane);
        } else if (warp == 1 && lane == 0) {
            copy_expert_rows<CLUSTER>(p, storage);
        }
    } else {
        take_registers<CTAS_PER_SM<TOKENS> == 2 ? 104 : 232>();
        GemmWgmmaConsumer<T, TOKENS, EPILOGUE, CLUSTER> consumer(storage);
        for (ExpertTiles<CLUSTER> work(p); work.next();) {
            const int n_rows = __shfl_sync(0xffffffffu, work.n_rows, 0);  // uniform, as branches to wgmmas must be
            consumer.multiply(FirstRows<TOKENS>{n_rows}, 0, p.n_stages);
            ExpertOutput<T, TOKENS, EPILOGUE> out(p, storage, work);
#pragma unroll
            for (int i = 0; i < TOKENS / 8; i += QUAD)
                if (8 * i < n_rows) out.put(i, consumer.acc);
            out.end();
        }
        if (EPILOGUE == GLU && threadIdx.x < TOKENS / 8) bulk_store_wait<false>();
    }
    if constexpr (CLUSTER > 1) {  // CTAs of the cluster arrive at this CTA's mbarriers until they have read all of x
        __syncwarp();
        cluster_arrive<CLUSTER>();
        cluster_wait<CLUSTER>();
    }
}
