// GEMV of quant blocks and float or half activations, for T = 1 to 8 tokens:
//
//        y[T, N] = x[T, K] W[N, K]^T (+ residual[T, N])
//
// Weights are dequantised to float; products and sums are float. FORMAT_HEADER declares the block type of W.
//
// Launch: grid N / rows per CTA; CTA (32, parts of a row, rows), 8 warps. 1, 2, 4 or 8 warps share a row, see
// mul_mat_vec.cuh. Neighbouring lanes take neighbouring groups of eight weights, so their loads coalesce.
#include FORMAT_HEADER
#include "blocks/mul_mat_vec.cuh"
#include "lib/store.cuh"

__device__ __forceinline__ float dot8(const float (&w)[8], const float (&x)[8], float sum) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = __fmaf_rn(w[j], x[j], sum);
    return sum;
}

// `residual` may be y or null.
template <typename Block, typename X, int T>
__global__ void __launch_bounds__(MAX_WARPS * 32, T > 4 ? 2 : 4)
    dequantize_mul_mat_vec(const Block* __restrict__ w, const X* __restrict__ x, const float* residual, float* y,
                           int rows, int columns) {
    using F = Format<Block>;
    grid_dependency_launch();
    grid_dependency_launch();
    grid_dependency_wait();
    const int row = this_row();
    const Block* weights = row_of(w, row, columns);
    const int groups = row < rows ? (columns + 7) / 8 : 0;
    float sum[T] = {};
#pragma unroll(T > 4 ? 1 : 2)
    for (int i = first_group(); i < groups; i += group_step()) {
        float v[8], xs[8];
        if constexpr (F::quantized && !F::shifted) {  // multiplies by the scale once per eight weights
            const Codes c = F::codes8(weights, i);
            int8_to_float(c.q, v);
#pragma unroll
            for (int t = 0; t < T; ++t) {
                load8(x + int64_t(t) * columns, i, columns, xs);
                sum[t] = __fmaf_rn(c.d, dot8(v, xs, 0.0f), sum[t]);
            }
        } else {
            weights8(weights, i, columns, v);
#pragma unroll
            for (int t = 0; t < T; ++t) {
                load8(x + int64_t(t) * columns, i, columns, xs);
                sum[t] = dot8(v, xs, sum[t]);
            }
        }
    }
    store_sums(sum, residual, y, row, rows);
}
