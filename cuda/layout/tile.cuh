// Tiles: how weights lie in device memory. GGUF blocks are made for files (34 bytes for Q8_0 are never 16-byte
// aligned); a tile is made for a warp that multiplies with tensor cores. repack.cu writes tiles once, at load.
//
// A tensor [N, K] is cut into tiles of 16 rows x chunk_k columns ("chunks" along K, tile rows along N, chunks of one
// tile row adjacent, each from a line of 128 bytes on). Rows and columns past N and K hold zeros. The 16 rows are the M
// of mma.m16n8k16 (halves) and mma.m16n8k32 (bytes), and the order of the weights inside a chunk is the order in which
// the mma wants its A operand, so that a lane reads 16 bytes and has registers:
//
//        lane = 4 g + t                            32 columns of a group, whose they are:
//        g = 0..7   rows g and g + 8               group of 32:  t t t t t t t t (8 t ... 8 t + 7)
//        t = 0..3   columns                        group of 16:  t t t t (4 t ... 4 t + 3), twice
//
// One mma of halves covers 16 columns, four of each t: "step" s = 0, 1 inside 32 columns, element e = 0..3 inside the
// step. One of bytes covers both steps. The activations are B: lane (g, t) needs the same columns of B's column g.
//
// Weights stay integers, and a word unpacks in two ways. bytes(), for few tokens (fixed_point.cuh), gives unsigned
// bytes: one AND for four codes, none of 8 bits, and where codes are left four bits too far up the scale of x makes good
// for it.
// unpack(), for many tokens, gives halves: a code u < 2048 in the low bits of a half *is* the half u * 2^-24 (mostly
// subnormal), exactly, so that it takes one AND (2 and 4 bits) or one byte permute (8 bits) for two codes, without the
// 1024 + u bias of the PRMT and LOP3 converters and without what it costs in cancellation. Tensor cores multiply
// subnormals at full speed. The 2^24 comes back once per output, the scale once per group in float32, the zero point
// through the sum of the activations.
//
// Codes of three or four bits may stand for signed bytes; looked up, they are codes of eight bits. Codes without scales
// become the exact halves that they stand for. A scale of a whole row is no part of a tile: see gemm.cuh.
#pragma once
#include "lib/convert.cuh"
#include "formats/bits.cuh"
#include "norm/norm.cuh"

constexpr int TILE_ROWS = 16;
constexpr float CODE_UNIT = 5.9604644775390625e-8f;  // 2^-24, what code 1 is as a half

enum class Scales {
    NONE,
    D,      // f16 d per group:                                        [g][group][row half]
    DM,     // f16 (d, m) per group:                                   [g][group][row half]
    SUB,    // f16 d per 256 columns, i8 scale per group:              d [g][row half], sc [g][group][row half]
    SUB_8,  // the same with eighths of d
    SUB_M4, // f16 (d, dmin) per 256, u4 (scale, min) per group:       dd [g][row half], fours [g][group / 2]
    SUB_M6, // the same with u6:                                       dd, fours, and twos [g][group / 4]
    E8,     // u8 e per group, for 2^(e - 128):                        [g][group][row half]
};
// Words of fours have bytes (scale of row g, of row g + 8, min of g, of g + 8), a nibble for each of two groups: the lower
// four bits. Words of twos have the bits above these, likewise, two for each of four groups.

// ---- what codes stand for ----------------------------------------------------------------------------------------
// zero(bits) is what the code is too large by, as it is multiplied.

struct Integers {
    static constexpr bool TABLE = false, SPLIT = false;
    static constexpr int SCALE = 1;
    // Of two bits they are the digits -1, 0, 1.
    static __device__ __forceinline__ constexpr int zero(int bits) { return bits == 2 ? 1 : 1 << (bits - 1); }
};

// Bytes that are 8-bit floats: sign, four bits of exponent, three of mantissa.
struct E4M3 {
    static constexpr bool TABLE = false, SPLIT = false;
    static constexpr int SCALE = 1;
    static __device__ __forceinline__ constexpr int zero(int) { return 0; }
};

// A byte permutation; a selector whose highest bit is set takes a byte's highest bit, eight times.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
#if EMULATED
    return __byte_perm(low, high, selectors);
#else
    uint32_t result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selectors));
    return result;
#endif
}

