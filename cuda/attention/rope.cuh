// Between the projections and attention: bias, norm of heads, rotation, and where keys and values lie.
//
// Pages of a layer: k [page][G][PAGE_SIZE][row], v transposed [page][G][PAGE_SIZE / 16][row][16], both half, a head's E
// elements rounded up to `row`, a multiple of 32, with zeros: so that attention reads both 16 bytes at a time in the order
// of its tensor-core operands (kv_types.cuh). Other types than numbers have layouts of their own (kv_blocks.cuh).
//
// An angle is counted in turns, as a 64-bit fraction: position * turns wraps around exactly, so that angles at
// position one million are as good as at position one.
#pragma once
#include "attention/kv_blocks.cuh"

constexpr int MAX_HEAD = 256;

struct RopeKv {
    const float* projected[3];  // q [T, H * E], k and v [T, G * E]
    const float* bias[3];       // [H * E], [G * E], [G * E] or null
    const float* norm[2];       // of q and k heads, [E] or null
    const uint64_t* turns;      // [n_pairs] of a circle per position, times 2^64
    const int* positions;       // [T]
    const int* pages;           // [T], of these positions
    const int* sequences;       // [T]
    const int* page_tables;     // [S, table_stride]
    __half* q;                  // [T, H, row]
    __half* k_pages;  // or another type
    __half* v_pages;
    int n_head, n_head_kv, head_size, row;
    int n_pairs;  // rotated pairs of elements
    int neox;     // pairs (i, i + n_pairs); else (2 i, 2 i + 1)
    int table_stride;
    float magnitude;
    float eps[2];  // of the q and k norms
};

enum HeadPart { QUERY, KEY, VALUE };

// Elements before the head of a page of keys or values.
__device__ __forceinline__ size_t page_offset(const RopeKv& p, const int* table, int kv_head, int position) {
    return (static_cast<size_t>(table[position / PAGE_SIZE]) * p.n_head_kv + kv_head) * p.row * PAGE_SIZE;
}

// The same as an address, of pages of any type with `row` elements a head.
template <class Type>
__device__ __forceinline__ uint8_t* page_at(const RopeKv& p, __half* pages, int page, int kv_head, int row) {
    const uint32_t head = page * p.n_head_kv + kv_head;
    return reinterpret_cast<uint8_t*>(pages) + static_cast<size_t>(head) * (row / 32 * PAGE_SIZE * Type::block_bytes);
}

template <class Type>
__device__ __forceinline__ uint8_t* page_of(const RopeKv& p, __half* pages, const int* table, int kv_head, int position,
                                            int row) {
    return page_at<Type>(p, pages, table[position / PAGE_SIZE], kv_head, row);
}

// By how much a lane's pairs lane, lane + 32, ... turn from one position to the next.
template <int COUNT>
struct TurnsOf {
    uint64_t of[COUNT];

    __device__ __forceinline__ TurnsOf(const RopeKv& p, int lane) {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) of[j] = lane + 32 * j < p.n_pairs ? load_now(p.turns + lane + 32 * j) : 0;
    }
};
template <>
struct TurnsOf<0> {
    __device__ __forceinline__ TurnsOf(const RopeKv&, int) {}
};

// A pair, turned. Which product is not rounded is said, so that all kernels that turn heads give the same bits.
__device__ __forceinline__ float2 turned(float2 v, float cosine, float sine, float magnitude) {
    return make_float2(fmaf(v.x, cosine, -(v.y * sine)) * magnitude, fmaf(v.x, sine, v.y * cosine) * magnitude);
}

// The rotation of these pairs at one position.
template <int COUNT>
struct RotationOf {
    float sine[COUNT], cosine[COUNT];

