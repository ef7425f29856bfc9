// From the QKV projections to attention: bias, head norm and RoPE of q and k, and the layout of the KV cache.
//
// T: tokens; H: query heads; G: KV heads; E: elements of a head; row: E rounded up to a multiple of 32 with zeros.
//
//    x        = projected + bias                                     q [T, H, E], k and v [T, G, E]
//    x        = x / sqrt(mean(x^2) + eps) * norm                     q and k, if the model has head norms
//    x        = x / sqrt(mean(x^2) + eps)                            v, if VALUE_NORM
//    (x, y)   = magnitude * (x cos - y sin, x sin + y cos)           q and k, for each of n_pairs pairs
//
// SHARED_KV: the layer has no k and v of its own; another layer of the step has written them to the pages.
//
// Pages of a layer, f16: k [page][G][PAGE_SIZE][row], v transposed [page][G][PAGE_SIZE / 16][row][16]. Attention reads
// both 16 bytes at a time, in the order of its tensor-core operands (kv_types.cuh). f32 and bf16 have the same layout;
// block formats have another (kv_blocks.cuh).
//
// An angle is a 64-bit fraction of a turn. position * angle wraps around exactly, so angles at position one million are
// as accurate as at position one.
#pragma once
#include "attention/kv_blocks.cuh"

// Elements of a head at most; the host asks for 512 where a model has so large heads.
#ifndef MAX_HEAD
#define MAX_HEAD 256
#endif
#ifndef VALUE_NORM
#define VALUE_NORM 0
#endif
#ifndef SHARED_KV
#define SHARED_KV 0
#endif

struct RopeArgs {
    const float* projected[3];  // q [T, H * E], k and v [T, G * E]
    const float* bias[3];       // [H * E], [G * E], [G * E], or null
    const float* norm[2];       // weights of the q and k head norms, [E], or null
    const uint64_t* angles;     // [n_pairs], turns per position, times 2^64
    const int* positions;       // [T]
    const int* pages;           // [T], pages of these positions
    const int* sequences;       // [T]
    const int* page_tables;     // [S, table_stride]
    __half* q;                  // [T, H, row]
    __half* k_pages;            // f16, or another KV cache type
    __half* v_pages;
    int n_head, n_head_kv, head_size, row;
    int n_pairs;  // pairs of elements that RoPE rotates
    int neox;     // 1: pairs (i, i + n_pairs); 0: pairs (2 i, 2 i + 1)
    int table_stride;
    float magnitude;
    float eps[3];  // of the head norms of q, k and v
};

enum HeadPart { QUERY, KEY, VALUE };

// Offset in elements of a KV head within the K or V pages, for the page of `position`.
__device__ __forceinline__ size_t page_offset(const RopeArgs& p, const int* table, int kv_head, int position) {
    return (static_cast<size_t>(table[position / PAGE_SIZE]) * p.n_head_kv + kv_head) * p.row * PAGE_SIZE;
}

// Address of a KV head within the pages of any type, with `row` elements per head.
template <class Type>
__device__ __forceinline__ uint8_t* page_at(const RopeArgs& p, __half* pages, int page, int kv_head, int row) {
    const uint32_t head = page * p.n_head_kv + kv_head;
    return reinterpret_cast<uint8_t*>(pages) + static_cast<size_t>(head) * (row / 32 * PAGE_SIZE * Type::block_bytes);
}

template <class Type>
__device__ __forceinline__ uint8_t* page_of(const RopeArgs& p, __half* pages, const int* table, int kv_head,
                                            int position, int row) {
    return page_at<Type>(p, pages, table[position / PAGE_SIZE], kv_head, row);
}

// Angle per position of a lane's pairs lane, lane + 32, ..., loaded early.
template <int COUNT>
struct AnglesOf {
    uint64_t of[COUNT];

    __device__ __forceinline__ AnglesOf(const RopeArgs& p, int lane) {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) of[j] = lane + 32 * j < p.n_pairs ? load_now(p.angles + lane + 32 * j) : 0;
    }
};
template <>
struct AnglesOf<0> {
    __device__ __forceinline__ AnglesOf(const RopeArgs&, int) {}
};

