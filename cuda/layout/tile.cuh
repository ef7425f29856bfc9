// Tiles: the layout of a weight matrix W[N, K] in device memory, and the device functions that read it.
//
// A tile replaces the GGUF quant blocks, which suit files and not the GPU (a 34-byte Q8_0 block is never 16-byte
// aligned). The order of the weights in a tile is the order of the A operand of an mma, so a lane fills its operand
// registers with 16-byte loads. repack.cu writes the tiles once, when the model is loaded.
//
//        tile row    16 rows of W. 16 is the M of mma.m16n8k16 (f16) and of mma.m16n8k32 (bytes).
//        chunk       16 rows x CHUNK_K columns. Each chunk starts on a 128-byte line.
//        matrix      [tile row][chunk along K]. Rows past N and columns past K hold zeros.
//        group       GROUP columns with one scale: 16 or 32
//        step s      16 columns of 32: s = 0, 1
//        element e   one of the four weights of a lane in a step: e = 0..3
//        row half h  row g (h = 0) or row g + 8 (h = 1)
//
//        lane = 4 g + t                            the t that holds each of 32 columns:
//        g = 0..7   rows g and g + 8               group of 32:  t t t t t t t t (8 t ... 8 t + 7)
//        t = 0..3   columns                        group of 16:  t t t t (4 t ... 4 t + 3), twice
//
// An f16 mma covers one step, four columns for each t; a byte mma covers both steps. The activations are the B operand:
// lane (g, t) needs the same columns of B's column g.
//
// Weights stay integers in memory. A word of codes unpacks in two ways:
//
//        bytes()    decode GEMMs (fixed_point.cuh)  unsigned bytes: one AND per four codes, no instruction for 8 bits.
//                                                   Some codes stay four bits too high; the scale of x corrects that.
//        unpack()   prefill GEMMs                   f16: one AND (2, 4 bits) or one byte permute (8 bits) per two codes
//
// unpack() uses that a code u < 2048 in the low bits of an f16 *is* the f16 u * 2^-24 (mostly subnormal), exactly. This
// avoids the 1024 + u bias of the usual PRMT and LOP3 converters, and the cancellation that the bias causes. Tensor
// cores multiply subnormals at full speed. The GEMM multiplies each output by 2^24 once, applies the scale once per
// group in float32, and subtracts the zero point by way of the sum of the activations.
//
// Codes of three or four bits may index a table of signed bytes; a looked-up code is an 8-bit code. Codes without
// scales unpack to the exact f16 values that they stand for. A scale of a whole row is not part of a tile: see
// gemm.cuh.
#pragma once
#include "lib/convert.cuh"
#include "formats/bits.cuh"
#include "norm/norm.cuh"

constexpr int TILE_ROWS = 16;
constexpr float CODE_UNIT = 5.9604644775390625e-8f;  // 2^-24: the f16 whose bits are 1

// The scales of a tile, and their layout at the start of a chunk.
enum class Scales {
    NONE,
    D,       // f16 d per group:                                        [g][group][row half]
    DM,      // f16 (d, m) per group:                                   [g][group][row half]
    SUB,     // f16 d per 256 columns, i8 scale per group:              d [g][row half], sc [g][group][row half]
    SUB_8,   // as SUB; the scale counts eighths of d
    SUB_M4,  // f16 (d, dmin) per 256, u4 (scale, min) per group:       dd [g][row half], fours [g][group / 2]
    SUB_M6,  // as SUB_M4, with u6 (scale, min):                        dd, fours, and twos [g][group / 4]
    E8,      // u8 e per group, for 2^(e - 128):                        [g][group][row half]
};
// A word of fours holds the lower four bits of the scales and minimums of two groups, one nibble per group. Its bytes
// are (scale of row g, scale of row g + 8, min of row g, min of row g + 8). A word of twos holds the upper two bits of
// four groups in the same byte order.

// ---- the values of codes -----------------------------------------------------------------------------------------
// zero(bits) is the zero point: the weight is scale * (code - zero).

// The registers of values that need none; see Table::Words.
struct NoWords {
    static __device__ __forceinline__ NoWords kept(int) { return {}; }
};

struct Integers {
    using Words = NoWords;
    static constexpr bool TABLE = false, SPLIT = false;
    static constexpr int SCALE = 1;
    // Two-bit codes are the digits -1, 0, 1.
    static __device__ __forceinline__ constexpr int zero(int bits) { return bits == 2 ? 1 : 1 << (bits - 1); }
};

