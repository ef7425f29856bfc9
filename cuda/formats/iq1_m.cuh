// IQ1_M: 256 weights as 32 points of the IQ1_S grid, each shifted by +-1/8; 16 weights share a 3-bit scale.
#pragma once
#include "formats/iq1_s.cuh"

struct block_iq1_m {
    uint8_t qs[32];     // low bytes of the indices
    uint8_t qh[16];     // a nibble per index: three high bits and the sign of the shift
    uint8_t scales[8];  // four 16-bit words: four scales each, and above them a nibble of the f16 d
};

__device__ __forceinline__ float block_d(const block_iq1_m& block) {
    const uint32_t low = load4<4>(block.scales), high = load4<4>(block.scales + 4);
    const uint32_t d = low >> 12 & 0x000f | low >> 24 & 0x00f0 | high >> 4 & 0x0f00 | high >> 16 & 0xf000;
    return __half2float(__ushort_as_half(uint16_t(d)));
}

template <>
struct Format<block_iq1_m> {
    static constexpr int weights = 256, group = 16;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ Codes codes8(const block_iq1_m* row, unsigned i) {
        const block_iq1_m& block = row[i / 32];
        i %= 32;
        const uint32_t nibble = block.qh[i / 2] >> i % 2 * 4 & 15;
        const uint32_t low = load4<4>(block.scales), high = load4<4>(block.scales + 4);
        const uint32_t scale = (i < 16 ? low : high) >> i / 8 % 2 * 16 >> i / 2 % 4 * 3 & 7;
        Codes c;
        shift_point(grid_iq1_s[block.qs[i] | (nibble & 7) << 8], nibble >> 3, c.q);
        c.d = block_d(block) * float(2 * scale + 1) * 0.125f;
        c.m = 0.0f;
        return c;
    }
};