// Rotates a pair. fmaf is explicit, so that all kernels that rotate heads give the same bits.
__device__ __forceinline__ float2 rotated(float2 v, float cosine, float sine, float magnitude) {
    return make_float2(fmaf(v.x, cosine, -(v.y * sine)) * magnitude, fmaf(v.x, sine, v.y * cosine) * magnitude);
}

// Sine and cosine of a lane's pairs lane, lane + 32, ... at one position.
template <int COUNT>
struct RotationOf {
    float sine[COUNT], cosine[COUNT];

    __device__ __forceinline__ void prepare(const RopeArgs& p, int position, int lane) {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            if (lane + 32 * j >= p.n_pairs) break;
            prepare_pair(p.angles[lane + 32 * j], position, j);
        }
    }
    // The same from angles that were loaded before.
    __device__ __forceinline__ void prepare(const RopeArgs& p, const AnglesOf<COUNT>& angles, int position) {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) prepare_pair(angles.of[j], position, j);
    }
    // A value that depends on all of `sine` and `cosine`, for grid_dependency_wait: the compiler then computes them
    // before the wait.
    __device__ __forceinline__ int made() const {
        int all = 0;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) all |= __float_as_int(sine[j]) | __float_as_int(cosine[j]);
        return all & 0x7fffffff;
    }
    // Computes sine and cosine of the lane's pair j.
    __device__ __forceinline__ void prepare_pair(uint64_t angles, int position, int j) {
        const uint64_t angle = angles * static_cast<uint64_t>(static_cast<int64_t>(position));
        const int half_turns = static_cast<int>(angle >> 32);  // in units of 2^-31 half turns: from -1 to 1
        sincospif(static_cast<float>(half_turns) * 4.656612873077393e-10f, &sine[j], &cosine[j]);
    }
    __device__ __forceinline__ void apply(const RopeArgs& p, float* head, int lane) const {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const int i = lane + 32 * j;
            if (i >= p.n_pairs) break;
            const int a = p.neox ? i : 2 * i, b = p.neox ? i + p.n_pairs : 2 * i + 1;
            const float2 pair = rotate(p, j, make_float2(head[a], head[b]));
            head[a] = pair.x, head[b] = pair.y;
        }
    }
    __device__ __forceinline__ float2 rotate(const RopeArgs& p, int j, float2 v) const {
        return rotated(v, cosine[j], sine[j], p.magnitude);
    }
};

using Rotation = RotationOf<MAX_HEAD / 64>;  // for any head size

// Address of head `index` of q, k or v of one token.
__device__ __forceinline__ const float* head_of(const RopeArgs& p, int part, int index, int token) {
    const int n = part == QUERY ? p.n_head : p.n_head_kv;
    return p.projected[part] + static_cast<uint32_t>((token * n + index) * p.head_size);
}

// A head in registers of one warp, between its projection and the KV cache. A lane has pairs lane, lane + 32, ...; the
// n_pairs rotated pairs come first, then pairs of the elements that are not rotated.
template <int ROW>
struct Pairs {
    static constexpr int COUNT = (ROW + 63) / 64;
    float2 v[COUNT];

