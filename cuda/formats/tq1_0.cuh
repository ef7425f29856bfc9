// TQ1_0: 256 ternary digits, five per byte, and one scale; w = d * (digit - 1).
#pragma once
#include "formats/format.cuh"

struct block_tq1_0 {
    uint8_t qs[48];  // 32 bytes whose digits are 32 weights apart, then 16 bytes whose digits are 16 weights apart
    uint8_t qh[4];   // bytes of four digits, 4 weights apart
    half d;
};

template <>
struct Format<block_tq1_0> {
    static constexpr int weights = 256, group = 256;
    static constexpr bool quantized = true, shifted = false;

    // Extracts digit `index` of each byte. byte / 256 is a fraction in base 3. Multiplication by 3^index, modulo 256,
    // moves the digit to the front of the fraction; multiplication by 3 / 256 then gives the digit. The function
    // computes two bytes per 32-bit word, 16 bits each.
    static __device__ __forceinline__ uint32_t digits(uint32_t bytes, int index) {
        const uint32_t power = index == 0 ? 1 : index == 1 ? 3 : index == 2 ? 9 : index == 3 ? 27 : 81;
        const uint32_t even = ((bytes & 0x00ff00ffu) * power & 0x00ff00ffu) * 3;
        const uint32_t odd = ((bytes >> 8 & 0x00ff00ffu) * power & 0x00ff00ffu) * 3;
        return (even >> 8 & 0x00030003u) | (odd & 0x03000300u);
    }

    static __device__ __forceinline__ Codes codes8(const block_tq1_0* row, unsigned i) {
        const block_tq1_0& block = row[i / 32];
        i %= 32;
        const uint8_t* bytes = i < 20 ? block.qs + i % 4 * 8 : i < 30 ? block.qs + 32 + i % 2 * 8 : block.qh;
        const int digit = i < 20 ? i / 4 : i < 30 ? (i - 20) / 2 : (i - 30) * 2;
        const bool four = i >= 30;  // four bytes give eight weights
        Codes c;
        c.q[0] = subtract_bytes(digits(load4<2>(bytes), digit), repeat_byte(1));
        c.q[1] = subtract_bytes(digits(load4<2>(four ? bytes : bytes + 4), digit + four), repeat_byte(1));
        c.d = __half2float(block.d);
        c.m = 0.0f;
        return c;
    }
};
