// TQ1_0: 256 ternary digits and one scale, five digits in a byte; w = d * (digit - 1).
#pragma once
#include "formats/format.cuh"

struct block_tq1_0 {
    uint8_t qs[48];  // 32 bytes with digits 32 apart, then 16 bytes with digits 16 apart
    uint8_t qh[4];   // four digits 4 apart
    half d;
};

template <>
struct Format<block_tq1_0> {
    static constexpr int weights = 256, group = 256;
    static constexpr bool quantized = true, shifted = false;

    // Digit `index` of each byte. A byte is a fraction of 256 in base 3: times 3^index, modulo 256, brings the digit to
    // the front, where 3/256 of it is read. Two bytes at a time, in 16 bits each.
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
