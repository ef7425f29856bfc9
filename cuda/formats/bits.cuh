// Fields narrower than a byte, four to eight at a time in 32-bit words, and loads of words that are not aligned.
//
// Blocks are as long as they are: rows of 34-byte blocks start at even addresses, rows of 17-byte blocks anywhere. A
// format knows how its fields lie and says so as ALIGNMENT. Knows how ggml packs fields, but no format.
#pragma once
#include "lib/common.cuh"

// Four bytes, the first in the lowest bits, from an address that is a multiple of ALIGNMENT.
template <int ALIGNMENT>
__device__ __forceinline__ uint32_t load4(const void* address) {
    static_assert(ALIGNMENT == 1 || ALIGNMENT == 2 || ALIGNMENT == 4, "alignments of 1, 2 and 4 bytes are told apart");
    if constexpr (ALIGNMENT == 4) {
        return *static_cast<const uint32_t*>(address);
    } else if constexpr (ALIGNMENT == 2) {
        const uint16_t* part = static_cast<const uint16_t*>(address);
        return part[0] | uint32_t(part[1]) << 16;
    } else {
        const uint8_t* part = static_cast<const uint8_t*>(address);
        return part[0] | part[1] << 8 | part[2] << 16 | uint32_t(part[3]) << 24;
    }
}

// Each byte of a, less that byte of b: signed bytes. All bytes of a and b are in 0..127, so that no borrow crosses.
__device__ __forceinline__ uint32_t subtract_bytes(uint32_t a, uint32_t b) {
    return ((a | 0x80808080u) - b) ^ 0x80808080u;
}

// The byte `value` four times.
__device__ __forceinline__ constexpr uint32_t repeat_byte(uint32_t value) { return value * 0x01010101u; }

// Field `index` of WIDTH bits (2 or 4) of each byte.
template <int WIDTH>
__device__ __forceinline__ uint32_t fields(uint32_t bytes, int index) {
    return bytes >> WIDTH * index & repeat_byte((1 << WIDTH) - 1);
}

// Bit `index` of each byte, at bit `to` of it.
__device__ __forceinline__ uint32_t bit_of_bytes(uint32_t bytes, int index, int to) {
    return (bytes >> index & 0x01010101u) << to;
}

// Bit i of a nibble -> byte i, 0 or 1. The four products of the multiplication touch different bits.
__device__ __forceinline__ uint32_t spread_bits(uint32_t nibble) { return nibble * 0x00204081u & 0x01010101u; }

// Four bytes in 1..127, those negated whose bit in `signs` (a nibble) is set.
__device__ __forceinline__ uint32_t apply_signs(uint32_t magnitudes, uint32_t signs) {
    const uint32_t negative = spread_bits(signs);
    return (magnitudes ^ negative * 255) + negative;  // a byte 255 - m has room for the 1
}

// Seven sign bits and the eighth, which makes the number of minus signs even (ggml's ksigns_iq2xs).
__device__ __forceinline__ uint32_t even_signs(uint32_t code) { return code | (__popc(code) & 1u) << 7; }

// Sixteen signed bytes, looked up by nibbles.
struct Table16 {
    uint32_t word[4];
};

__device__ __forceinline__ constexpr uint32_t pack4(int a, int b, int c, int d) {
    return (a & 255u) | (b & 255u) << 8 | (c & 255u) << 16 | (d & 255u) << 24;
}

// The entries that the four lowest nibbles name. A byte permutation looks up eight; two of them, and a third that
// takes each byte from the one or the other by the nibble's highest bit.
__device__ __forceinline__ uint32_t look_up4(const Table16& table, uint32_t nibbles) {
    const uint32_t selector = nibbles & 0x7777u;
    const uint32_t first = __byte_perm(table.word[0], table.word[1], selector);
    const uint32_t second = __byte_perm(table.word[2], table.word[3], selector);
    return __byte_perm(first, second, 0x3210u | (nibbles & 0x8888u) >> 1);
}

// Entries for eight codes, each in the low nibble of a byte.
__device__ __forceinline__ void look_up8(const Table16& table, uint32_t low, uint32_t high, int (&q)[2]) {
    const uint32_t nibbles = __byte_perm(low | low >> 4, high | high >> 4, 0x6420);  // code i in nibble i
    q[0] = look_up4(table, nibbles);
    q[1] = look_up4(table, nibbles >> 16);
}
