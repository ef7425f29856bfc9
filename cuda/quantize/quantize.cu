// out = quantize(W[N, K]): weights of any source format to quant blocks. The bytes equal those of ggpy/formats and of
// ggml. ENCODER_HEADER declares the Encoder of the target (quantize/encoder.cuh), FORMAT_HEADER both block types.
//
// Compile with --fmad=false: a fused multiply-add rounds once where numpy and ggml round twice.
#include FORMAT_HEADER
#include ENCODER_HEADER

constexpr int THREADS = 128;

// blocks[n] = quantize(source[rows, columns]). WEIGHTED: minimises errors weighted by importance[columns]; blocks of
// fewer than 256 weights then also read the mean squares squares[rows]. Sets `strange` to 1 if a weight or a scale is
// NaN or infinite; the numpy quantiser then decides what to do.
//
// Launch: grid n * LANES / THREADS or more. 1 to 16 lanes share a quant block; a lane searches for the scales of one
// group and keeps its weights in registers.
template <typename Block, typename Source, bool WEIGHTED>
__global__ void __launch_bounds__(THREADS) quantize(const Source* source, const float* importance, const float* squares,
                                                    Block* blocks, uint32_t* strange, int columns, int64_t n) {
    using E = Encoder<Block>;
    constexpr int WEIGHTS = Format<Block>::weights, LANES = WEIGHTS / E::group;
    static_assert(E::group >= 16, "the grid may be too small");
    __shared__ uint8_t codes[THREADS / LANES][WEIGHTS];
    const int64_t first = int64_t(blockIdx.x) * (THREADS / LANES);
    if (first >= n) return;
    // Lanes past the last quant block repeat the last block, because all lanes take part in shuffles.
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

// means[n] = mean of source[n, :]^2, summed in order of the columns. Launch: grid rows / THREADS; a thread sums one
// row, because the order of the sum determines the bytes of the quant blocks.
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