// Eight or sixteen signed bytes, the first in the lowest bits of A. What a code is looked up as is (value + zero) * SCALE: zero is
// a power of two, exact as a half times any scale, and SCALE keeps the products of small tables from low bits.
template <uint32_t A, uint32_t B, uint32_t C = 0, uint32_t D = 0>
struct Table {
    static constexpr bool TABLE = true;
    static __device__ __forceinline__ constexpr int value(int code) {
        const uint32_t word = code < 8 ? (code < 4 ? A : B) : (code < 12 ? C : D);
        const int byte = word >> 8 * (code % 4) & 255;
        return byte < 128 ? byte : byte - 256;
    }
    static __device__ __forceinline__ constexpr int zero(int) {
        int result = 1;
        for (int code = 0; code < 16; ++code)
            while (result < -value(code)) result *= 2;
        return result;
    }
    static __device__ __forceinline__ constexpr int largest() {
        int result = 0;
        for (int code = 0; code < 16; ++code) result = value(code) + zero(4) > result ? value(code) + zero(4) : result;
        return result;
    }
    static constexpr int SCALE = largest() < 32 ? 4 : 1;
    static constexpr bool SEVEN_BITS = largest() * SCALE < 128;

    // Whether the first eight values have one sign, SIGN, and the last eight the other, so that products with them come
    // as a difference of products with their sizes.
    static __device__ __forceinline__ constexpr bool split_by(int sign) {
        bool result = (C | D) != 0;
        for (int code = 0; code < 16; ++code) {
            const int size = (code < 8 ? sign : -sign) * value(code);
            result = result && 0 <= size && size < 128;
        }
        return result;
    }
    static constexpr int SIGN = split_by(1) ? 1 : -1;
    static constexpr bool SPLIT = split_by(SIGN);

    static __device__ __forceinline__ constexpr int looked_up(int code) { return (value(code) + zero(4)) * SCALE; }
    static __device__ __forceinline__ constexpr uint32_t word(int i) {
        return pack4(looked_up(4 * i), looked_up(4 * i + 1), looked_up(4 * i + 2), looked_up(4 * i + 3));
    }
    static __device__ __forceinline__ constexpr uint32_t sizes(int i) {
        const int sign = i < 2 ? SIGN : -SIGN;
        return pack4(sign * value(4 * i), sign * value(4 * i + 1), sign * value(4 * i + 2), sign * value(4 * i + 3));
    }
    // The sizes of four of a word's eight codes (the lower, or the UPPER ones) that are among the first or the LAST eight;
    // of the others, 0: a byte permutation repeats the highest bit, which is 0.
    template <bool UPPER, bool LAST>
    static __device__ __forceinline__ uint32_t look_up_sizes(uint32_t codes) {
        constexpr uint32_t low = sizes(LAST ? 2 : 0), high = sizes(LAST ? 3 : 1);
        const uint32_t here = codes >> (UPPER ? 16 : 0);
        return permute_bytes(low, high, LAST ? here ^ 0x88888888u : here);
    }
    // Bytes for four of a word's eight codes of three bits: the lower, or the UPPER ones.
    template <bool UPPER>
    static __device__ __forceinline__ uint32_t look_up3(uint32_t codes) {
        constexpr uint32_t low = word(0), high = word(1);
        return permute_bytes(low, high, codes >> (UPPER ? 16 : 0));
    }
    // The same of four bits. A byte permutation looks up eight entries; it
    // takes two. Of seven bits, each makes zeros for the codes of the other, since its entries' highest bit is 0; else a
    // third one chooses. Both halves of a word share what lop3 makes: written with operators it is made twice.
    template <bool UPPER>
    static __device__ __forceinline__ uint32_t look_up4(uint32_t codes) {
        constexpr uint32_t low[2] = {word(0), word(1)}, high[2] = {word(2), word(3)};
        constexpr int from = UPPER ? 16 : 0;
        if constexpr (SEVEN_BITS) {
            const uint32_t others = codes ^ 0x88888888u;
            return permute_bytes(low[0], low[1], codes >> from) | permute_bytes(high[0], high[1], others >> from);
        } else {
            const uint32_t entry = lop3<0xf0 & 0xcc>(codes, 0x77777777u, 0);
            const uint32_t choice = lop3<(0xf0 & 0xcc) | 0xaa>(codes >> 1, 0x44444444u, 0x32103210u);
            return permute_bytes(permute_bytes(low[0], low[1], entry >> from),
                                 permute_bytes(high[0], high[1], entry >> from), choice >> from);
        }
    }
};

// Which of the codes that have a SPLIT, as sizes: those that are added in a product, those that are taken off.
enum class Part { ALL, ADDED, TAKEN };

