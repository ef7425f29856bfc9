// IQ4_NL: 32 indices of a fixed non-linear 16-value table and one scale; w = d * table[q]. IQ4_XS uses the table too.
#pragma once
#include "formats/format.cuh"

struct block_iq4_nl {
    half d;
    uint8_t qs[16];  // byte j: weights j and j + 16
};

// ggml's kvalues_iq4nl.
constexpr Table16 IQ4_VALUES = {
    {pack4(-127, -104, -83, -65), pack4(-49, -35, -22, -10), pack4(1, 13, 25, 38), pack4(53, 69, 89, 113)}};

template <>
struct Format<block_iq4_nl> {
    static constexpr int weights = 32, group = 32;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ Codes codes8(const block_iq4_nl* row, unsigned i) {
        const block_iq4_nl& block = row[i / 4];
        const uint8_t* qs = block.qs + i % 2 * 8;
        Codes c;
        look_up8(IQ4_VALUES, fields<4>(load4<2>(qs), i % 4 / 2), fields<4>(load4<2>(qs + 4), i % 4 / 2), c.q);
        c.d = __half2float(block.d);
        c.m = 0.0f;
        return c;
    }
};
