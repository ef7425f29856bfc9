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

// A warp takes heads of one token, each the grid's warps further on: the angles are found once. Values of tokens that are
// together are left to the first of them.
// grid (at most ceil((H + 2 G) / HEAD_WARPS), T)
template <class K, class V>  // types of keys and values
__global__ void __launch_bounds__(HEAD_WARPS * 32, both_halves<K, V> ? 8 : 6) rope_kv(const RopeKv p) {
    // The next head is on its way while one is turned, where rounding to blocks does not take the registers.
    constexpr bool AHEAD = both_halves<K, V>;
    __shared__ float heads[HEAD_WARPS][MAX_HEAD];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.y;
    const int stride = gridDim.x * HEAD_WARPS;
    grid_dependency_launch();
    int i = blockIdx.x * HEAD_WARPS + warp;
    // The step's integers are there before earlier kernels end.
    const int position = p.positions[token], first = token / TOGETHER * TOGETHER;
    const bool together = AHEAD && are_together(p, first, gridDim.y, lane);
    const int end = p.n_head + (together ? 1 : 2) * p.n_head_kv;
    Rotation rotation;
    rotation.prepare(p, position, lane);
    grid_dependency_wait();
    if (together && token == first)
        for (int kv_head = i; kv_head < p.n_head_kv; kv_head += stride) store_values(p, kv_head, first, position, lane);
    if (i >= end) return;
    float* head = heads[warp];
    Which now(p, i);
    RawHead raw;
    if (AHEAD) raw.load(p, now.part, now.index, token, lane);
    for (; i < end; i += stride) {
        const Which next(p, min(i + stride, end - 1));
        if constexpr (AHEAD) {
            raw.put(p, head, lane);
            if (i + stride < end) raw.load(p, next.part, next.index, token, lane);
            turn_head<K>(p, now.part, rotation, head, lane);
        } else {
            prepare_head<K>(p, now.part, now.index, token, rotation, head, lane);
        }
        if (now.part == QUERY) {
            __half* to = p.q + (static_cast<size_t>(token) * p.n_head + now.index) * p.row;
            for (int e = lane; e < p.row; e += 32) to[e] = saturated_half(head[e]);
        } else {
            store_head<K, V>(p, now.part, now.index, token, position, head, lane);
        }
        __syncwarp();
        now = next;
    }
}
