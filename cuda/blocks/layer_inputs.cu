// The inputs of all layers, from the projected embedding of each token and its row of a table of quant blocks:
//
//    p[l, t, :] = (norm(y[t, l, :]) + sqrt(I) * dequantize(table[ids[t], l * I : (l + 1) * I])) / sqrt(2)
//
// norm(y) = y / sqrt(mean(y^2) + eps) * weight, over the I elements of a layer. FORMAT_HEADER declares the block type.
// The table may lie in host memory: a token reads a few kilobytes of it. Ids are as in get_rows.cu, with one
// difference: an id that is not in the table reads row 0, because the embedding is NaN already.
//
// Launch: grid (layers / WARPS, T), WARPS warps. A warp has one layer, and a lane eight elements at a time.
#include FORMAT_HEADER
#include "lib/store.cuh"

constexpr int WARPS = 4;

__device__ __forceinline__ void read8(const float* src, int i, float (&v)[8]) {
    const float4 a = __ldcg(reinterpret_cast<const float4*>(src) + 2 * i);
    const float4 b = __ldcg(reinterpret_cast<const float4*>(src) + 2 * i + 1);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// table: blocks [rows, n_layer * size]; ids [T]; y [T, n_layer, size]; weight [size]; out [n_layer, T, size].
template <typename Block>
__global__ void __launch_bounds__(32 * WARPS)
    layer_inputs(const Block* table, const int* ids, const int* sampled, const float* y_all, const float* weights,
                 float* out, int rows, int n_layer, int size, float eps) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int lane = threadIdx.x % 32, layer = blockIdx.x * WARPS + threadIdx.x / 32, token = blockIdx.y;
    if (layer >= n_layer) return;
    const int columns = n_layer * size, first = layer * size / 8;
    const int id = ids[token], wanted = id < 0 && sampled != nullptr ? sampled[~id] : id;
    const Block* row = row_of(table, 0 <= wanted && wanted < rows ? wanted : 0, columns);
    const float* y = y_all + (static_cast<size_t>(token) * n_layer + layer) * size;
    float squares = 0.0f;
    for (int i = lane; 8 * i < size; i += 32) {
        float v[8];
        read8(y, i, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) squares = fmaf(v[j], v[j], squares);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    const float n = static_cast<float>(size), half_root = 0.70710678f;
    const float inverse = half_root / sqrtf(squares / n + eps), scale = half_root * sqrtf(n);
    for (int i = lane; 8 * i < size; i += 32) {
        float v[8], weight[8], w[8];
        read8(y, i, v);
        read8(weights, i, weight);
        weights8(row, first + i, columns, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = fmaf(v[j] * inverse, weight[j], w[j] * scale);
        store8(out + (static_cast<size_t>(layer) * gridDim.y + token) * size, i, size, v);
    }
}