// BITS 2 to 6 and 8: codes; 16: halves. GROUP: columns with one scale. CHUNK_K: columns of a chunk.
template <int BITS_, int GROUP_, Scales SCALES_, int CHUNK_K_, class VALUES_ = Integers>
struct Tile {
    static constexpr int BITS = BITS_, GROUP = GROUP_, CHUNK_K = CHUNK_K_;
    static constexpr Scales SCALES = SCALES_;
    using VALUES = VALUES_;
    static constexpr bool FLOAT = BITS == 16;
    static constexpr bool SCALED = !FLOAT && SCALES != Scales::NONE;  // codes are multiplied, else halves
    static constexpr bool SIGNED_SUB = SCALES == Scales::SUB || SCALES == Scales::SUB_8;
    static constexpr bool PACKED_SUB = SCALES == Scales::SUB_M4 || SCALES == Scales::SUB_M6;
    static constexpr bool TWOS = SCALES == Scales::SUB_M6;
    static constexpr bool HAS_SUB = SIGNED_SUB || PACKED_SUB;
    static constexpr float SUB_UNIT = SCALES == Scales::SUB_8 ? 0.125f : 1.0f;
    static constexpr bool MIN = SCALES == Scales::DM || PACKED_SUB;
    static constexpr int ZERO = MIN || FLOAT ? 0 : VALUES::zero(BITS);
    static constexpr int GROUPS = CHUNK_K / GROUP;
    static constexpr int SUB_BYTES = TILE_ROWS * GROUPS;  // of signed bytes, or of fours
    static constexpr int SCALE_BYTES = !SCALED                   ? 0
                                       : SCALES == Scales::D     ? TILE_ROWS * GROUPS * 2
                                       : SCALES == Scales::DM    ? TILE_ROWS * GROUPS * 4
                                       : SIGNED_SUB              ? TILE_ROWS * 2 + SUB_BYTES
                                       : PACKED_SUB              ? TILE_ROWS * 4 + SUB_BYTES + TWOS * SUB_BYTES / 2
                                                                 : SUB_BYTES;
    static constexpr int BASE_BITS = BITS == 5 || BITS == 6 ? 4 : BITS == 3 ? 2 : BITS;  // bits in the main plane
    static constexpr int BASE_BYTES = TILE_ROWS * CHUNK_K * BASE_BITS / 8;
    static constexpr int EXTRA_BYTES = TILE_ROWS * CHUNK_K * (BITS - BASE_BITS) / 8;
    static constexpr int USED = SCALE_BYTES + BASE_BYTES + EXTRA_BYTES;
    static_assert(USED % 16 == 0 && SCALE_BYTES % 16 == 0, "chunks are read 16 bytes at a time");
    static constexpr int BYTES = (USED + 127) / 128 * 128;  // from chunk to chunk: each begins on a line of memory
    static_assert(!VALUES::TABLE || ((BITS == 3 || BITS == 4) && SCALED && !MIN), "");

    // What the codes of row half H of group J (32 columns) are too large by, where several share bits of a word.
    template <int J, int H>
    static __device__ __forceinline__ constexpr float shift() {
        if (VALUES::TABLE) return VALUES::SCALE;
        if (BASE_BITS == 2) return 4 << 2 * (2 * (J & 1) + H);
        return BASE_BITS == 4 && (J & 1) ? 16.0f : VALUES::SCALE;
    }
    // How many bits further up than in a byte of its own a code of group J (32 columns) may lie.
    static __device__ __forceinline__ constexpr int byte_shift(int j) {
        return BASE_BITS < 8 && BITS <= 4 && !VALUES::TABLE && (j & 1) ? 4 : 0;
    }
};

// Where the weight of (row half h, lane, 32-column group j, step s, element e) lies: used by repack and get_rows.
// Main plane: a lane reads words of groups j, j + 1 (of 8 bits: of one group). A word is of one h and s; of 2 bits it is
// of both h. Of 8 bits with scales, a lane's words are the A operand of a product of bytes. Of fewer, fields are so placed
// that one AND gives four bytes or a half2: elements 0, 1 are the halves of one register, 2, 3
// those of the next, eight bits higher, and in between lie odd groups. Codes of a table lie in order, each in four bits
// that other codes may share: what look-ups take one by one.
template <class T>
struct TilePlace {
    static constexpr int GROUPS_AT_ONCE = T::BASE_BITS == 8 ? 1 : 2;
    static constexpr int WORDS = T::BASE_BITS == 2 ? 2 : 4;
    static constexpr bool OPERANDS = T::BASE_BITS == 8 && T::SCALED;