    // First element of pair i, and the distance to its second element.
    static __device__ __forceinline__ int first(const RopeArgs& p, int i) {
        return p.neox && i < p.n_pairs ? i : 2 * i;
    }
    static __device__ __forceinline__ int apart(const RopeArgs& p, int i) {
        return p.neox && i < p.n_pairs ? p.n_pairs : 1;
    }
    __device__ __forceinline__ void load(const RopeArgs& p, int part, int index, int token, int lane) {
        const float *src = head_of(p, part, index, token), *bias = p.bias[part];
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const int i = lane + 32 * j, a = first(p, i), b = a + apart(p, i);
            v[j] = make_float2(0.0f, 0.0f);
            if (2 * i >= p.head_size) continue;
            v[j] = make_float2(__ldcg(src + a), __ldcg(src + b));
            if (bias != nullptr) v[j].x += bias[index * p.head_size + a], v[j].y += bias[index * p.head_size + b];
        }
    }
    // 1 / sqrt(mean(x^2) + eps) of a head. All kernels use this order of summation, so their bits agree.
    __device__ __forceinline__ float inverse_root(const RopeArgs& p, float eps) const {
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) squares = fmaf(v[j].y, v[j].y, fmaf(v[j].x, v[j].x, squares));
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
        return 1.0f / sqrtf(squares / static_cast<float>(p.head_size) + eps);
    }
    // Applies the head norm; weight(j) returns the norm's weights of the lane's j-th pair.
    template <class Weight>
    __device__ __forceinline__ void normalise(const RopeArgs& p, float eps, Weight weight) {
        const float inverse = inverse_root(p, eps);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const float2 by = weight(j);
            v[j] = make_float2(v[j].x * inverse * by.x, v[j].y * inverse * by.y);
        }
    }
    // Loads these weights; 0 past the end of the head.
    static __device__ __forceinline__ float2 load_weight(const RopeArgs& p, const float* norm, int lane, int j) {
        const int i = lane + 32 * j, a = first(p, i);
        if (2 * i >= p.head_size) return make_float2(0.0f, 0.0f);
        return make_float2(load_now(norm + a), load_now(norm + a + apart(p, i)));
    }
    template <class Rotation>
    __device__ __forceinline__ void rotate(const RopeArgs& p, const Rotation& rotation, int lane) {
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
            if (lane + 32 * j < p.n_pairs) v[j] = rotation.rotate(p, j, v[j]);
    }
    __device__ __forceinline__ void store(const RopeArgs& p, __half* dst, int lane) const {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const int i = lane + 32 * j, a = first(p, i);
            if (2 * i >= p.row) break;
            const uint32_t pair = saturated_half2(v[j].x, v[j].y);
            if (apart(p, i) == 1) {
                *reinterpret_cast<uint32_t*>(dst + a) = pair;
            } else {
                dst[a] = __ushort_as_half(static_cast<unsigned short>(pair));
                dst[a + apart(p, i)] = __ushort_as_half(static_cast<unsigned short>(pair >> 16));
            }
        }
    }
    // Calls take(element, value) for each element of the lane.
    template <class Take>
    __device__ __forceinline__ void each(const RopeArgs& p, int lane, Take take) const {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const int i = lane + 32 * j, a = first(p, i);
            if (2 * i >= p.row) break;
            take(a, v[j].x), take(a + apart(p, i), v[j].y);
        }
    }
};

// The same for a kernel that computes the addresses and loads the bias before it waits for the projection (PDL).
template <int ROW>
struct LocatedPairs : Pairs<ROW> {
    using Pairs<ROW>::COUNT;
    using Pairs<ROW>::v;
    const float* head;
    int2 at[COUNT];  // the elements of each pair; past the end of the head, those of pair 0
    float2 bias[COUNT];

    __device__ __forceinline__ void locate(const RopeArgs& p, int part, int index, int token, int lane) {
        const float* b = p.bias[part] == nullptr ? nullptr : p.bias[part] + index * p.head_size;
        head = head_of(p, part, index, token);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const int i = lane + 32 * j, a = 2 * i < p.head_size ? Pairs<ROW>::first(p, i) : 0;
            at[j] = make_int2(a, a + Pairs<ROW>::apart(p, i));
            bias[j] = make_float2(-0.0f, -0.0f);  // adding -0 changes no number, not even -0
            if (b != nullptr) bias[j] = make_float2(load_now(b + at[j].x), load_now(b + at[j].y));
        }
    }
    __device__ __forceinline__ int made() const {
        int all = made_of(head);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) all |= at[j].x | at[j].y;
        return all;
    }
    // Issues all loads; add_bias is the first to use them.
    __device__ __forceinline__ void load() {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) v[j] = make_float2(__ldcg(head + at[j].x), __ldcg(head + at[j].y));
    }
    __device__ __forceinline__ void add_bias(const RopeArgs& p, int lane) {
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
            v[j] = 2 * (lane + 32 * j) < p.head_size ? make_float2(v[j].x + bias[j].x, v[j].y + bias[j].y)
                                                     : make_float2(0.0f, 0.0f);
    }
};

