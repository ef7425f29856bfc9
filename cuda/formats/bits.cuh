// Helpers for quant blocks: unaligned loads, and operations on four to eight packed fields in 32-bit words.
//
// Quant blocks have odd lengths: rows of 34-byte blocks start at even addresses, rows of 17-byte blocks at any address.
// Each format passes the alignment of its fields as ALIGNMENT. This file knows how ggml packs fields, but no format.
#pragma once
#include "lib/common.cuh"

// Loads four bytes, the first one into the lowest bits, from an address that is a multiple of ALIGNMENT.
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

// Returns a - b for each byte, as signed bytes. All bytes of a and b must be in 0..127, so that no borrow crosses
// bytes.
__device__ __forceinline__ uint32_t subtract_bytes(uint32_t a, uint32_t b) {
    return ((a | 0x80808080u) - b) ^ 0x80808080u;
}

// Returns the byte `value` four times.
__device__ __forceinline__ constexpr uint32_t repeat_byte(uint32_t value) { return value * 0x01010101u; }

// Extracts field `index` of WIDTH bits (2 or 4) from each byte.
template <int WIDTH>
__device__ __forceinline__ uint32_t fields(uint32_t bytes, int index) {
    return bytes >> WIDTH * index & repeat_byte((1 << WIDTH) - 1);
}

// Moves bit `index` of each byte to bit `to` of that byte, and clears the other bits.
__device__ __forceinline__ uint32_t bit_of_bytes(uint32_t bytes, int index, int to) {
    return (bytes >> index & 0x01010101u) << to;
}

// Expands bit i of a nibble to byte i (0 or 1). The four partial products of the multiplication do not overlap.
__device__ __forceinline__ uint32_t spread_bits(uint32_t nibble) { return nibble * 0x00204081u & 0x01010101u; }

// Negates byte i of `magnitudes` if bit i of the nibble `signs` is set. The bytes are in 1..127.
__device__ __forceinline__ uint32_t apply_signs(uint32_t magnitudes, uint32_t signs) {
    const uint32_t negative = spread_bits(signs);
    return (magnitudes ^ negative * 255) + negative;  // a byte 255 - m cannot overflow when 1 is added
}

// Adds the eighth sign bit to seven sign bits: it makes the number of minus signs even (ggml's ksigns_iq2xs).
__device__ __forceinline__ uint32_t even_signs(uint32_t code) { return code | (__popc(code) & 1u) << 7; }

// A look-up table of 16 signed bytes, indexed by nibbles.
struct Table16 {
    uint32_t word[4];
};

__device__ __forceinline__ constexpr uint32_t pack4(int a, int b, int c, int d) {
    return (a & 255u) | (b & 255u) << 8 | (c & 255u) << 16 | (d & 255u) << 24;
}

// Looks up the four lowest nibbles. A PRMT looks up eight entries, so two PRMTs look up the table, and a
// third one selects between the results by the highest bit of each nibble.
__device__ __forceinline__ uint32_t look_up4(const Table16& table, uint32_t nibbles) {
    const uint32_t selector = nibbles & 0x7777u;
    const uint32_t first = __byte_perm(table.word[0], table.word[1], selector);
    const uint32_t second = __byte_perm(table.word[2], table.word[3], selector);
    return __byte_perm(first, second, 0x3210u | (nibbles & 0x8888u) >> 1);
}

// Looks up eight codes, each in the low nibble of a byte.
__device__ __forceinline__ void look_up8(const Table16& table, uint32_t low, uint32_t high, int (&q)[2]) {
    const uint32_t nibbles = __byte_perm(low | low >> 4, high | high >> 4, 0x6420);  // code i in nibble i
    q[0] = look_up4(table, nibbles);
    q[1] = look_up4(table, nibbles >> 16);
}