    static __device__ __forceinline__ constexpr int word(int h, int s) {
        return T::BASE_BITS == 2 ? s : OPERANDS ? 2 * s + h : 2 * h + s;
    }
    static __device__ __forceinline__ int bit(int h, int j, int e) {
        if (T::BASE_BITS == 8) return 8 * e;
        if (T::VALUES::TABLE) return 16 * (j & 1) + 4 * e + (T::BASE_BITS == 2 ? 2 * h : 0);
        return (e & 1) * 16 + (e >> 1) * 8 + (T::BASE_BITS == 2 ? 4 * (j & 1) + 2 * h : 4 * (j & 1));
    }
    // Byte offset in the main plane and bit shift in that byte.
    static __device__ __forceinline__ int byte(int h, int lane, int j, int s, int e) {
        if (T::FLOAT) return ((2 * j + s) * 32 + lane) * 16 + (e / 2) * 8 + h * 4 + (e & 1) * 2;
        return ((j / GROUPS_AT_ONCE * 32 + lane) * WORDS + word(h, s)) * 4 + bit(h, j, e) / 8;
    }
    static __device__ __forceinline__ int shift(int h, int j, int e) { return T::FLOAT ? 0 : bit(h, j, e) % 8; }
    // Which of the words of the extra plane it is (1 or 2 of a lane per 64 columns), and the bit offset in it.
    static __device__ __forceinline__ int extra_word(int lane, int j) {
        constexpr int words = T::BITS - T::BASE_BITS;
        return ((j / 2) * 32 + lane) * words + (words == 2 ? (j & 1) : 0);
    }
    static __device__ __forceinline__ constexpr int extra_index(int h, int j, int s) {
        return 2 * h + s + (T::BITS - T::BASE_BITS == 1 && !T::VALUES::TABLE ? 4 * (j & 1) : 0);
    }
    static __device__ __forceinline__ int extra_bit(int h, int j, int s, int e) {
        constexpr int bits = T::BITS - T::BASE_BITS;
        if (T::VALUES::TABLE) return extra_index(h, j, s) + 16 * (j & 1) + 4 * e;
        return extra_index(h, j, s) * bits + (e & 1) * 16 + (e >> 1) * 8;
    }
    // Offsets of the scales in bytes.
    static __device__ __forceinline__ int scale(int g, int group, int h) {
        if (T::SCALES == Scales::D) return ((g * T::GROUPS + group) * 2 + h) * 2;
        if (T::SCALES == Scales::DM) return ((g * T::GROUPS + group) * 2 + h) * 4;
        if (T::SCALES == Scales::E8) return (g * T::GROUPS + group) * 2 + h;
        if (T::SIGNED_SUB) return (g * 2 + h) * 2;
        return (g * 2 + h) * 4;
    }
    static __device__ __forceinline__ int sub_scale(int g, int group, int h) {
        if (T::SIGNED_SUB) return TILE_ROWS * 2 + (g * T::GROUPS + group) * 2 + h;
        return TILE_ROWS * 4 + (g * T::GROUPS + group) / 2 * 4 + h;  // of fours; the min's is two bytes behind
    }
    static __device__ __forceinline__ int sub_twos(int g, int group, int h) {
        return TILE_ROWS * 4 + T::SUB_BYTES + (g * T::GROUPS + group) / 4 * 4 + h;
    }
};

// Column inside a group of 32 that (t, s, e) stands for.
template <class T>
__device__ __forceinline__ constexpr int tile_column(int t, int s, int e) {
    return T::GROUP == 16 || T::FLOAT ? 16 * s + 4 * t + e : 8 * t + 4 * s + e;
}

// The bits of `word` from bit FROM on, at bit TO.
template <int FROM, int TO>
__device__ __forceinline__ uint32_t align_bits(uint32_t word) {
    return FROM > TO ? word >> (FROM > TO ? FROM - TO : 0) : word << (FROM > TO ? 0 : TO - FROM);
}

__device__ __forceinline__ uint32_t as_bits(half2 v) { return *reinterpret_cast<const uint32_t*>(&v); }

// Two unsigned bytes u (PAIR: the lower or the higher two) as the halves 1024 + u, by one byte permute. Conversion
// instructions have an eighth of the speed.
template <int PAIR>
__device__ __forceinline__ half2 biased_bytes(uint32_t bytes) {
    return as_half2(__byte_perm(bytes, 0x64646464u, PAIR ? 0x4342 : 0x4140));
}
// The same less `bias`, exactly.
template <int PAIR>
__device__ __forceinline__ half2 bytes_to_half2(uint32_t bytes, float bias) {
    return __hsub2(biased_bytes<PAIR>(bytes), __float2half2_rn(1024.0f + bias));
}

