// The twelve bytes in which Q4_K and Q5_K keep eight 6-bit scales and eight 6-bit minimums.
//
// Bytes 0-3 have scales 0-3, bytes 4-7 minimums 0-3, each in the low six bits. Bytes 8-11 have the low nibbles of scales
// 4-7 and, above them, of minimums 4-7, whose high two bits are the spare ones of bytes 0-3 and 4-7.
#pragma once
#include "formats/format.cuh"

// Sets d and m of the 32 weights `index` of a block.
template <typename Block>
__device__ __forceinline__ void set_scale_and_minimum(const Block& block, int index, Codes& c) {
    const uint8_t* packed = block.scales + index % 4;
    const uint32_t first = packed[0], second = packed[4], nibbles = packed[8];
    const bool late = index >= 4;
    const uint32_t scale = late ? (nibbles & 15) | first >> 6 << 4 : first & 63;
    const uint32_t minimum = late ? nibbles >> 4 | second >> 6 << 4 : second & 63;
    c.d = __half2float(block.d) * float(scale);
    c.m = -(__half2float(block.dmin) * float(minimum));
}
