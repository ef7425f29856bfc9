// The (token, expert) pairs of a prefill step by expert, for a grouped GEMM. Nothing is read back: the GEMM's grid is an
// upper bound of its work tiles, and tiles without work end at once.
//
// | kernel        | does                                                                                        |
// | sort_pairs    | counting sort: rows of a sorted matrix to pairs and back, and the work tiles of the experts |
// | gather_rows   | sorted[row] = x[token of the row's pair], f16                                               |
//
// Pair t * n_used + j is the j-th expert of token t. Rows of one expert are in no fixed order: what is computed of a row
// does not depend on where it is.
#include "lib/common.cuh"

constexpr int SORT_THREADS = 1024;
constexpr int MAX_EXPERTS = 1024;  // as many counters in shared memory

// Exclusive sums of count[n] over the CTA, in place; n <= MAX_EXPERTS. `units` is the size that counts are rounded up to
// and divided by.
__device__ __forceinline__ void prefix_sums(int* count, int n) {
    for (int distance = 1; distance < n; distance *= 2) {
        const int i = threadIdx.x;
        const int before = i < n && i >= distance ? count[i - distance] : 0;
        __syncthreads();
        if (i < n) count[i] += before;
        __syncthreads();
    }
}

// One CTA. pair_of[n_pairs]: of each row; row_of[n_pairs]: of each pair; work[n_work]: (expert, first row, end row, 0) of
// up to tile_rows rows, expert -1 where there is none.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    sort_pairs(const int* ids, int* pair_of, int* row_of, int4* work, int n_pairs, int n_expert, int tile_rows,
               int n_work) {
    __shared__ int end[MAX_EXPERTS], next[MAX_EXPERTS], tiles[MAX_EXPERTS];
    grid_dependency_launch();
    grid_dependency_wait();
    const int thread = threadIdx.x;
    if (thread < n_expert) end[thread] = 0;
    __syncthreads();
    for (int pair = thread; pair < n_pairs; pair += SORT_THREADS) atomicAdd(&end[__ldcg(ids + pair)], 1);
    __syncthreads();
    const int count = thread < n_expert ? end[thread] : 0, n_tiles = (count + tile_rows - 1) / tile_rows;
    if (thread < n_expert) tiles[thread] = n_tiles;
    __syncthreads();
    prefix_sums(end, n_expert);
    prefix_sums(tiles, n_expert);
    if (thread < n_expert) {
        next[thread] = end[thread] - count;
        for (int i = 0; i < n_tiles; ++i) {
            const int first = end[thread] - count + i * tile_rows;
            work[tiles[thread] - n_tiles + i] = make_int4(thread, first, min(first + tile_rows, end[thread]), 0);
        }
    }
    for (int i = tiles[n_expert - 1] + thread; i < n_work; i += SORT_THREADS) work[i] = make_int4(-1, 0, 0, 0);
    __syncthreads();
    for (int pair = thread; pair < n_pairs; pair += SORT_THREADS) {
        const int row = atomicAdd(&next[__ldcg(ids + pair)], 1);
        pair_of[row] = pair, row_of[pair] = row;
    }
}

// One CTA per row; k is a multiple of 8.
extern "C" __global__ void gather_rows(const __half* x, const int* pair_of, __half* sorted, int n_used, int k) {
    grid_dependency_launch();
    grid_dependency_wait();
    const size_t row = blockIdx.x, token = __ldcg(pair_of + row) / n_used;
    const uint4* src = reinterpret_cast<const uint4*>(x + token * k);
    uint4* dst = reinterpret_cast<uint4*>(sorted + row * k);
    for (int i = threadIdx.x; i < k / 8; i += blockDim.x) dst[i] = __ldcg(src + i);
}
