// Tiles: how weights lie in device memory. GGUF blocks are made for files (34 bytes for Q8_0 are never 16-byte
// aligned); a tile is made for a warp that multiplies with tensor cores. repack.cu writes tiles once, at load.
//
// A tensor [N, K] is cut into tiles of 16 rows x chunk_k columns ("chunks" along K, tile rows along N, chunks of one
// tile row adjacent). Rows and columns past N and K hold zeros. The 16 rows are the M of mma.m16n8k16, and the order
// of the weights inside a chunk is the order in which the mma wants its A operand, so that a lane reads 16 bytes and
// has registers:
//
//        lane = 4 g + t                            32 columns of a group, whose they are:
//        g = 0..7   rows g and g + 8               group of 32:  t t t t t t t t (8 t ... 8 t + 7)
//        t = 0..3   columns                        group of 16:  t t t t (4 t ... 4 t + 3), twice
//
// One mma covers 16 columns, four of each t: "step" s = 0, 1 inside 32 columns, element e = 0..3 inside the step.
// The activations are B, column = token: lane (g, t) needs the same columns of token g, contiguous in memory.
//
// Weights stay integers. A code u < 1024 in the low bits of a half *is* the half u * 2^-24 (a subnormal), exactly, so
// unpacking is one AND (4 bits) or one byte permute (8 bits), without the 1024 + u bias of the PRMT and LOP3
// converters and without what it costs in cancellation. Tensor cores multiply subnormals at full speed. The 2^24 comes
// back once per output, the scale once per group in float32, the zero point through the sum of the activations.
#pragma once
#include "norm.cuh"

constexpr int TILE_ROWS = 16;
constexpr float CODE_UNIT = 5.9604644775390625e-8f;  // 2^-24, what code 1 is as a half

enum class Scales {
    D,      // f16 d per 32 columns:                                   [g][group][row half]
    DM,     // f16 (d, m) per 32 columns:                              [g][group][row half]
    SUB,    // f16 d per 256 columns, i8 scale per 16:                 d [g][row half], sc [g][group][row half]
    SUB_M,  // f16 (d, dmin) per 256, u8 (scale, min) per group:       dd [g][row half], sc, m [g][group][row half]
};

// BITS 4, 5, 6, 8: integer codes; 16: halves. GROUP: columns with one scale. CHUNK_K: columns of a chunk.
template <int BITS_, int GROUP_, Scales SCALES_, int CHUNK_K_>
struct Tile {
    static constexpr int BITS = BITS_, GROUP = GROUP_, CHUNK_K = CHUNK_K_;
    static constexpr Scales SCALES = SCALES_;
    static constexpr bool FLOAT = BITS == 16;
    static constexpr bool MIN = SCALES == Scales::DM || SCALES == Scales::SUB_M;
    static constexpr int ZERO = MIN || FLOAT ? 0 : 1 << (BITS - 1);
    static constexpr int GROUPS = CHUNK_K / GROUP;
    static constexpr int SUB_BYTES = TILE_ROWS * GROUPS;
    static constexpr int SCALE_BYTES = FLOAT                      ? 0
                                       : SCALES == Scales::D      ? TILE_ROWS * GROUPS * 2
                                       : SCALES == Scales::DM     ? TILE_ROWS * GROUPS * 4
                                       : SCALES == Scales::SUB    ? TILE_ROWS * 2 + SUB_BYTES
                                                                  : TILE_ROWS * 4 + 2 * SUB_BYTES;
    static constexpr int BASE_BITS = BITS == 5 || BITS == 6 ? 4 : BITS;  // bits in the main plane
    static constexpr int BASE_BYTES = TILE_ROWS * CHUNK_K * BASE_BITS / 8;
    static constexpr int EXTRA_BYTES = TILE_ROWS * CHUNK_K * (BITS - BASE_BITS) / 8;
    static constexpr int BYTES = SCALE_BYTES + BASE_BYTES + EXTRA_BYTES;
    static_assert(BYTES % 16 == 0 && SCALE_BYTES % 16 == 0, "chunks are read 16 bytes at a time");
};

