// What the two matrix-vector kernels share: which warp has which part of which row, and the sum of the parts.
//
// threadIdx.x is the lane, threadIdx.y the part of a row (blockDim.y warps share a row), threadIdx.z the row in the block.
// The order of every sum follows from the shape of the matrix alone: a token's result does not depend on how many
// tokens there are.
#pragma once
#include "lib/common.cuh"

constexpr int MAX_WARPS = 8;  // of a block

__device__ __forceinline__ int this_row() { return blockIdx.x * blockDim.z + threadIdx.z; }
__device__ __forceinline__ int first_group() { return threadIdx.y * 32 + threadIdx.x; }
__device__ __forceinline__ int group_step() { return blockDim.y * 32; }

// y[t, row] = sum of the row's parts (+ residual[t, row]). All threads of the block must call it.
template <int T>
__device__ __forceinline__ void store_sums(float (&sum)[T], const float* residual, float* y, int row, int rows) {
    __shared__ float parts[MAX_WARPS][T];
#pragma unroll
    for (int t = 0; t < T; ++t)
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) sum[t] += __shfl_xor_sync(~0u, sum[t], lanes);
    const int warp = threadIdx.z * blockDim.y, t = threadIdx.x;
#pragma unroll
    for (int k = 0; k < T; ++k)
        if (t == k) parts[warp + threadIdx.y][k] = sum[k];
    __syncthreads();
    if (threadIdx.y > 0 || t >= T || row >= rows) return;
    float total = parts[warp][t];
    for (int part = 1; part < blockDim.y; ++part) total += parts[warp + part][t];
    const int64_t at = int64_t(t) * rows + row;
    y[at] = residual ? residual[at] + total : total;
}
