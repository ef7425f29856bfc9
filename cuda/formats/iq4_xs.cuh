// IQ4_XS: 256 indices of the IQ4_NL table; 32 weights share a 6-bit scale; w = d * (scale - 32) * table[q].
#pragma once
#include "formats/iq4_nl.cuh"

struct block_iq4_xs {
    half d;
    uint16_t scales_h;    // two high bits per scale
    uint8_t scales_l[4];  // four low bits per scale
    uint8_t qs[128];      // byte 16 * g + j: weights 32 * g + j + (0, 16)
};

template <>
struct Format<block_iq4_xs> {
    static constexpr int weights = 256, group = 32;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ Codes codes8(const block_iq4_xs* row, unsigned i) {
        const block_iq4_xs& block = row[i / 32];
        i %= 32;
        const int g = i / 4;
        const uint8_t* qs = block.qs + g * 16 + i % 2 * 8;
        Codes c;
        look_up8(IQ4_VALUES, fields<4>(load4<4>(qs), i % 4 / 2), fields<4>(load4<4>(qs + 4), i % 4 / 2), c.q);
        const int low = block.scales_l[g / 2] >> g % 2 * 4 & 15, high = block.scales_h >> 2 * g & 3;
        c.d = __half2float(block.d) * float((low | high << 4) - 32);
        c.m = 0.0f;
        return c;
    }
};
