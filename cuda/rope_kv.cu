// Between the projections and attention: bias, norm of heads, rotation; q to halves, k and v to their pages.
//
// A warp per (token, head of q, k or v). Pages of a layer: k [page][G][PAGE_SIZE][E], v transposed
// [page][G][E][PAGE_SIZE], both half, E rounded up to 32 with zeros (ROW): so that attend.cu reads both 16 bytes at a
// time in the order of its tensor-core operands.
//
// An angle is counted in turns, as a 64-bit fraction: position * turns wraps around exactly, so that angles at
// position one million are as good as at position one.
#include "common.cuh"

#ifndef PAGE_SIZE
#define PAGE_SIZE 64
#endif

constexpr int HEAD_WARPS = 4;
constexpr int MAX_HEAD = 256;

struct RopeKv {
    const float* projected[3];  // q [T, H * E], k and v [T, G * E]
    const float* bias[3];    // [H * E], [G * E], [G * E] or null
    const float* norm[2];    // of q and k heads, [E] or null
    const uint64_t* turns;   // [n_pairs] of a circle, times 2^64
    const int* positions;    // [T]
    const int* sequences;    // [T]
    const int* page_tables;  // [S, table_stride]
    __half* q;               // [T, H, ROW]
    __half* k_pages;
    __half* v_pages;
    int n_head, n_head_kv, head_size, row;
    int n_pairs;   // rotated pairs of elements
    int neox;      // pairs (i, i + n_pairs); else (2 i, 2 i + 1)
    int table_stride;
    float magnitude;
    float eps[2];  // of the q and k norms
};

__device__ void rotate(const RopeKv& p, float* head, int position, int lane) {
    for (int i = lane; i < p.n_pairs; i += 32) {
        const int64_t turn = static_cast<int64_t>(p.turns[i] * static_cast<uint64_t>(static_cast<int64_t>(position)));
        float sine, cosine;
        sincospif(static_cast<float>(turn >> 32) * 4.656612873077393e-10f, &sine, &cosine);  // 2^-31: half turns
        const int a = p.neox ? i : 2 * i, b = p.neox ? i + p.n_pairs : 2 * i + 1;
        const float x = head[a], y = head[b];
        head[a] = (x * cosine - y * sine) * p.magnitude;
        head[b] = (x * sine + y * cosine) * p.magnitude;
    }
}

__device__ void normalise(float* head, const float* weight, int n, float eps, int lane) {
    float squares = 0.0f;
    for (int i = lane; i < n; i += 32) squares = fmaf(head[i], head[i], squares);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    const float inverse = 1.0f / sqrtf(squares / static_cast<float>(n) + eps);
    for (int i = lane; i < n; i += 32) head[i] = head[i] * inverse * weight[i];
}

__device__ __forceinline__ __half to_half(float v) { return __float2half(fminf(fmaxf(v, -65504.0f), 65504.0f)); }

// grid (ceil((H + 2 G) / HEAD_WARPS), T)
extern "C" __global__ void __launch_bounds__(HEAD_WARPS * 32) rope_kv(const RopeKv p) {
    __shared__ float heads[HEAD_WARPS][MAX_HEAD];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.y, e = p.head_size;
    const int index = blockIdx.x * HEAD_WARPS + warp, n_heads = p.n_head + 2 * p.n_head_kv;
    grid_dependency_launch();
    grid_dependency_wait();
    if (index >= n_heads) return;
    const int part = index < p.n_head ? 0 : index < p.n_head + p.n_head_kv ? 1 : 2;
    const int head_in_part = index - (part == 0 ? 0 : part == 1 ? p.n_head : p.n_head + p.n_head_kv);
    const int position = p.positions[token];
    const int of_part = part == 0 ? p.n_head : p.n_head_kv;
    const float* from = p.projected[part] + (static_cast<size_t>(token) * of_part + head_in_part) * e;
    float* head = heads[warp];
    for (int i = lane; i < p.row; i += 32)
        head[i] = i < e ? __ldcg(from + i) + (p.bias[part] != nullptr ? p.bias[part][head_in_part * e + i] : 0.0f) : 0.0f;
    __syncwarp();
    if (part < 2 && p.norm[part] != nullptr) {
        normalise(head, p.norm[part], e, p.eps[part], lane);
        __syncwarp();
    }
    if (part < 2) {
        rotate(p, head, position, lane);
        __syncwarp();
    }
    if (part == 0) {
        __half* to = p.q + (static_cast<size_t>(token) * p.n_head + head_in_part) * p.row;
        for (int i = lane; i < p.row; i += 32) to[i] = to_half(head[i]);
        return;
    }
    const size_t page = p.page_tables[p.sequences[token] * p.table_stride + position / PAGE_SIZE];
    const size_t block = (page * p.n_head_kv + head_in_part) * p.row * PAGE_SIZE;
    const int slot = position % PAGE_SIZE;
    for (int i = lane; i < p.row; i += 32) {
        if (part == 1)
            p.k_pages[block + static_cast<size_t>(slot) * p.row + i] = to_half(head[i]);
        else
            p.v_pages[block + static_cast<size_t>(i) * PAGE_SIZE + slot] = to_half(head[i]);
    }
}
