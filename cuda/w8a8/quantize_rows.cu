// Activations -> 8-bit codes with one scale per token (quantize_rows.cuh), packed as w8a8.cuh describes.
#include "w8a8/quantize_rows.cuh"

// A block makes the codes of a token; NORM: of norm(x). k is a multiple of 8.
// grid: tokens up to a multiple of 8; those behind the last one are 0
template <class VALUES, class In, bool NORM>
__global__ void __launch_bounds__(THREADS)
    quantize_rows(const In* x, const int* rows, const float* norm_weight, uint8_t* out, float* scales, int n_tokens,
                  int k, float eps) {
    const int token = blockIdx.x, pieces = (k + CODES_STEP - 1) / CODES_STEP * (CODES_STEP / 8);
    const bool there = token < n_tokens;
    RmsNorm norm;
    grid_dependency_launch();
    if constexpr (NORM) norm.load_weight(norm_weight, k);
    grid_dependency_wait();
    const In* from = x + static_cast<size_t>(!there ? 0 : rows != nullptr ? rows[token] : token) * k;
    QuantizedRow<VALUES, In, NORM> row;
    row.load(norm, from, k, eps, there, [] {});
    if (there && threadIdx.x == 0) scales[token] = row.scale;
#pragma unroll
    for (int i = 0; i < NORM_PIECES; ++i) {
        const int piece = row.column(i) / 8;
        const uint2 words = exchange_codes(row.codes(i));
        if (piece < pieces)
            *reinterpret_cast<uint2*>(out + codes_row(piece / 16, token, n_tokens) + codes_place(piece, token)) = words;
    }
}
