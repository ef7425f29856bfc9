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

// A warp takes heads of one token, each the grid's warps further on: the angles are found once.
// grid (at most ceil((H + 2 G) / HEAD_WARPS), T)
template <class K, class V>  // types of keys and values
__global__ void __launch_bounds__(HEAD_WARPS * 32) rope_kv(const RopeKv p) {
    // The next head is on its way while one is turned, where rounding to blocks does not take the registers.
    constexpr bool AHEAD = is_same<K, CacheF16> && is_same<V, CacheF16>;
    __shared__ float heads[HEAD_WARPS][MAX_HEAD];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.y;
    const int stride = gridDim.x * HEAD_WARPS, end = p.n_head + 2 * p.n_head_kv;
    grid_dependency_launch();
    int i = blockIdx.x * HEAD_WARPS + warp;
    if (i >= end) return;
    // The step's integers are there before earlier kernels end.
    const int position = p.positions[token];
    Rotation rotation;
    rotation.prepare(p, position, lane);
    grid_dependency_wait();
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