    __device__ __forceinline__ void prepare(const RopeKv& p, int position, int lane) {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            if (lane + 32 * j >= p.n_pairs) break;
            prepare_pair(p.turns[lane + 32 * j], position, j);
        }
    }
    // The same from turns that were asked for before.
    __device__ __forceinline__ void prepare(const RopeKv& p, const TurnsOf<COUNT>& turns, int position) {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) prepare_pair(turns.of[j], position, j);
    }
    // See grid_dependency_wait.
    __device__ __forceinline__ int made() const {
        int all = 0;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) all |= __float_as_int(sine[j]) | __float_as_int(cosine[j]);
        return all & 0x7fffffff;
    }
    // Pair j of this lane.
    __device__ __forceinline__ void prepare_pair(uint64_t turns, int position, int j) {
        const uint64_t turn = turns * static_cast<uint64_t>(static_cast<int64_t>(position));
        const int half_turns = static_cast<int>(turn >> 32);  // times 2^-31, from -1 to 1
        sincospif(static_cast<float>(half_turns) * 4.656612873077393e-10f, &sine[j], &cosine[j]);
    }
    __device__ __forceinline__ void apply(const RopeKv& p, float* head, int lane) const {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const int i = lane + 32 * j;
            if (i >= p.n_pairs) break;
            const int a = p.neox ? i : 2 * i, b = p.neox ? i + p.n_pairs : 2 * i + 1;
            const float2 pair = turn(p, j, make_float2(head[a], head[b]));
            head[a] = pair.x, head[b] = pair.y;
        }
    }
    __device__ __forceinline__ float2 turn(const RopeKv& p, int j, float2 v) const {
        return turned(v, cosine[j], sine[j], p.magnitude);
    }
};

using Rotation = RotationOf<MAX_HEAD / 64>;  // of any head

// Where a head of a part of one token comes from.
__device__ __forceinline__ const float* head_of(const RopeKv& p, int part, int index, int token) {
    const int n = part == QUERY ? p.n_head : p.n_head_kv;
    return p.projected[part] + static_cast<uint32_t>((token * n + index) * p.head_size);
}

// A head on its way from its projection; by one warp. A lane has pairs lane, lane + 32, ...: those that turn, then what is
// left.
template <int ROW>
struct Pairs {
    static constexpr int COUNT = (ROW + 63) / 64;
    float2 v[COUNT];

    // The first element of a pair, and the distance of the other.
    static __device__ __forceinline__ int first(const RopeKv& p, int i) { return p.neox && i < p.n_pairs ? i : 2 * i; }
    static __device__ __forceinline__ int apart(const RopeKv& p, int i) {
        return p.neox && i < p.n_pairs ? p.n_pairs : 1;
    }
    __device__ __forceinline__ void load(const RopeKv& p, int part, int index, int token, int lane) {
        const float *from = head_of(p, part, index, token), *bias = p.bias[part];
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const int i = lane + 32 * j, a = first(p, i), b = a + apart(p, i);
            v[j] = make_float2(0.0f, 0.0f);
            if (2 * i >= p.head_size) continue;
            v[j] = make_float2(__ldcg(from + a), __ldcg(from + b));
            if (bias != nullptr) v[j].x += bias[index * p.head_size + a], v[j].y += bias[index * p.head_size + b];
        }
    }
    // 1 / root of the mean square of a head: the order of this sum is that of all kernels.
    __device__ __forceinline__ float inverse_root(const RopeKv& p, float eps) const {
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) squares = fmaf(v[j].y, v[j].y, fmaf(v[j].x, v[j].x, squares));
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
        return 1.0f / sqrtf(squares / static_cast<float>(p.head_size) + eps);
    }
    // By the norm of its part, whose weights at the lane's j-th pair are weight(j).
    template <class Weight>
    __device__ __forceinline__ void normalise(const RopeKv& p, float eps, Weight weight) {
        const float inverse = inverse_root(p, eps);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const float2 by = weight(j);
            v[j] = make_float2(v[j].x * inverse * by.x, v[j].y * inverse * by.y);
        }
    }
    // That, now; past the end 0.
    static __device__ __forceinline__ float2 load_weight(const RopeKv& p, const float* norm, int lane, int j) {
        const int i = lane + 32 * j, a = first(p, i);
        if (2 * i >= p.head_size) return make_float2(0.0f, 0.0f);
        return make_float2(load_now(norm + a), load_now(norm + a + apart(p, i)));
    }
    template <class Rotation>
    __device__ __forceinline__ void turn(const RopeKv& p, const Rotation& rotation, int lane) {
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
            if (lane + 32 * j < p.n_pairs) v[j] = rotation.turn(p, j, v[j]);
    }
    __device__ __forceinline__ void store(const RopeKv& p, __half* to, int lane) const {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const int i = lane + 32 * j, a = first(p, i);
            if (2 * i >= p.row) break;
            const uint32_t pair = saturated_half2(v[j].x, v[j].y);
            if (apart(p, i) == 1) {
                *reinterpret_cast<uint32_t*>(to + a) = pair;
            } else {
                to[a] = __ushort_as_half(static_cast<unsigned short>(pair));
                to[a + apart(p, i)] = __ushort_as_half(static_cast<unsigned short>(pair >> 16));
            }
        }
    }
    // take(element, value) of each.
    template <class Take>
    __device__ __forceinline__ void each(const RopeKv& p, int lane, Take take) const {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const int i = lane + 32 * j, a = first(p, i);
            if (2 * i >= p.row) break;
            take(a, v[j].x), take(a + apart(p, i), v[j].y);
        }
    }
};