// 8-bit floats: sign, four bits of exponent, three bits of mantissa.
struct E4M3 {
    using Words = NoWords;
    static constexpr bool TABLE = false, SPLIT = false;
    static constexpr int SCALE = 1;
    static __device__ __forceinline__ constexpr int zero(int) { return 0; }
};

// PRMT. A selector with its highest bit set repeats the highest bit of the selected byte eight times.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
#if EMULATED
    return __byte_perm(low, high, selectors);
#else
    uint32_t result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selectors));
    return result;
#endif
}

// A table of 8 or 16 signed bytes, the first one in the lowest bits of A. A look-up returns (value + zero) * SCALE.
// zero is a power of two, so zero * scale is exact in f16. SCALE lifts the products of small tables above the lowest
// bits.
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

    // Whether the first eight values have the sign SIGN and the last eight the opposite sign. A product with the table
    // is then the difference of two products with magnitudes.
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
    // The words of a table that a look-up needs in registers, because a PRMT takes one constant.
    struct Words {
        uint32_t first = word(0), third = word(2);
        // Registers for the whole kernel; the compiler otherwise sets them again for each look-up.
        static __device__ __forceinline__ Words kept(int lane) {
            const uint32_t zero = ::kept(lane) / 32;  // the compiler does not know that it is below 32
            return {::kept(word(0) + zero), ::kept(word(2) + zero)};
        }
    };
    static __device__ __forceinline__ constexpr uint32_t sizes(int i) {
        const int sign = i < 2 ? SIGN : -SIGN;
        return pack4(sign * value(4 * i), sign * value(4 * i + 1), sign * value(4 * i + 2), sign * value(4 * i + 3));
    }
    // Returns the magnitudes of four of a word's eight codes: the lower four, or the UPPER four. Codes in the other
    // half of the table (LAST selects the last eight entries) give 0: PRMT repeats the highest bit, and that bit is 0.
    template <bool UPPER, bool LAST>
    static __device__ __forceinline__ uint32_t look_up_sizes(uint32_t codes) {
        constexpr uint32_t low = sizes(LAST ? 2 : 0), high = sizes(LAST ? 3 : 1);
        const uint32_t here = codes >> (UPPER ? 16 : 0);
        return permute_bytes(low, high, LAST ? here ^ 0x88888888u : here);
    }
    // Looks up four of a word's eight 3-bit codes: the lower four, or the UPPER four.
    template <bool UPPER>
    static __device__ __forceinline__ uint32_t look_up3(uint32_t codes, const Words& words) {
        constexpr uint32_t high = word(1);
        return permute_bytes(words.first, high, codes >> (UPPER ? 16 : 0));
    }
    // Looks up four of a word's eight 4-bit codes. A PRMT looks up eight entries, so 16 entries take two PRMTs. With
    // entries of seven bits, each PRMT returns 0 for the codes of the other PRMT, because the highest bit of its
    // entries is 0; with entries of eight bits, a third PRMT selects. The two results are added, since an addition need
    // not wait for the pipe of PRMTs. The lop3 results serve both parts of a word: the compiler would compute them twice
    // if they were written with operators.
    template <bool UPPER>
    static __device__ __forceinline__ uint32_t look_up4(uint32_t codes, const Words& words) {
        const uint32_t low[2] = {words.first, word(1)}, high[2] = {words.third, word(3)};
        constexpr int from_bit = UPPER ? 16 : 0;
        if constexpr (SEVEN_BITS) {
            const uint32_t others = lop3<0xf0 ^ 0xcc>(codes, 0x88888888u, 0);
            return permute_bytes(low[0], low[1], codes >> from_bit) +
                   permute_bytes(high[0], high[1], others >> from_bit);
        } else {
            const uint32_t entry = lop3<0xf0 & 0xcc>(codes, 0x77777777u, 0);
            const uint32_t choice = lop3<(0xf0 & 0xcc) | 0xaa>(codes >> 1, 0x44444444u, 0x32103210u);
            return permute_bytes(permute_bytes(low[0], low[1], entry >> from_bit),
                                 permute_bytes(high[0], high[1], entry >> from_bit), choice >> from_bit);
        }
    }
};

