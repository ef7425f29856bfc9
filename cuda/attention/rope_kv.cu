// q, k and v of any number of tokens: rotated q to halves, k and v to their pages (rope.cuh). A decode step's tokens
// have this done by attention itself (paged_attention.cu), and many tokens on Hopper by the product that makes them, for which
// find_turns leaves what it has to know (rope_epilogue.cuh). Of many tokens elsewhere, the heads that most models have,
// which turn in whole and have no norm, are moved 16 bytes at a time, several of them ahead (rope_kv_whole).
#include "attention/rope.cuh"

constexpr int HEAD_WARPS = 4;

// Which head of a token, counted over q, k and v.
struct Which {
    int part, index;
    __device__ __forceinline__ Which(const RopeKv& p, int i) {
        part = i < p.n_head ? QUERY : i < p.n_head + p.n_head_kv ? KEY : VALUE;
        index = i - (part == QUERY ? 0 : part == KEY ? p.n_head : p.n_head + p.n_head_kv);
    }
};

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;
template <class K, class V>
constexpr bool both_halves = is_same<K, CacheF16> && is_same<V, CacheF16>;

// Values lie transposed, so that a token's are two bytes in each of many lines. Those of eight tokens are 16 bytes.
constexpr int TOGETHER = 8;

// Whether all of tokens first ... first + 7 of n are of one sequence, at positions that begin with a multiple of eight.
__device__ __forceinline__ bool are_together(const RopeKv& p, int first, int n, int lane) {
    const int token = min(first + lane % TOGETHER, n - 1), position = p.positions[token], sequence = p.sequences[token];
    const int start = __shfl_sync(0xffffffffu, position, 0), one = __shfl_sync(0xffffffffu, sequence, 0);
    const bool mine = position == start + lane % TOGETHER && sequence == one;
    return __all_sync(0xffffffffu, mine && start % TOGETHER == 0);
}

// Where the 16 positions are among a head's values of a page that have this one; that of element 0 in place of
// value_place, which would be worked out again for each column (of ptxas for sm_120 in more registers than there are).
__device__ __forceinline__ __half* sixteen(__half* values, int row, int position) {
    return values + position % PAGE_SIZE / 16 * 16 * row;
}

// A column of values of tokens that are together goes to its 16 positions, where it has 16 bytes in a row.
__device__ __forceinline__ void store_column(const RopeKv& p, __half* to, int kv_head, int first, int position, int i) {
    const int e = p.head_size;
    const float* bias = p.bias[VALUE];
    float value[TOGETHER];
    __align__(16) __half column[TOGETHER];
#pragma unroll
    for (int t = 0; t < TOGETHER; ++t)
        value[t] = i < e ? __ldcg(p.projected[VALUE] + (static_cast<size_t>(first + t) * p.n_head_kv + kv_head) * e + i)
                         : 0.0f;
    const float more = bias != nullptr && i < e ? bias[kv_head * e + i] : 0.0f;
#pragma unroll
    for (int t = 0; t < TOGETHER; ++t) column[t] = saturated_half(value[t] + more);
    *reinterpret_cast<uint4*>(to + value_place(p.row, position % 16, i)) = *reinterpret_cast<const uint4*>(column);
}
// The same of a value head; by one warp.
__device__ __forceinline__ void store_values(const RopeKv& p, int kv_head, int first, int position, int lane) {
    __half* values = reinterpret_cast<__half*>(page_at<CacheF16>(p, p.v_pages, p.pages[first], kv_head, p.row));
    values = sixteen(values, p.row, position);
#pragma unroll 2
    for (int i = lane; i < p.row; i += 32) store_column(p, values, kv_head, first, position, i);
}