// The same of a kernel that works out where the head lies, and reads its bias, before it waits for the projection.
template <int ROW>
struct LocatedPairs : Pairs<ROW> {
    using Pairs<ROW>::COUNT;
    using Pairs<ROW>::v;
    const float* head;
    int2 at[COUNT];  // its elements; past the end the first ones
    float2 bias[COUNT];

    __device__ __forceinline__ void locate(const RopeKv& p, int part, int index, int token, int lane) {
        const float* b = p.bias[part] == nullptr ? nullptr : p.bias[part] + index * p.head_size;
        head = head_of(p, part, index, token);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const int i = lane + 32 * j, a = 2 * i < p.head_size ? Pairs<ROW>::first(p, i) : 0;
            at[j] = make_int2(a, a + Pairs<ROW>::apart(p, i));
            bias[j] = make_float2(-0.0f, -0.0f);  // what changes nothing, not even -0
            if (b != nullptr) bias[j] = make_float2(load_now(b + at[j].x), load_now(b + at[j].y));
        }
    }
    __device__ __forceinline__ int made() const {
        int all = made_of(head);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) all |= at[j].x | at[j].y;
        return all;
    }
    // All loads are under way before the first is awaited, by add_bias.
    __device__ __forceinline__ void load() {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) v[j] = make_float2(__ldcg(head + at[j].x), __ldcg(head + at[j].y));
    }
    __device__ __forceinline__ void add_bias(const RopeKv& p, int lane) {
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
            v[j] = 2 * (lane + 32 * j) < p.head_size ? make_float2(v[j].x + bias[j].x, v[j].y + bias[j].y)
                                                     : make_float2(0.0f, 0.0f);
    }
};

// A head in shared memory; by one warp.
__device__ __forceinline__ void normalise_head(const RopeKv& p, float* head, const float* weight, float eps, int lane) {
    Pairs<MAX_HEAD> pairs;
#pragma unroll
    for (int j = 0; j < pairs.COUNT; ++j) {
        const int i = lane + 32 * j, a = pairs.first(p, i);
        pairs.v[j] = 2 * i < p.head_size ? make_float2(head[a], head[a + pairs.apart(p, i)]) : make_float2(0.0f, 0.0f);
    }
    const float inverse = pairs.inverse_root(p, eps);
    for (int i = lane; i < p.head_size; i += 32) head[i] = head[i] * inverse * weight[i];
}

// A head of one token in shared memory, bias added, becomes what attention takes with keys of type K; by one warp.
template <class K, class Rotation>
__device__ __forceinline__ void turn_head(const RopeKv& p, int part, const Rotation& rotation, float* head, int lane) {
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

// Head `index` of a part of one token becomes what attention takes, in shared memory `head` [row]; by one warp.
template <class K>
__device__ __forceinline__ void prepare_head(const RopeKv& p, int part, int index, int token, const Rotation& rotation,
                                             float* head, int lane) {
    const int e = p.head_size;
    const float *from = head_of(p, part, index, token), *bias = p.bias[part];
    float v[MAX_HEAD / 32];
#pragma unroll
    for (int j = 0; j < MAX_HEAD / 32; ++j) v[j] = lane + 32 * j < e ? __ldcg(from + lane + 32 * j) : 0.0f;
#pragma unroll
    for (int j = 0; j < MAX_HEAD / 32; ++j) {  // when all loads are under way
        const int i = lane + 32 * j;
        if (bias != nullptr && i < e) v[j] += bias[index * e + i];
        if (i < p.row) head[i] = v[j];
    }
    __syncwarp();
    turn_head<K>(p, part, rotation, head, lane);
}

// A prepared key or value goes to its page; by one warp.
template <class K, class V>
__device__ __forceinline__ void store_head(const RopeKv& p, int part, int kv_head, int page, int position,
                                           const float* head, int lane) {
    const int slot = position % PAGE_SIZE;
    if (part == KEY)
        K::store_key(page_at<K>(p, p.k_pages, page, kv_head, p.row), p.row, slot, head, lane);
    else
        V::store_value(page_at<V>(p, p.v_pages, page, kv_head, p.row), p.row, slot, head, lane);
}
