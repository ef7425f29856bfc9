// The (token, expert) pairs of a step by expert, for a grouped GEMM: a counting sort. Nothing is read back: the GEMM's
// grid is an upper bound of its work tiles, and tiles without work end at once.
//
// Pair t * n_used + j is the j-th expert of token t. Rows of one expert are in no fixed order: what is computed of a row
// does not depend on where it is.
#include "lib/common.cuh"

constexpr int SORT_THREADS = 1024;
constexpr int MAX_EXPERTS = SORT_THREADS;  // a thread has one

// The sums of v.x and of v.y over the threads up to and with this one.
__device__ __forceinline__ int2 prefix_sums(int2 v) {
    __shared__ int2 of_warp[SORT_THREADS / 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto scan = [&] {
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int x = __shfl_up_sync(0xffffffffu, v.x, distance), y = __shfl_up_sync(0xffffffffu, v.y, distance);
            if (lane >= distance) v.x += x, v.y += y;
        }
    };
    scan();
    if (lane == 31) of_warp[warp] = v;
    const int2 own = v;
    __syncthreads();
    v = of_warp[lane];
    scan();
    if (warp == 0) return own;
    return make_int2(own.x + __shfl_sync(0xffffffffu, v.x, warp - 1), own.y + __shfl_sync(0xffffffffu, v.y, warp - 1));
}

// Calls f(pair, expert) for the pairs of this thread, AT_ONCE of which it loads together.
template <class Function>
__device__ __forceinline__ void for_pairs(const int* ids, int n_pairs, Function f) {
    constexpr int AT_ONCE = 8;
    for (int first = threadIdx.x; first < n_pairs; first += AT_ONCE * SORT_THREADS) {
        int expert[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int pair = first + i * SORT_THREADS;
            expert[i] = pair < n_pairs ? __ldcg(ids + pair) : -1;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (expert[i] >= 0) f(first + i * SORT_THREADS, expert[i]);
    }
}

// One CTA. pair_of[n_pairs]: of each row; row_of[n_pairs]: of each pair; work[n_work]: (expert, first row, end row, 0) of
// up to tile_rows rows, expert -1 where there is none.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    sort_pairs(const int* ids, int* pair_of, int* row_of, int4* work, int n_pairs, int tile_rows, int n_work) {
    __shared__ int next[MAX_EXPERTS], n_made;
    grid_dependency_launch();
    const int thread = threadIdx.x;
    next[thread] = 0;
    grid_dependency_wait();
    __syncthreads();
    for_pairs(ids, n_pairs, [&](int, int expert) { atomicAdd(&next[expert], 1); });
    __syncthreads();
    const int count = next[thread], n_tiles = (count + tile_rows - 1) / tile_rows;
    const int2 end = prefix_sums(make_int2(count, n_tiles));
    next[thread] = end.x - count;
    for (int i = 0; i < n_tiles; ++i) {
        const int first = end.x - count + i * tile_rows;
        work[end.y - n_tiles + i] = make_int4(thread, first, min(first + tile_rows, end.x), 0);
    }
    if (thread == SORT_THREADS - 1) n_made = end.y;
    __syncthreads();
    for (int i = n_made + thread; i < n_work; i += SORT_THREADS) work[i] = make_int4(-1, 0, 0, 0);
    for_pairs(ids, n_pairs, [&](int pair, int expert) {
        const int row = atomicAdd(&next[expert], 1);
        pair_of[row] = pair, row_of[pair] = row;
    });
}
