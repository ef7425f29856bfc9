// y = W x for a few tokens, W in GGUF blocks, x as block_q8_1: integer products, scaled once for eight weights.
//
// FORMAT_HEADER declares the block. What is computed is exactly the product with the activations that the q8_1 blocks
// stand for, d * q: the sum of eight codes is recomputed (one instruction for four) rather than taken from the block's
// s, which is rounded apart and covers 32 where half of the formats change their minimum every 16.
#include FORMAT_HEADER
#include "formats/q8_1.cuh"
#include "blocks/mul_mat_vec.cuh"

// Eight weights times eight activations.
__device__ __forceinline__ int dot_codes(const int (&a)[2], const int (&b)[2]) {
    return __dp4a(a[1], b[1], __dp4a(a[0], b[0], 0));
}

template <bool shifted>
__device__ __forceinline__ float add_product(const Codes& w, const Codes& x, float sum) {
    sum = __fmaf_rn(__fmul_rn(w.d, x.d), float(dot_codes(w.q, x.q)), sum);
    if constexpr (shifted) {
        const int ones[2] = {0x01010101, 0x01010101};
        sum = __fmaf_rn(__fmul_rn(w.m, x.d), float(dot_codes(ones, x.q)), sum);
    }
    return sum;
}

// y[T, rows] = x[T, columns] W^T (+ residual[T, rows], which may be y or null); columns is a multiple of 32.
template <typename Block, int T>
__global__ void __launch_bounds__(MAX_WARPS * 32, T > 4 ? 2 : 4)
    mul_mat_vec_q(const Block* __restrict__ w, const block_q8_1* __restrict__ x, const float* residual, float* y,
                  int rows, int columns) {
    using F = Format<Block>;
    grid_dependency_launch();
    grid_dependency_wait();
    const int row = this_row();
    const Block* weights = row_of(w, row, columns);
    const int groups = row < rows ? columns / 8 : 0;
    float sum[T] = {};
#pragma unroll(T > 4 ? 1 : 2)
    for (int i = first_group(); i < groups; i += group_step()) {
        if constexpr (F::quantized) {
            const Codes c = F::codes8(weights, i);
#pragma unroll
            for (int t = 0; t < T; ++t)
                sum[t] = add_product<F::shifted>(c, Format<block_q8_1>::codes8(row_of(x, t, columns), i), sum[t]);
        } else {
            float v[8], q[8];
            F::weights8(weights, i, v);
#pragma unroll
            for (int t = 0; t < T; ++t) {
                const Codes c = Format<block_q8_1>::codes8(row_of(x, t, columns), i);
                int8_to_float(c.q, q);
                float dot = 0.0f;
#pragma unroll
                for (int j = 0; j < 8; ++j) dot = __fmaf_rn(v[j], q[j], dot);
                sum[t] = __fmaf_rn(c.d, dot, sum[t]);
            }
        }
    }
    store_sums(sum, residual, y, row, rows);
}
