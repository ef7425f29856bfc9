// W8A8: GEMMs of 8-bit weights W[N, K] and 8-bit activations q[T, K]. Both are int8 or both are E4M3 floats:
//
//        y[t, n] = (sum over k of q[t, k] * W[n, k]) * x_scale[t] * row_scale[n]
//
// This file has the arguments, operands and epilogues that w8a8_decode.cu, w8a8_prefill.cu and w8a8_wgmma.cu share.
//
// Sums of int8 products are exact in every order, so all three kernels return the same bits. Sums of E4M3 products are
// added to float32 registers every 128 columns, because tensor cores accumulate them with fewer bits than a float has.
//
// The weights are 8-bit tiles without scales (tile.cuh). For 32 columns a lane has four registers, (row half h, step s)
// at [2 h + s], with four consecutive columns each: the A operand of an mma of 32 columns. The activations are the B
// operand. Their packed layout suits both ldmatrix and wgmma, and one bulk copy fills a stage:
//
//        [K / 128][T rounded up to a multiple of 8][128 columns = 128 bytes]
//
// The eight 16-byte pieces of a row are (32 columns j, step s); word t of a piece is columns 8 t + 4 s ... + 3 of j.
// Piece c of token r is stored at index c ^ (r % 8): the 128-byte swizzle. Columns past K and tokens past T are 0.
#pragma once
#include "lib/activation.cuh"
#include "lib/mma.cuh"
#include "gemm/gemm.cuh"
#include "gemm/tile_scheduler.cuh"
#include "layout/tile.cuh"

constexpr int CODES_STEP = 128;                      // columns of a packed row of x, and of a chunk of weights
constexpr int CODES_CHUNK = TILE_ROWS * CODES_STEP;  // bytes of a chunk of weights

struct W8A8Args : GemmArgs {
    const uint8_t* x;       // packed codes; prologues F16 and NORM of w8a8_decode.cu: x[k] in f16 or float
    const float* x_scale;   // [n_tokens]
    const float* norm;      // prologue NORM: the weight [k] of the RMS norm
    const float* residual;  // ADD: [n_tokens, n_rows] of the only segment
    float* partial;         // split-K workspace of w8a8_wgmma.cu
    int first_token;
    int end_token;                   // a launch writes outputs of tokens first_token ... end_token - 1
    TileSchedulerArgs scheduler;     // w8a8_wgmma.cu
    RopeEpilogueArgs rope_epilogue;  // QKV epilogue, which only w8a8_wgmma.cu has
    float eps;
    float soft_cap;  // STORE: y becomes cap * tanh(y / cap); 0: no cap
};

__device__ __forceinline__ int codes_tokens(int n_tokens) { return (n_tokens + 7) / 8 * 8; }

// The byte offset of a token's row in 128-column step `step`.
__device__ __forceinline__ size_t codes_row(int step, int token, int n_tokens) {
    return (static_cast<size_t>(step) * codes_tokens(n_tokens) + token) * CODES_STEP;
}

// The tensor-core operations of a code type. VALUES is Integers or E4M3, as in tile.cuh.
template <class VALUES>
struct Codes8;
template <>
struct Codes8<Integers> {
    using Sum = int;
    static constexpr bool EXACT = true;  // sums are exact in every order
    static constexpr float LARGEST = 127.0f;
    // Tiles store codes with 128 added; this removes the bias.
    static __device__ __forceinline__ uint32_t weights(uint32_t word) { return word ^ 0x80808080u; }
    static __device__ __forceinline__ void multiply(int (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
        mma_m16n8k32_s8(sum, a, b);
    }
};
template <>
struct Codes8<E4M3> {
    using Sum = float;
    static constexpr bool EXACT = false;
    static constexpr float LARGEST = 448.0f;
    static __device__ __forceinline__ uint32_t weights(uint32_t word) { return word; }
    static __device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
        mma_m16n8k32_e4m3(sum, a, b);
    }
};

// Returns the A operand of 32 columns, from the lane's 16 bytes of the tile.
template <class VALUES>
__device__ __forceinline__ void operand8(uint32_t (&a)[4], const uint4& words) {
    a[0] = Codes8<VALUES>::weights(words.x), a[2] = Codes8<VALUES>::weights(words.y);
    a[1] = Codes8<VALUES>::weights(words.z), a[3] = Codes8<VALUES>::weights(words.w);
}

__device__ __forceinline__ float row_scale_of(const Segment& segment, int row) {
    return segment.row_scale ? __ldg(segment.row_scale + row) : 1.0f;
}

// Scales a sum. The order of the factors is the order of the numpy reference, so the results have the same bits.
template <class Sum>
__device__ __forceinline__ float scaled(Sum sum, float x_scale, float row_scale) {
    return __fmul_rn(__fmul_rn(static_cast<float>(sum), x_scale), row_scale);
}

// Writes an output. y is the scaled sum. GLU: `up` is the scaled sum of the up row. ADD: `old` is the residual.
template <int EPILOGUE>
__device__ __forceinline__ void write_output(const W8A8Args& p, const Segment& segment, size_t index, float y, float up,
                                             float old) {
    if constexpr (EPILOGUE == GLU)
        static_cast<__half*>(segment.out)[index] = gated(p.activation, y, up);
    else if constexpr (EPILOGUE == ADD)
        static_cast<float*>(segment.out)[index] = old + y;
    else
        static_cast<float*>(segment.out)[index] = p.soft_cap > 0.0f ? p.soft_cap * tanhf(y / p.soft_cap) : y;
}
