// Weights of any format to blocks, with the bytes of ggpy/formats and so of ggml.
//
// ENCODER_HEADER has the Encoder of the block (quantize/encoder.cuh), FORMAT_HEADER the formats. A lane searches for the
// scales of a group of weights, the 1 to 16 lanes of a block share them. Must be compiled with --fmad=false.
#include FORMAT_HEADER
#include ENCODER_HEADER

constexpr int THREADS = 128;

// source[rows, columns] -> blocks[n], by the importance[columns] if WEIGHTED; then small blocks take squares[rows] too.
// `strange` becomes 1 where a weight or a scale is NaN or infinite: what to say is numpy's to tell.
// grid: lanes of all blocks / THREADS, or more
template <typename Block, typename Source, bool WEIGHTED>
__global__ void __launch_bounds__(THREADS) quantize(const Source* source, const float* importance, const float* squares,
                                                    Block* blocks, uint32_t* strange, int columns, int64_t n) {
    using E = Encoder<Block>;
    constexpr int WEIGHTS = Format<Block>::weights, LANES = WEIGHTS / E::group;
    static_assert(E::group >= 16, "the grid may be too small");
    __shared__ uint8_t codes[THREADS / LANES][WEIGHTS];
    const int64_t first = int64_t(blockIdx.x) * (THREADS / LANES);
    if (first >= n) return;
    // Lanes behind the last block do it once more.
    const int64_t i = min(first + threadIdx.x / LANES, n - 1);
    const int lane = threadIdx.x % LANES;
    const int per_row = columns / WEIGHTS;
    const int64_t row = i / per_row;
    const int column = int(i % per_row) * WEIGHTS + lane * E::group;

    Group<E::group, LANES> group;
    bool good = true;
#pragma unroll
    for (int k = 0; k < E::group / 8; ++k) {
        float w[8];
        weights8(row_of(source, row, columns), column / 8 + k, columns, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            group.x[8 * k + j] = w[j];
            good = good && is_number(w[j]);
        }
    }
    group.importance = importance + (WEIGHTED ? column : 0);
    group.row_mean_square = WEIGHTED && WEIGHTS < 256 ? squares[row] : 0.0f;

    uint8_t* block_codes = codes[threadIdx.x / LANES];
    good = E::template encode<WEIGHTED>(group, blocks[i], block_codes + lane * E::group) && good;
    __syncwarp();
    E::pack(block_codes, blocks[i], lane);
    if (!good) *strange = 1;
}

// source[rows, columns] -> the mean of the squares of each row, added in order.
// grid: rows / THREADS
template <typename Source>
__global__ void __launch_bounds__(THREADS) mean_squares(const Source* source, float* means, int rows, int columns) {
    const int row = blockIdx.x * THREADS + threadIdx.x;
    if (row >= rows) return;
    float sum = 0.0f;
    for (int i = 0; i < columns / 8; ++i) {
        float w[8];
        weights8(row_of(source, row, columns), i, columns, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += w[j] * w[j];
    }
    means[row] = sum / float(columns);
}
