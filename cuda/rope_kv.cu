// q, k and v of any number of tokens: rotated q to halves, k and v to their pages (rope.cuh). A decode step's tokens
// have this done by attention itself (attend.cu).
#include "rope.cuh"

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

// A value head of tokens that are together goes to its page; by one warp.
__device__ __forceinline__ void store_values(const RopeKv& p, int kv_head, int first, int position, int lane) {
    const int e = p.head_size, *table = p.page_tables + p.sequences[first] * p.table_stride;
    uint8_t* page = page_of<CacheF16>(p, p.v_pages, table, kv_head, position, p.row);
    const float* bias = p.bias[VALUE];
#pragma unroll 2
    for (int i = lane; i < p.row; i += 32) {
        float value[TOGETHER];
        __align__(16) __half column[TOGETHER];
#pragma unroll
        for (int t = 0; t < TOGETHER; ++t)
            value[t] = i < e ? __ldcg(p.projected[VALUE] + (static_cast<size_t>(first + t) * p.n_head_kv + kv_head) * e + i)
                             : 0.0f;
        const float more = bias != nullptr && i < e ? bias[kv_head * e + i] : 0.0f;
#pragma unroll
        for (int t = 0; t < TOGETHER; ++t) column[t] = saturated_half(value[t] + more);
        __half* to = reinterpret_cast<__half*>(page) + static_cast<size_t>(i) * PAGE_SIZE + position % PAGE_SIZE;
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(column);
    }
}

// A head of a query or a key without a norm, on its way from its projection to halves; by one warp. A lane has pairs
// lane, lane + 32, ...: those that turn, then what is left.
struct Pairs {
    float2 v[MAX_HEAD / 64];

    // The first element of a pair, and the distance of the other.
    static __device__ __forceinline__ int first(const RopeKv& p, int i) { return p.neox && i < p.n_pairs ? i : 2 * i; }
    static __device__ __forceinline__ int apart(const RopeKv& p, int i) {
        return p.neox && i < p.n_pairs ? p.n_pairs : 1;
    }
    __device__ __forceinline__ void load(const RopeKv& p, const Which& which, int token, int lane) {
        const int e = p.head_size, n = which.part == QUERY ? p.n_head : p.n_head_kv;
        const float* from = p.projected[which.part] + (static_cast<size_t>(token) * n + which.index) * e;
        const float* bias = p.bias[which.part];
#pragma unroll
        for (int j = 0; j < MAX_HEAD / 64; ++j) {
            const int i = lane + 32 * j, a = first(p, i), b = a + apart(p, i);
            v[j] = make_float2(0.0f, 0.0f);
            if (2 * i >= e) continue;
            v[j] = make_float2(__ldcg(from + a), __ldcg(from + b));
            if (bias != nullptr) v[j].x += bias[which.index * e + a], v[j].y += bias[which.index * e + b];
        }
    }
    __device__ __forceinline__ void store(const RopeKv& p, const Rotation& rotation, __half* to, int lane) const {
#pragma unroll
        for (int j = 0; j < MAX_HEAD / 64; ++j) {
            const int i = lane + 32 * j, a = first(p, i);
            if (2 * i >= p.row) break;
            const float2 turned = i < p.n_pairs ? rotation.turn(p, j, v[j]) : v[j];
            const __half2 pair = __halves2half2(saturated_half(turned.x), saturated_half(turned.y));
            if (apart(p, i) == 1)
                *reinterpret_cast<__half2*>(to + a) = pair;
            else
                to[a] = __low2half(pair), to[a + apart(p, i)] = __high2half(pair);
        }
    }
};

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
    const int* table = p.page_tables + p.sequences[token] * p.table_stride;
    for (; i < end; i += stride) {
        const Which which(p, i);
        __half* q = p.q + (static_cast<size_t>(token) * p.n_head + which.index) * p.row;
        if (both_halves<K, V> && which.part != VALUE && p.norm[which.part] == nullptr) {
            uint8_t* page = page_of<K>(p, p.k_pages, table, which.index, position, p.row);
            __half* k = reinterpret_cast<__half*>(page) + static_cast<size_t>(position % PAGE_SIZE) * p.row;
            Pairs pairs;
            pairs.load(p, which, token, lane);
            pairs.store(p, rotation, which.part == QUERY ? q : k, lane);
            continue;
        }
        prepare_head<K>(p, which.part, which.index, token, rotation, head, lane);
        if (which.part == QUERY)
            for (int e = lane; e < p.row; e += 32) q[e] = saturated_half(head[e]);
        else
            store_head<K, V>(p, which.part, which.index, token, position, head, lane);
        __syncwarp();
    }
}
