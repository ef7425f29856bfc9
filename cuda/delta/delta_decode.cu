// A gated delta net between its products, for steps of one token a sequence: convolution, recurrence, norm and gate.
//
// Launch: grid (CLUSTER Hv, tokens at once), clusters of CLUSTER CTAs along x. A cluster takes one value head of every
// gridDim.y-th token, and a CTA COLUMNS = P / CLUSTER columns of its matrix, a column in the registers of LANES lanes.
// Each CTA convolves q and k of its key head and its own elements of v, a warp 32 channels at a time. CTAs exchange only
// the squares of o, through distributed shared memory.
//
// Reading and writing the matrix bounds the time of this kernel. Nothing of a state depends on earlier kernels of the
// step, so the loads of the matrix, and of the inputs that the convolution kept, are issued before
// grid_dependency_wait.
//
// STAGES = 0, for few tokens: gridDim.y is T, and a CTA ends after its token. Otherwise all CTAs of the grid should be
// resident. While a CTA computes a token, the columns of its next STAGES tokens are on their way into shared memory, and
// the other inputs of the next one into registers. Tokens that pad a step write the same state, which none reads.
#include "delta/delta.cuh"
#include "lib/cluster.cuh"

template <int QUADS, int CLUSTER>
struct DecodeTraits {
    static_assert(QUADS % CLUSTER == 0, "CTAs of a cluster have equal parts of a head");
    static constexpr int BLOCKS = QUADS / CLUSTER;  // of v and o of a CTA
    static constexpr int COLUMNS = BLOCKS * BLOCK, THREADS = COLUMNS * LANES, N_WARPS = THREADS / 32;
    static constexpr int N_CHANNELS = (2 * QUADS + BLOCKS) * BLOCK;
    static constexpr int ROUNDS = (2 * QUADS + BLOCKS + N_WARPS - 1) / N_WARPS;  // blocks of channels of a warp
    // CTAs of an SM, for many tokens: a column of 128 rows leaves room for 64 registers a thread
    static constexpr int THREADS_AT_ONCE = QUADS > 4 ? 512 : 1024;
    static constexpr int CTAS = THREADS < THREADS_AT_ONCE ? THREADS_AT_ONCE / THREADS : 1;
};

// Dynamic shared memory, after that of ColumnPipeline.
template <int QUADS, int CLUSTER, int TAPS>
struct DecodeStorage {
    static constexpr int N_CHANNELS = DecodeTraits<QUADS, CLUSTER>::N_CHANNELS;
    static constexpr int K = QUADS * BLOCK, V = 2 * QUADS * BLOCK;  // where k and v begin in u
    // q, k and the CTA's elements of v after the convolution; q and k are not yet of length 1
    float u[V + DecodeTraits<QUADS, CLUSTER>::COLUMNS];
    float o[DecodeTraits<QUADS, CLUSTER>::COLUMNS];
    float squares[2 * QUADS];  // of the blocks of q, then of k
    float taps[TAPS][N_CHANNELS];
    float norm[DecodeTraits<QUADS, CLUSTER>::COLUMNS];  // weights
    float2 decay;                                       // what the matrix is multiplied with, and sigmoid(beta)
    // Of the blocks of o, from all CTAs of the cluster; y is unused. Every second token has its own: a CTA stores those
    // of a token while others read those of the token before.
    float2 squares_of_o[2][QUADS];
};

// Columns of the CTA's next tokens on their way into shared memory, [STAGES][QUADS][THREADS]. A thread takes only what it
// has copied, so no barrier is needed.
template <int QUADS, int THREADS, int STAGES>
struct ColumnPipeline {
    float4* memory;  // of the thread
    int slot;

    // Copies a lane's rows of a column, or zeros, as one cp.async group. The group is empty past the last token.
    __device__ __forceinline__ void prefetch(const float4* src, bool inside, bool is_token) {
        if (is_token) {
#pragma unroll
            for (int j = 0; j < QUADS; ++j)
                cp_async<16>(memory + (slot * QUADS + j) * THREADS, src + LANES * j, inside ? 16 : 0);
        }
        cp_async_commit();
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    // The oldest of STAGES groups; prefetch fills its slot again.
    __device__ __forceinline__ void take(Column<QUADS>& column) const {
        cp_async_wait<STAGES - 1>();
#pragma unroll
        for (int j = 0; j < QUADS; ++j) column.m[j] = memory[(slot * QUADS + j) * THREADS];
    }
};

// A lane's channel in a block of 32: blocks of q come first, then those of k and v.
template <int QUADS, int CLUSTER, int TAPS>
struct DecodeChannel {
    int block, channel;
    bool inside;
    float input[TAPS], weight[TAPS];

