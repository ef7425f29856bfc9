// ids[r] = the index of the largest of logits[r], the lowest index among equals.
#include "sampling/ranking.cuh"

constexpr int ARGMAX_THREADS = 256, ARGMAX_WARPS = ARGMAX_THREADS / 32;
constexpr int AT_ONCE = 4;  // logits that a thread asks for together

// best[r] and arrived[r] are zero before and after. grid (blocks, rows)
extern "C" __global__ void __launch_bounds__(ARGMAX_THREADS)
    argmax(const float* logits, int n_vocab, unsigned long long* best, uint32_t* arrived, int* ids, int* results) {
    __shared__ unsigned long long of_warp[ARGMAX_WARPS];
    grid_dependency_launch();
    grid_dependency_wait();
    const int row = blockIdx.y, stride = gridDim.x * ARGMAX_THREADS;
    const float* from = logits + static_cast<size_t>(row) * n_vocab;
    unsigned long long key = 0;
    const auto take = [&](unsigned long long other) { key = other > key ? other : key; };
    for (int first = blockIdx.x * ARGMAX_THREADS + threadIdx.x; first < n_vocab; first += AT_ONCE * stride) {
        float v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            v[i] = first + i * stride < n_vocab ? __ldcg(from + first + i * stride) : 0.0f;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (first + i * stride < n_vocab) take(ranking_key(v[i], first + i * stride));
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) take(__shfl_xor_sync(0xffffffffu, key, offset));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = key;
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int i = 1; i < ARGMAX_WARPS; ++i) take(of_warp[i]);
    atomicMax(best + row, key);
    if (add_acquire_release(arrived + row, 1) != gridDim.x - 1) return;
    key = atomicExch(best + row, 0ull);
    store_token(ids, results, row, key, index_of(key));
    arrived[row] = 0;
}
