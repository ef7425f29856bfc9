// Rows of a matrix of blocks, by id, times a factor: the embedding of tokens.
//
// FORMAT_HEADER declares the block. A thread makes eight numbers.
#include FORMAT_HEADER
#include "lib/store.cuh"

// out[T, columns] = scale * blocks[ids[T], columns]. A negative id, ~r, stands for sampled[r]. An id that is no row
// makes NaN: it comes from device memory, where nobody can check it before the launch. Grid: T, and along y as many
// blocks of threads as eighths of a row need.
template <typename Block>
__global__ void get_rows(const Block* __restrict__ blocks, const int* ids, const int* sampled, float* out, int rows,
                         int columns, float scale) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (8 * i >= columns) return;
    const int id = ids[blockIdx.x], row = id < 0 && sampled ? sampled[~id] : id;
    const bool valid = 0 <= row && row < rows;
    float w[8];
    weights8(row_of(blocks, valid ? row : 0, columns), i, columns, w);
#pragma unroll
    for (int j = 0; j < 8; ++j) w[j] = valid ? __fmul_rn(w[j], scale) : __int_as_float(0x7fffffff);
    store8(out + int64_t(blockIdx.x) * columns, i, columns, w);
}
