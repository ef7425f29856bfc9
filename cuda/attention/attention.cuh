// Shared by paged_attention (tiles of up to 16 rows) and decode_attention (one token per tile): the kernel parameters,
// the mapping from rows of a tile to (token, query head), and the merge of partial results.
//
// T: tokens of the step; H: query heads; G: KV heads; E: elements of a head; ROW: E rounded up to a multiple of 32.
//
// A partial result of one row is ROW + 2 floats: the unnormalised output o[ROW], the running maximum m and the running
// sum l of the softmax, both over the positions that the warp or the split saw. Logits are in units of log2, so partial
// results merge as
//
//    m = max_i m_i,   o = sum_i 2^(m_i - m) o_i,   l = sum_i 2^(m_i - m) l_i,   out = o / l
//
// The merge order is the index i, never the order of arrival, so the output does not depend on timing.
#pragma once
#include "lib/activation.cuh"
#include "lib/mma.cuh"
#include "layout/packed.cuh"
#include "attention/rope.cuh"

#ifndef CHUNKED
#define CHUNKED 0  // 1: a window is a chunk, whose first position is a multiple of its size
#endif
#ifndef BOTH_SIDES
#define BOTH_SIDES 0  // 1: a token sees all of its sequence in the step, or half a window before and after it
#endif
#ifndef GATED
#define GATED 0  // 1: the output is multiplied by sigmoid(gate)
#endif

// Rows of a tile.
constexpr int ROWS = 16;
constexpr int MAX_SPLIT = 16;  // splits of one context
// Logit of a masked position.
constexpr float NONE = -1e30f;

struct AttentionTile {  // 16-byte aligned, so that one load reads the tile
    int first_token;
    int n_tokens;  // consecutive tokens of one sequence
    int n_split;
    int workspace;  // index of the tile's slot in the workspace; -1 if n_split is 1
};

struct AttentionArgs {
    RopeArgs rope;  // also holds positions, page indices, page tables and sizes
    const AttentionTile* tiles;
    const float* sinks;  // [H], or null
    const float* gate;   // GATED: [T, H * E]
    __half* out;         // [T, H * E]
    float* workspace;    // [slot][head group][MAX_SPLIT][ROWS][ROW + 2], partial results of the splits
    uint32_t* counters;  // [slot][head group], zero before and after the kernel
    int heads_per_tile;  // query heads of a tile, at most 16; all share one KV head
    int group, parts;    // query heads per KV head, and tiles (head groups) that cover them
    int window;          // positions that a token sees, including its position; 0: all; or of a chunk
    float scale;
    float soft_cap;  // 0: no cap
    int order;       // layout of `out`: PLAIN_ORDER, or a packed order (packed.cuh) that the next GEMM reads
    int n_tokens;    // T
};

// The first position of the window of a token.
__device__ __forceinline__ int window_start(const AttentionArgs& p, int position) {
    if (BOTH_SIDES) return max(0, position - p.window / 2);
    return CHUNKED ? position / p.window * p.window : max(0, position - p.window + 1);
}

// The last position that a token sees; -1 for no token. `first` is any token of its sequence: the tokens of a sequence
// are neighbours.
__device__ __forceinline__ int last_seen(const AttentionArgs& p, int first, int position) {
    if (!BOTH_SIDES || position < 0) return position;
    int token = first, end = p.n_tokens;  // the last token of the sequence is one of [token, end)
    const int sequence = p.rope.sequences[first];
    while (end - token > 1) {
        const int middle = (token + end) / 2;
        if (p.rope.sequences[middle] == sequence)
            token = middle;
        else
            end = middle;
    }
    const int last = p.rope.positions[token];
    return p.window > 0 ? min(last, position + p.window / 2) : last;
}

// Row r of a tile is (token r / heads, head r % heads).
struct Rows {
    int first_token, n_rows, heads, first_head, kv_head;

    // `index` is the head group. An integer division is slow, and most models have parts == 1, so the branch skips the
    // division.
    __device__ __forceinline__ Rows(const AttentionArgs& p, const AttentionTile& tile, int index) {
        kv_head = p.parts == 1 ? index : index / p.parts;
        const int part = index - kv_head * p.parts;
        first_token = tile.first_token;
        heads = min(p.heads_per_tile, p.group - part * p.heads_per_tile);
        first_head = kv_head * p.group + part * p.heads_per_tile;
        n_rows = tile.n_tokens * heads;
    }
    __device__ __forceinline__ int token(int r) const {
        return n_rows == heads ? first_token : first_token + r / heads;
    }
    __device__ __forceinline__ int head(int r) const { return first_head + (n_rows == heads ? r : r % heads); }
};

// Up to MOST partial results of one row, elements e and e + 1, merged in index order.
template <int MOST>
struct Merging {
    float2 values[MOST], ends[MOST];  // o of elements e and e + 1; (maximum, sum)

