// The interface of a block format to the kernels: Format<block_q4_K> and so on, one specialisation per file of this
// folder.
//
// The main function of a quantised format is codes8. It decodes eight consecutive weights w[8i .. 8i+7] of a row as
// w = d * q + m with eight signed bytes q. All generic kernels use it: dequantize, dequantize_mul_mat_vec,
// mul_mat_vec_q, get_rows and repack. d and m are rounded as in the numpy dequantisers, so weights have the same bits.
#pragma once
#include "formats/bits.cuh"
#include "lib/convert.cuh"

// Eight weights as d * q + m; q holds eight signed bytes, weight 0 in the lowest byte of q[0].
struct Codes {
    int q[2];
    float d;
    float m;
};

// A specialisation for a quantised format has
//   static constexpr int weights;                            weights per block
//   static constexpr bool quantized = true;
//   static constexpr int group;                              weights that share one (d, m): 16, 32 or more
//   static constexpr bool shifted;                           whether m can be other than 0
//   static Codes codes8(const Block* row, unsigned i);       weights 8i .. 8i+7 of the row, as codes
// A specialisation for numbers without blocks has
//   weights = 1, quantized = shifted = false
//   static float weight(const Block* row, int j);            weight j of the row
//   static void weights8(const Block* row, int i, float (&w)[8]);   weights 8i .. 8i+7, all inside the row
template <typename Block>
struct Format;

// Returns row `row` of a matrix [rows, columns].
template <typename Block>
__device__ __forceinline__ const Block* row_of(const Block* matrix, int64_t row, int columns) {
    return matrix + row * (columns / Format<Block>::weights);
}

// Dequantises weights 8i .. 8i+7 of a row of `columns` weights. Weights past the end are 0.
template <typename Block>
__device__ __forceinline__ void weights8(const Block* row, int i, int columns, float (&w)[8]) {
    using F = Format<Block>;
    if constexpr (F::quantized) {
        const Codes c = F::codes8(row, i);
        int8_to_float(c.q, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            w[j] = __fmul_rn(c.d, w[j]);
            if (F::shifted) w[j] = __fadd_rn(w[j], c.m);
        }
    } else if (8 * i + 8 <= columns) {
        F::weights8(row, i, w);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) w[j] = 8 * i + j < columns ? F::weight(row, 8 * i + j) : 0.0f;
    }
}