// The 4-bit floats E2M1, doubled, so that they are integers. bytes() looks them up. unpack() does not: their bits are
// the sign, the lower bits of the exponent and the highest bit of the mantissa of the f16 value * F16_FACTOR * 2^-24.
struct E2M1 : Table<0x03020100, 0x0c080604, 0xfdfeff00, 0xf4f8fafc> {
    static constexpr int F16_FACTOR = 512;
    // Returns four of a word's eight codes as f16, the lower four or the UPPER four: elements 0 and 1, then 2 and 3. In
    // `even` and `odd`, every second code is the upper byte of its f16.
    template <bool UPPER>
    static __device__ __forceinline__ uint2 to_half2(uint32_t codes) {
        constexpr uint32_t sign = 0x80808080u, size = 0x0e0e0e0eu, places = UPPER ? 0x3424 : 0x1404;
        const uint32_t even = lop3<(0xf0 & 0xcc) | 0xaa>(codes << 1, size, lop3<0xf0 & 0xcc>(codes << 4, sign, 0));
        const uint32_t odd = lop3<(0xf0 & 0xcc) | 0xaa>(codes >> 3, size, lop3<0xf0 & 0xcc>(codes, sign, 0));
        return {__byte_perm(even, 0, places), __byte_perm(odd, 0, places)};
    }
};
template <class VALUES>
constexpr bool IS_E2M1 = false;
template <>
constexpr bool IS_E2M1<E2M1> = true;

// Which codes of a SPLIT table to look up: all as values, or the magnitudes of the positive (ADDED) or negative (TAKEN)
// values.
enum class Part { ALL, ADDED, TAKEN };

// The layout of one kind of tile.
//
//        BITS      2 to 6 or 8: codes; 16: f16 weights
//        GROUP     columns with one scale
//        SCALES    the scales, see above
//        CHUNK_K   columns of a chunk
//        VALUES    the values of codes: Integers, E4M3 or Table
template <int BITS_, int GROUP_, Scales SCALES_, int CHUNK_K_, class VALUES_ = Integers>
struct Tile {
    static constexpr int BITS = BITS_, GROUP = GROUP_, CHUNK_K = CHUNK_K_;
    static constexpr Scales SCALES = SCALES_;
    using VALUES = VALUES_;
    static constexpr bool FLOAT = BITS == 16;
    static constexpr bool SCALED = !FLOAT && SCALES != Scales::NONE;  // the GEMM multiplies codes; else f16 values
    static constexpr bool SIGNED_SUB = SCALES == Scales::SUB || SCALES == Scales::SUB_8;
    static constexpr bool PACKED_SUB = SCALES == Scales::SUB_M4 || SCALES == Scales::SUB_M6;
    static constexpr bool TWOS = SCALES == Scales::SUB_M6;
    static constexpr bool HAS_SUB = SIGNED_SUB || PACKED_SUB;
    static constexpr float SUB_UNIT = SCALES == Scales::SUB_8 ? 0.125f : 1.0f;
    static constexpr bool MIN = SCALES == Scales::DM || PACKED_SUB;
    static constexpr int ZERO = MIN || FLOAT || IS_E2M1<VALUES> ? 0 : VALUES::zero(BITS);
    // Whether a word's codes are in the order of elements; otherwise it is 0, 2, 1, 3.
    static constexpr bool IN_ORDER = BITS == 8 || (VALUES::TABLE && !IS_E2M1<VALUES>);
    static constexpr int GROUPS = CHUNK_K / GROUP;
    static constexpr int SUB_BYTES = TILE_ROWS * GROUPS;  // bytes of the i8 scales, or of the fours
    static constexpr int SCALE_BYTES = !SCALED                ? 0
                                       : SCALES == Scales::D  ? TILE_ROWS * GROUPS * 2
                                       : SCALES == Scales::DM ? TILE_ROWS * GROUPS * 4
                                       : SIGNED_SUB           ? TILE_ROWS * 2 + SUB_BYTES
                                       : PACKED_SUB           ? TILE_ROWS * 4 + SUB_BYTES + TWOS * SUB_BYTES / 2
                                                              : SUB_BYTES;
    static constexpr int BASE_BITS = BITS == 5 || BITS == 6 ? 4 : BITS == 3 ? 2 : BITS;  // bits in the main plane
    static constexpr int BASE_BYTES = TILE_ROWS * CHUNK_K * BASE_BITS / 8;
    static constexpr int EXTRA_BYTES = TILE_ROWS * CHUNK_K * (BITS - BASE_BITS) / 8;
    static constexpr int USED = SCALE_BYTES + BASE_BYTES + EXTRA_BYTES;
    static_assert(USED % 16 == 0 && SCALE_BYTES % 16 == 0, "chunks are read 16 bytes at a time");
    static constexpr int BYTES = (USED + 127) / 128 * 128;  // distance of chunks: each starts on a 128-byte line
    static_assert(!VALUES::TABLE || ((BITS == 3 || BITS == 4) && SCALED && !MIN), "");

