// A gated delta net between its products, for steps of one token a sequence: convolution, recurrence, norm and gate.
//
// Launch: grid (CLUSTER Hv, T), clusters of CLUSTER CTAs along x. A cluster takes one value head of one token, and a CTA
// COLUMNS = P / CLUSTER columns of its matrix, a column in the registers of LANES lanes. Each CTA convolves q and k of
// its key head and its own elements of v, a warp 32 channels at a time. CTAs exchange only the squares of o, through
// distributed shared memory.
//
// Reading and writing the matrix bounds the time of this kernel. Nothing of a state depends on earlier kernels of the
// step, so the loads of the matrix, and of the inputs that the convolution kept, are issued before
// grid_dependency_wait.
#include "delta/delta.cuh"
#include "lib/cluster.cuh"

template <int QUADS, int CLUSTER>
struct DecodeTraits {
    static_assert(QUADS % CLUSTER == 0, "CTAs of a cluster have equal parts of a head");
    static constexpr int BLOCKS = QUADS / CLUSTER;  // of v and o of a CTA
    static constexpr int COLUMNS = BLOCKS * BLOCK, THREADS = COLUMNS * LANES, N_WARPS = THREADS / 32;
    static constexpr int ROUNDS = (2 * QUADS + BLOCKS + N_WARPS - 1) / N_WARPS;  // blocks of channels of a warp
};

// Dynamic shared memory.
template <int QUADS, int CLUSTER>
struct DecodeStorage {
    static constexpr int K = QUADS * BLOCK, V = 2 * QUADS * BLOCK;  // where k and v begin in u
    // q, k and the CTA's elements of v after the convolution; q and k are not yet of length 1
    float u[V + DecodeTraits<QUADS, CLUSTER>::COLUMNS];
    float o[DecodeTraits<QUADS, CLUSTER>::COLUMNS];
    float squares[2 * QUADS];    // of the blocks of q, then of k
    float2 squares_of_o[QUADS];  // of the blocks of o, from all CTAs of the cluster; y is unused
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
    // What does not depend on earlier kernels of the step.
    __device__ __forceinline__ void load_kept(const DeltaArgs& p, int page) {
#pragma unroll
        for (int j = 0; j < TAPS; ++j)
            weight[j] = inside ? load_now(p.taps_of + static_cast<size_t>(channel) * TAPS + j) : 0.0f;
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j)
            input[j] = inside && page != NO_STATE ? load_of_line(p.kept_input<TAPS>(page, j, channel)) : 0.0f;
    }
    __device__ __forceinline__ void load_newest(const DeltaArgs& p, int token) {
        const float* src = p.projected + static_cast<size_t>(token) * p.channels() + channel;
        input[TAPS - 1] = inside ? __ldcg(src) : 0.0f;
    }
    __device__ __forceinline__ void convolve(DecodeStorage<QUADS, CLUSTER>& storage, int lane) const {
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

template <int QUADS, int CLUSTER, int TAPS>
__global__ void __launch_bounds__(DecodeTraits<QUADS, CLUSTER>::THREADS) delta_decode(const DeltaArgs p) {
    using Traits = DecodeTraits<QUADS, CLUSTER>;
    using Storage = DecodeStorage<QUADS, CLUSTER>;
    SHARED_DYNAMIC(Storage, shared);
    Storage& storage = *shared;
    cluster_arrive<CLUSTER>();  // the CTAs of the cluster run; waited for before sums are stored in their shared memory
    const int head = blockIdx.x / CLUSTER, rank = cluster_rank<CLUSTER>(), token = blockIdx.y;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = threadIdx.x % LANES;
    const int of_cta = threadIdx.x / LANES, column = rank * Traits::COLUMNS + of_cta;
    const int read = p.pages[2 * token], written = p.pages[2 * token + 1];
    const bool inside = column < p.size;
    Column<QUADS> m;
    m.load(Column<QUADS>::of(p, read, head, column, row), inside && read != NO_STATE);
    DecodeChannel<QUADS, CLUSTER, TAPS> channel[Traits::ROUNDS];
#pragma unroll
    for (int i = 0; i < Traits::ROUNDS; ++i) {
        channel[i].locate(p, warp + i * Traits::N_WARPS, head, rank, lane);
        channel[i].load_kept(p, read);
    }
    // The thread's element of out, if it has one.
    const int element = rank * Traits::COLUMNS + threadIdx.x;
    const bool has_element = threadIdx.x < Traits::COLUMNS && element < p.size;
    const float weight = has_element ? load_now(p.norm + element) : 0.0f;
    grid_dependency_launch();
    grid_dependency_wait();
#pragma unroll
    for (int i = 0; i < Traits::ROUNDS; ++i) channel[i].load_newest(p, token);
    const float2 decay = p.decay_of(token, head);
    const size_t at = (static_cast<size_t>(token) * p.n_v_head + head) * p.size + element;
    const float gate = has_element ? __ldcg(p.gate + at) : 0.0f;
#pragma unroll
    for (int i = 0; i < Traits::ROUNDS; ++i) channel[i].convolve(storage, lane);
    __syncthreads();

    const float of_k = unit_scale(sum_of_blocks<QUADS>(storage.squares + QUADS), false, p.size);
    const float of_q = unit_scale(sum_of_blocks<QUADS>(storage.squares), true, p.size);
    const float4* const rows = reinterpret_cast<const float4*>(storage.u) + row;
    const auto q = [&](int j) { return scaled(rows[LANES * j], of_q); };
    const auto k = [&](int j) { return scaled(rows[Storage::K / 4 + LANES * j], of_k); };
    const float o = m.step(k, q, storage.u[Storage::V + of_cta], expf(decay.x), decay.y);
    if (row == 0) storage.o[of_cta] = o;
    __syncthreads();
    if constexpr (CLUSTER > 1) cluster_wait<CLUSTER>();
    float own = 0.0f;
    if (warp < Traits::BLOCKS) {
        own = storage.o[threadIdx.x];
        const float sum = squares_of_block(own);
        if (lane < CLUSTER)
            RemoteFloats<CLUSTER>(&storage.squares_of_o[0].x, lane)
                .put(2 * (rank * Traits::BLOCKS + warp), make_float2(sum, 0.0f));
    }
    cluster_arrive<CLUSTER>();
    if (inside) m.store(Column<QUADS>::of(p, written, head, column, row));
#pragma unroll
    for (int i = 0; i < Traits::ROUNDS; ++i)
        if (channel[i].block >= 2 * QUADS || (rank == 0 && p.is_first_of_key(head))) channel[i].keep(p, written);
    cluster_wait<CLUSTER>();
    if (!has_element) return;
    const float squares = sum_of_blocks<QUADS>(&storage.squares_of_o[0].x, 2);
    p.store(token, head, element, gated_norm(own, squares, weight, gate, p.size, p.eps));
}
