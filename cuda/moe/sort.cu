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

__device__ __forceinline__ int rounded_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

constexpr int CLASSES = 8;  // of tiles, by size

// The index of a thread's first tile among all, where tiles of a smaller class stand first; n_tiles may be 0.
__device__ __forceinline__ int place_by_class(int n_tiles, int of_class) {
    __shared__ int end[CLASSES];
    if (threadIdx.x < CLASSES) end[threadIdx.x] = 0;
    __syncthreads();
    for (int i = of_class + 1; n_tiles > 0 && i < CLASSES; ++i) atomicAdd(&end[i], n_tiles);
    __syncthreads();
    return n_tiles > 0 ? atomicAdd(&end[of_class], n_tiles) : 0;
}

// One CTA. pair_of[n_rows]: of each row, -1 where there is none; row_of[n_pairs]: of each pair; work[n_work]: (expert,
// first row, end row, 0) of up to tile_rows rows, expert -1 where there is none. The rows of an expert begin at a
// multiple of `unit`. With a unit above 1, tiles of an expert have about the same number of rows, a multiple of the unit
// but for the last one's, and large tiles stand first.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    sort_pairs(const int* ids, int* pair_of, int* row_of, int4* work, int n_pairs, int tile_rows, int n_work, int unit,
               int n_rows) {
    __shared__ int next[MAX_EXPERTS], n_made, rows_made;
    grid_dependency_launch();
    const int thread = threadIdx.x;
    next[thread] = 0;
    grid_dependency_wait();
    __syncthreads();
    for_pairs(ids, n_pairs, [&](int, int expert) { atomicAdd(&next[expert], 1); });
    __syncthreads();
    const int count = next[thread], n_tiles = (count + tile_rows - 1) / tile_rows, padded = rounded_up(count, unit);
    const int2 end = prefix_sums(make_int2(padded, n_tiles));
    const int first_row = end.x - padded, end_row = first_row + count;
    int place = end.y - n_tiles, rows = tile_rows;
    if (unit > 1) {
        if (n_tiles > 0) rows = rounded_up((count + n_tiles - 1) / n_tiles, unit);
        place = place_by_class(n_tiles, (tile_rows - rows) * CLASSES / tile_rows);
    }
    next[thread] = first_row;
    for (int i = 0; i < n_tiles; ++i) {
        const int first = first_row + i * rows;
        work[place + i] = make_int4(thread, first, min(first + rows, end_row), 0);
    }
    for (int i = end_row; i < end.x; ++i) pair_of[i] = -1;
    if (thread == SORT_THREADS - 1) n_made = end.y, rows_made = end.x;
    __syncthreads();
    for (int i = n_made + thread; i < n_work; i += SORT_THREADS) work[i] = make_int4(-1, 0, 0, 0);
    for (int i = rows_made + thread; i < n_rows; i += SORT_THREADS) pair_of[i] = -1;
    for_pairs(ids, n_pairs, [&](int pair, int expert) {
        const int row = atomicAdd(&next[expert], 1);
        pair_of[row] = pair, row_of[pair] = row;
    });
}