    // The factor by which unpack() returns the codes of row half H of 32-column group J too large, because several
    // codes share a word and unpack() does not shift them down.
    template <int J, int H>
    static __device__ __forceinline__ constexpr float shift() {
        if constexpr (IS_E2M1<VALUES>) return VALUES::F16_FACTOR;
        if (VALUES::TABLE) return VALUES::SCALE;
        if (BASE_BITS == 2) return 4 << 2 * (2 * (J & 1) + H);
        return BASE_BITS == 4 && (J & 1) ? 16.0f : VALUES::SCALE;
    }
    // The bits by which bytes() returns the codes of 32-column group j too high.
    static __device__ __forceinline__ constexpr int byte_shift(int j) {
        return BASE_BITS < 8 && BITS <= 4 && !VALUES::TABLE && (j & 1) ? 4 : 0;
    }
};

// The offset of the weight (row half h, lane, 32-column group j, step s, element e) in a chunk. repack.cu writes with
// these offsets; tile_weight() reads single weights with them.
//
// A chunk is [scales][main plane][extra plane]. The main plane holds BASE_BITS of each code, the extra plane the bits
// above. A lane reads the main plane in words of groups j and j + 1 (8 bits: of one group):
//
//        8 bits         a word has one (h, s). With scales, a lane's four words are the A operand of a byte mma.
//        4 bits         a word has one (h, s) of two groups
//        2 bits         a word has both h of one s of two groups
//        table codes    four bits apart, so that a PRMT takes them as selectors; in the order of e, E2M1: 0, 2, 1, 3
//
// The fields of codes below 8 bits are placed so that one AND gives four bytes or a half2: elements 0 and 1 are the two
// f16 of one register, elements 2 and 3 those of the next one, eight bits higher. Odd groups use the bits in between.
template <class T>
struct TileOffset {
    static constexpr int GROUPS_AT_ONCE = T::BASE_BITS == 8 ? 1 : 2;
    static constexpr int WORDS = T::BASE_BITS == 2 ? 2 : 4;
    static constexpr bool OPERANDS = T::BASE_BITS == 8 && T::SCALED;

    static __device__ __forceinline__ constexpr int word(int h, int s) {
        return T::BASE_BITS == 2 ? s : OPERANDS ? 2 * s + h : 2 * h + s;
    }
    static __device__ __forceinline__ int bit(int h, int j, int e) {
        if (T::BASE_BITS == 8) return 8 * e;
        if (IS_E2M1<typename T::VALUES>) return 16 * (j & 1) + (e & 1) * 8 + (e >> 1) * 4;
        if (T::VALUES::TABLE) return 16 * (j & 1) + 4 * e + (T::BASE_BITS == 2 ? 2 * h : 0);
        return (e & 1) * 16 + (e >> 1) * 8 + (T::BASE_BITS == 2 ? 4 * (j & 1) + 2 * h : 4 * (j & 1));
    }
    // The byte offset in the main plane; shift() is the bit offset in that byte.
    static __device__ __forceinline__ int byte(int h, int lane, int j, int s, int e) {
        if (T::FLOAT) return ((2 * j + s) * 32 + lane) * 16 + (e / 2) * 8 + h * 4 + (e & 1) * 2;
        return ((j / GROUPS_AT_ONCE * 32 + lane) * WORDS + word(h, s)) * 4 + bit(h, j, e) / 8;
    }
    static __device__ __forceinline__ int shift(int h, int j, int e) { return T::FLOAT ? 0 : bit(h, j, e) % 8; }
    // The word of the extra plane (a lane has 1 or 2 words per 64 columns); extra_bit() is the bit offset in that word.
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
    // Byte offsets of the scales from the start of the chunk.
    static __device__ __forceinline__ int scale(int g, int group, int h) {
        if (T::SCALES == Scales::D) return ((g * T::GROUPS + group) * 2 + h) * 2;
        if (T::SCALES == Scales::DM) return ((g * T::GROUPS + group) * 2 + h) * 4;
        if (T::SCALES == Scales::E8) return (g * T::GROUPS + group) * 2 + h;
        if (T::SIGNED_SUB) return (g * 2 + h) * 2;
        return (g * 2 + h) * 4;
    }
    static __device__ __forceinline__ int sub_scale(int g, int group, int h) {
        if (T::SIGNED_SUB) return TILE_ROWS * 2 + (g * T::GROUPS + group) * 2 + h;
        return TILE_ROWS * 4 + (g * T::GROUPS + group) / 2 * 4 + h;  // fours: the min is two bytes after the scale
    }
    static __device__ __forceinline__ int sub_twos(int g, int group, int h) {
        return TILE_ROWS * 4 + T::SUB_BYTES + (g * T::GROUPS + group) / 4 * 4 + h;
    }
};