    __device__ __forceinline__ void locate(const DeltaArgs& p, int block_, int head, int rank, int lane) {
        constexpr int BLOCKS = DecodeTraits<QUADS, CLUSTER>::BLOCKS;
        block = block_;
        const int part = block < QUADS ? 0 : block < 2 * QUADS ? 1 : 2;
        const int of_head = (part == 2 ? rank * BLOCKS + block - 2 * QUADS : block - part * QUADS) * BLOCK + lane;
        const int of_part = part == 2 ? 2 * p.n_k_head + head : part * p.n_k_head + p.key_head(head);
        channel = of_part * p.size + of_head;
        inside = block < 2 * QUADS + BLOCKS && of_head < p.size;
    }
    __device__ __forceinline__ void load_taps(const DeltaArgs& p) {
#pragma unroll
        for (int j = 0; j < TAPS; ++j)
            weight[j] = inside ? load_now(p.taps_of + static_cast<size_t>(channel) * TAPS + j) : 0.0f;
    }
    // Moves the weights to shared memory and back.
    __device__ __forceinline__ void put_taps(DecodeStorage<QUADS, CLUSTER, TAPS>& storage, int lane) const {
        if (block >= 2 * QUADS + DecodeTraits<QUADS, CLUSTER>::BLOCKS) return;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) storage.taps[j][block * BLOCK + lane] = weight[j];
    }
    __device__ __forceinline__ void take_taps(const DecodeStorage<QUADS, CLUSTER, TAPS>& storage, int lane) {
        if (block >= 2 * QUADS + DecodeTraits<QUADS, CLUSTER>::BLOCKS) return;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) weight[j] = storage.taps[j][block * BLOCK + lane];
    }
    // What does not depend on earlier kernels of the step.
    __device__ __forceinline__ void load_kept(const DeltaArgs& p, int page) {
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j)
            input[j] = inside && page != NO_STATE ? load_of_line(p.kept_input<TAPS>(page, j, channel)) : 0.0f;
    }
    __device__ __forceinline__ void load_newest(const DeltaArgs& p, int token) {
        const float* src = p.projected + static_cast<size_t>(token) * p.channels() + channel;
        input[TAPS - 1] = inside ? __ldcg(src) : 0.0f;
    }
    __device__ __forceinline__ void convolve(DecodeStorage<QUADS, CLUSTER, TAPS>& storage, int lane) const {
        if (block >= 2 * QUADS + DecodeTraits<QUADS, CLUSTER>::BLOCKS) return;
        const float u = convolved(input, weight);
        storage.u[block * BLOCK + lane] = u;
        if (block >= 2 * QUADS) return;
        const float sum = squares_of_block(u);
        if (lane == 0) storage.squares[block] = sum;
    }
    // The inputs that the next step's convolution sees.
    __device__ __forceinline__ void keep(const DeltaArgs& p, int page) const {
        if (!inside) return;
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j) *p.kept_input<TAPS>(page, j, channel) = input[j + 1];
    }
};

