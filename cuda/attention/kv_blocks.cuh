// Layout of KV cache pages in ggml's block formats (q8_0, q5_1, q5_0, q4_1, q4_0): quantise when a head is stored,
// dequantise to f16 operands when a warp reads. A quant block is 32 elements of one position along the head, because
// tokens arrive one at a time:
//
//    x ~ d * q        q8_0, q5_0, q4_0, with signed q
//    x ~ d * q + m    q5_1, q4_1, with unsigned q
//
// A page holds the same bits as the ggml blocks, in another order: codes, fifth bits and scales are separate arrays,
// each in the order in which the lanes of a warp read, so that loads coalesce. `high` holds the fifth bits of 5-bit
// codes; a scale is d, or (d, m). "Piece" is 32 elements of a head.
//
//    keys     codes  [position][pair of pieces][t][piece of the pair], units of 8 elements from 8t on; an odd number
//                    of pieces leaves the last one without a partner; 4 bits: byte j of a word has elements j and j + 4
//             high   [position][piece] words, bit e is element e
//             scales [position][piece] d, or (d, m)
//    values   codes  [strip of 16 positions][n][g][t][h][4 positions] bytes: element 16n + 8h + g, positions from
//                    4t on; 4 bits: no [h], a byte has both elements
//             high   [strip][n][t][h][4 positions] bytes: bit g is element 16n + 8h + g
//             scales [strip][piece][d, or d and m][16 positions]
//
// Codes are stored unsigned: formats without a minimum add half the range. No byte belongs to two positions, so CTAs
// may store tokens of one page at the same time.
#pragma once
#include "attention/kv_types.cuh"
#include "formats/bits.cuh"

constexpr float BLOCK_LIMIT = 65408.0f;  // limit of magnitudes, so that no scale times a code exceeds the f16 range

// The largest power of two up to 16 that divides a and b.
__host__ __device__ constexpr int common_alignment(int a, int b) {
    int found = 1;
    while (found < 16 && a % (2 * found) == 0 && b % (2 * found) == 0) found *= 2;
    return found;
}

// Loads BYTES bytes from an address that is a multiple of ALIGNMENT.
template <int BYTES, int ALIGNMENT>
__device__ __forceinline__ void load_bytes(const uint8_t* src, uint32_t (&dst)[(BYTES + 3) / 4]) {
    static_assert(BYTES % ALIGNMENT == 0, "whole loads");
#pragma unroll
    for (int i = 0; i < BYTES / ALIGNMENT; ++i) {
        if constexpr (ALIGNMENT == 16) {
            const uint4 v = __ldcg(reinterpret_cast<const uint4*>(src) + i);
            dst[4 * i] = v.x, dst[4 * i + 1] = v.y, dst[4 * i + 2] = v.z, dst[4 * i + 3] = v.w;
        } else if constexpr (ALIGNMENT == 8) {
            const uint2 v = __ldcg(reinterpret_cast<const uint2*>(src) + i);
            dst[2 * i] = v.x, dst[2 * i + 1] = v.y;
        } else if constexpr (ALIGNMENT == 4) {
            dst[i] = __ldcg(reinterpret_cast<const uint32_t*>(src) + i);
        } else {
            const uint32_t v = __ldcg(reinterpret_cast<const uint16_t*>(src) + i);
            dst[i / 2] = i % 2 ? dst[i / 2] | v << 16 : v;
        }
    }
}

__device__ __forceinline__ uint32_t low_halves(uint32_t pair) { return __byte_perm(pair, 0, 0x1010); }
__device__ __forceinline__ uint32_t high_halves(uint32_t pair) { return __byte_perm(pair, 0, 0x3232); }

template <typename T, class Combine>
__device__ __forceinline__ T over_warp(T v, Combine combine) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) v = combine(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
}

