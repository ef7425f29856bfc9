// NVFP4: 64 weights of the 4-bit float type E2M1; 16 weights share an unsigned 8-bit float UE4M3 as scale. As in ggml,
// the table holds doubled values, which are integers, and the scale is halved.
#pragma once
#include "formats/mxfp4.cuh"

struct block_nvfp4 {
    uint8_t d[4];
    uint8_t qs[32];  // byte 8 * g + j: weights 16 * g + j + (0, 8)
};

template <>
struct Format<block_nvfp4> {
    static constexpr int weights = 64, group = 16;
    static constexpr bool quantized = true, shifted = false;

    // Returns half of the UE4M3 scale d: exponent bias 7, bit 7 ignored, 127 (NaN) read as 0.
    static __device__ __forceinline__ float half_scale(uint32_t d) {
        const uint32_t exponent = d >> 3 & 15, mantissa = d & 7;
        const float normal = __uint_as_float(exponent + 119 << 23 | mantissa << 20);
        const float subnormal = float(mantissa) * 0.0009765625f;  // 2^-10
        return d == 127 ? 0.0f : exponent ? normal : subnormal;
    }

    static __device__ __forceinline__ Codes codes8(const block_nvfp4* row, unsigned i) {
        const block_nvfp4& block = row[i / 8];
        i %= 8;
        const uint8_t* qs = block.qs + i / 2 * 8;
        Codes c;
        look_up8(E2M1_DOUBLED, fields<4>(load4<4>(qs), i % 2), fields<4>(load4<4>(qs + 4), i % 2), c.q);
        c.d = half_scale(block.d[i / 2]);
        c.m = 0.0f;
        return c;
    }
};
