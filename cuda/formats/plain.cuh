// F32, F16, BF16, I8: numbers without blocks. A row can have any length and is aligned to the size of one number.
#pragma once
#include "formats/format.cuh"

struct block_f32 {
    float value;
};
struct block_f16 {
    half value;
};
struct block_bf16 {
    uint16_t value;  // the upper half of a float
};
struct block_i8 {
    int8_t value;
};

__device__ __forceinline__ float to_float(block_f32 number) { return number.value; }
__device__ __forceinline__ float to_float(block_f16 number) { return __half2float(number.value); }
__device__ __forceinline__ float to_float(block_bf16 number) { return __uint_as_float(uint32_t(number.value) << 16); }
__device__ __forceinline__ float to_float(block_i8 number) { return number.value; }

template <int BYTES>
struct PieceOf {
    using Type = uint4;
};
template <>
struct PieceOf<1> {
    using Type = uint2;
};

template <typename Number>
struct PlainFormat {
    static constexpr int weights = 1;
    static constexpr bool quantized = false, shifted = false;

    static __device__ __forceinline__ float weight(const Number* row, int j) { return to_float(row[j]); }

    // Loads 16 bytes at a time (8 bytes for I8) if the row is aligned.
    static __device__ __forceinline__ void weights8(const Number* row, int i, float (&w)[8]) {
        using Piece = typename PieceOf<sizeof(Number)>::Type;
        constexpr int pieces = 8 * sizeof(Number) / sizeof(Piece);
        alignas(16) Number number[8];
        const Number* from = row + 8 * i;
        if (reinterpret_cast<size_t>(from) % sizeof(Piece) == 0) {
#pragma unroll
            for (int k = 0; k < pieces; ++k)
                reinterpret_cast<Piece*>(number)[k] = reinterpret_cast<const Piece*>(from)[k];
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) number[j] = from[j];
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) w[j] = to_float(number[j]);
    }
};

template <>
struct Format<block_f32> : PlainFormat<block_f32> {};
template <>
struct Format<block_f16> : PlainFormat<block_f16> {};
template <>
struct Format<block_bf16> : PlainFormat<block_bf16> {};
template <>
struct Format<block_i8> : PlainFormat<block_i8> {};