// The column, inside 32 columns, of element e of step s of lane t.
template <class T>
__device__ __forceinline__ constexpr int tile_column(int t, int s, int e) {
    return T::GROUP == 16 || T::FLOAT ? 16 * s + 4 * t + e : 8 * t + 4 * s + e;
}

// Shifts `word` so that bit FROM moves to bit TO.
template <int FROM, int TO>
__device__ __forceinline__ uint32_t align_bits(uint32_t word) {
    return FROM > TO ? word >> (FROM > TO ? FROM - TO : 0) : word << (FROM > TO ? 0 : TO - FROM);
}

__device__ __forceinline__ uint32_t as_bits(half2 v) { return *reinterpret_cast<const uint32_t*>(&v); }

// Converts two unsigned bytes u (PAIR 0: the lower two, 1: the upper two) to the f16 values 1024 + u with one PRMT.
// Conversion instructions have an eighth of the speed.
template <int PAIR>
__device__ __forceinline__ half2 biased_bytes(uint32_t bytes) {
    return as_half2(__byte_perm(bytes, 0x64646464u, PAIR ? 0x4342 : 0x4140));
}
// Converts two unsigned bytes u to the f16 values u - bias, exactly.
template <int PAIR>
__device__ __forceinline__ half2 bytes_to_half2(uint32_t bytes, float bias) {
    return __hsub2(biased_bytes<PAIR>(bytes), __float2half2_rn(1024.0f + bias));
}

// Converts two signed scales of a Scales::SUB or SUB_8 tile to f16, exactly.
template <class T, int PAIR>
__device__ __forceinline__ half2 sub_scales(uint32_t bytes) {
    const half2 biased = biased_bytes<PAIR>(bytes ^ 0x80808080u);
    if constexpr (T::SUB_UNIT == 1.0f) return __hsub2(biased, __float2half2_rn(1152.0f));
    return __hfma2(biased, __float2half2_rn(T::SUB_UNIT), __float2half2_rn(-1152.0f * T::SUB_UNIT));
}

// Converts two bytes (PAIR 0: the lower two, 1: the upper two) to f16, exactly. integers_to_half2: integers with a bias
// of 128. e4m3_to_half2: E4M3 floats; the bits of an E4M3 float, subnormal or not, are an f16 that is 256 times too
// small, because the exponents have different biases.
template <int PAIR>
__device__ __forceinline__ uint32_t integers_to_half2(uint32_t bytes) {
    return as_bits(bytes_to_half2<PAIR>(bytes, 128.0f));
}
template <int PAIR>
__device__ __forceinline__ uint32_t e4m3_to_half2(uint32_t bytes) {
    const uint32_t high = __byte_perm(bytes, 0, PAIR ? 0x3424 : 0x1404);  // each byte in the upper byte of an f16
    return as_bits(__hmul2(as_half2((high & 0x80008000u) | (high >> 1 & 0x3f803f80u)), as_half2(0x5c005c00u)));
}

// The codes of a chunk that one lane holds in registers. load() reads the main plane 16 bytes at a time.
template <class T>
struct ChunkCodes {
    static constexpr int EXTRA = T::BITS - T::BASE_BITS;  // words per 64 columns
    using Words = typename T::VALUES::Words;
    uint32_t main[T::BASE_BYTES / 128];
    uint32_t extra[T::EXTRA_BYTES > 0 ? T::EXTRA_BYTES / 128 : 1];

