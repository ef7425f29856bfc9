// out[t, :] = scale * dequantize(blocks[ids[t], :]), t < T: the token embedding out[T, K] from a table of quant blocks,
// in float32. FORMAT_HEADER declares the block type.
//
// A negative id ~r stands for sampled[r], a token that the GPU sampled in the step before. An id that is not a row of
// the table gives NaN: ids are in device memory, so the host cannot check them before the launch.
//
// Launch: grid (T, parts of a row), 128 threads per CTA. A thread dequantises eight weights.
#include FORMAT_HEADER
#include "lib/store.cuh"

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