// A warp takes heads of one token, each the grid's warps further on: the angles are found once. Values of tokens that are
// together are left to the first of them.
// grid (at most ceil((H + 2 G) / HEAD_WARPS), T)
template <class K, class V>  // types of keys and values
__global__ void __launch_bounds__(HEAD_WARPS * 32, both_halves<K, V> ? 8 : 6) rope_kv(const RopeKv p) {
    __shared__ float heads[HEAD_WARPS][MAX_HEAD];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.y;
    const int stride = gridDim.x * HEAD_WARPS;
    grid_dependency_launch();
    int i = blockIdx.x * HEAD_WARPS + warp;
    // The step's integers are there before earlier kernels end.
    const int position = p.positions[token], first = token / TOGETHER * TOGETHER;
    const bool together = both_halves<K, V> && are_together(p, first, gridDim.y, lane);
    const int end = p.n_head + (together ? 1 : 2) * p.n_head_kv;
    Rotation rotation;
    rotation.prepare(p, position, lane);
    grid_dependency_wait();
    if (together && token == first)
        for (int kv_head = i; kv_head < p.n_head_kv; kv_head += stride) store_values(p, kv_head, first, position, lane);
    if (i >= end) return;
    float* head = heads[warp];
    const int page = p.pages[token];
    for (; i < end; i += stride) {
        const Which which(p, i);
        __half* q = p.q + (static_cast<size_t>(token) * p.n_head + which.index) * p.row;
        if (both_halves<K, V> && which.part != VALUE) {
            __half* k = reinterpret_cast<__half*>(page_at<K>(p, p.k_pages, page, which.index, p.row)) +
                        static_cast<size_t>(position % PAGE_SIZE) * p.row;
            Pairs<MAX_HEAD> pairs;
            pairs.load(p, which.part, which.index, token, lane);
            if (const float* norm = p.norm[which.part])
                pairs.normalise(p, p.eps[which.part], [&](int j) { return pairs.load_weight(p, norm, lane, j); });
            pairs.turn(p, rotation, lane);
            pairs.store(p, which.part == QUERY ? q : k, lane);
            continue;
        }
        prepare_head<K>(p, which.part, which.index, token, rotation, head, lane);
        if (which.part == QUERY)
            for (int e = lane; e < p.row; e += 32) q[e] = saturated_half(head[e]);
        else
            store_head<K, V>(p, which.part, which.index, page, position, head, lane);
        __syncwarp();
    }
}

// turns[T][n_pairs] = (cosine, sine) of each pair at the token's position; rows[T] = which row of keys of the layer's
// first key/value head the token's is. A thread has a pair.
extern "C" __global__ void find_turns(const RopeKv p, float2* turns, int* rows, int n_tokens) {
    grid_dependency_launch();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, token = i / p.n_pairs, pair = i % p.n_pairs;
    if (token >= n_tokens) return;
    const int position = p.positions[token];
    RotationOf<1> rotation;
    rotation.prepare_pair(p.turns[pair], position, 0);
    const int page = p.pages[token];
    grid_dependency_wait();
    turns[i] = make_float2(rotation.cosine[0], rotation.sine[0]);
    if (pair == 0) rows[token] = page * p.n_head_kv * PAGE_SIZE + position % PAGE_SIZE;
}

constexpr int AHEAD = 4;  // heads of a lane whose loads are under way together

// Eight elements of a head, on their way from its projection to halves: 4 l ... 4 l + 3 of its first half and of its
// second.
struct Quads {
    float4 low, high;

    // Which pair of the head the lane's pair j is.
    template <int E>
    static __device__ __forceinline__ int pair_of(bool neox, int l, int j) {
        return neox ? 4 * l + j : (j < 2 ? 0 : E / 4 - 2) + 2 * l + j;
    }
    template <int E>
    __device__ __forceinline__ void load(const float* from, int l) {
        low = __ldcg(reinterpret_cast<const float4*>(from) + l);
        high = __ldcg(reinterpret_cast<const float4*>(from + E / 2) + l);
    }
    template <int E>
    __device__ __forceinline__ void add(const float* bias, int l) {
        const float4 a = reinterpret_cast<const float4*>(bias)[l], b = reinterpret_cast<const float4*>(bias + E / 2)[l];
        low.x += a.x, low.y += a.y, low.z += a.z, low.w += a.w;
        high.x += b.x, high.y += b.y, high.z += b.z, high.w += b.w;
    }
    static __device__ __forceinline__ __half2 half_pair(float a, float b) {
        return __halves2half2(saturated_half(a), saturated_half(b));
    }
    static __device__ __forceinline__ void store_four(__half* to, float a, float b, float c, float d) {
        const __half2 first = half_pair(a, b), second = half_pair(c, d);
        *reinterpret_cast<uint2*>(to) =
            make_uint2(*reinterpret_cast<const uint32_t*>(&first), *reinterpret_cast<const uint32_t*>(&second));
    }
    template <int E>
    __device__ __forceinline__ void store(const RopeKv& p, const Rotation& rotation, __half* to, int l) const {
        const bool neox = p.neox;
        const float2 a = rotation.turn(p, 0, make_float2(low.x, neox ? high.x : low.y));
        const float2 b = rotation.turn(p, 1, neox ? make_float2(low.y, high.y) : make_float2(low.z, low.w));
        const float2 c = rotation.turn(p, 2, neox ? make_float2(low.z, high.z) : make_float2(high.x, high.y));
        const float2 d = rotation.turn(p, 3, make_float2(neox ? low.w : high.z, high.w));
        store_four(to + 4 * l, a.x, neox ? b.x : a.y, neox ? c.x : b.x, neox ? d.x : b.y);
        store_four(to + E / 2 + 4 * l, neox ? a.y : c.x, neox ? b.y : c.y, neox ? c.y : d.x, d.y);
    }
};