// Two signed scales of a Tile<SUB> or Tile<SUB_8>, exactly.
template <class T, int PAIR>
__device__ __forceinline__ half2 sub_scales(uint32_t bytes) {
    const half2 biased = biased_bytes<PAIR>(bytes ^ 0x80808080u);
    if constexpr (T::SUB_UNIT == 1.0f) return __hsub2(biased, __float2half2_rn(1152.0f));
    return __hfma2(biased, __float2half2_rn(T::SUB_UNIT), __float2half2_rn(-1152.0f * T::SUB_UNIT));
}

// Two bytes of `bytes` (PAIR: the lower or the higher two) as halves, exactly: integers that are biased by 128; 8-bit
// floats, which bit by bit are halves 256 times too small (the exponent has another bias), subnormal ones, too.
template <int PAIR>
__device__ __forceinline__ uint32_t integers_to_half2(uint32_t bytes) {
    return as_bits(bytes_to_half2<PAIR>(bytes, 128.0f));
}
template <int PAIR>
__device__ __forceinline__ uint32_t e4m3_to_half2(uint32_t bytes) {
    const uint32_t high = __byte_perm(bytes, 0, PAIR ? 0x3424 : 0x1404);  // each the upper byte of a half
    return as_bits(__hmul2(as_half2((high & 0x80008000u) | (high >> 1 & 0x3f803f80u)), as_half2(0x5c005c00u)));
}

// What one lane holds of a chunk's codes: 16 bytes of the main plane at a time, and its words of the extra plane.
template <class T>
struct ChunkCodes {
    static constexpr int EXTRA = T::BITS - T::BASE_BITS;  // words per 64 columns
    uint32_t main[T::BASE_BYTES / 128];
    uint32_t extra[T::EXTRA_BYTES > 0 ? T::EXTRA_BYTES / 128 : 1];

    __device__ __forceinline__ void load(const uint8_t* chunk, int lane) {
        load(chunk + T::SCALE_BYTES, chunk + T::SCALE_BYTES + T::BASE_BYTES, lane);
    }
    __device__ __forceinline__ void load(const uint8_t* main_plane, const uint8_t* extra_plane, int lane) {
        if constexpr (T::BASE_BITS == 2) {
            const uint2* from = reinterpret_cast<const uint2*>(main_plane) + lane;
#pragma unroll
            for (int i = 0; i < T::BASE_BYTES / 256; ++i) {
                const uint2 v = from[32 * i];
                main[2 * i] = v.x, main[2 * i + 1] = v.y;
            }
        } else {
            const uint4* from = reinterpret_cast<const uint4*>(main_plane) + lane;
#pragma unroll
            for (int i = 0; i < T::BASE_BYTES / 512; ++i) {
                const uint4 v = from[32 * i];
                main[4 * i] = v.x, main[4 * i + 1] = v.y, main[4 * i + 2] = v.z, main[4 * i + 3] = v.w;
            }
        }
        if constexpr (EXTRA > 0) {
#pragma unroll
            for (int i = 0; i < T::EXTRA_BYTES / 128; i += EXTRA)
                load_extra(extra + i, extra_plane + (i * 32 + lane * EXTRA) * 4);
        }
    }

    // A lane's words of 64 columns: two as one load, for the banks.
    static __device__ __forceinline__ void load_extra(uint32_t* to, const uint8_t* from) {
        if constexpr (EXTRA == 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(from);
            to[0] = v.x, to[1] = v.y;
        } else {
            to[0] = *reinterpret_cast<const uint32_t*>(from);
        }
    }

