// IQ1_S: 256 weights as 32 points of a 2048-point ternary grid, shifted by +-1/8; 32 weights share a 3-bit scale.
#pragma once
#include "formats/format.cuh"
#include "grids/iq1_s.cuh"

struct block_iq1_s {
    half d;
    uint8_t qs[32];  // low bytes of the indices
    uint16_t qh[8];  // 4 x 3 high bits of indices, the scale, and the sign of the shift
};

// Returns 8 * point + 1 or - 1: the shifted point in eighths. IQ1_M uses this function too.
__device__ __forceinline__ void shift_point(uint2 point, bool down, int (&q)[2]) {
    const uint32_t shift = repeat_byte(down ? 7 : 9);  // digits are 0, 1, 2: 8 * digit - 8 + (-1 or 1)
    q[0] = subtract_bytes(point.x * 8 + shift, repeat_byte(16));
    q[1] = subtract_bytes(point.y * 8 + shift, repeat_byte(16));
}

template <>
struct Format<block_iq1_s> {
    static constexpr int weights = 256, group = 32;
    static constexpr bool quantized = true, shifted = false;

    static __device__ __forceinline__ Codes codes8(const block_iq1_s* row, unsigned i) {
        const block_iq1_s& block = row[i / 32];
        i %= 32;
        const uint32_t qh = block.qh[i / 4];
        Codes c;
        shift_point(grid_iq1_s[block.qs[i] | (qh >> i % 4 * 3 & 7) << 8], qh >> 15, c.q);
        c.d = __half2float(block.d) * float(2 * (qh >> 12 & 7) + 1) * 0.125f;
        c.m = 0.0f;
        return c;
    }
};
