// ids[r] = the index of the largest of logits[r], the lowest index among equals.
#include "ranking.cuh"

constexpr int ARGMAX_THREADS = 256;

// best[r] and arrived[r] are zero before and after. grid (blocks, rows)
extern "C" __global__ void __launch_bounds__(ARGMAX_THREADS)
    argmax(const float* logits, int n_vocab, unsigned long long* best, uint32_t* arrived, int* ids, int* results) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int row = blockIdx.y;
    const float* from = logits + static_cast<size_t>(row) * n_vocab;
    unsigned long long key = 0;
    for (int i = blockIdx.x * ARGMAX_THREADS + threadIdx.x; i < n_vocab; i += gridDim.x * ARGMAX_THREADS) {
        const unsigned long long other = ranking_key(__ldcg(from + i), i);
        key = other > key ? other : key;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        const unsigned long long other = __shfl_xor_sync(0xffffffffu, key, offset);
        key = other > key ? other : key;
    }
    if (threadIdx.x % 32 == 0) atomicMax(best + row, key);
    __threadfence();
    __syncthreads();
    if (threadIdx.x != 0 || add_acquire_release(arrived + row, 1) != gridDim.x - 1) return;
    key = atomicExch(best + row, 0ull);
    store_token(ids, results, row, key, index_of(key));
    arrived[row] = 0;
}
