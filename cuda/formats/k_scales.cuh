// The 12 bytes that hold the eight 6-bit scales and eight 6-bit minimums of a Q4_K or Q5_K block.
//
//        bytes 0-3     scale 0-3 in the low six bits; high two bits of scale 4-7 above
//        bytes 4-7     minimum 0-3 in the low six bits; high two bits of minimum 4-7 above
//        bytes 8-11    low nibble of scale 4-7; low nibble of minimum 4-7 above
#pragma once
#include "formats/format.cuh"

// Sets d and m of group `index` (32 weights) of a block.
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
