// What attention over pages has in common, for tiles of rows (attend.cu) and for one token alone (attend_token.cuh): its
// parameters, and how partial results become one.
#pragma once
#include "packed.cuh"
#include "rope.cuh"

constexpr int ROWS = 16;
constexpr int MAX_SPLIT = 16;  // parts of a context
constexpr float NONE = -1e30f;
constexpr float LOG2E = 1.4426950408889634f;

struct AttendTile {
    int first_token;
    int n_tokens;   // of one sequence, adjacent
    int n_split;
    int workspace;  // index of this tile's part of the workspace; -1 where n_split is 1
};

struct Attend {
    RopeKv rope;         // also pages, positions, page tables and sizes
    const AttendTile* tiles;
    const float* sinks;  // [H] or null
    __half* out;         // [T, H * E]
    float* workspace;    // per (tile, head group): MAX_SPLIT x ROWS x (ROW + 2)
    uint32_t* counters;  // per (tile, head group), zero before and after
    int heads_per_tile;  // query heads of a tile: of one key/value head, at most 16
    int window;          // positions seen, itself included; 0 is all
    float scale;
    float soft_cap;      // 0 is none
    int order;           // of the output: PLAIN_ORDER, or packed (packed.cuh) for the product that takes it
    int n_tokens;        // of the step
};

// Row r of a tile is (token r / heads, head r % heads).
struct Rows {
    int first_token, n_rows, heads, first_head, kv_head;

    // Head group `index` of `count`.
    __device__ __forceinline__ Rows(const Attend& p, const AttendTile& tile, int index, int count) {
        const int group = p.rope.n_head / p.rope.n_head_kv, parts = count / p.rope.n_head_kv;
        const int part = index % parts;
        kv_head = index / parts;
        first_token = tile.first_token;
        heads = min(p.heads_per_tile, group - part * p.heads_per_tile);
        first_head = kv_head * group + part * p.heads_per_tile;
        n_rows = tile.n_tokens * heads;
    }
    __device__ __forceinline__ int token(int r) const { return first_token + r / heads; }
    __device__ __forceinline__ int head(int r) const { return first_head + r % heads; }
};

// Elements e, e + 1 of row r of n results [n][n_rows][ROW + 2] of (o, maximum, sum), made one in the order they have.
template <int ROW>
__device__ __forceinline__ float2 merge_parts(const float* parts, int n, int n_rows, int r, int e, float& maximum,
                                              float& sum) {
    maximum = NONE;
#pragma unroll 4
    for (int i = 0; i < n; ++i) maximum = fmaxf(maximum, parts[(i * n_rows + r) * (ROW + 2) + ROW]);
    float2 o = make_float2(0.0f, 0.0f);
    sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < n; ++i) {
        const float* part = parts + (i * n_rows + r) * (ROW + 2);
        const float2 value = *reinterpret_cast<const float2*>(part + e);
        const float weight = exp2f(part[ROW] - maximum);
        o.x += weight * value.x;
        o.y += weight * value.y;
        sum += weight * part[ROW + 1];
    }
    return o;
}

// What attention gives for elements e, e + 1 of row r goes to write(r, e, two halves).
template <class Write>
__device__ __forceinline__ void finish(const Attend& p, const Rows& rows, int r, int e, float2 o, float maximum,
                                       float sum, Write write) {
    if (e >= p.rope.head_size) return;
    if (p.sinks != nullptr) {  // a logit that takes weight and gives nothing
        const float sink = p.sinks[rows.head(r)] * LOG2E, top = fmaxf(maximum, sink), shrink = exp2f(maximum - top);
        o.x *= shrink, o.y *= shrink;
        sum = sum * shrink + exp2f(sink - top);
    }
    write(r, e, __halves2half2(saturated_half(o.x / sum), saturated_half(o.y / sum)));
}

// The parts of a context, [MAX_SPLIT][ROWS][ROW + 2] in global memory, made one and written by N_WARPS warps. A warp
// weighs a row's parts, a lane each; then every thread adds up elements in the order of the parts.
template <int ROW, int N_WARPS, class Write>
__device__ void merge_splits(const Attend& p, const Rows& rows, const float* parts, int n_split, Write write) {
    __shared__ float weights[ROWS][MAX_SPLIT], maxima[ROWS], sums[ROWS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int r = warp; r < rows.n_rows; r += N_WARPS) {
        const float* row = parts + (min(lane, n_split - 1) * ROWS + r) * (ROW + 2) + ROW;
        float maximum = __ldcg(row), sum = __ldcg(row + 1), top = maximum;
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
        const float weight = lane < n_split ? exp2f(maximum - top) : 0.0f;
        sum *= weight;
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (lane < n_split) weights[r][lane] = weight;
        if (lane == 0) maxima[r] = top, sums[r] = sum;
    }
    named_barrier_sync(0, N_WARPS * 32);
    for (int i = threadIdx.x; i < rows.n_rows * (ROW / 2); i += N_WARPS * 32) {
        const int r = i / (ROW / 2), e = i % (ROW / 2) * 2;
        float2 o = make_float2(0.0f, 0.0f);
#pragma unroll 8
        for (int s = 0; s < n_split; ++s) {
            const float2 v = __ldcg(reinterpret_cast<const float2*>(parts + (s * ROWS + r) * (ROW + 2) + e));
            o.x += weights[r][s] * v.x;
            o.y += weights[r][s] * v.y;
        }
        finish(p, rows, r, e, o, maxima[r], sums[r], write);
    }
}

// The results of a tile's warps, `parts` [n_parts][part_rows][ROW + 2] in shared memory: made one and written, or where
// the context is split left in the workspace `index` of `count`; then the last block to finish merges.
template <int ROW, int N_WARPS, class Write>
__device__ void merge_and_write(const Attend& p, const AttendTile& tile, const Rows& rows, int index, int count,
                                int split, const float* parts, int n_parts, int part_rows, Write write) {
    const size_t mine = static_cast<size_t>(max(0, tile.workspace)) * count + index;
    float* workspace = p.workspace + mine * MAX_SPLIT * ROWS * (ROW + 2);
    for (int i = threadIdx.x; i < rows.n_rows * (ROW / 2); i += N_WARPS * 32) {
        const int r = i / (ROW / 2), e = i % (ROW / 2) * 2;
        float maximum, sum;
        const float2 value = merge_parts<ROW>(parts, n_parts, part_rows, r, e, maximum, sum);
        if (tile.n_split == 1) {
            finish(p, rows, r, e, value, maximum, sum, write);
        } else {
            float* row = workspace + (split * ROWS + r) * (ROW + 2);
            *reinterpret_cast<float2*>(row + e) = value;
            if (e == 0) *reinterpret_cast<float2*>(row + ROW) = make_float2(maximum, sum);
        }
    }
    if (tile.n_split == 1) return;
    __shared__ bool is_last;
    __threadfence();
    named_barrier_sync(0, N_WARPS * 32);
    if (threadIdx.x == 0) {
        is_last = add_acquire_release(p.counters + mine, 1) == static_cast<uint32_t>(tile.n_split) - 1;
        if (is_last) p.counters[mine] = 0;
    }
    named_barrier_sync(0, N_WARPS * 32);
    if (!is_last) return;
    __threadfence();
    merge_splits<ROW, N_WARPS>(p, rows, workspace, tile.n_split, write);
}
