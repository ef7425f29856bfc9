// Eight numbers of a row from and to memory: 16 bytes at a time where the row allows it, and nothing past its end.
#pragma once
#include "lib/common.cuh"

__device__ __forceinline__ void convert(float& to, float from) { to = from; }
__device__ __forceinline__ void convert(float& to, half from) { to = __half2float(from); }
__device__ __forceinline__ void convert(half& to, float from) { to = __float2half_rn(from); }
__device__ __forceinline__ void convert(__nv_bfloat16& to, float from) { to = __float2bfloat16_rn(from); }

// Elements 8i .. 8i+7 of a row of `columns` start at 16 bytes and end inside it.
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
    Out* to = row + 8 * i;
    if (is_whole(to, i, columns)) {
#pragma unroll
        for (int k = 0; k < words; ++k) reinterpret_cast<uint4*>(to)[k] = reinterpret_cast<const uint4*>(result)[k];
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (8 * i + j < columns) to[j] = result[j];
    }
}

// Elements past the end of the row are 0.
template <typename In>
__device__ __forceinline__ void load8(const In* row, int i, int columns, float (&values)[8]) {
    constexpr int words = sizeof(In) / 2;
    alignas(16) In number[8];
    const In* from = row + 8 * i;
    if (is_whole(from, i, columns)) {
#pragma unroll
        for (int k = 0; k < words; ++k) reinterpret_cast<uint4*>(number)[k] = reinterpret_cast<const uint4*>(from)[k];
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) number[j] = 8 * i + j < columns ? from[j] : In(0.0f);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) convert(values[j], number[j]);
}
