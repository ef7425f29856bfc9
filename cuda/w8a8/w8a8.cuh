// What the products of 8-bit weights and 8-bit activations have in common: integers, or E4M3 floats.
//
//        y[token, row] = (sum over k of q[token, k] * w[row, k]) * scale[token] * row_scale[row]
//
// Integer sums are exact whoever adds them up, so every product here gives the same bits for them. Sums of E4M3 are
// taken over to float32 registers every 128 columns: tensor cores add them up with fewer bits than a float has.
//
// Weights are tiles of 8 bits without scales (tile.cuh): of 32 columns a lane has registers (row half h, step s) at
// [2 h + s], each four columns in a row, which is the A operand of an mma of 32 columns. The activations (B) are packed
// to suit both ldmatrix and wgmma, and so that what a block takes is one piece of memory:
//
//        [128 columns][token, up to a multiple of eight][128 bytes]
//
// The eight 16-byte pieces of 128 bytes are (32 columns j, s); word t of a piece is columns 8 t + 4 s ... + 3 of j. Piece
// c of token r lies at place c ^ (r % 8), the 128-byte swizzle. What lies behind the last column or token is 0.
#pragma once
#include "lib/activation.cuh"
#include "lib/mma.cuh"
#include "gemm/gemm.cuh"
#include "gemm/tile_scheduler.cuh"
#include "layout/tile.cuh"

constexpr int CODES_STEP = 128;                        // columns of a step of x, and of a chunk of weights
constexpr int CODES_CHUNK = TILE_ROWS * CODES_STEP;    // bytes

struct Product : Matrices {
    const uint8_t* x;       // packed; of one token floats or halves, where a kernel quantises it
    const float* x_scale;   // [n_tokens]
    const float* norm;      // of x in floats, which is normalised first: [k]
    const float* residual;  // ADD: [n_tokens, n_rows] of the one segment
    float* partial;         // of tiles that blocks share: see w8a8_wgmma.cu
    int first_token;
    int end_token;  // of a launch: outputs of first_token ... end_token - 1 are written
    Dealt dealt;      // w8a8_wgmma.cu
    Turning turning;  // QKV, which only that makes
    float eps;
    float soft_cap;  // STORE: cap * tanh(y / cap); 0 is none
};

__device__ __forceinline__ int codes_tokens(int n_tokens) { return (n_tokens + 7) / 8 * 8; }

// Where 128 columns of a token begin, in bytes.
__device__ __forceinline__ size_t codes_row(int step, int token, int n_tokens) {
    return (static_cast<size_t>(step) * codes_tokens(n_tokens) + token) * CODES_STEP;
}

// VALUES as of a tile (tile.cuh): what weights and activations are.
template <class VALUES>
struct Codes8;
template <>
struct Codes8<Integers> {
    using Sum = int;
    static constexpr bool EXACT = true;  // sums, in whatever order
    static constexpr float LARGEST = 127.0f;
    // Codes lie in tiles with 128 added.
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

// The A operand of 32 columns, from the 16 bytes that the lane has of them.
template <class VALUES>
__device__ __forceinline__ void operand8(uint32_t (&a)[4], const uint4& words) {
    a[0] = Codes8<VALUES>::weights(words.x), a[2] = Codes8<VALUES>::weights(words.y);
    a[1] = Codes8<VALUES>::weights(words.z), a[3] = Codes8<VALUES>::weights(words.w);
}

__device__ __forceinline__ float row_scale_of(const Segment& segment, int row) {
    return segment.row_scale ? __ldg(segment.row_scale + row) : 1.0f;
}

// A sum at its size. The order of the factors is that of the reference: the same bits.
template <class Sum>
__device__ __forceinline__ float scaled(Sum sum, float x_scale, float row_scale) {
    return __fmul_rn(__fmul_rn(static_cast<float>(sum), x_scale), row_scale);
}

// An output, of sums at their size; `up` and `old` are for GLU and ADD.
template <int EPILOGUE>
__device__ __forceinline__ void write_output(const Product& p, const Segment& segment, size_t at, float y, float up,
                                             float old) {
    if constexpr (EPILOGUE == GLU)
        static_cast<__half*>(segment.out)[at] = gated(p.activation, y, up);
    else if constexpr (EPILOGUE == ADD)
        static_cast<float*>(segment.out)[at] = old + y;
    else
        static_cast<float*>(segment.out)[at] = p.soft_cap > 0.0f ? p.soft_cap * tanhf(y / p.soft_cap) : y;
}