    __device__ __forceinline__ void load(const uint8_t* chunk, int lane) {
        load(chunk + T::SCALE_BYTES, chunk + T::SCALE_BYTES + T::BASE_BYTES, lane);
    }
    __device__ __forceinline__ void load(const uint8_t* main_plane, const uint8_t* extra_plane, int lane) {
        if constexpr (T::BASE_BITS == 2) {
            const uint2* src = reinterpret_cast<const uint2*>(main_plane) + lane;
#pragma unroll
            for (int i = 0; i < T::BASE_BYTES / 256; ++i) {
                const uint2 v = src[32 * i];
                main[2 * i] = v.x, main[2 * i + 1] = v.y;
            }
        } else {
            const uint4* src = reinterpret_cast<const uint4*>(main_plane) + lane;
#pragma unroll
            for (int i = 0; i < T::BASE_BYTES / 512; ++i) {
                const uint4 v = src[32 * i];
                main[4 * i] = v.x, main[4 * i + 1] = v.y, main[4 * i + 2] = v.z, main[4 * i + 3] = v.w;
            }
        }
        if constexpr (EXTRA > 0) {
#pragma unroll
            for (int i = 0; i < T::EXTRA_BYTES / 128; i += EXTRA)
                load_extra(extra + i, extra_plane + (i * 32 + lane * EXTRA) * 4);
        }
    }

    // Loads a lane's words of 64 columns. Two words are one 8-byte load, which avoids bank conflicts.
    static __device__ __forceinline__ void load_extra(uint32_t* dst, const uint8_t* src) {
        if constexpr (EXTRA == 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(src);
            dst[0] = v.x, dst[1] = v.y;
        } else {
            dst[0] = *reinterpret_cast<const uint32_t*>(src);
        }
    }

