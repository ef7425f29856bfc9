// Layout of KV cache pages by type: what a warp stores, and what a lane reads as operands of mma.m16n8k16.
//
// A page of one KV head holds PAGE_SIZE positions of `row` elements, a multiple of 32; 32 elements of one position take
// `block_bytes` bytes. A type has functions with which a warp stores a head, and one struct per way of reading. Each
// struct loads first (load) and converts to f16 later (get), so that many loads are in flight:
//
//    Keys          pieces of 32 elements of N positions, 2 apart, from `position` on; a lane has elements 8t ... 8t + 7
//    Values        elements 8n + g at positions 8t ... 8t + 7 of 32 (paged_attention.cu)
//    DecodeValues  elements 16n + g and 16n + g + 8 at positions 4t ... 4t + 3 of 16 (decode_attention.cuh)
//
// Here g = lane / 4 and t = lane % 4. Numbers outside the f16 range are saturated.
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

// Prefetches `nbytes` bytes from `src` to L2, one 128-byte line per lane at a time.
__device__ __forceinline__ void prefetch_lines(const uint8_t* src, int nbytes, int lane) {
#pragma unroll 1
    for (int i = lane; i * 128 < nbytes; i += 32) prefetch_l2(src + i * 128);
}

// ---- number formats ------------------------------------------------------------------------------------------------

__device__ __forceinline__ void encode(float& dst, float v) { dst = v; }
__device__ __forceinline__ void encode(__half& dst, float v) { dst = saturated_half(v); }
__device__ __forceinline__ void encode(__nv_bfloat16& dst, float v) { dst = __float2bfloat16_rn(v); }

// The f16 operand of a stored number.
__device__ __forceinline__ __half as_half(__half v) { return v; }
template <typename T>
__device__ __forceinline__ __half as_half(T v) {
    return saturated_half(static_cast<float>(v));
}

// Two bf16 to two f16.
__device__ __forceinline__ uint32_t narrowed(uint32_t pair) {
    return saturated_half2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Loads four consecutive numbers as f16.
__device__ __forceinline__ uint2 load_halves4(const __half* src) {
    return load_of_line(reinterpret_cast<const uint2*>(src));
}
__device__ __forceinline__ uint2 load_halves4(const __nv_bfloat16* src) {
    const uint2 v = __ldcg(reinterpret_cast<const uint2*>(src));
    return make_uint2(narrowed(v.x), narrowed(v.y));
}
__device__ __forceinline__ uint2 load_halves4(const float* src) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(src));
    return make_uint2(saturated_half2(v.x, v.y), saturated_half2(v.z, v.w));
}

// Loads eight consecutive numbers as f16.
__device__ __forceinline__ uint4 load_halves8(const __half* src) {
    return load_of_line(reinterpret_cast<const uint4*>(src));
}
template <typename T>
__device__ __forceinline__ uint4 load_halves8(const T* src) {
    const uint2 a = load_halves4(src), b = load_halves4(src + 4);
    return make_uint4(a.x, a.y, b.x, b.y);
}

// ---- pages of number formats ---------------------------------------------------------------------------------------

// Index of element e at a position within a page of values. Values are transposed, 16 positions at a time:
// [PAGE_SIZE / 16][row][16], so that a warp reads contiguous memory. Where bit 2 of e is set, the first eight of the 16
// positions swap with the last eight: this is the 32-byte swizzle of wgmma, and it also avoids bank conflicts of other
// reads.
__device__ __forceinline__ int value_offset(int row, int position, int e) {
    return position / 16 * 16 * row + e * 16 + (position % 16 ^ (e & 4) * 2);
}

// Number format T: keys [PAGE_SIZE][row], values at value_offset.
template <typename T>
struct CacheNumbers {
    static constexpr int block_bytes = 32 * sizeof(T);
    static constexpr int key_step = 1;  // pieces that one read takes
    static constexpr bool spreads = false;
    static constexpr bool independent = true;  // a stored number depends on no other number of the head

    template <int ROW, int N, int COUNT>
    struct Keys {
        uint4 v[N][COUNT];