    // The A operand of step S of group J: elements 0, 1 of rows g, g + 8, then elements 2, 3.
    template <int J, int S>
    __device__ __forceinline__ void unpack(uint32_t (&a)[4]) const {
        if constexpr (T::FLOAT) {
            constexpr int at = 8 * J + 4 * S;
            a[0] = main[at], a[1] = main[at + 1], a[2] = main[at + 2], a[3] = main[at + 3];
        } else if constexpr (T::BASE_BITS == 8) {
            constexpr int low = 4 * J + TilePlace<T>::word(0, S), high = 4 * J + TilePlace<T>::word(1, S);
            unpack_bytes(a, main[low], main[high]);
        } else if constexpr (T::VALUES::TABLE) {
            unpack_bytes(a, bytes<J, S, 0>(), bytes<J, S, 1>());
        } else if constexpr (T::BASE_BITS == 2) {
            constexpr int at = 2 * (J / 2) + S;
            // Two bits further up, for the sake of the lowest: of a product with a subnormal that has many leading zeros
            // tensor cores drop bits.
            constexpr uint32_t low = 0x000c000cu << (J & 1 ? 4 : 0), high_row = low << 2;
            a[0] = (main[at] << 2 & low) | high<J, 0, S, 0>();
            a[1] = (main[at] << 2 & high_row) | high<J, 1, S, 0>();
            a[2] = (main[at] >> 6 & low) | high<J, 0, S, 1>();
            a[3] = (main[at] >> 6 & high_row) | high<J, 1, S, 1>();
        } else {
            constexpr int at = 4 * (J / 2) + S;
            constexpr uint32_t mask = J & 1 ? 0x00f000f0u : 0x000f000fu;
            a[0] = (main[at] & mask) | high<J, 0, S, 0>();
            a[1] = (main[at + 2] & mask) | high<J, 1, S, 0>();
            a[2] = ((main[at] >> 8) & mask) | high<J, 0, S, 1>();
            a[3] = ((main[at + 2] >> 8) & mask) | high<J, 1, S, 1>();
        }
    }
    // Four codes of row g, four of row g + 8.
    static __device__ __forceinline__ void unpack_bytes(uint32_t (&a)[4], uint32_t low, uint32_t high) {
        if constexpr (T::SCALED) {
            a[0] = __byte_perm(low, 0, 0x4140), a[1] = __byte_perm(high, 0, 0x4140);
            a[2] = __byte_perm(low, 0, 0x4342), a[3] = __byte_perm(high, 0, 0x4342);
        } else if constexpr (T::ZERO != 0) {
            a[0] = integers_to_half2<0>(low), a[1] = integers_to_half2<0>(high);
            a[2] = integers_to_half2<1>(low), a[3] = integers_to_half2<1>(high);
        } else {
            a[0] = e4m3_to_half2<0>(low), a[1] = e4m3_to_half2<0>(high);
            a[2] = e4m3_to_half2<1>(low), a[3] = e4m3_to_half2<1>(high);
        }
    }
    // Four codes of row half H in step S of group J as bytes, shifted up by byte_shift(J) bits: in order, or of codes of
    // less than eight bits that are no table's in the order of elements 0, 2, 1, 3. PART: see there.
    template <int J, int S, int H, Part PART = Part::ALL>
    __device__ __forceinline__ uint32_t bytes() const {
        using V = typename T::VALUES;
        if constexpr (PART != Part::ALL) {
            return V::template look_up_sizes<J & 1, (PART == Part::TAKEN) == (V::SIGN > 0)>(main[4 * (J / 2) + 2 * H + S]);
        } else if constexpr (T::BASE_BITS == 8) {
            return main[4 * J + TilePlace<T>::word(H, S)];
        } else if constexpr (T::VALUES::TABLE && T::BASE_BITS == 2) {
            constexpr int from = TilePlace<T>::extra_index(H, J, S);
            const uint32_t low = lop3<0xf0 & 0xcc>(align_bits<2 * H, 0>(main[2 * (J / 2) + S]), 0x33333333u, 0);
            const uint32_t codes =
                lop3<(0xf0 & 0xcc) | 0xaa>(align_bits<from, 2>(extra[J / 2]), 0x44444444u, low);
            return V::template look_up3<J & 1>(codes);
        } else if constexpr (T::VALUES::TABLE) {
            return V::template look_up4<J & 1>(main[4 * (J / 2) + 2 * H + S]);
        } else {
            constexpr int from = T::BASE_BITS == 2 ? 4 * (J & 1) + 2 * H : 4 * (J & 1), to = T::byte_shift(J);
            constexpr uint32_t mask = repeat_byte(((1 << T::BASE_BITS) - 1) << to);
            const uint32_t word = main[T::BASE_BITS == 2 ? 2 * (J / 2) + S : 4 * (J / 2) + 2 * H + S];
            return (align_bits<from, to>(word) & mask) | high_of_bytes<J, S, H, to + T::BASE_BITS>();
        }
    }
    template <int J, int S, int H, int TO>
    __device__ __forceinline__ uint32_t high_of_bytes() const {
        if constexpr (EXTRA == 0) {
            return 0;
        } else {
            constexpr int from = TilePlace<T>::extra_index(H, J, S) * EXTRA;
            return align_bits<from, TO>(extra[EXTRA == 1 ? J / 2 : J]) & repeat_byte(((1 << EXTRA) - 1) << TO);
        }
    }
    // The high bits of row half H, step S, element pair P of group J, moved to where they belong.
    template <int J, int H, int S, int P>
    __device__ __forceinline__ uint32_t high() const {
        if constexpr (EXTRA == 0) {
            return 0;
        } else {
            constexpr int to = T::BASE_BITS == 2 ? 4 * (J & 1) + 2 * H + 4 : J & 1 ? 8 : 4;
            constexpr uint32_t mask = (EXTRA == 1 ? 0x00010001u : 0x00030003u) << to;
            constexpr int from = TilePlace<T>::extra_index(H, J, S) * EXTRA + 8 * P;
            return align_bits<from, to>(extra[EXTRA == 1 ? J / 2 : J]) & mask;
        }
    }
};