    // Returns the f16 A operand of step S of group J: elements 0, 1 of rows g and g + 8, then elements 2, 3. HIGH: the
    // upper bytes of codes that are looked up.
    template <int J, int S, int HIGH = 0>
    __device__ __forceinline__ void unpack(uint32_t (&a)[4], const Words& words = {}) const {
        if constexpr (T::FLOAT) {
            constexpr int at = 8 * J + 4 * S;
            a[0] = main[at], a[1] = main[at + 1], a[2] = main[at + 2], a[3] = main[at + 3];
        } else if constexpr (T::BASE_BITS == 8) {
            constexpr int low = 4 * J + TileOffset<T>::word(0, S), high = 4 * J + TileOffset<T>::word(1, S);
            unpack_bytes(a, main[low], main[high]);
        } else if constexpr (IS_E2M1<typename T::VALUES> && HIGH == 0) {
            constexpr int at = 4 * (J / 2) + S;
            const uint2 low = E2M1::to_half2<J & 1>(main[at]), high_row = E2M1::to_half2<J & 1>(main[at + 2]);
            a[0] = low.x, a[1] = high_row.x, a[2] = low.y, a[3] = high_row.y;
        } else if constexpr (T::VALUES::TABLE) {
            unpack_bytes<HIGH>(a, bytes<J, S, 0>(words), bytes<J, S, 1>(words));
        } else if constexpr (T::BASE_BITS == 2) {
            constexpr int at = 2 * (J / 2) + S;
            // The codes are shifted up by two bits: tensor cores drop bits of a product with a subnormal that has many
            // leading zeros, which would affect the codes in the lowest bits.
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
    // Converts four bytes of row g (low) and four bytes of row g + 8 (high) to an f16 A operand.
    template <int HIGH = 0>
    static __device__ __forceinline__ void unpack_bytes(uint32_t (&a)[4], uint32_t low, uint32_t high) {
        if constexpr (T::SCALED) {
            constexpr uint32_t first = T::IN_ORDER ? 0x4140 : 0x4240, second = T::IN_ORDER ? 0x4342 : 0x4341;
            a[0] = __byte_perm(low, HIGH, first), a[1] = __byte_perm(high, HIGH, first);
            a[2] = __byte_perm(low, HIGH, second), a[3] = __byte_perm(high, HIGH, second);
        } else if constexpr (T::ZERO != 0) {
            a[0] = integers_to_half2<0>(low), a[1] = integers_to_half2<0>(high);
            a[2] = integers_to_half2<1>(low), a[3] = integers_to_half2<1>(high);
        } else {
            a[0] = e4m3_to_half2<0>(low), a[1] = e4m3_to_half2<0>(high);
            a[2] = e4m3_to_half2<1>(low), a[3] = e4m3_to_half2<1>(high);
        }
    }
    // Returns the four codes of row half H in step S of group J as bytes, shifted up by byte_shift(J) bits, in
    // the order of elements, or 0, 2, 1, 3 without IN_ORDER. PART: see enum Part.
    template <int J, int S, int H, Part PART = Part::ALL>
    __device__ __forceinline__ uint32_t bytes(const Words& words = {}) const {
        using V = typename T::VALUES;
        if constexpr (PART != Part::ALL) {
            return V::template look_up_sizes<J & 1, (PART == Part::TAKEN) == (V::SIGN > 0)>(
                main[4 * (J / 2) + 2 * H + S]);
        } else if constexpr (T::BASE_BITS == 8) {
            return main[4 * J + TileOffset<T>::word(H, S)];
        } else if constexpr (T::VALUES::TABLE && T::BASE_BITS == 2) {
            constexpr int from_bit = TileOffset<T>::extra_index(H, J, S);
            const uint32_t low = lop3<0xf0 & 0xcc>(align_bits<2 * H, 0>(main[2 * (J / 2) + S]), 0x33333333u, 0);
            const uint32_t codes = lop3<(0xf0 & 0xcc) | 0xaa>(align_bits<from_bit, 2>(extra[J / 2]), 0x44444444u, low);
            return V::template look_up3<J & 1>(codes, words);
        } else if constexpr (T::VALUES::TABLE) {
            return V::template look_up4<J & 1>(main[4 * (J / 2) + 2 * H + S], words);
        } else {
            constexpr int from_bit = T::BASE_BITS == 2 ? 4 * (J & 1) + 2 * H : 4 * (J & 1), to_bit = T::byte_shift(J);
            constexpr uint32_t mask = repeat_byte(((1 << T::BASE_BITS) - 1) << to_bit);
            const uint32_t word = main[T::BASE_BITS == 2 ? 2 * (J / 2) + S : 4 * (J / 2) + 2 * H + S];
            return (align_bits<from_bit, to_bit>(word) & mask) | high_of_bytes<J, S, H, to_bit + T::BASE_BITS>();
        }
    }
    template <int J, int S, int H, int TO>
    __device__ __forceinline__ uint32_t high_of_bytes() const {
        if constexpr (EXTRA == 0) {
            return 0;
        } else {
            constexpr int from_bit = TileOffset<T>::extra_index(H, J, S) * EXTRA;
            return align_bits<from_bit, TO>(extra[EXTRA == 1 ? J / 2 : J]) & repeat_byte(((1 << EXTRA) - 1) << TO);
        }
    }
    // Returns the extra-plane bits of row half H, step S, element pair P of group J, shifted to their bits of the code.
    template <int J, int H, int S, int P>
    __device__ __forceinline__ uint32_t high() const {
        if constexpr (EXTRA == 0) {
            return 0;
        } else {
            constexpr int to_bit = T::BASE_BITS == 2 ? 4 * (J & 1) + 2 * H + 4 : J & 1 ? 8 : 4;
            constexpr uint32_t mask = (EXTRA == 1 ? 0x00010001u : 0x00030003u) << to_bit;
            constexpr int from_bit = TileOffset<T>::extra_index(H, J, S) * EXTRA + 8 * P;
            return align_bits<from_bit, to_bit>(extra[EXTRA == 1 ? J / 2 : J]) & mask;
        }
    }
};

// Returns 2^(e - 128). The results for e = 0 and 1 are subnormal.
__device__ __forceinline__ float power_of_two(uint32_t e) {
    return __uint_as_float(e < 2 ? 0x00200000u << e : e - 1 << 23);
}

// Returns 2^(e - 127) for the byte e at bit FROM, in two instructions. e = 0 returns 0: no sum can tell 0 from 2^-127.
template <int FROM>
__device__ __forceinline__ float power_bits(uint32_t bytes) {
    return __uint_as_float(align_bits<FROM, 23>(bytes) & 0x7f800000u);
}
// Returns 2^(e - 128) in the same way.
template <int FROM>
__device__ __forceinline__ float half_power_of_two(uint32_t bytes) {
    return power_bits<FROM>(bytes) * 0.5f;
}

// The scales d and minimums m of rows g and g + 8 for one group, in float32: weight = d * (code - ZERO) + m.
struct RowScales {
    float d[2];
    float m[2];
};

// The scales of N groups of a chunk for rows g and g + 8, in registers. load() reads up to 16 bytes at a time; get<i>()
// decodes the scales of group i.
template <class T, int N = T::GROUPS>
struct ChunkScales {
    uint32_t dd[T::SCALES == Scales::D ? N : T::SCALES == Scales::DM ? 2 * N : 2];
    uint32_t sc[T::HAS_SUB || T::SCALES == Scales::E8 ? (N + 1) / 2 : 1];  // bytes of two groups, or fours
    uint32_t twos[T::TWOS ? (N + 3) / 4 : 1];

    // Loads the scales of groups first ... first + N - 1. `first` is a multiple of N.
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
                if constexpr (N < 4) twos[0] >>= (first & 2) * 2;  // moves the two groups to the bits of groups 0 and 1
            }
        }
    }

    // Loads two bytes for each group.
    template <int WORDS>
    static __device__ __forceinline__ void load_pairs(uint32_t (&out)[WORDS], const uint8_t* src) {
        if constexpr (N == 1)
            out[0] = *reinterpret_cast<const uint16_t*>(src);
        else
            load_words<N / 2>(out, src);
    }

    template <int WORDS, int CAPACITY>
    static __device__ __forceinline__ void load_words(uint32_t (&out)[CAPACITY], const uint8_t* src) {
        static_assert(WORDS <= CAPACITY, "");
        if constexpr (WORDS % 4 == 0) {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4) {
                const uint4 v = *reinterpret_cast<const uint4*>(src + 4 * i);
                out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
            }
        } else if constexpr (WORDS == 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(src);
            out[0] = v.x, out[1] = v.y;
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) out[i] = reinterpret_cast<const unsigned*>(src)[i];
        }
    }

    // Returns the bytes (scale of row g, scale of row g + 8, min of row g, min of row g + 8) of a group.
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
                constexpr int from_bit = 16 * (GROUP_INDEX & 1);
                r.d[0] = half_power_of_two<from_bit>(word), r.d[1] = half_power_of_two<from_bit + 8>(word);
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

