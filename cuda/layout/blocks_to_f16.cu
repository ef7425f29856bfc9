// Blocks -> halves, for products of many tokens with a format that has no tiles of its own: as tiles of halves
// (tile.cuh), or as rows for a product that knows no tiles.
//
// FORMAT_HEADER declares the block. Weights are rounded to the nearest half; those that a half cannot hold become the
// largest that it can, as in repack.cu. A thread makes the same eight columns of rows g and g + 8, which lie side by
// side in a tile: [t, t + 1][element pair][row half], 32 bytes.
#include FORMAT_HEADER
#include "layout/tile.cuh"

constexpr int HALF_CHUNK = 64;                  // columns of a chunk of halves
constexpr int STEP_BYTES = TILE_ROWS * 16 * 2;  // of 16 columns of a tile row
constexpr int BLOCK_COLUMNS = 256;              // of a block of threads: 256 of them

// Weights 8 i ... 8 i + 7 of a row of k, a multiple of 8; zeros where there is no such row or column.
template <class Block>
__device__ __forceinline__ uint4 eight_halves(const Block* blocks, int row, int column, int n_rows, int k) {
    float w[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (row < n_rows && column < k) weights8(row_of(blocks, row, k), column / 8, k, w);
    return make_uint4(saturated_half2(w[0], w[1]), saturated_half2(w[2], w[3]), saturated_half2(w[4], w[5]),
                      saturated_half2(w[6], w[7]));
}

// grid (columns / 256, tile rows); TILED: out is tiles, else [n_rows][k].
template <class Block, bool TILED>
__global__ void __launch_bounds__(BLOCK_COLUMNS) blocks_to_f16(const Block* blocks, uint8_t* out, int n_rows, int k) {
    const int g = threadIdx.x % 16 / 2, row = blockIdx.y * TILE_ROWS + g;
    const int column = blockIdx.x * BLOCK_COLUMNS + threadIdx.x / 16 * 16 + threadIdx.x % 2 * 8;
    const int padded = (k + HALF_CHUNK - 1) / HALF_CHUNK * HALF_CHUNK;
    if (column >= (TILED ? padded : k)) return;
    const uint4 low = eight_halves(blocks, row, column, n_rows, k);
    const uint4 high = eight_halves(blocks, row + 8, column, n_rows, k);
    if constexpr (TILED) {
        const size_t step = static_cast<size_t>(blockIdx.y) * (padded / 16) + column / 16;
        uint4* to = reinterpret_cast<uint4*>(out + step * STEP_BYTES) + threadIdx.x % 16 * 2;
        to[0] = make_uint4(low.x, high.x, low.y, high.y);
        to[1] = make_uint4(low.z, high.z, low.w, high.w);
    } else {
        uint4* to = reinterpret_cast<uint4*>(out) + (static_cast<size_t>(row) * k + column) / 8;
        if (row < n_rows) *to = low;
        if (row + 8 < n_rows) to[k] = high;  // 8 rows further on, in eighths of a row
    }
}
