// GEMV of quant blocks and activations as block_q8_1, for T = 1 to 8 tokens:
//
//        y[T, N] = x[T, K] W[N, K]^T (+ residual[T, N])        K a multiple of 32
//
// Products of codes are int32 sums (dp4a), scaled once per eight weights. FORMAT_HEADER declares the block type of W.
//
// Launch: grid N / rows per CTA; CTA (32, parts of a row, rows), 8 warps. 1, 2, 4 or 8 warps share a row, see
// mul_mat_vec.cuh.
//
// The kernel computes the exact product with the activations d * q that the q8_1 blocks stand for. For formats with a
// minimum it sums each eight activation codes again (one instruction per four codes) instead of using s of the block: s
// is rounded separately, and it covers 32 columns while half of the formats have a minimum per 16 columns.
#include FORMAT_HEADER
#include "formats/q8_1.cuh"
#include "blocks/mul_mat_vec.cuh"

// The dot product of eight weight codes and eight activation codes.
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

// `residual` may be y or null.
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
