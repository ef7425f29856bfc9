// The thread mapping and the reduction that dequantize_mul_mat_vec.cu and mul_mat_vec_q.cu share.
//
//        threadIdx.x    lane
//        threadIdx.y    part of a row: blockDim.y warps share a row
//        threadIdx.z    row in the CTA
//
// Lanes take groups of eight weights: lane i of part p takes groups 32 p + i, 32 (p + blockDim.y) + i, ... The order of
// every sum depends only on the shape of the matrix, so the result of a token does not depend on the number of tokens.
#pragma once
#include "lib/common.cuh"

constexpr int MAX_WARPS = 8;  // warps per CTA

__device__ __forceinline__ int this_row() { return blockIdx.x * blockDim.z + threadIdx.z; }
__device__ __forceinline__ int first_group() { return threadIdx.y * 32 + threadIdx.x; }
__device__ __forceinline__ int group_step() { return blockDim.y * 32; }

// y[t, row] = sum of the row's parts (+ residual[t, row]). All threads of the CTA must call this function, because it
// synchronises them.
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
    const int64_t index = int64_t(t) * rows + row;
    y[index] = residual ? residual[index] + total : total;
}