// Maximum over the warp.
__device__ __forceinline__ uint32_t warp_max(uint32_t v) {
#if ARCH >= 800 || EMULATED
    return __reduce_max_sync(0xffffffffu, v);
#else
    return over_warp(v, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
#endif
}

// v of the first lane for which `is` holds.
__device__ __forceinline__ float from_first(float v, bool is) {
    return __shfl_sync(0xffffffffu, v, (__ffs(__ballot_sync(0xffffffffu, is)) + 31) % 32);
}

// Multiplies each 32 elements of a head in shared memory by the orthonormal 32 x 32 Hadamard matrix; one warp. Dot
// products of two transformed heads equal those of the originals. The transform spreads an outlier channel, which keys
// often have, over all 32 elements that share its scale, so the quantisation error shrinks.
template <int MAX_ROW>
__device__ __forceinline__ void spread_head(float* head, int row, int lane) {
    constexpr float norm = 0.17677669529663687f;  // 1 / sqrt(32)
    float v[MAX_ROW / 32];
#pragma unroll
    for (int i = 0; i < MAX_ROW / 32; ++i)
        if (32 * i < row) v[i] = clamped(head[32 * i + lane], BLOCK_LIMIT);
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
#pragma unroll
        for (int i = 0; i < MAX_ROW / 32; ++i)
            if (32 * i < row) {
                const float other = __shfl_xor_sync(0xffffffffu, v[i], step);
                v[i] = lane & step ? __fsub_rn(other, v[i]) : __fadd_rn(v[i], other);
            }
#pragma unroll
    for (int i = 0; i < MAX_ROW / 32; ++i)
        if (32 * i < row) head[32 * i + lane] = __fmul_rn(v[i], norm);
}

__device__ __forceinline__ float inverse_or_zero(float d) { return d == 0.0f ? 0.0f : __fdiv_rn(1.0f, d); }

template <int BITS, bool MINIMUM>
struct CacheBlocks {
    static constexpr int code_bytes = BITS == 8 ? 32 : 16, high_bytes = BITS == 5 ? 4 : 0;
    static constexpr int scale_bytes = MINIMUM ? 4 : 2, block_bytes = code_bytes + high_bytes + scale_bytes;
    static constexpr int unit_bytes = code_bytes / 4, unit_words = code_bytes / 16;  // of eight codes
    static constexpr int offset = MINIMUM ? 0 : 1 << (BITS - 1), key_step = 2;
    static constexpr bool independent = false;
    static constexpr bool spreads = true;  // keys and queries are multiplied by the Hadamard matrix

    static __device__ __forceinline__ int high_at(int row) { return PAGE_SIZE * row / 32 * code_bytes; }
    static __device__ __forceinline__ int scales_at(int row) {
        return PAGE_SIZE * row / 32 * (code_bytes + high_bytes);
    }

    // Dequantises bytes 2 PAIR and 2 PAIR + 1 of `codes` to two f16, with a pair of scales and a pair of minima.
    template <int PAIR>
    static __device__ __forceinline__ uint32_t weights(uint32_t codes, uint32_t d, uint32_t m) {
        constexpr uint32_t bias = 0x6400u + offset;  // 1024 (the f16 bias of the byte) and the offset
        const half2 biased = as_half2(__byte_perm(codes, 0x64646464u, PAIR ? 0x4342 : 0x4140));
        const half2 q = __hsub2(biased, as_half2(bias | bias << 16));
        return half2_bits(MINIMUM ? __hfma2(q, as_half2(d), as_half2(m)) : __hmul2(q, as_half2(d)));
    }

    // ---- reading

    template <int ROW, int N, int COUNT>
    struct Keys {
        static constexpr int R = ROW / 32, S = COUNT * scale_bytes;
        uint32_t codes[N][COUNT * unit_words], scales[N][(S + 3) / 4], high[N][COUNT];

        __device__ __forceinline__ void load(const uint8_t* page, int position, int first, int t) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int block = (position + 2 * n) * R + first;
#pragma unroll
                for (int i = 0; i < COUNT; i += 2) load_codes(page + (block + i) * code_bytes, codes[n], i, t);
                if constexpr (BITS == 5)
                    load_bytes<4 * COUNT, common_alignment(4 * R, 4 * COUNT)>(page + high_at(ROW) + 4 * block, high[n]);
                load_bytes<S, common_alignment(R * scale_bytes, S)>(page + scales_at(ROW) + block * scale_bytes,
                                                                    scales[n]);
            }
        }
        __device__ __forceinline__ void load_codes(const uint8_t* src, uint32_t (&dst)[COUNT * unit_words], int i,
                                                   int t) {
            const bool two = i + 1 < COUNT;
            uint32_t pair[2 * unit_words], one[unit_words];
            if (two)
                load_bytes<2 * unit_bytes, 2 * unit_bytes>(src + t * 2 * unit_bytes, pair);
            else
                load_bytes<unit_bytes, unit_bytes>(src + t * unit_bytes, one);
#pragma unroll
            for (int j = 0; j < 2 * unit_words; ++j) {
                if (two)
                    dst[i * unit_words + j] = pair[j];
                else if (j < unit_words)
                    dst[i * unit_words + j] = one[j];
            }
        }
        __device__ __forceinline__ uint4 get(int n, int i, int t) const {
            uint32_t a, b;  // elements 0 to 3 and 4 to 7
            if constexpr (BITS == 8) {
                a = codes[n][2 * i], b = codes[n][2 * i + 1];
            } else {
                a = fields<4>(codes[n][i], 0), b = fields<4>(codes[n][i], 1);
            }
            if constexpr (BITS == 5) {
                const uint32_t bits = high[n][i] >> 8 * t;
                a |= spread_bits(bits & 15) << 4, b |= spread_bits(bits >> 4 & 15) << 4;
            }
            const uint32_t word = scales[n][MINIMUM ? i : i / 2], m = high_halves(word);
            const uint32_t d = !MINIMUM && i % 2 ? m : low_halves(word);
            return make_uint4(weights<0>(a, d, m), weights<1>(a, d, m), weights<0>(b, d, m), weights<1>(b, d, m));
        }
    };

    // Values of COUNT x 16 elements at T x 4 positions of a strip, with the scales of the lane's positions.
    template <int ROW, int COUNT, int T>
    struct Strip {
        uint32_t codes[COUNT][T * unit_words], high[COUNT][2 * T], d[COUNT / 2][2 * T], m[COUNT / 2][2 * T];

        __device__ __forceinline__ void load(const uint8_t* page, int strip, int first, int g, int t) {
            const uint8_t* src = page + strip * (ROW / 2) * code_bytes + first * 8 * code_bytes;
            const uint8_t* bits = page + high_at(ROW) + strip * 2 * ROW + first * 32 + t * 8;
            const uint8_t* scale = page + scales_at(ROW) + (strip * ROW / 2 + first * 8) * scale_bytes + t * 8;
#pragma unroll
            for (int n = 0; n < COUNT; ++n) {
                constexpr int bytes = T * unit_bytes;
                load_bytes<bytes, bytes>(src + n * 8 * code_bytes + (g * 4 + t) * unit_bytes, codes[n]);
                if constexpr (BITS == 5) load_bytes<8 * T, 8 * T>(bits + n * 32, high[n]);
            }
#pragma unroll
            for (int i = 0; i < COUNT / 2; ++i) {
                load_bytes<8 * T, 8 * T>(scale + i * 16 * scale_bytes, d[i]);
                if constexpr (MINIMUM) load_bytes<8 * T, 8 * T>(scale + i * 16 * scale_bytes + 32, m[i]);
            }
        }
        // Codes of element 16n + 8h + g at four positions, from 4j on.
        __device__ __forceinline__ uint32_t four(int n, int h, int j, int g) const {
            uint32_t q;
            if constexpr (BITS == 8)
                q = codes[n][2 * j + h];
            else
                q = fields<4>(codes[n][j], h);
            if constexpr (BITS == 5) q |= bit_of_bytes(high[n][2 * j + h], g, 4);
            return q;
        }
        template <int PAIR>
        __device__ __forceinline__ uint32_t two(int n, int h, int j, int g) const {
            const int i = n / 2, at = 2 * j + PAIR;
            return weights<PAIR>(four(n, h, j, g), d[i][at], MINIMUM ? m[i][at] : 0u);
        }
    };

    template <int ROW, int COUNT>
    struct Values {
        Strip<ROW, COUNT / 2, 2> strip;

        __device__ __forceinline__ void load(const uint8_t* page, int position, int first, int g, int t) {
            strip.load(page, position / 16 + t / 2, first / 2, g, t % 2 * 2);
        }
        __device__ __forceinline__ uint4 get(int n, int g) const {
            const int h = n % 2;
            return make_uint4(strip.template two<0>(n / 2, h, 0, g), strip.template two<1>(n / 2, h, 0, g),
                              strip.template two<0>(n / 2, h, 1, g), strip.template two<1>(n / 2, h, 1, g));
        }
    };

    template <int ROW, int COUNT>
    struct DecodeValues {
        Strip<ROW, COUNT, 1> strip;

        __device__ __forceinline__ void load(const uint8_t* page, int position, int first, int g, int t) {
            strip.load(page, position / 16, first, g, t);
        }
        __device__ __forceinline__ uint4 get(int n, int g) const {
            return make_uint4(strip.template two<0>(n, 0, 0, g), strip.template two<0>(n, 1, 0, g),
                              strip.template two<1>(n, 0, 0, g), strip.template two<1>(n, 1, 0, g));
        }
    };

    // Prefetches keys or values to L2; values in whole strips.
    static __device__ __forceinline__ void prefetch(const uint8_t* page, int row, int position, int count, int lane) {
        const int block = position * row / 32, blocks = count * row / 32;
        prefetch_lines(page + block * code_bytes, blocks * code_bytes, lane);
        prefetch_lines(page + high_at(row) + block * high_bytes, blocks * high_bytes, lane);
        prefetch_lines(page + scales_at(row) + block * scale_bytes, blocks * scale_bytes, lane);
    }
    static __device__ __forceinline__ void prefetch_keys(const uint8_t* page, int row, int position, int count,
                                                         int lane) {
        prefetch(page, row, position, count, lane);
    }
    static __device__ __forceinline__ void prefetch_values(const uint8_t* page, int row, int position, int count,
                                                           int lane) {
        prefetch(page, row, position, count, lane);
    }

    // ---- writing

    // Quantises the lane's element of a block to a code, by one warp; sets d and m. The arithmetic and the bytes are
    // those of ggml, as in ggpy/formats.
    static __device__ __forceinline__ uint32_t quantize(float v, float& d, float& m) {
        constexpr float most = static_cast<float>((1 << BITS) - 1);
        v = clamped(v, BLOCK_LIMIT);
        m = 0.0f;
        if constexpr (MINIMUM) {
            const float low = over_warp(v, [](float a, float b) { return fminf(a, b); });
            const float high = over_warp(v, [](float a, float b) { return fmaxf(a, b); });
            const bool broken = __any_sync(0xffffffffu, v != v);
            // the first minimum, so that the sign of a zero is ggml's
            m = broken ? __int_as_float(0x7fffffff) : from_first(v, v == low);
            d = __fdiv_rn(fabsf(__fsub_rn(high, m)), most);
            const float inverse = inverse_or_zero(d);
            const float q = fminf(__fadd_rn(__fmul_rn(__fsub_rn(v, m), inverse), 0.5f), most);
            return isinf(inverse) ? 0u : static_cast<uint32_t>(__float2int_rz(q));
        } else {
            // NaN compares above all numbers
            const uint32_t bits = __float_as_uint(v) & 0x7fffffffu, top = warp_max(bits);
            if constexpr (BITS == 8) {
                d = __fdiv_rn(__uint_as_float(top), 127.0f);
                const float inverse = inverse_or_zero(d);
                const int q = round_half_away(__fmul_rn(v, isinf(inverse) ? 0.0f : inverse));
                return static_cast<uint32_t>(q + offset) & 255;
            } else {
                const float extreme = __fadd_rn(from_first(v, bits == top), 0.0f);
                d = __fdiv_rn(extreme, -static_cast<float>(offset));
                const float inverse = inverse_or_zero(d);
                const float q = fminf(__fadd_rn(__fmul_rn(v, inverse), static_cast<float>(offset) + 0.5f), most);
                return isinf(inverse) ? 0u : static_cast<uint32_t>(__float2int_rz(q));
            }
        }
    }

    static __device__ __forceinline__ void store_key(uint8_t* page, int row, int position, const float* head,
                                                     int lane) {
        const int pieces = row / 32;
        for (int i = 0; i < pieces; ++i) {
            float d, m;
            const uint32_t code = quantize(head[32 * i + lane], d, m);
            const int t = lane / 8, e = lane % 8, block = position * pieces + i;
            const int unit = i % 2 || i + 1 < pieces ? (i / 2 * 4 + t) * 2 + i % 2 : i / 2 * 8 + t;
            uint8_t* dst = page + position * pieces * code_bytes + unit * unit_bytes;
            if constexpr (BITS == 8) {
                dst[e] = static_cast<uint8_t>(code);
            } else {
                const uint32_t other = __shfl_xor_sync(0xffffffffu, code, 4);
                if (e < 4) dst[e] = static_cast<uint8_t>((code & 15) | (other & 15) << 4);
            }
            if constexpr (BITS == 5) {
                const uint32_t bits = __ballot_sync(0xffffffffu, code & 16);
                if (lane == 0) reinterpret_cast<uint32_t*>(page + high_at(row))[block] = bits;
            }
            if (lane == 0) {
                __half* scale = reinterpret_cast<__half*>(page + scales_at(row) + block * scale_bytes);
                scale[0] = __float2half_rn(d);
                if constexpr (MINIMUM) scale[1] = __float2half_rn(m);
            }
        }
    }
    static __device__ __forceinline__ void store_value(uint8_t* page, int row, int position, const float* head,
                                                       int lane) {
        const int pieces = row / 32, strip = position / 16, t = position % 16 / 4, j = position % 4;
        const int h = lane / 8 % 2, g = lane % 8;
        for (int i = 0; i < pieces; ++i) {
            float d, m;
            const uint32_t code = quantize(head[32 * i + lane], d, m);
            const int n = 2 * i + lane / 16;
            uint8_t* dst = page + strip * row / 2 * code_bytes + n * 8 * code_bytes + (g * 4 + t) * unit_bytes + j;
            if constexpr (BITS == 8) {
                dst[4 * h] = static_cast<uint8_t>(code);
            } else {
                const uint32_t other = __shfl_xor_sync(0xffffffffu, code, 8);
                if (h == 0) *dst = static_cast<uint8_t>((code & 15) | (other & 15) << 4);
            }
            if constexpr (BITS == 5) {
                const uint32_t bits = __ballot_sync(0xffffffffu, code & 16) >> (lane & 24);
                if (g == 0) page[high_at(row) + strip * 2 * row + n * 32 + t * 8 + 4 * h + j] = bits & 255;
            }
            if (lane == 0) {
                uint8_t* scales = page + scales_at(row) + (strip * row / 2 + 16 * i) * scale_bytes;
                reinterpret_cast<__half*>(scales)[position % 16] = __float2half_rn(d);
                if constexpr (MINIMUM) reinterpret_cast<__half*>(scales)[16 + position % 16] = __float2half_rn(m);
            }
        }
    }
};

using CacheQ8_0 = CacheBlocks<8, false>;
using CacheQ5_1 = CacheBlocks<5, true>;
using CacheQ5_0 = CacheBlocks<5, false>;
using CacheQ4_1 = CacheBlocks<4, true>;
using CacheQ4_0 = CacheBlocks<4, false>;
