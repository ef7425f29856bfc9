// out[N, K] = dequantize(blocks[N, K]): quant blocks to float, half or bfloat16. Float results equal the numpy
// dequantisers bit by bit; half and bfloat16 are rounded from float. FORMAT_HEADER declares the block type.
//
// Launch: grid (N, parts of a row), 128 threads per CTA. A thread dequantises eight weights (Format::weights8).
#include FORMAT_HEADER
#include "lib/store.cuh"

template <typename Block, typename Out>
__global__ void dequantize(const Block* __restrict__ blocks, Out* __restrict__ out, int columns) {
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (8 * i >= columns) return;
    float w[8];
    weights8(row_of(blocks, blockIdx.x, columns), i, columns, w);
    store8(out + int64_t(blockIdx.x) * columns, i, columns, w);
}
