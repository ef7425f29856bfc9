// Gathers the rows of x that sorted pairs multiply (sort.cu) into the packed layout of packed.cuh: row r of the output
// is x[pair_of[r] / pairs_per_x], or 0 where there is no pair (-1). Columns past K are 0.
//
// Launch: grid n_rows / PACK_ROWS * 8 * steps / 256, 256 threads per CTA; a step is 64 columns. A thread loads eight
// columns of PACK_ROWS rows; four lanes exchange 32 columns by shuffles, and each stores one 16-byte piece of each row.
#include "layout/packed.cuh"

constexpr int PACK_ROWS = 4;  // loads in flight of a thread

// n_rows is a multiple of 8, and k too.
extern "C" __global__ void __launch_bounds__(256) pack_pairs(const __half* x, const int* pair_of, uint8_t* out,
                                                             int n_rows, int k, int steps, int order, int pairs_per_x) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int pieces = steps * 8, index = blockIdx.x * 256 + threadIdx.x, row = index / pieces * PACK_ROWS,
              piece = index % pieces;
    const bool valid = row < n_rows;
    const int4 pairs = valid ? __ldcg(reinterpret_cast<const int4*>(pair_of + row)) : make_int4(-1, -1, -1, -1);
    const int pair[PACK_ROWS] = {pairs.x, pairs.y, pairs.z, pairs.w};
    uint4 columns[PACK_ROWS];
#pragma unroll
    for (int i = 0; i < PACK_ROWS; ++i) {
        columns[i] = make_uint4(0, 0, 0, 0);
        if (pair[i] < 0 || piece * 8 >= k) continue;
        const __half* src = x + static_cast<size_t>(pair[i] / pairs_per_x) * k;
        columns[i] = __ldcg(reinterpret_cast<const uint4*>(src) + piece);
    }
#pragma unroll
    for (int i = 0; i < PACK_ROWS; ++i) {
        const uint4 packed = pack_columns(columns[i], order);
        if (valid) *reinterpret_cast<uint4*>(out + packed_piece(piece / 8, row + i, piece % 8, n_rows)) = packed;
    }
}
