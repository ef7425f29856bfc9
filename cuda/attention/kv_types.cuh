// How keys and values lie in pages, by type: what is written, and what a lane reads as operands of mma.m16n8k16.
//
// Of one head, a page is PAGE_SIZE positions of `row` elements, a multiple of 32; 32 elements of one position take
// `block_bytes`. A type has functions by which a warp stores a head, and for each way of reading a struct that is
// loaded first and gives halves later, so that much can be under way at once:
//
//     Keys         pieces of 32 elements of N positions, 2 apart, from `position` on: a lane has elements 8t ... 8t + 7
//     Values       elements 8n + g at positions 8t ... 8t + 7 of 32 (paged_attention.cu)
//     TokenValues  elements 16n + g and 16n + g + 8 at positions 4t ... 4t + 3 of 16 (decode_attention.cuh)
//
// where g is the lane / 4 and t the lane % 4. Numbers beyond halves are saturated.
#pragma once
#include "lib/convert.cuh"

#ifndef PAGE_SIZE
#define PAGE_SIZE 64
#endif

__device__ __forceinline__ uint32_t half2_bits(half2 v) {
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}

__device__ __forceinline__ float clamped(float v, float limit) {  // NaN stays NaN
    v = v > limit ? limit : v;
    return v < -limit ? -limit : v;
}

// The lines of memory from `from` on, one for each lane in turn.
__device__ __forceinline__ void prefetch_lines(const uint8_t* from, int nbytes, int lane) {
#pragma unroll 1
    for (int i = lane; i * 128 < nbytes; i += 32) prefetch_l2(from + i * 128);
}

// ---- numbers -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void encode(float& to, float v) { to = v; }
__device__ __forceinline__ void encode(__half& to, float v) { to = saturated_half(v); }
__device__ __forceinline__ void encode(__nv_bfloat16& to, float v) { to = __float2bfloat16_rn(v); }

// What they are multiplied as.
__device__ __forceinline__ __half as_half(__half v) { return v; }
template <typename T>
__device__ __forceinline__ __half as_half(T v) {
    return saturated_half(static_cast<float>(v));
}

// Two bf16 -> halves.
__device__ __forceinline__ uint32_t narrowed(uint32_t pair) {
    return saturated_half2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Four neighbours as halves.
__device__ __forceinline__ uint2 load_halves4(const __half* from) {
    return load_of_line(reinterpret_cast<const uint2*>(from));
}
__device__ __forceinline__ uint2 load_halves4(const __nv_bfloat16* from) {
    const uint2 v = __ldcg(reinterpret_cast<const uint2*>(from));
    return make_uint2(narrowed(v.x), narrowed(v.y));
}
__device__ __forceinline__ uint2 load_halves4(const float* from) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(from));
    return make_uint2(saturated_half2(v.x, v.y), saturated_half2(v.z, v.w));
}

// Eight of them.
__device__ __forceinline__ uint4 load_halves8(const __half* from) {
    return load_of_line(reinterpret_cast<const uint4*>(from));
}
template <typename T>
__device__ __forceinline__ uint4 load_halves8(const T* from) {
    const uint2 a = load_halves4(from), b = load_halves4(from + 4);
    return make_uint4(a.x, a.y, b.x, b.y);
}

// ---- pages of numbers ------------------------------------------------------------------------------------------------

// Where the value of element e at a position is among those of a page: transposed, 16 positions at a time,
// [PAGE_SIZE / 16][row][16], so that what a warp takes at a time lies together. Of the 16 the first eight change places with
// the others where bit 2 of e is set: the swizzle of 32 bytes that wgmma wants, and other reads of shared memory like, too.
__device__ __forceinline__ int value_place(int row, int position, int e) {
    return position / 16 * 16 * row + e * 16 + (position % 16 ^ (e & 4) * 2);
}

// Of type T: keys [PAGE_SIZE][row], values at their places.
template <typename T>
struct CacheNumbers {
    static constexpr int block_bytes = 32 * sizeof(T);
    static constexpr int key_step = 1;  // pieces that are best read together
    static constexpr bool spreads = false;
    static constexpr bool alone = true;  // a number is stored without regard to others

    template <int ROW, int N, int COUNT>
    struct Keys {
        uint4 v[N][COUNT];

