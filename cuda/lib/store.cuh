// Loads and stores of eight consecutive elements of a row: 16 bytes per instruction if the row is aligned, and no
// access past its end.
#pragma once
#include "lib/common.cuh"

__device__ __forceinline__ void convert(float& dst, float src) { dst = src; }
__device__ __forceinline__ void convert(float& dst, half src) { dst = __half2float(src); }
__device__ __forceinline__ void convert(half& dst, float src) { dst = __float2half_rn(src); }
__device__ __forceinline__ void convert(__nv_bfloat16& dst, float src) { dst = __float2bfloat16_rn(src); }

// Whether elements 8i ... 8i+7 of a row of `columns` elements are within the row and 16-byte accesses are aligned.
template <typename T>
__device__ __forceinline__ bool is_whole(const T* address, int i, int columns) {
    return 8 * i + 8 <= columns && reinterpret_cast<size_t>(address) % 16 == 0;
}

template <typename Out>
__device__ __forceinline__ void store8(Out* row, int i, int columns, const float (&values)[8]) {
    constexpr int words = sizeof(Out) / 2;
    alignas(16) Out result[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) convert(result[j], values[j]);
    Out* dst = row + 8 * i;
    if (is_whole(dst, i, columns)) {
#pragma unroll
        for (int k = 0; k < words; ++k) reinterpret_cast<uint4*>(dst)[k] = reinterpret_cast<const uint4*>(result)[k];
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (8 * i + j < columns) dst[j] = result[j];
    }
}

// Loads elements 8i ... 8i+7; elements past the end of the row become 0.
template <typename In>
__device__ __forceinline__ void load8(const In* row, int i, int columns, float (&values)[8]) {
    constexpr int words = sizeof(In) / 2;
    alignas(16) In number[8];
    const In* src = row + 8 * i;
    if (is_whole(src, i, columns)) {
#pragma unroll
        for (int k = 0; k < words; ++k) reinterpret_cast<uint4*>(number)[k] = reinterpret_cast<const uint4*>(src)[k];
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) number[j] = 8 * i + j < columns ? src[j] : In(0.0f);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) convert(values[j], number[j]);
}
