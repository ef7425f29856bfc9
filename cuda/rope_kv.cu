// q, k and v of any number of tokens: rotated q to halves, k and v to their pages (rope.cuh). A decode step's tokens
// have this done by attention itself (attend.cu).
#include "rope.cuh"

constexpr int HEAD_WARPS = 4;

// A warp per (token, head of q, k or v). grid (ceil((H + 2 G) / HEAD_WARPS), T)
template <class K, class V>  // types of keys and values
__global__ void __launch_bounds__(HEAD_WARPS * 32) rope_kv(const RopeKv p) {
    __shared__ float heads[HEAD_WARPS][MAX_HEAD];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.y;
    const int index = blockIdx.x * HEAD_WARPS + warp;
    grid_dependency_launch();
    if (index >= p.n_head + 2 * p.n_head_kv) return;
    const int part = index < p.n_head ? QUERY : index < p.n_head + p.n_head_kv ? KEY : VALUE;
    const int head_of_part = index - (part == QUERY ? 0 : part == KEY ? p.n_head : p.n_head + p.n_head_kv);
    // The step's integers are there before earlier kernels end.
    const int position = p.positions[token];
    Rotation rotation;
    if (part != VALUE) rotation.prepare(p, position, lane);
    grid_dependency_wait();
    float* head = heads[warp];
    prepare_head<K>(p, part, head_of_part, token, rotation, head, lane);
    if (part != QUERY) {
        store_head<K, V>(p, part, head_of_part, token, position, head, lane);
        return;
    }
    __half* to = p.q + (static_cast<size_t>(token) * p.n_head + head_of_part) * p.row;
    for (int i = lane; i < p.row; i += 32) to[i] = saturated_half(head[i]);
}