// 2^(e - 128); the lowest two are subnormal.
__device__ __forceinline__ float power_of_two(uint32_t e) {
    return __uint_as_float(e < 2 ? 0x00200000u << e : e - 1 << 23);
}

// The same of the byte from bit FROM on, in few instructions: of 0 it is 0, which no sum can tell from 2^-128.
template <int FROM>
__device__ __forceinline__ float half_power_of_two(uint32_t bytes) {
    return __uint_as_float(align_bits<FROM, 23>(bytes) & 0x7f800000u) * 0.5f;
}

// The scales and minimums of rows g and g + 8 for one group, in float32.
struct RowScales {
    float d[2];
    float m[2];
};

// The scales of N groups of a chunk that one lane needs, loaded up to 16 bytes at a time; get<i>() decodes.
template <class T, int N = T::GROUPS>
struct ChunkScales {
    uint32_t dd[T::SCALES == Scales::D ? N : T::SCALES == Scales::DM ? 2 * N : 2];
    uint32_t sc[T::HAS_SUB || T::SCALES == Scales::E8 ? (N + 1) / 2 : 1];  // two groups' bytes, or fours
    uint32_t twos[T::TWOS ? (N + 3) / 4 : 1];

    // Of groups first ... first + N - 1; `first` is a multiple of N.
    __device__ __forceinline__ void load(const uint8_t* chunk, int g, int first = 0) {
        const int group = g * T::GROUPS + first;
        if constexpr (T::SCALES == Scales::D || T::SCALES == Scales::DM) {
            constexpr int words = T::SCALES == Scales::D ? 1 : 2;
            load_words<N * words>(dd, chunk + group * words * 4);
        } else if constexpr (T::SCALES == Scales::E8) {
            load_pairs(sc, chunk + group * 2);
        } else {
            constexpr int d_bytes = T::SIGNED_SUB ? 4 : 8;
            load_words<d_bytes / 4>(dd, chunk + g * d_bytes);
            const uint8_t* sub = chunk + 8 * d_bytes;
            load_pairs(sc, sub + group * 2);
            if constexpr (T::TWOS) {
                load_words<(N + 3) / 4>(twos, sub + T::SUB_BYTES + group / 4 * 4);
                if constexpr (N < 4) twos[0] >>= (first & 2) * 2;  // as if they were the first two of four
            }
        }
    }

    // Two bytes of each group.
    template <int WORDS>
    static __device__ __forceinline__ void load_pairs(uint32_t (&out)[WORDS], const uint8_t* from) {
        if constexpr (N == 1)
            out[0] = *reinterpret_cast<const uint16_t*>(from);
        else
            load_words<N / 2>(out, from);
    }

    template <int WORDS, int ROOM>
    static __device__ __forceinline__ void load_words(uint32_t (&out)[ROOM], const uint8_t* from) {
        static_assert(WORDS <= ROOM, "");
        if constexpr (WORDS % 4 == 0) {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4) {
                const uint4 v = *reinterpret_cast<const uint4*>(from + 4 * i);
                out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
            }
        } else if constexpr (WORDS == 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(from);
            out[0] = v.x, out[1] = v.y;
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) out[i] = reinterpret_cast<const unsigned*>(from)[i];
        }
    }

    // Bytes (scale of row g, of row g + 8, min of g, of g + 8).
    template <int GROUP_INDEX>
    __device__ __forceinline__ uint32_t scales_and_mins() const {
        const uint32_t fours = align_bits<GROUP_INDEX % 2 * 4, 0>(sc[GROUP_INDEX / 2]) & 0x0f0f0f0fu;
        if constexpr (!T::TWOS) return fours;
        return fours | (align_bits<GROUP_INDEX % 4 * 2, 4>(twos[GROUP_INDEX / 4]) & 0x30303030u);
    }

    template <int GROUP_INDEX>
    __device__ __forceinline__ RowScales get() const {
        RowScales r;
        if constexpr (T::SCALES == Scales::D) {
            const float2 d = half2_to_float2(dd[GROUP_INDEX]);
            r.d[0] = d.x, r.d[1] = d.y, r.m[0] = r.m[1] = 0.0f;
        } else if constexpr (T::SCALES == Scales::DM) {
            const float2 low = half2_to_float2(dd[2 * GROUP_INDEX]), high = half2_to_float2(dd[2 * GROUP_INDEX + 1]);
            r.d[0] = low.x, r.d[1] = high.x, r.m[0] = low.y, r.m[1] = high.y;
        } else {
            const uint32_t word = sc[GROUP_INDEX / 2];
            if constexpr (T::SIGNED_SUB) {
                const float2 d = half2_to_float2(dd[0]);
                const float2 scale = __half22float2(sub_scales<T, GROUP_INDEX & 1>(word));
                r.d[0] = d.x * scale.x, r.d[1] = d.y * scale.y;
                r.m[0] = r.m[1] = 0.0f;
            } else if constexpr (T::SCALES == Scales::E8) {
                constexpr int from = 16 * (GROUP_INDEX & 1);
                r.d[0] = half_power_of_two<from>(word), r.d[1] = half_power_of_two<from + 8>(word);
                r.m[0] = r.m[1] = 0.0f;
            } else {
                const float2 low = half2_to_float2(dd[0]), high = half2_to_float2(dd[1]);
                const uint32_t both = scales_and_mins<GROUP_INDEX>();
                const float2 scale = __half22float2(bytes_to_half2<0>(both, 0.0f));
                const float2 least = __half22float2(bytes_to_half2<1>(both, 0.0f));
                r.d[0] = low.x * scale.x, r.d[1] = high.x * scale.y;
                r.m[0] = -low.y * least.x, r.m[1] = -high.y * least.y;
            }
        }
        return r;
    }
};