// Where the weight of (row half h, lane, 32-column group j, step s, element e) lies: used by repack and get_rows.
// Main plane: 8 bits a byte; 4 bits a nibble, 64 columns (groups j, j + 1) interleaved so that one AND gives a half2.
template <class T>
struct TilePlace {
    // Byte offset in the main plane and bit shift in that byte.
    static __device__ __forceinline__ int byte(int h, int lane, int j, int s, int e) {
        if (T::FLOAT) return ((2 * j + s) * 32 + lane) * 16 + (e / 2) * 8 + h * 4 + (e & 1) * 2;
        if (T::BASE_BITS == 8) return (j * 32 + lane) * 16 + h * 8 + s * 4 + e;
        return ((j / 2) * 32 + lane) * 16 + (h * 2 + s) * 4 + nibble(j, e) / 2;
    }
    static __device__ __forceinline__ int shift(int j, int e) {
        return T::BASE_BITS == 4 ? (nibble(j, e) & 1) * 4 : 0;
    }
    // Elements 0, 1 are the halves of one register, 2, 3 those of the next; odd groups sit four bits higher.
    static __device__ __forceinline__ int nibble(int j, int e) { return (e & 1) * 4 + (e >> 1) * 2 + (j & 1); }
    // Bit offset inside the lane's words of the extra plane (1 or 2 words per 64 columns).
    static __device__ __forceinline__ int extra_word(int lane, int j) {
        constexpr int words = T::BITS - T::BASE_BITS;
        return ((j / 2) * 32 + lane) * words + (words == 2 ? (j & 1) : 0);
    }
    static __device__ __forceinline__ int extra_bit(int h, int j, int s, int e) {
        constexpr int bits = T::BITS - T::BASE_BITS;
        const int index = (h * 2 + s) * 2 + (e >> 1) + (bits == 1 ? (j & 1) * 8 : 0);
        return index * bits + (e & 1) * 16;
    }
    // Offsets of the scales in bytes.
    static __device__ __forceinline__ int scale(int g, int group, int h) {
        if (T::SCALES == Scales::D) return ((g * T::GROUPS + group) * 2 + h) * 2;
        if (T::SCALES == Scales::DM) return ((g * T::GROUPS + group) * 2 + h) * 4;
        if (T::SCALES == Scales::SUB) return (g * 2 + h) * 2;
        return (g * 2 + h) * 4;
    }
    static __device__ __forceinline__ int sub_scale(int g, int group, int h) {
        return TILE_ROWS * (T::SCALES == Scales::SUB ? 2 : 4) + (g * T::GROUPS + group) * 2 + h;
    }
};

// Column inside a group of 32 that (t, s, e) stands for.
template <class T>
__device__ __forceinline__ int tile_column(int t, int s, int e) {
    return T::GROUP == 16 || T::FLOAT ? 16 * s + 4 * t + e : 8 * t + 4 * s + e;
}

// The bits of `word` from bit FROM on, at bit TO.
template <int FROM, int TO>
__device__ __forceinline__ uint32_t align_bits(uint32_t word) {
    return FROM > TO ? word >> (FROM > TO ? FROM - TO : 0) : word << (FROM > TO ? 0 : TO - FROM);
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
        const uint4* from = reinterpret_cast<const uint4*>(main_plane) + lane;
#pragma unroll
        for (int i = 0; i < T::BASE_BYTES / 512; ++i) {
            const uint4 v = from[32 * i];
            main[4 * i] = v.x, main[4 * i + 1] = v.y, main[4 * i + 2] = v.z, main[4 * i + 3] = v.w;
        }
        if constexpr (EXTRA > 0) {
            const uint32_t* high = reinterpret_cast<const uint32_t*>(extra_plane);
#pragma unroll
            for (int i = 0; i < T::EXTRA_BYTES / 128; ++i) extra[i] = high[(i / EXTRA * 32 + lane) * EXTRA + i % EXTRA];
        }
    }

    // What the codes of group J (32 columns) are too large by.
    template <int J>
    static __device__ __forceinline__ constexpr float shift() {
        return T::BASE_BITS == 4 && (J & 1) ? 16.0f : 1.0f;
    }

    // The A operand of step S of group J: elements 0, 1 of rows g, g + 8, then elements 2, 3.
    template <int J, int S>
    __device__ __forceinline__ void unpack(uint32_t (&a)[4]) const {
        if constexpr (T::FLOAT) {
            constexpr int at = 8 * J + 4 * S;
            a[0] = main[at], a[1] = main[at + 1], a[2] = main[at + 2], a[3] = main[at + 3];
        } else if constexpr (T::BASE_BITS == 8) {
            constexpr int at = 4 * J + S;
            a[0] = __byte_perm(main[at], 0, 0x4140), a[1] = __byte_perm(main[at + 2], 0, 0x4140);
            a[2] = __byte_perm(main[at], 0, 0x4342), a[3] = __byte_perm(main[at + 2], 0, 0x4342);
        } else {
            constexpr int at = 4 * (J / 2) + S;
            constexpr uint32_t mask = J & 1 ? 0x00f000f0u : 0x000f000fu;
            a[0] = (main[at] & mask) | high<J, 0, S, 0>();
            a[1] = (main[at + 2] & mask) | high<J, 1, S, 0>();
            a[2] = ((main[at] >> 8) & mask) | high<J, 0, S, 1>();
            a[3] = ((main[at + 2] >> 8) & mask) | high<J, 1, S, 1>();
        }
    }
    // The high bits of row half H, step S, element pair P of group J, moved to where they belong.
    template <int J, int H, int S, int P>
    __device__ __forceinline__ uint32_t high() const {
        if constexpr (EXTRA == 0) {
            return 0;
        } else {
            constexpr uint32_t mask = (EXTRA == 1 ? 0x00010001u : 0x00030003u) << (J & 1 ? 8 : 4);
            constexpr int from = ((H * 2 + S) * 2 + P + (EXTRA == 1 ? (J & 1) * 8 : 0)) * EXTRA;
            return align_bits<from, J & 1 ? 8 : 4>(extra[EXTRA == 1 ? J / 2 : J]) & mask;
        }
    }
};

