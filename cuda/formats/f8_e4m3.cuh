// F8_E4M3: 8-bit floats, without blocks: 4 bits of exponent with a bias of 7, 3 bits of mantissa, no infinities.
#pragma once
#include "formats/format.cuh"

struct block_f8_e4m3 {
    uint8_t code;
};

// The exponent and mantissa bits, read as an f16, give the value divided by 2^8, for subnormal values too.
__device__ __forceinline__ float e4m3_to_float(uint32_t code) {
    const uint16_t bits = (code & 127) << 7 | (code & 128) << 8;
    const float number = __half2float(__ushort_as_half(bits)) * 256.0f;
    return (code & 127) == 127 ? __uint_as_float(0x7fc00000u) : number;
}

template <>
struct Format<block_f8_e4m3> {
    static constexpr int weights = 1;
    static constexpr bool quantized = false, shifted = false;

    static __device__ __forceinline__ float weight(const block_f8_e4m3* row, int j) {
        return e4m3_to_float(row[j].code);
    }

    // Loads four bytes at a time if the row is aligned.
    static __device__ __forceinline__ void weights8(const block_f8_e4m3* row, int i, float (&w)[8]) {
        const block_f8_e4m3* from = row + 8 * i;
        const bool aligned = reinterpret_cast<size_t>(from) % 4 == 0;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint32_t codes = aligned ? load4<4>(from + 4 * k) : load4<1>(from + 4 * k);
#pragma unroll
            for (int j = 0; j < 4; ++j) w[4 * k + j] = e4m3_to_float(codes >> 8 * j & 255);
        }
    }
};
