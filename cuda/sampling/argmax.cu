// Greedy sampling: ids[r] = argmax(logits[r, :]), logits [rows, n_vocab]; the lowest index wins among equal logits.
//
// Grid (CTAs per row, rows); a CTA has 8 warps and strides over a row. A logit and its index form one 64-bit key
// (ranking.cuh), so every reduction is an integer maximum: threads, then warps by shuffles, then the CTA through one
// key per warp in shared memory, then CTAs by atomicMax. The last CTA of a row to arrive writes the result and resets
// the counters.
#include "sampling/ranking.cuh"

constexpr int ARGMAX_THREADS = 256, ARGMAX_WARPS = ARGMAX_THREADS / 32;
constexpr int LOADS_IN_FLIGHT = 4;  // logits that a thread loads before it compares them

// best[r] and arrived[r] must be zero before, and are zero after. Grid (CTAs per row, rows).
extern "C" __global__ void __launch_bounds__(ARGMAX_THREADS)
    argmax(const float* logits, int n_vocab, unsigned long long* best, uint32_t* arrived, int* ids, int* results) {
    __shared__ unsigned long long of_warp[ARGMAX_WARPS];
    grid_dependency_launch();
    grid_dependency_wait();
    const int row = blockIdx.y, stride = gridDim.x * ARGMAX_THREADS;
    const float* src = logits + static_cast<size_t>(row) * n_vocab;
    unsigned long long key = 0;
    const auto take = [&](unsigned long long other) { key = other > key ? other : key; };
    for (int first = blockIdx.x * ARGMAX_THREADS + threadIdx.x; first < n_vocab; first += LOADS_IN_FLIGHT * stride) {
        float v[LOADS_IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < LOADS_IN_FLIGHT; ++i)
            v[i] = first + i * stride < n_vocab ? __ldcg(src + first + i * stride) : 0.0f;
#pragma unroll
        for (int i = 0; i < LOADS_IN_FLIGHT; ++i)
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