// The value of a code, less what it is scaled by.
template <class T>
__device__ __forceinline__ float code_value(int code) {
    if constexpr (T::VALUES::TABLE)
        return static_cast<float>(T::VALUES::value(code));
    else if constexpr (!T::SCALED && T::ZERO == 0)
        return half2_to_float2(e4m3_to_half2<0>(code)).x;
    else
        return static_cast<float>(code - T::ZERO);
}

// The scale and minimum of one (row, group), from where they lie.
template <class T>
__device__ __forceinline__ RowScales row_scales(const uint8_t* chunk, int g, int group, int h) {
    using Place = TilePlace<T>;
    const uint8_t* at = chunk + Place::scale(g, group, h);
    if constexpr (T::SCALES == Scales::E8) {
        return {{power_of_two(*at)}, {0.0f}};
    } else {
        const __half* d = reinterpret_cast<const __half*>(at);
        float scale = __half2float(d[0]), minimum = T::MIN ? __half2float(d[1]) : 0.0f;
        const uint8_t* sub = chunk + Place::sub_scale(g, group, h);
        if constexpr (T::SIGNED_SUB) scale *= static_cast<float>(static_cast<int8_t>(*sub)) * T::SUB_UNIT;
        if constexpr (T::PACKED_SUB) {
            const auto small = [&](int i) {
                const int fours = sub[i] >> group % 2 * 4 & 15;
                return T::TWOS ? fours | (chunk[Place::sub_twos(g, group, h) + i] >> group % 4 * 2 & 3) << 4 : fours;
            };
            scale *= static_cast<float>(small(0));
            minimum *= -static_cast<float>(small(2));
        }
        return {{scale}, {minimum}};
    }
}

// The weight at (row of the tile, column of the chunk), in float32: for lookups of single rows.
template <class T>
__device__ float tile_weight(const uint8_t* chunk, int row, int column) {
    const int h = row / 8, g = row % 8, j = column / 32, c = column % 32, e = c % 4;
    constexpr bool halves = T::GROUP == 16 || T::FLOAT;
    const int t = halves ? c % 16 / 4 : c / 8, s = halves ? c / 16 : c % 8 / 4, lane = 4 * g + t;
    using Place = TilePlace<T>;
    const uint8_t* main = chunk + T::SCALE_BYTES + Place::byte(h, lane, j, s, e);
    if constexpr (T::FLOAT) {
        return __half2float(*reinterpret_cast<const __half*>(main));
    } else {
        int code = *main >> Place::shift(h, j, e) & ((1 << T::BASE_BITS) - 1);
        if constexpr (T::EXTRA_BYTES > 0) {
            constexpr int bits = T::BITS - T::BASE_BITS;
            const uint32_t* high = reinterpret_cast<const uint32_t*>(chunk + T::SCALE_BYTES + T::BASE_BYTES);
            const uint32_t word = high[Place::extra_word(lane, j)];
            code |= (word >> Place::extra_bit(h, j, s, e) & ((1 << bits) - 1)) << T::BASE_BITS;
        }
        const float value = code_value<T>(code);
        if constexpr (T::SCALED) {
            const RowScales scales = row_scales<T>(chunk, g, column / T::GROUP, h);
            return scales.d[0] * value + scales.m[0];
        } else {
            return value;
        }
    }
}
