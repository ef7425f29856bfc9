// o = softmax(mask(cap(q k^T * scale))) v over the pages of each token's sequence, for decode and prompts alike.
//
// A tile is up to 16 rows of (token, query head) pairs that share a key/value head: the heads of one group, and in a
// prompt several tokens. Rows are the M of mma.m16n8k16; the keys and values are read once for all of them. A warp
// takes 32 positions at a time: S[16][32] = Q K^T, online softmax, O[16][E] += P V. The accumulator of S is, register
// for register, the A operand of P V, if position 8 t + 4 s + 2 u + c of the 32 is column 2 t + c of S's tile 2 s + u;
// then both k (by rows) and v (transposed pages, rope_kv.cu) are read 16 bytes a lane.
//
// Warps of a block interleave their positions and merge in shared memory. A long context is cut into n_split parts, a
// function of the sequence's length alone, whose results the last block to finish merges in order: the outcome depends
// neither on the batch nor on timing. No T x T memory anywhere.
#include "common.cuh"

#ifndef PAGE_SIZE
#define PAGE_SIZE 64
#endif

constexpr int ATTEND_WARPS = 4;
constexpr int ROWS = 16;
constexpr int STRIP = 32;  // positions a warp takes at a time
constexpr float NONE = -1e30f;
constexpr float LOG2E = 1.4426950408889634f;

struct AttendTile {
    int first_token;
    int n_tokens;   // of one sequence, adjacent
    int n_split;
    int workspace;  // index of this tile's part of the workspace; -1 where n_split is 1
};

struct Attend {
    const __half* q;          // [T, H, ROW]
    const __half* k_pages;    // [page][G][PAGE_SIZE][ROW]
    const __half* v_pages;    // [page][G][ROW][PAGE_SIZE]
    const AttendTile* tiles;
    const int* positions;     // [T]
    const int* sequences;     // [T]
    const int* page_tables;   // [S, table_stride]
    const float* sinks;       // [H] or null
    __half* out;              // [T, H * E]
    float* workspace;         // per (tile, head group): n_split x ROWS x (ROW + 2)
    uint32_t* counters;       // per (tile, head group), zero before and after
    int n_head, n_head_kv, head_size;
    int heads_per_tile;       // query heads of a tile: of one key/value head, at most 16
    int table_stride;
    int max_split;
    int window;               // positions seen, itself included; 0 is all
    float scale;
    float soft_cap;           // 0 is none
};

// The rows of a tile: row r is (token r / heads_per_tile, head r % heads_per_tile).
struct Rows {
    int first_token, n_rows, heads, first_head;
    __device__ __forceinline__ int token(int r) const { return first_token + r / heads; }
    __device__ __forceinline__ int head(int r) const { return first_head + r % heads; }
};

// Running softmax of rows g and g + 8.
struct Softmax {
    float maximum[2] = {NONE, NONE};
    float sum[2] = {0.0f, 0.0f};
};

template <int ROW>
__device__ __forceinline__ void load_q(const Attend& p, const Rows& rows, int g, int t, uint32_t (&a)[ROW / 16][4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int r = g + 8 * h;
        const uint4* from = reinterpret_cast<const uint4*>(
            p.q + (static_cast<size_t>(rows.token(r)) * p.n_head + rows.head(r)) * ROW);
#pragma unroll
        for (int i = 0; i < ROW / 32; ++i) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (r < rows.n_rows) v = __ldcg(from + i * 4 + t);
            a[2 * i][h] = v.x, a[2 * i][2 + h] = v.y, a[2 * i + 1][h] = v.z, a[2 * i + 1][2 + h] = v.w;
        }
    }
}

// s[4][4]: scores of rows g, g + 8 for the 32 positions.
template <int ROW>
__device__ __forceinline__ void scores(const __half* k, int g, int t, const uint32_t (&q)[ROW / 16][4],
                                       float (&s)[4][4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const int position = 8 * (g / 2) + 2 * n + (g & 1);
        const uint4* from = reinterpret_cast<const uint4*>(k + static_cast<size_t>(position) * ROW);
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
        for (int i = 0; i < ROW / 32; ++i) {
            const uint4 v = __ldcg(from + i * 4 + t);
            mma_m16n8k16_f16(s[n], q[2 * i], {v.x, v.y});
            mma_m16n8k16_f16(s[n], q[2 * i + 1], {v.z, v.w});
        }
    }
}

