// (q[T, K], scale[T]) = quantize(x[T, K]), or of norm(x) with NORM: activations to 8-bit codes with one scale per token
// (quantize_rows.cuh), in the packed layout of w8a8.cuh. K is a multiple of 8.
//
// Launch: grid T rounded up to a multiple of 8, THREADS threads per CTA. A CTA quantises one token, because the scale
// needs the maximum of the whole row. CTAs of padding tokens write zeros. `rows` selects the tokens: CTA t reads row
// rows[t] of x, or row t if `rows` is null.
#include "w8a8/quantize_rows.cuh"

template <class VALUES, class In, bool NORM>
__global__ void __launch_bounds__(THREADS) quantize_rows(const In* x, const int* rows, const float* norm_weight,
                                                         uint8_t* out, float* scales, int n_tokens, int k, float eps) {
    const int token = blockIdx.x, pieces = (k + CODES_STEP - 1) / CODES_STEP * (CODES_STEP / 8);
    const bool valid = token < n_tokens;
    RmsNorm norm;
    grid_dependency_launch();
    if constexpr (NORM) norm.load_weight(norm_weight, k);
    grid_dependency_wait();
    const In* src = x + static_cast<size_t>(!valid ? 0 : rows != nullptr ? rows[token] : token) * k;
    QuantizedRow<VALUES, In, NORM> row;
    row.load(norm, src, k, eps, valid, [] {});
    if (valid && threadIdx.x == 0) scales[token] = row.scale;
#pragma unroll
    for (int i = 0; i < NORM_PIECES; ++i) {
        const int piece = row.column(i) / 8;
        const uint2 words = exchange_codes(row.codes(i));
        if (piece < pieces)
            *reinterpret_cast<uint2*>(out + codes_row(piece / 16, token, n_tokens) + codes_offset(piece, token)) =
                words;
    }
}