// Heads of E elements without norms, all of which turn, and pages of halves. A warp takes heads of one token, as many
// at once as have E / 8 lanes each, and a part of the values of its block's eight tokens.
// grid (at most ceil((H + G) / (256 / E)), ceil(T / 8))
template <int E>
__global__ void __launch_bounds__(TOGETHER * 32, 3) rope_kv_whole(const RopeKv p, int n_tokens) {
    constexpr int LANES = E / 8, HEADS = 32 / LANES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, l = lane % LANES;
    const int first = blockIdx.y * TOGETHER, token = min(first + warp, n_tokens - 1), stride = gridDim.x * HEADS;
    const bool there = first + warp < n_tokens;
    grid_dependency_launch();
    const int position = p.positions[token];
    const bool together = are_together(p, first, n_tokens, lane);
    Rotation rotation;
#pragma unroll
    for (int j = 0; j < 4; ++j) rotation.prepare_pair(p.turns[Quads::pair_of<E>(p.neox, l, j)], position, j);
    grid_dependency_wait();
    const int page = p.pages[token] * p.n_head_kv;
    const int end = there ? p.n_head + p.n_head_kv : 0;
    const float* q = p.projected[QUERY] + static_cast<size_t>(token) * p.n_head * E;
    const float* k = p.projected[KEY] + static_cast<size_t>(token) * p.n_head_kv * E;
    for (int i = blockIdx.x * HEADS + lane / LANES; i < end; i += AHEAD * stride) {
        Quads quads[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            const int head = i + u * stride;
            if (head < end) quads[u].load<E>(head < p.n_head ? q + head * E : k + (head - p.n_head) * E, l);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            const int head = i + u * stride, kv_head = head - p.n_head;
            if (head >= end) break;
            const int part = kv_head < 0 ? QUERY : KEY;
            if (p.bias[part] != nullptr) quads[u].add<E>(p.bias[part] + (kv_head < 0 ? head : kv_head) * E, l);
            __half* to = p.q + (static_cast<size_t>(token) * p.n_head + head) * E;
            if (kv_head >= 0)
                to = p.k_pages + (static_cast<size_t>(page + kv_head) * PAGE_SIZE + position % PAGE_SIZE) * E;
            quads[u].store<E>(p, rotation, to, l);
        }
    }
    if (together) {
        const int start = position - warp;
        for (int i = blockIdx.x * TOGETHER + warp; i < p.n_head_kv * (E / 32); i += gridDim.x * TOGETHER) {
            const int kv_head = i / (E / 32);
            __half* to = sixteen(p.v_pages + static_cast<size_t>(page + kv_head) * E * PAGE_SIZE, E, start);
            store_column(p, to, kv_head, first, start, i % (E / 32) * 32 + lane);
        }
    } else if (there) {
        const float* bias = p.bias[VALUE];
        for (int i = blockIdx.x * 32 + lane; i < p.n_head_kv * E; i += gridDim.x * 32) {
            const float value = __ldcg(p.projected[VALUE] + static_cast<size_t>(token) * p.n_head_kv * E + i);
            __half* to = p.v_pages + static_cast<size_t>(page + i / E) * E * PAGE_SIZE;
            to[value_place(E, position % PAGE_SIZE, i % E)] = saturated_half(value + (bias != nullptr ? bias[i] : 0.0f));
        }
    }
}