// The scales and minimums of rows g and g + 8 for one group, in float32.
struct RowScales {
    float d[2];
    float m[2];
};

// All scales of a chunk that one lane needs, loaded 16 bytes at a time; get<group>() decodes.
template <class T>
struct ChunkScales {
    uint32_t dd[T::SCALES == Scales::D ? T::GROUPS : T::SCALES == Scales::DM ? 2 * T::GROUPS : 2];
    uint32_t sc[T::SCALES == Scales::SUB || T::SCALES == Scales::SUB_M ? T::GROUPS / 2 : 1];
    uint32_t mn[T::SCALES == Scales::SUB_M ? T::GROUPS / 2 : 1];

    __device__ __forceinline__ void load(const uint8_t* chunk, int g) {
        if constexpr (T::SCALES == Scales::D || T::SCALES == Scales::DM) {
            constexpr int words = T::SCALES == Scales::D ? T::GROUPS : 2 * T::GROUPS;
            load_words<words>(dd, chunk + g * words * 4);
        } else {
            constexpr int d_bytes = T::SCALES == Scales::SUB ? 4 : 8;
            load_words<d_bytes / 4>(dd, chunk + g * d_bytes);
            const uint8_t* sub = chunk + 8 * d_bytes;
            load_words<T::GROUPS / 2>(sc, sub + g * T::GROUPS * 2);
            if constexpr (T::MIN) load_words<T::GROUPS / 2>(mn, sub + T::SUB_BYTES + g * T::GROUPS * 2);
        }
    }

    template <int WORDS, int N>
    static __device__ __forceinline__ void load_words(uint32_t (&out)[N], const uint8_t* from) {
        static_assert(WORDS <= N, "");
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
            const uint32_t pair = sc[GROUP_INDEX / 2] >> (GROUP_INDEX & 1 ? 16 : 0);
            if constexpr (T::SCALES == Scales::SUB) {
                const float2 d = half2_to_float2(dd[0]);
                r.d[0] = d.x * static_cast<float>(static_cast<signed char>(pair & 0xff));
                r.d[1] = d.y * static_cast<float>(static_cast<signed char>((pair >> 8) & 0xff));
                r.m[0] = r.m[1] = 0.0f;
            } else {
                const float2 low = half2_to_float2(dd[0]), high = half2_to_float2(dd[1]);
                const uint32_t mins = mn[GROUP_INDEX / 2] >> (GROUP_INDEX & 1 ? 16 : 0);
                r.d[0] = low.x * static_cast<float>(pair & 0xff);
                r.d[1] = high.x * static_cast<float>((pair >> 8) & 0xff);
                r.m[0] = -low.y * static_cast<float>(mins & 0xff);
                r.m[1] = -high.y * static_cast<float>((mins >> 8) & 0xff);
            }
        }
        return r;
    }
};

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
        int code = T::BASE_BITS == 8 ? *main : *main >> Place::shift(j, e) & 15;
        if constexpr (T::EXTRA_BYTES > 0) {
            constexpr int bits = T::BITS - T::BASE_BITS;
            const uint32_t* high = reinterpret_cast<const uint32_t*>(chunk + T::SCALE_BYTES + T::BASE_BYTES);
            const uint32_t word = high[Place::extra_word(lane, j)];
            code |= (word >> Place::extra_bit(h, j, s, e) & ((1 << bits) - 1)) << 4;
        }
        const int group = column / T::GROUP;
        const __half* d = reinterpret_cast<const __half*>(chunk + Place::scale(g, group, h));
        float scale = __half2float(d[0]), minimum = T::MIN ? __half2float(d[1]) : 0.0f;
        if constexpr (T::SCALES == Scales::SUB || T::SCALES == Scales::SUB_M) {
            const uint8_t* sub = chunk + Place::sub_scale(g, group, h);
            if constexpr (T::SCALES == Scales::SUB) {
                scale *= static_cast<float>(static_cast<int8_t>(*sub));
            } else {
                scale *= static_cast<float>(*sub);
                minimum *= -static_cast<float>(sub[T::SUB_BYTES]);
            }
        }
        return scale * static_cast<float>(code - T::ZERO) + minimum;
    }
}