        static __device__ __forceinline__ const uint8_t* address(const uint8_t* page, int position, int t) {
            return reinterpret_cast<const uint8_t*>(reinterpret_cast<const T*>(page) +
                                                    static_cast<uint32_t>(position * ROW + 8 * t));
        }
        __device__ __forceinline__ void load(const uint8_t* page, int position, int first, int t) {
            load(address(page, position, t), first);
        }
        // Loads from an address that `address` returned.
        __device__ __forceinline__ void load(const uint8_t* src, int first = 0) {
            const T* k = reinterpret_cast<const T*>(src);
#pragma unroll
            for (int j = 0; j < N * COUNT; ++j) {  // in order of use
                const int n = N == 2 ? j % N : j / COUNT, i = N == 2 ? j / N : j % COUNT;
                v[n][i] = load_halves8(k + 2 * n * ROW + (first + i) * 32);
            }
        }
        __device__ __forceinline__ uint4 get(int n, int i, int) const { return v[n][i]; }
        // Overwrites the key of position `at` of the strip of 16 positions (N == 2) with `key` [ROW].
        __device__ __forceinline__ void put(int at, const __half* key, int g, int t) {
            if (g != at / 4 * 2 + at % 2) return;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const uint4 piece = *reinterpret_cast<const uint4*>(key + i * 32 + 8 * t);
                v[0][i] = at & 2 ? v[0][i] : piece;
                v[1][i] = at & 2 ? piece : v[1][i];
            }
        }
    };

    template <int ROW, int COUNT>
    struct Values {
        uint4 w[COUNT];

        __device__ __forceinline__ void load(const uint8_t* page, int position, int first, int g, int t) {
            const T* v = reinterpret_cast<const T*>(page) + value_offset(ROW, position + 8 * t, g);
#pragma unroll
            for (int n = 0; n < COUNT; ++n) w[n] = load_halves8(v + (first + n) * 8 * 16);
        }
        __device__ __forceinline__ uint4 get(int n, int) const { return w[n]; }
    };

    template <int ROW, int COUNT>
    struct DecodeValues {
        uint2 w[COUNT][2];

        static __device__ __forceinline__ const uint8_t* address(const uint8_t* page, int position, int g, int t) {
            const int offset = position * ROW + g * 16 + (4 * t ^ (g & 4) * 2);
            return reinterpret_cast<const uint8_t*>(reinterpret_cast<const T*>(page) + static_cast<uint32_t>(offset));
        }
        __device__ __forceinline__ void load(const uint8_t* page, int position, int first, int g, int t) {
            load(address(page, position, g, t), first);
        }
        // Loads from an address that `address` returned.
        __device__ __forceinline__ void load(const uint8_t* src, int first = 0) {
            const T* v = reinterpret_cast<const T*>(src);
#pragma unroll
            for (int n = 0; n < COUNT; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h) w[n][h] = load_halves4(v + ((first + n) * 16 + 8 * h) * 16);
        }
        __device__ __forceinline__ uint4 get(int n, int) const {
            return make_uint4(w[n][0].x, w[n][1].x, w[n][0].y, w[n][1].y);
        }
        // Overwrites the value of position `at` of the strip with `value` [ROW].
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

    // store_*_element: stores one element of a position. as_read: the f16 that later reads of the element return.
    template <int ROW>
    static __device__ __forceinline__ void store_key_element(uint8_t* page, int position, int e, float v) {
        encode(reinterpret_cast<T*>(page)[position * ROW + e], v);
    }
    template <int ROW>
    static __device__ __forceinline__ void store_value_element(uint8_t* page, int position, int e, float v) {
        encode(reinterpret_cast<T*>(page)[value_offset(ROW, position, e)], v);
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
        for (int i = lane; i < row; i += 32)
            encode(reinterpret_cast<T*>(page)[value_offset(row, position, i)], head[i]);
    }
};

using CacheF32 = CacheNumbers<float>;
using CacheF16 = CacheNumbers<__half>;
using CacheBF16 = CacheNumbers<__nv_bfloat16>;
