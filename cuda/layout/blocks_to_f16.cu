// out = f16(dequantize(blocks[N, K])): dequantises quant blocks of any format to f16 tiles (tile.cuh), or to rows
// [N, K]. Prefill uses it for formats that have no tile layout: the GEMM then runs on f16 weights.
//
// Weights are rounded to the nearest f16 and saturated to the largest finite f16, as in repack.cu. K is a multiple of
// 8. FORMAT_HEADER declares the block type.
//
// Launch: grid (K / 256, tile rows of 16), 256 threads per CTA. A thread dequantises the same eight columns of rows g
// and g + 8, because these 16 weights are adjacent in a tile: [t, t + 1][element pair][row half], 32 bytes.
#include FORMAT_HEADER
#include "layout/tile.cuh"

constexpr int HALF_CHUNK = 64;                  // columns of a chunk of f16 weights
constexpr int STEP_BYTES = TILE_ROWS * 16 * 2;  // bytes of 16 columns of a tile row
constexpr int CTA_COLUMNS = 256;                // columns per CTA, and threads per CTA

// Dequantises columns column ... column + 7 of a row to f16. Returns zeros past the last row or column.
template <class Block>
__device__ __forceinline__ uint4 eight_halves(const Block* blocks, int row, int column, int n_rows, int k) {
    float w[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (row < n_rows && column < k) weights8(row_of(blocks, row, k), column / 8, k, w);
    return make_uint4(saturated_half2(w[0], w[1]), saturated_half2(w[2], w[3]), saturated_half2(w[4], w[5]),
                      saturated_half2(w[6], w[7]));
}

// TILED: out is f16 tiles; otherwise f16 rows [n_rows, k].
template <class Block, bool TILED>
__global__ void __launch_bounds__(CTA_COLUMNS) blocks_to_f16(const Block* blocks, uint8_t* out, int n_rows, int k) {
    const int g = threadIdx.x % 16 / 2, row = blockIdx.y * TILE_ROWS + g;
    const int column = blockIdx.x * CTA_COLUMNS + threadIdx.x / 16 * 16 + threadIdx.x % 2 * 8;
    const int padded = (k + HALF_CHUNK - 1) / HALF_CHUNK * HALF_CHUNK;
    if (column >= (TILED ? padded : k)) return;
    const uint4 low = eight_halves(blocks, row, column, n_rows, k);
    const uint4 high = eight_halves(blocks, row + 8, column, n_rows, k);
    if constexpr (TILED) {
        const size_t step = static_cast<size_t>(blockIdx.y) * (padded / 16) + column / 16;
        uint4* dst = reinterpret_cast<uint4*>(out + step * STEP_BYTES) + threadIdx.x % 16 * 2;
        dst[0] = make_uint4(low.x, high.x, low.y, high.y);
        dst[1] = make_uint4(low.z, high.z, low.w, high.w);
    } else {
        uint4* dst = reinterpret_cast<uint4*>(out) + (static_cast<size_t>(row) * k + column) / 8;
        if (row < n_rows) *dst = low;
        if (row + 8 < n_rows) dst[k] = high;  // 8 rows further: 8 k elements are k pieces of eight
    }
}
