// Blocks -> numbers, bit-equal to the numpy dequantisers in float; half and bfloat16 are rounded from float.
//
// FORMAT_HEADER declares the block. A thread makes eight weights.
#include FORMAT_HEADER
#include "lib/store.cuh"

// out[rows, columns]. Grid: rows, and along y as many blocks of threads as eighths of a row need.
template <typename Block, typename Out>
__global__ void dequantize(const Block* __restrict__ blocks, Out* __restrict__ out, int columns) {
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (8 * i >= columns) return;
    float w[8];
    weights8(row_of(blocks, blockIdx.x, columns), i, columns, w);
    store8(out + int64_t(blockIdx.x) * columns, i, columns, w);
}