// Scores to probabilities (relative to the running maximum), as the A operands of two k16 steps; returns by how much
// what was accumulated before must shrink.
__device__ __forceinline__ void soften(const Attend& p, float (&s)[4][4], int first, int t, const int (&low)[2],
                                       const int (&high)[2], Softmax& softmax, uint32_t (&a)[2][4], float (&shrink)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float top = softmax.maximum[h];
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int position = first + 8 * t + 2 * n + c;
                float v = s[n][2 * h + c] * p.scale;
                if (p.soft_cap > 0.0f) v = p.soft_cap * tanhf(v / p.soft_cap);
                v = position >= low[h] && position <= high[h] ? v * LOG2E : NONE;
                s[n][2 * h + c] = v;
                top = fmaxf(top, v);
            }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        shrink[h] = exp2f(softmax.maximum[h] - top);
        softmax.maximum[h] = top;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float x = s[n][2 * h] <= NONE ? 0.0f : exp2f(s[n][2 * h] - top);
            const float y = s[n][2 * h + 1] <= NONE ? 0.0f : exp2f(s[n][2 * h + 1] - top);
            sum += x + y;
            const __half2 pair = __floats2half2_rn(x, y);
            a[n / 2][(n & 1) * 2 + h] = *reinterpret_cast<const uint32_t*>(&pair);
        }
        softmax.sum[h] = softmax.sum[h] * shrink[h] + sum;
    }
}

template <int ROW>
__device__ __forceinline__ void add_values(const __half* v, int g, int t, const uint32_t (&a)[2][4],
                                           const float (&shrink)[2], float (&o)[ROW / 8][4]) {
#pragma unroll
    for (int n = 0; n < ROW / 8; ++n) {
        const uint4 w = __ldcg(reinterpret_cast<const uint4*>(v + static_cast<size_t>(n * 8 + g) * PAGE_SIZE) + t);
        o[n][0] *= shrink[0], o[n][1] *= shrink[0], o[n][2] *= shrink[1], o[n][3] *= shrink[1];
        mma_m16n8k16_f16(o[n], a[0], {w.x, w.y});
        mma_m16n8k16_f16(o[n], a[1], {w.z, w.w});
    }
}

// Parts [n_parts][ROWS][ROW + 2] of (o, maximum, sum) become one: element e of row r, and the row's maximum and sum.
template <int ROW>
__device__ __forceinline__ float merge(const float* parts, int n_parts, int r, int e, float& maximum, float& sum) {
    maximum = NONE;
    for (int i = 0; i < n_parts; ++i) maximum = fmaxf(maximum, __ldcg(parts + (i * ROWS + r) * (ROW + 2) + ROW));
    float o = 0.0f;
    sum = 0.0f;
    for (int i = 0; i < n_parts; ++i) {
        const float* part = parts + (i * ROWS + r) * (ROW + 2);
        const float weight = exp2f(__ldcg(part + ROW) - maximum);
        o += weight * __ldcg(part + e);
        sum += weight * __ldcg(part + ROW + 1);
    }
    return o;
}

// The same for parts in shared memory.
template <int ROW>
__device__ __forceinline__ float merge_shared(const float* parts, int r, int e, float& maximum, float& sum) {
    maximum = NONE;
    for (int i = 0; i < ATTEND_WARPS; ++i) maximum = fmaxf(maximum, parts[(i * ROWS + r) * (ROW + 2) + ROW]);
    float o = 0.0f;
    sum = 0.0f;
    for (int i = 0; i < ATTEND_WARPS; ++i) {
        const float* part = parts + (i * ROWS + r) * (ROW + 2);
        const float weight = exp2f(part[ROW] - maximum);
        o += weight * part[e];
        sum += weight * part[ROW + 1];
    }
    return o;
}

__device__ __forceinline__ void write_out(const Attend& p, const Rows& rows, int r, int e, float o, float maximum,
                                          float sum) {
    if (r >= rows.n_rows || e >= p.head_size) return;
    if (p.sinks != nullptr) {  // a logit that takes weight and gives nothing
        const float sink = p.sinks[rows.head(r)] * LOG2E, top = fmaxf(maximum, sink);
        o *= exp2f(maximum - top);
        sum = sum * exp2f(maximum - top) + exp2f(sink - top);
    }
    p.out[(static_cast<size_t>(rows.token(r)) * p.n_head + rows.head(r)) * p.head_size + e] =
        __float2half(fminf(fmaxf(o / sum, -65504.0f), 65504.0f));
}

