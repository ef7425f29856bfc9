// MXFP4: 32 weights of the 4-bit float type E2M1 and a power of two as scale. As in ggml, the table holds doubled
// values, which are integers, and the scale is halved. NVFP4 uses the table too.
#pragma once
#include "formats/format.cuh"

struct block_mxfp4 {
    uint8_t e;
    uint8_t qs[16];  // byte j: weights j and j + 16
};

constexpr Table16 E2M1_DOUBLED = {
    {pack4(0, 1, 2, 3), pack4(4, 6, 8, 12), pack4(0, -1, -2, -3), pack4(-4, -6, -8, -12)}};

template <>
struct Format<block_mxfp4> {
    static constexpr int weights = 32, group = 32;
    static constexpr bool quantized = true, shifted = false;

    // Returns 2^(e - 128), half of the E8M0 scale e. The results for e = 0 and 1 are subnormal.
    static __device__ __forceinline__ float half_scale(uint32_t e) {
        return __uint_as_float(e < 2 ? 0x00200000u << e : e - 1 << 23);
    }

    static __device__ __forceinline__ Codes codes8(const block_mxfp4* row, unsigned i) {
        const block_mxfp4& block = row[i / 4];
        const uint8_t* qs = block.qs + i % 2 * 8;
        Codes c;
        look_up8(E2M1_DOUBLED, fields<4>(load4<1>(qs), i % 4 / 2), fields<4>(load4<1>(qs + 4), i % 4 / 2), c.q);
        c.d = half_scale(block.e);
        c.m = 0.0f;
        return c;
    }
};