// The value of a code before scaling: the weight is d * value + m.
template <class T>
__device__ __forceinline__ float code_value(int code) {
    if constexpr (T::VALUES::TABLE)
        return static_cast<float>(T::VALUES::value(code));
    else if constexpr (!T::SCALED && T::ZERO == 0)
        return half2_to_float2(e4m3_to_half2<0>(code)).x;
    else
        return static_cast<float>(code - T::ZERO);
}

// Reads the scale and minimum of one (row, group) into d[0] and m[0].
template <class T>
__device__ __forceinline__ RowScales row_scales(const uint8_t* chunk, int g, int group, int h) {
    using Offset = TileOffset<T>;
    const uint8_t* at = chunk + Offset::scale(g, group, h);
    if constexpr (T::SCALES == Scales::E8) {
        return {{power_of_two(*at)}, {0.0f}};
    } else {
        const __half* d = reinterpret_cast<const __half*>(at);
        float scale = __half2float(d[0]), minimum = T::MIN ? __half2float(d[1]) : 0.0f;
        const uint8_t* sub = chunk + Offset::sub_scale(g, group, h);
        if constexpr (T::SIGNED_SUB) scale *= static_cast<float>(static_cast<int8_t>(*sub)) * T::SUB_UNIT;
        if constexpr (T::PACKED_SUB) {
            const auto small = [&](int i) {
                const int fours = sub[i] >> group % 2 * 4 & 15;
                return T::TWOS ? fours | (chunk[Offset::sub_twos(g, group, h) + i] >> group % 4 * 2 & 3) << 4 : fours;
            };
            scale *= static_cast<float>(small(0));
            minimum *= -static_cast<float>(small(2));
        }
        return {{scale}, {minimum}};
    }
}

// Returns the weight at (row of the tile, column of the chunk) in float32. For embedding look-ups, not for GEMMs.
template <class T>
__device__ float tile_weight(const uint8_t* chunk, int row, int column) {
    const int h = row / 8, g = row % 8, j = column / 32, c = column % 32, e = c % 4;
    constexpr bool by_step = T::GROUP == 16 || T::FLOAT;  // lane t has four columns of each step, not eight in a row
    const int t = by_step ? c % 16 / 4 : c / 8, s = by_step ? c / 16 : c % 8 / 4, lane = 4 * g + t;
    using Offset = TileOffset<T>;
    const uint8_t* main = chunk + T::SCALE_BYTES + Offset::byte(h, lane, j, s, e);
    if constexpr (T::FLOAT) {
        return __half2float(*reinterpret_cast<const __half*>(main));
    } else {
        int code = *main >> Offset::shift(h, j, e) & ((1 << T::BASE_BITS) - 1);
        if constexpr (T::EXTRA_BYTES > 0) {
            constexpr int bits = T::BITS - T::BASE_BITS;
            const uint32_t* high = reinterpret_cast<const uint32_t*>(chunk + T::SCALE_BYTES + T::BASE_BYTES);
            const uint32_t word = high[Offset::extra_word(lane, j)];
            code |= (word >> Offset::extra_bit(h, j, s, e) & ((1 << bits) - 1)) << T::BASE_BITS;
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
