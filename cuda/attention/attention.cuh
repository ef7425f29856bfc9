// What attention over pages has in common, for tiles of rows (paged_attention.cu) and for one token alone (decode_attention.cuh): its
// parameters, and how partial results become one.
#pragma once
#include "lib/mma.cuh"
#include "layout/packed.cuh"
#include "attention/rope.cuh"

constexpr int ROWS = 16;
constexpr int MAX_SPLIT = 16;  // parts of a context
constexpr float NONE = -1e30f;
constexpr float LOG2E = 1.4426950408889634f;

struct AttendTile {  // on 16 bytes
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
    int group, parts;    // query heads of a key/value head, and tiles for them
    int window;          // positions seen, itself included; 0 is all
    float scale;
    float soft_cap;      // 0 is none
    int order;           // of the output: PLAIN_ORDER, or packed (packed.cuh) for the product that takes it
    int n_tokens;        // of the step
};

// Row r of a tile is (token r / heads, head r % heads).
struct Rows {
    int first_token, n_rows, heads, first_head, kv_head;

    // Head group `index`. Division takes long, and is seldom needed.
    __device__ __forceinline__ Rows(const Attend& p, const AttendTile& tile, int index) {
        kv_head = p.parts == 1 ? index : index / p.parts;
        const int part = index - kv_head * p.parts;
        first_token = tile.first_token;
        heads = min(p.heads_per_tile, p.group - part * p.heads_per_tile);
        first_head = kv_head * p.group + part * p.heads_per_tile;
        n_rows = tile.n_tokens * heads;
    }
    __device__ __forceinline__ int token(int r) const { return n_rows == heads ? first_token : first_token + r / heads; }
    __device__ __forceinline__ int head(int r) const { return first_head + (n_rows == heads ? r : r % heads); }
};

// Up to MOST results of attention for a row, whose elements e and e + 1 become one, in the order they have.
template <int MOST>
struct Merging {
    float2 values[MOST], ends[MOST];  // the elements; maximum and sum

    // Of n rows [size + 2] that begin at row + i * stride. All are on their way before the first is needed.
    template <class Load>
    __device__ __forceinline__ void load(const float* row, int stride, int size, int e, int n, Load load) {
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            const float* from = row + i * stride;
            values[i] = i < n ? load(reinterpret_cast<const float2*>(from + e)) : make_float2(0.0f, 0.0f);
            ends[i] = i < n ? load(reinterpret_cast<const float2*>(from + size)) : make_float2(NONE, 0.0f);
        }
    }
    __device__ __forceinline__ float2 merge(float& maximum, float& sum) const {
        maximum = NONE;
#pragma unroll
        for (int i = 0; i < MOST; ++i) maximum = fmaxf(maximum, ends[i].x);
        float2 o = make_float2(0.0f, 0.0f);
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            const float weight = exp2_approx(ends[i].x - maximum);
            o.x += weight * values[i].x;
            o.y += weight * values[i].y;
            sum += weight * ends[i].y;
        }
        return o;
    }
};

// What attention gives for elements e, e + 1 of row r goes to the output. SINKS: there may be some.
template <bool SINKS>
__device__ __forceinline__ void finish(const Attend& p, const Rows& rows, int r, int e, float2 o, float maximum,
                                       float sum) {
    if (e >= p.rope.head_size) return;
    if (SINKS && p.sinks != nullptr) {  // a logit that takes weight and gives nothing
        const float sink = p.sinks[rows.head(r)] * LOG2E, top = fmaxf(maximum, sink), shrink = exp2f(maximum - top);
        o.x *= shrink, o.y *= shrink;
        sum = sum * shrink + exp2f(sink - top);
    }
    const float inverse = fast_reciprocal(sum);
    const int token = rows.token(r), column = rows.head(r) * p.rope.head_size + e;
    size_t at = static_cast<size_t>(token) * p.rope.n_head * p.rope.head_size + column;
    if (p.order != PLAIN_ORDER) at = packed_half(p.order, column, token, p.n_tokens);
    *reinterpret_cast<uint32_t*>(p.out + at) = saturated_half2(o.x * inverse, o.y * inverse);
}

// The parts of a context, [MAX_SPLIT][ROWS][ROW + 2] in global memory, made one in the order they have and written by
// N_WARPS warps. Each thread asks for all it needs at once, also for what other threads of the row weigh by.
template <int ROW, int N_WARPS, bool SINKS>
__device__ void merge_splits(const Attend& p, const Rows& rows, const float* parts, int n_split) {
    for (int i = threadIdx.x; i < rows.n_rows * (ROW / 2); i += N_WARPS * 32) {
        const int r = i / (ROW / 2), e = i % (ROW / 2) * 2;
        Merging<MAX_SPLIT> merging;
        merging.load(parts + r * (ROW + 2), ROWS * (ROW + 2), ROW, e, n_split, [](const float2* from) { return __ldcg(from); });
        float maximum, sum;
        const float2 o = merging.merge(maximum, sum);
        finish<SINKS>(p, rows, r, e, o, maximum, sum);
    }
}

// The results of a tile's warps, `parts` [n_parts][part_rows][ROW + 2] in shared memory: made one and written, or where
// the context is split left in the workspace `index` of `count`; then the last block to finish merges.
template <int ROW, int N_WARPS, bool SINKS>
__device__ void merge_and_write(const Attend& p, const AttendTile& tile, const Rows& rows, int index, int count,
                                int split, const float* parts, int n_parts, int part_rows) {
    const size_t mine = static_cast<size_t>(max(0, tile.workspace)) * count + index;
    float* workspace = p.workspace + mine * MAX_SPLIT * ROWS * (ROW + 2);
    for (int i = threadIdx.x; i < rows.n_rows * (ROW / 2); i += N_WARPS * 32) {
        const int r = i / (ROW / 2), e = i % (ROW / 2) * 2;
        Merging<N_WARPS> merging;
        merging.load(parts + r * (ROW + 2), part_rows * (ROW + 2), ROW, e, n_parts, [](const float2* from) { return *from; });
        float maximum, sum;
        const float2 value = merging.merge(maximum, sum);
        if (tile.n_split == 1) {
            finish<SINKS>(p, rows, r, e, value, maximum, sum);
        } else {
            float* row = workspace + (split * ROWS + r) * (ROW + 2);
            *reinterpret_cast<float2*>(row + e) = value;
            if (e == 0) *reinterpret_cast<float2*>(row + ROW) = make_float2(maximum, sum);
        }
    }
    if (tile.n_split == 1) return;
    __shared__ bool is_last;
    named_barrier_sync(0, N_WARPS * 32);
    if (threadIdx.x == 0) {
        is_last = add_acquire_release(p.counters + mine, 1) == static_cast<uint32_t>(tile.n_split) - 1;
        if (is_last) p.counters[mine] = 0;
    }
    named_barrier_sync(0, N_WARPS * 32);
    if (!is_last) return;
    merge_splits<ROW, N_WARPS, SINKS>(p, rows, workspace, tile.n_split);
}