// 1 / sqrt(mean(x^2) + eps) of a head in shared memory; one warp.
__device__ __forceinline__ float inverse_root_of(const RopeArgs& p, const float* head, float eps, int lane) {
    Pairs<MAX_HEAD> pairs;
#pragma unroll
    for (int j = 0; j < pairs.COUNT; ++j) {
        const int i = lane + 32 * j, a = pairs.first(p, i);
        pairs.v[j] = 2 * i < p.head_size ? make_float2(head[a], head[a + pairs.apart(p, i)]) : make_float2(0.0f, 0.0f);
    }
    return pairs.inverse_root(p, eps);
}

// Applies the head norm to a head in shared memory; one warp.
__device__ __forceinline__ void normalise_head(const RopeArgs& p, float* head, const float* weight, float eps,
                                               int lane) {
    const float inverse = inverse_root_of(p, head, eps, lane);
    for (int i = lane; i < p.head_size; i += 32) head[i] = head[i] * inverse * weight[i];
}
__device__ __forceinline__ void normalise_value(const RopeArgs& p, float* head, int lane) {
    const float inverse = inverse_root_of(p, head, p.eps[VALUE], lane);
    for (int i = lane; i < p.head_size; i += 32) head[i] *= inverse;
    __syncwarp();
}

// Normalises and rotates one head in shared memory, bias already added, for keys of type K; one warp.
template <class K, class Rotation>
__device__ __forceinline__ void rotate_head(const RopeArgs& p, int part, const Rotation& rotation, float* head,
                                            int lane) {
    if (VALUE_NORM && part == VALUE) normalise_value(p, head, lane);
    if (part == VALUE) return;
    if (p.norm[part] != nullptr) {
        normalise_head(p, head, p.norm[part], p.eps[part], lane);
        __syncwarp();
    }
    rotation.apply(p, head, lane);
    __syncwarp();
    if constexpr (K::spreads) {
        spread_head<MAX_HEAD>(head, p.row, lane);
        __syncwarp();
    }
}

// Loads head `index` of q, k or v of one token, adds the bias, normalises and rotates it; the result is in shared
// memory `head` [row]; one warp.
template <class K>
__device__ __forceinline__ void prepare_head(const RopeArgs& p, int part, int index, int token,
                                             const Rotation& rotation, float* head, int lane) {
    const int e = p.head_size;
    const float *src = head_of(p, part, index, token), *bias = p.bias[part];
    float v[MAX_HEAD / 32];
#pragma unroll
    for (int j = 0; j < MAX_HEAD / 32; ++j) v[j] = lane + 32 * j < e ? __ldcg(src + lane + 32 * j) : 0.0f;
#pragma unroll
    for (int j = 0; j < MAX_HEAD / 32; ++j) {  // after all loads are issued
        const int i = lane + 32 * j;
        if (bias != nullptr && i < e) v[j] += bias[index * e + i];
        if (i < p.row) head[i] = v[j];
    }
    __syncwarp();
    rotate_head<K>(p, part, rotation, head, lane);
}

// Stores a prepared key or value to its page; one warp.
template <class K, class V>
__device__ __forceinline__ void store_head(const RopeArgs& p, int part, int kv_head, int page, int position,
                                           const float* head, int lane) {
    const int slot = position % PAGE_SIZE;
    if (part == KEY)
        K::store_key(page_at<K>(p, p.k_pages, page, kv_head, p.row), p.row, slot, head, lane);
    else
        V::store_value(page_at<V>(p, p.v_pages, page, kv_head, p.row), p.row, slot, head, lane);
}
