// x[t, :] = table[ids[t], :] * row_scale[ids[t]] * scale, t < T: the token embedding x[T, K], in float32.
//
// The table [vocabulary, K] is in tiles (tile.cuh) because it is also the output matrix of the model. row_scale may be
// null: then it is 1. A negative id ~r stands for sampled[r], a token that the GPU sampled in the step before.
//
// Launch: grid (T, parts of the columns), 256 threads per CTA. A thread writes every (gridDim.y * 256)-th column.
#include "layout/tile.cuh"

template <class T>
__global__ void embed_tile(const uint8_t* table, const float* row_scale, const int* ids, const int* sampled, float* x,
                           int k, int n_chunk, float scale) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int id = ids[blockIdx.x], row = id < 0 ? sampled[~id] : id;
    const float by_row = row_scale ? __ldg(row_scale + row) : 1.0f;
    const uint8_t* tile_row = table + static_cast<size_t>(row / TILE_ROWS) * n_chunk * T::BYTES;
    for (int column = blockIdx.y * blockDim.x + threadIdx.x; column < k; column += gridDim.y * blockDim.x) {
        const uint8_t* chunk = tile_row + static_cast<size_t>(column / T::CHUNK_K) * T::BYTES;
        x[static_cast<size_t>(blockIdx.x) * k + column] =
            tile_weight<T>(chunk, row % TILE_ROWS, column % T::CHUNK_K) * by_row * scale;
    }
}