// grid (G * tiles of a head group, tiles, max_split)
template <int ROW>
__global__ void __launch_bounds__(ATTEND_WARPS * 32) attend(const Attend p) {
    SHARED_DYNAMIC(float, parts);  // [ATTEND_WARPS][ROWS][ROW + 2]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    grid_dependency_launch();
    grid_dependency_wait();
    const AttendTile tile = p.tiles[blockIdx.y];
    if (static_cast<int>(blockIdx.z) >= tile.n_split) return;
    const int group = p.n_head / p.n_head_kv, tiles_per_group = gridDim.x / p.n_head_kv;
    const int kv_head = blockIdx.x / tiles_per_group, part = blockIdx.x % tiles_per_group;
    Rows rows;
    rows.first_token = tile.first_token, rows.heads = min(p.heads_per_tile, group - part * p.heads_per_tile);
    rows.first_head = kv_head * group + part * p.heads_per_tile, rows.n_rows = tile.n_tokens * rows.heads;

    int low[2], high[2];  // positions that rows g and g + 8 see
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int r = g + 8 * h;
        high[h] = r < rows.n_rows ? p.positions[rows.token(r)] : -1;
        low[h] = p.window > 0 ? max(0, high[h] - p.window + 1) : 0;
    }
    const int last = p.positions[tile.first_token + tile.n_tokens - 1], first = p.positions[tile.first_token];
    const int start = p.window > 0 ? max(0, first - p.window + 1) / STRIP : 0, end = last / STRIP + 1;
    const int per_split = (end - start + tile.n_split - 1) / tile.n_split;
    const int from = start + blockIdx.z * per_split, to = min(end, from + per_split);

    uint32_t q[ROW / 16][4];
    load_q<ROW>(p, rows, g, t, q);
    const int* table = p.page_tables + p.sequences[tile.first_token] * p.table_stride;
    Softmax softmax;
    float o[ROW / 8][4] = {};
    for (int strip = from + warp; strip < to; strip += ATTEND_WARPS) {
        const int position = strip * STRIP, slot = position % PAGE_SIZE;
        const size_t block = (static_cast<size_t>(table[position / PAGE_SIZE]) * p.n_head_kv + kv_head) * ROW * PAGE_SIZE;
        float s[4][4], shrink[2];
        uint32_t a[2][4];
        scores<ROW>(p.k_pages + block + static_cast<size_t>(slot) * ROW, g, t, q, s);
        soften(p, s, position, t, low, high, softmax, a, shrink);
        add_values<ROW>(p.v_pages + block + slot, g, t, a, shrink, o);
    }

#pragma unroll
    for (int h = 0; h < 2; ++h) {
        softmax.sum[h] += __shfl_xor_sync(0xffffffffu, softmax.sum[h], 1);
        softmax.sum[h] += __shfl_xor_sync(0xffffffffu, softmax.sum[h], 2);
        float* row = parts + (warp * ROWS + g + 8 * h) * (ROW + 2);
#pragma unroll
        for (int n = 0; n < ROW / 8; ++n) row[n * 8 + 2 * t] = o[n][2 * h], row[n * 8 + 2 * t + 1] = o[n][2 * h + 1];
        if (t == 0) row[ROW] = softmax.maximum[h], row[ROW + 1] = softmax.sum[h];
    }
    __syncthreads();
    constexpr int ALL = ROWS * ROW;
    float maximum, sum;
    if (tile.n_split == 1) {
        for (int i = threadIdx.x; i < ALL; i += ATTEND_WARPS * 32) {
            const float value = merge_shared<ROW>(parts, i / ROW, i % ROW, maximum, sum);
            write_out(p, rows, i / ROW, i % ROW, value, maximum, sum);
        }
        return;
    }
    const size_t mine = static_cast<size_t>(tile.workspace) * gridDim.x + blockIdx.x;
    float* workspace = p.workspace + mine * p.max_split * ROWS * (ROW + 2);
    for (int i = threadIdx.x; i < ALL; i += ATTEND_WARPS * 32) {
        const int r = i / ROW, e = i % ROW;
        float* row = workspace + (blockIdx.z * ROWS + r) * (ROW + 2);
        row[e] = merge_shared<ROW>(parts, r, e, maximum, sum);
        if (e == 0) row[ROW] = maximum, row[ROW + 1] = sum;
    }
    __threadfence();
    __syncthreads();
    __shared__ bool is_last;
    if (threadIdx.x == 0) {
        is_last = add_acquire_release(p.counters + mine, 1) == static_cast<uint32_t>(tile.n_split) - 1;
        if (is_last) p.counters[mine] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int i = threadIdx.x; i < ALL; i += ATTEND_WARPS * 32) {
        const float value = merge<ROW>(workspace, tile.n_split, i / ROW, i % ROW, maximum, sum);
        write_out(p, rows, i / ROW, i % ROW, value, maximum, sum);
    }
}