        static __device__ __forceinline__ const uint8_t* place(const uint8_t* page, int position, int t) {
            return reinterpret_cast<const uint8_t*>(reinterpret_cast<const T*>(page) +
                                                    static_cast<uint32_t>(position * ROW + 8 * t));
        }
        __device__ __forceinline__ void load(const uint8_t* page, int position, int first, int t) {
            load(place(page, position, t), first);
        }
        // From there on.
        __device__ __forceinline__ void load(const uint8_t* from, int first = 0) {
            const T* k = reinterpret_cast<const T*>(from);
#pragma unroll
            for (int j = 0; j < N * COUNT; ++j) {  // in the order in which they are wanted
                const int n = N == 2 ? j % N : j / COUNT, i = N == 2 ? j / N : j % COUNT;
                v[n][i] = load_halves8(k + 2 * n * ROW + (first + i) * 32);
            }
        }
        __device__ __forceinline__ uint4 get(int n, int i, int) const { return v[n][i]; }
        // The key of position `at` of the strip of 16 (N is 2) is `key` [ROW].
        __device__ __forceinline__ void put(int at, const __half* key, int g, int t) {
            if (g != at / 4 * 2 + at % 2) return;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const uint4 halves = *reinterpret_cast<const uint4*>(key + i * 32 + 8 * t);
                v[0][i] = at & 2 ? v[0][i] : halves;
                v[1][i] = at & 2 ? halves : v[1][i];
            }
        }
    };

    template <int ROW, int COUNT>
    struct Values {
        uint4 w[COUNT];

        __device__ __forceinline__ void load(const uint8_t* page, int position, int first, int g, int t) {
            const T* v = reinterpret_cast<const T*>(page) + value_place(ROW, position + 8 * t, g);
#pragma unroll
            for (int n = 0; n < COUNT; ++n) w[n] = load_halves8(v + (first + n) * 8 * 16);
        }
        __device__ __forceinline__ uint4 get(int n, int) const { return w[n]; }
    };

    template <int ROW, int COUNT>
    struct TokenValues {
        uint2 w[COUNT][2];

        static __device__ __forceinline__ const uint8_t* place(const uint8_t* page, int position, int g, int t) {
            const int place = position * ROW + g * 16 + (4 * t ^ (g & 4) * 2);
            return reinterpret_cast<const uint8_t*>(reinterpret_cast<const T*>(page) + static_cast<uint32_t>(place));
        }
        __device__ __forceinline__ void load(const uint8_t* page, int position, int first, int g, int t) {
            load(place(page, position, g, t), first);
        }
        // From there on.
        __device__ __forceinline__ void load(const uint8_t* from, int first = 0) {
            const T* v = reinterpret_cast<const T*>(from);
#pragma unroll
            for (int n = 0; n < COUNT; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h) w[n][h] = load_halves4(v + ((first + n) * 16 + 8 * h) * 16);
        }
        __device__ __forceinline__ uint4 get(int n, int) const {
            return make_uint4(w[n][0].x, w[n][1].x, w[n][0].y, w[n][1].y);
        }
        // The value of position `at` of the strip is `value` [ROW].
        __device__ __forceinline__ void put(int at, const __half* value, int g, int t) {
            if (t != at / 4) return;
#pragma unroll
            for (int n = 0; n < COUNT; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const uint32_t half = __half_as_ushort(value[n * 16 + 8 * h + g]);
                    const uint32_t pair = __byte_perm(at & 2 ? w[n][h].y : w[n][h].x, half, at & 1 ? 0x5410 : 0x3254);
                    w[n][h] = at & 2 ? make_uint2(w[n][h].x, pair) : make_uint2(pair, w[n][h].y);
                }
        }
    };

    // One element of a position, and what it is read as from then on.
    template <int ROW>
    static __device__ __forceinline__ void store_key_element(uint8_t* page, int position, int e, float v) {
        encode(reinterpret_cast<T*>(page)[position * ROW + e], v);
    }
    template <int ROW>
    static __device__ __forceinline__ void store_value_element(uint8_t* page, int position, int e, float v) {
        encode(reinterpret_cast<T*>(page)[value_place(ROW, position, e)], v);
    }
    static __device__ __forceinline__ __half as_read(float v) {
        T stored;
        encode(stored, v);
        return as_half(stored);
    }
    static __device__ __forceinline__ void prefetch_keys(const uint8_t* page, int row, int position, int count,
                                                         int lane) {
        prefetch_lines(page + static_cast<size_t>(position) * row * sizeof(T), count * row * sizeof(T), lane);
    }
    static __device__ __forceinline__ void prefetch_values(const uint8_t* page, int row, int position, int count,
                                                           int lane) {
        prefetch_keys(page, row, position, count, lane);
    }
    static __device__ __forceinline__ void store_key(uint8_t* page, int row, int position, const float* head,
                                                     int lane) {
        T* k = reinterpret_cast<T*>(page) + static_cast<size_t>(position) * row;
#pragma unroll 1
        for (int i = lane; i < row; i += 32) encode(k[i], head[i]);
    }
    static __device__ __forceinline__ void store_value(uint8_t* page, int row, int position, const float* head,
                                                       int lane) {
#pragma unroll 1
        for (int i = lane; i < row; i += 32) encode(reinterpret_cast<T*>(page)[value_place(row, position, i)], head[i]);
    }
};

using CacheF32 = CacheNumbers<float>;
using CacheF16 = CacheNumbers<__half>;
using CacheBF16 = CacheNumbers<__nv_bfloat16>;