template <int QUADS, int CLUSTER, int TAPS, int STAGES>
__global__ void __launch_bounds__(DecodeTraits<QUADS, CLUSTER>::THREADS,
                                  STAGES > 0 ? DecodeTraits<QUADS, CLUSTER>::CTAS : 0) delta_decode(const DeltaArgs p) {
    using Traits = DecodeTraits<QUADS, CLUSTER>;
    using Storage = DecodeStorage<QUADS, CLUSTER, TAPS>;
    SHARED_DYNAMIC(float4, memory);
    Storage& storage = *reinterpret_cast<Storage*>(memory + STAGES * QUADS * Traits::THREADS);
    cluster_arrive<CLUSTER>();  // the CTAs of the cluster run; waited for before sums are stored in their shared memory
    const int head = blockIdx.x / CLUSTER, rank = cluster_rank<CLUSTER>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = threadIdx.x % LANES;
    const int of_cta = threadIdx.x / LANES, column = rank * Traits::COLUMNS + of_cta;
    const int stride = gridDim.y;
    int token = blockIdx.y, read = p.pages[2 * token], written = p.pages[2 * token + 1];
    const bool inside = column < p.size;
    // The page that a token reads, NO_STATE after the last one.
    const auto page_of = [&](int t) { return t < p.n_tokens ? load_now(p.pages + 2 * t) : NO_STATE; };
    Column<QUADS> m;
    ColumnPipeline<QUADS, Traits::THREADS, STAGES> pipeline{memory + threadIdx.x, 0};
    const auto prefetch = [&](int t, int page) {
        const bool is_read = inside && page != NO_STATE;
        pipeline.prefetch(Column<QUADS>::of(p, is_read ? page : 0, head, is_read ? column : 0, row), is_read,
                          t < p.n_tokens);
    };
    if constexpr (STAGES == 0) {
        m.load(Column<QUADS>::of(p, read, head, column, row), inside && read != NO_STATE);
    } else {
        prefetch(token, read);
#pragma unroll
        for (int i = 1; i < STAGES; ++i) prefetch(token + i * stride, page_of(token + i * stride));
    }
    DecodeChannel<QUADS, CLUSTER, TAPS> channel[Traits::ROUNDS];
#pragma unroll
    for (int i = 0; i < Traits::ROUNDS; ++i) {
        channel[i].locate(p, warp + i * Traits::N_WARPS, head, rank, lane);
        channel[i].load_taps(p);
        channel[i].load_kept(p, read);
    }
    // The thread's element of out, if it has one.
    const int element = rank * Traits::COLUMNS + threadIdx.x;
    const bool has_element = threadIdx.x < Traits::COLUMNS && element < p.size;
    float weight = has_element ? load_now(p.norm + element) : 0.0f;
    float alpha, beta;
    // What earlier kernels of the step wrote.
    const auto load_newest = [&](int t) {
#pragma unroll
        for (int i = 0; i < Traits::ROUNDS; ++i) channel[i].load_newest(p, t);
        alpha = __ldcg(p.alpha + static_cast<size_t>(t) * p.n_v_head + head);
        beta = __ldcg(p.beta + static_cast<size_t>(t) * p.n_v_head + head);
    };
    const auto keep = [&] {
#pragma unroll
        for (int i = 0; i < Traits::ROUNDS; ++i)
            if (channel[i].block >= 2 * QUADS || (rank == 0 && p.is_first_of_key(head))) channel[i].keep(p, written);
    };
    grid_dependency_launch();
    grid_dependency_wait();
    load_newest(token);
    if constexpr (STAGES > 0) {  // registers would not suffice
#pragma unroll
        for (int i = 0; i < Traits::ROUNDS; ++i) channel[i].put_taps(storage, lane);
        if (has_element) storage.norm[threadIdx.x] = weight;
    }
    for (int parity = 0;; parity ^= 1) {
        const int next = token + stride, far = token + STAGES * stride;
        int page_of_far = NO_STATE;
        if constexpr (STAGES > 0) page_of_far = page_of(far), read = page_of(next);
        const auto load_gate = [&] {
            const size_t at = (static_cast<size_t>(token) * p.n_v_head + head) * p.size + element;
            return has_element ? __ldcg(p.gate + at) : 0.0f;
        };
        float gate = 0.0f;
        if constexpr (STAGES == 0) gate = load_gate();
#pragma unroll
        for (int i = 0; i < Traits::ROUNDS; ++i) {
            if constexpr (STAGES > 0) channel[i].take_taps(storage, lane);
            channel[i].convolve(storage, lane);
        }
        if (warp == Traits::N_WARPS - 1) {  // it has the fewest channels
            const float2 decay = p.decay_of_inputs(head, alpha, beta);
            storage.decay = make_float2(expf(decay.x), decay.y);
        }
        if constexpr (STAGES > 0) {
            keep();
#pragma unroll
            for (int i = 0; i < Traits::ROUNDS; ++i) channel[i].load_kept(p, read);
            if (next < p.n_tokens) load_newest(next);
        }
        __syncthreads();
        if constexpr (STAGES > 0) {
            pipeline.take(m);
            prefetch(far, page_of_far);
        }
        const float of_k = unit_scale(sum_of_blocks<QUADS>(storage.squares + QUADS), false, p.size);
        const float of_q = unit_scale(sum_of_blocks<QUADS>(storage.squares), true, p.size);
        const float4* const rows = reinterpret_cast<const float4*>(storage.u) + row;
        const auto q = [&](int j) { return scaled(rows[LANES * j], of_q); };
        const auto k = [&](int j) { return scaled(rows[Storage::K / 4 + LANES * j], of_k); };
        const float o = m.step(k, q, storage.u[Storage::V + of_cta], storage.decay.x, storage.decay.y);
        if (row == 0) storage.o[of_cta] = o;
        __syncthreads();
        if constexpr (CLUSTER > 1)
            if (token == blockIdx.y) cluster_wait<CLUSTER>();
        if constexpr (STAGES > 0) gate = load_gate();
        float own = 0.0f;
        float2* const squares_of_o = storage.squares_of_o[parity];
        if (warp < Traits::BLOCKS) {
            own = storage.o[threadIdx.x];
            const float sum = squares_of_block(own);
            if (lane < CLUSTER)
                RemoteFloats<CLUSTER>(&squares_of_o->x, lane)
                    .put(2 * (rank * Traits::BLOCKS + warp), make_float2(sum, 0.0f));
        }
        cluster_arrive<CLUSTER>();
        if (inside) m.store(Column<QUADS>::of(p, written, head, column, row));
        if constexpr (STAGES == 0) keep();
        cluster_wait<CLUSTER>();
        if (has_element) {
            const float squares = sum_of_blocks<QUADS>(&squares_of_o->x, 2);
            if constexpr (STAGES > 0) weight = storage.norm[threadIdx.x];
            p.store(token, head, element, gated_norm(own, squares, weight, gate, p.size, p.eps));
        }
        if (STAGES == 0 || next >= p.n_tokens) return;
        token = next, written = load_now(p.pages + 2 * token + 1);
    }
}
