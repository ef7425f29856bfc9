// Greedy sampling: ids[r] = argmax(logits[r, :]), logits [rows, n_vocab]; the lowest index wins among equal logits.
//
// Grid (CTAs per row, rows); a CTA has 8 warps and strides over a row. A logit and its index form one 64-bit key
// (ranking.cuh), so every reduction is an integer maximum: threads, then warps by shuffles, then the CTA through one
// key per warp in shared memory, then CTAs by atomicMax. The last CTA of a row to arrive writes the result and resets
// the counters.
#include "sampling/ranking.cuh"

constexpr int ARGMAX_THREADS = 256, ARGMAX_WARPS = ARGMAX_THREADS / 32;
constexpr int LOADS_IN_FLIGHT = 4;  // logits that a thread loads before it compares them
constexpr int MASK_WORDS = 1024;    // of a CTA, at most

// The best key of row blockIdx.y, from those of all threads of its CTAs, and its token. best[row] and arrived[row] must
// be zero before, and are zero after.
__device__ __forceinline__ void store_best(unsigned long long key, unsigned long long* best, uint32_t* arrived,
                                           int* ids, int* results) {
    __shared__ unsigned long long of_warp[ARGMAX_WARPS];
    const int row = blockIdx.y;
    const auto take = [&](unsigned long long other) { key = other > key ? other : key; };
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
    store_token(ids, results, row, key, key > 0 ? index_of(key) : 0);
    arrived[row] = 0;
}

// Grid (CTAs per row, rows).
extern "C" __global__ void __launch_bounds__(ARGMAX_THREADS)
    argmax(const float* logits, int n_vocab, unsigned long long* best, uint32_t* arrived, int* ids, int* results) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int stride = gridDim.x * ARGMAX_THREADS;
    const float* src = logits + static_cast<size_t>(blockIdx.y) * n_vocab;
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
    store_best(key, best, arrived, ids, results);
}

// The same among the tokens that a mask allows: ids[r] is 0 and results[r] -1 if it allows none. A CTA has `length`
// logits in one piece, a multiple of 32 and at most 32 MASK_WORDS. masks[rows]: the number of each row's mask, or -1; after
// these numbers come the masks, each of ceil(n_vocab / 32) words, in which bit t % 32 of word t / 32 stands for token t.
// They may lie in host memory: a CTA requests all of its part at once, before it waits for the logits.
extern "C" __global__ void __launch_bounds__(ARGMAX_THREADS)
    argmax_masked(const float* logits, int n_vocab, unsigned long long* best, uint32_t* arrived, int* ids, int* results,
                  const int* masks, int length) {
    __shared__ uint32_t allowed[MASK_WORDS];
    grid_dependency_launch();
    const int mask = masks[blockIdx.y], begin = blockIdx.x * length, n = min(length, n_vocab - begin);
    const int* words = masks + gridDim.y + static_cast<size_t>(max(mask, 0)) * ((n_vocab + 31) / 32) + begin / 32;
    for (int i = threadIdx.x; 32 * i < n; i += ARGMAX_THREADS) allowed[i] = mask < 0 ? ~0u : words[i];
    grid_dependency_wait();
    __syncthreads();
    const float* src = logits + static_cast<size_t>(blockIdx.y) * n_vocab + begin;
    unsigned long long key = 0;
    const auto take = [&](unsigned long long other) { key = other > key ? other : key; };
    for (int first = threadIdx.x; first < n; first += LOADS_IN_FLIGHT * ARGMAX_THREADS) {
        float v[LOADS_IN_FLIGHT];
        bool may[LOADS_IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < LOADS_IN_FLIGHT; ++i) {
            const int at = first + i * ARGMAX_THREADS;
            may[i] = at < n && allowed[at / 32] >> at % 32 & 1;
            v[i] = may[i] ? __ldcg(src + at) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < LOADS_IN_FLIGHT; ++i)
            if (may[i]) take(ranking_key(v[i], begin + first + i * ARGMAX_THREADS));
    }
    store_best(key, best, arrived, ids, results);
}