    // Loads n partial results [size + 2]; partial result i begins at row + i * stride. All loads are issued before the
    // first value is used, so that their latencies overlap.
    template <class Load>
    __device__ __forceinline__ void load(const float* row, int stride, int size, int e, int n, Load load) {
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            const float* src = row + i * stride;
            values[i] = i < n ? load(reinterpret_cast<const float2*>(src + e)) : make_float2(0.0f, 0.0f);
            ends[i] = i < n ? load(reinterpret_cast<const float2*>(src + size)) : make_float2(NONE, 0.0f);
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

// Elements i and i + 1 of the output; GATED: times the sigmoid of their gates.
__device__ __forceinline__ float2 gated_output(const AttentionArgs& p, size_t i, float x, float y) {
    if (!GATED) return make_float2(x, y);
    const float2 gate = __ldcg(reinterpret_cast<const float2*>(p.gate + i));
    return make_float2(x * sigmoid(gate.x), y * sigmoid(gate.y));
}

// Normalises elements e and e + 1 of row r and writes them to `out`. SINKS: p.sinks may be non-null.
template <bool SINKS>
__device__ __forceinline__ void finish(const AttentionArgs& p, const Rows& rows, int r, int e, float2 o, float maximum,
                                       float sum) {
    if (e >= p.rope.head_size) return;
    if (SINKS && p.sinks != nullptr) {  // an attention sink adds to the sum and has no value
        const float sink = p.sinks[rows.head(r)] * LOG2E, top = fmaxf(maximum, sink), shrink = exp2f(maximum - top);
        o.x *= shrink, o.y *= shrink;
        sum = sum * shrink + exp2f(sink - top);
    }
    const float inverse = fast_reciprocal(sum);
    const int token = rows.token(r), column = rows.head(r) * p.rope.head_size + e;
    size_t index = static_cast<size_t>(token) * p.rope.n_head * p.rope.head_size + column;
    o = gated_output(p, index, o.x * inverse, o.y * inverse);
    if (p.order != PLAIN_ORDER) index = packed_half(p.order, column, token, p.n_tokens);
    *reinterpret_cast<uint32_t*>(p.out + index) = saturated_half2(o.x, o.y);
}

// Merges the splits of one tile, [MAX_SPLIT][ROWS][ROW + 2] in global memory, in index order, and writes the output;
// N_WARPS warps. Each thread loads (maximum, sum) of all splits of a row, although other threads of the row load the
// same numbers: sharing them would take a barrier.
template <int ROW, int N_WARPS, bool SINKS>
__device__ void merge_splits(const AttentionArgs& p, const Rows& rows, const float* parts, int n_split) {
    for (int i = threadIdx.x; i < rows.n_rows * (ROW / 2); i += N_WARPS * 32) {
        const int r = i / (ROW / 2), e = i % (ROW / 2) * 2;
        Merging<MAX_SPLIT> merging;
        merging.load(parts + r * (ROW + 2), ROWS * (ROW + 2), ROW, e, n_split,
                     [](const float2* src) { return __ldcg(src); });
        float maximum, sum;
        const float2 o = merging.merge(maximum, sum);
        finish<SINKS>(p, rows, r, e, o, maximum, sum);
    }
}

// Merges the warps' partial results of a tile, `parts` [n_parts][part_rows][ROW + 2] in shared memory. Without a split,
// the CTA writes the output. With splits, the CTA writes the merged row to the workspace of head group `index` (of
// `count`); the last CTA to finish merges the splits.
template <int ROW, int N_WARPS, bool SINKS>
__device__ void merge_and_write(const AttentionArgs& p, const AttentionTile& tile, const Rows& rows, int index,
                                int count, int split, const float* parts, int n_parts, int part_rows) {
    const size_t slot = static_cast<size_t>(max(0, tile.workspace)) * count + index;
    float* workspace = p.workspace + slot * MAX_SPLIT * ROWS * (ROW + 2);
    for (int i = threadIdx.x; i < rows.n_rows * (ROW / 2); i += N_WARPS * 32) {
        const int r = i / (ROW / 2), e = i % (ROW / 2) * 2;
        Merging<N_WARPS> merging;
        merging.load(parts + r * (ROW + 2), part_rows * (ROW + 2), ROW, e, n_parts,
                     [](const float2* src) { return *src; });
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
        is_last = add_acquire_release(p.counters + slot, 1) == static_cast<uint32_t>(tile.n_split) - 1;
        if (is_last) p.counters[slot] = 0;
    }
    named_barrier_sync(0, N_WARPS * 32);
    if (!is_last) return;
    merge_splits<ROW, N_WARPS, SINKS>(p, rows, workspace, tile.n_split);
}
