// FlashAttention-style online softmax of prefill, shared by prefill_attention.cu (mma, any GPU),
// prefill_attention_wgmma.cu (Hopper) and prefill_attention_wgmma_wide.cu (Hopper, heads of 512). This file has the
// part between the two matrix products; those files decide which instruction multiplies and how K and V reach shared
// memory.
//
//    S[16, 64] = Q K^T;  P = 2^(cap(S * scale) * log2 e - max);  O[16, E] = O * shrink + P V
//
// A warp has 16 rows of (token, query head) and takes one page of 64 positions at a time. S has the 64 positions of a
// page as columns, O has the E elements of a head. Both are m16n8 accumulators: with g = lane / 4 and t = lane % 4, a
// lane has rows g and g + 8, and columns 2 t and 2 t + 1 of each group of 8. Registers 4 i and 4 i + 1 belong to row g,
// 4 i + 2 and 4 i + 3 to row g + 8. S is, register for register, the A operand of P V, so P needs no shuffle.
#pragma once
#include "attention/attention.cuh"

static_assert(PAGE_SIZE == 64, "a page is one step");

// The range of pages that a tile sees.
struct Span {
    int first, end;
    __device__ __forceinline__ Span(const AttentionArgs& p, const AttentionTile& tile) {
        const int position = p.rope.positions[tile.first_token];
        first = p.window > 0 ? window_start(p, position) / PAGE_SIZE : 0;
        const int last = p.rope.positions[tile.first_token + tile.n_tokens - 1];
        end = last_seen(p, tile.first_token, last) / PAGE_SIZE + 1;
    }
};

// Byte offset in shared memory of a 16-byte piece of a row of keys or queries: boxes of 64 elements, 64 rows of 128
// bytes each, with the 128-byte swizzle of wgmma.cuh, which avoids bank conflicts.
constexpr int KEY_BOX = PAGE_SIZE * PACKED_ROW;
__device__ __forceinline__ int swizzled(int row, int piece) {
    return piece / 8 * KEY_BOX + row * PACKED_ROW + ((piece ^ row) & 7) * 16;
}

// PARTS: warpgroups that have the same rows and equal parts of the columns of O.
template <int ROW, int PARTS = 1>
struct PrefillRows {
    const AttentionArgs& p;
    const Rows& rows;
    int g, t, row[2];        // rows of the tile
    int low[2], high[2];     // range of positions that the rows see
    uint32_t weights[4][4];  // P, as A operands
    float maximum[2] = {NONE, NONE}, sum[2] = {0.0f, 0.0f}, shrink[2];
    float o[ROW / PARTS / 2];

    // The warp has rows 16 warp ... 16 warp + 15 of the tile.
    __device__ __forceinline__ PrefillRows(const AttentionArgs& args, const Rows& tile_rows,
                                           unsigned warp = threadIdx.x / 32)
        : p(args), rows(tile_rows), g(threadIdx.x % 32 / 4), t(threadIdx.x % 4) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            row[h] = warp * 16 + g + 8 * h;
            const int position = row[h] < rows.n_rows ? p.rope.positions[rows.token(row[h])] : -1;
            low[h] = p.window > 0 ? window_start(p, position) : 0;
            high[h] = last_seen(p, rows.first_token, position);
        }
#pragma unroll
        for (int i = 0; i < ROW / PARTS / 2; ++i) o[i] = 0.0f;
    }
    __device__ __forceinline__ const __half* query(int r) const {
        return p.rope.q + (static_cast<size_t>(rows.token(r)) * p.rope.n_head + rows.head(r)) * ROW;
    }
    // Loads Q as A operands; rows >= n_rows are 0.
    __device__ __forceinline__ void load_q(uint32_t (&q)[ROW / 16][4]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < ROW / 16; ++i) {
                const bool valid = row[h] < rows.n_rows;
                const uint32_t* src = reinterpret_cast<const uint32_t*>(query(valid ? row[h] : 0)) + 8 * i + t;
                q[i][h] = valid ? src[0] : 0;
                q[i][2 + h] = valid ? src[4] : 0;
            }
    }

    // Turns the scores of a page into probabilities relative to the running maximum; `shrink` is the factor for the
    // earlier sums.
    __device__ __forceinline__ void soften(float (&s)[32], int page) {
        const float unit = mask_scores(s, page);
#pragma unroll
        for (int h = 0; h < 2; ++h) weigh_scores(s, h, highest_score(s, h), unit);
    }
    // Caps the scores of a page, and masks positions that a row does not see. Returns the factor of logits.
    __device__ __forceinline__ float mask_scores(float (&s)[32], int page) const {
        float unit = p.scale * LOG2E;
        if (p.soft_cap > 0.0f) {
            const float inner = p.scale / p.soft_cap;
#pragma unroll
            for (int i = 0; i < 32; ++i) s[i] = tanhf(s[i] * inner);
            unit = p.soft_cap * LOG2E;
        }
        const int first = page * PAGE_SIZE;
        if (first + PAGE_SIZE - 1 > min(high[0], high[1]) || first < max(low[0], low[1])) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                const int position = first + i / 4 * 8 + 2 * t + i % 2, h = i / 2 % 2;
                if (position < low[h] || position > high[h]) s[i] = NONE;
            }
        }
        return unit;
    }
    // The maximum of row h's scores and of its earlier ones.
    __device__ __forceinline__ float highest_score(const float (&s)[32], int h) const {
        float top = maximum[h];
#pragma unroll
        for (int i = 0; i < 32; i += 4) top = fmaxf(top, fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        return fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    }
    // Turns row h's scores into probabilities relative to `top`, the new maximum.
    __device__ __forceinline__ void weigh_scores(float (&s)[32], int h, float top, float unit) {
        const float base = top <= NONE ? 0.0f : top * unit;  // no visible position so far: every probability is 0
        shrink[h] = exp2_approx(fmaf(maximum[h], unit, -base));
        maximum[h] = top;
        float part = 0.0f;
#pragma unroll
        for (int i = 2 * h; i < 32; i += 4) {
            s[i] = exp2_approx(fmaf(s[i], unit, -base));
            s[i + 1] = exp2_approx(fmaf(s[i + 1], unit, -base));
            part += s[i] + s[i + 1];
        }
        sum[h] = sum[h] * shrink[h] + part;
    }
    // Packs the probabilities into A operands. No wgmma that reads `weights` may be in flight.
    __device__ __forceinline__ void set_weights(const float (&s)[32]) {
#pragma unroll
        for (int i = 0; i < 32; i += 2) {
            const __half2 pair = __floats2half2_rn(s[i], s[i + 1]);
            weights[i / 8][i / 2 % 4] = *reinterpret_cast<const uint32_t*>(&pair);
        }
    }
    __device__ __forceinline__ void rescale() {
        if (!__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
        for (int i = 0; i < ROW / PARTS / 2; ++i) o[i] *= shrink[i / 2 % 2];
    }

    __device__ __forceinline__ void write() {
        const float unit = (p.soft_cap > 0.0f ? p.soft_cap : p.scale) * LOG2E;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
            sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
            const int r = min(row[h], rows.n_rows - 1), token = rows.token(r), head = rows.head(r);
            float factor = 1.0f / sum[h];
            if (p.sinks != nullptr) {  // an attention sink adds to the sum and has no value
                const float sink = p.sinks[head] * LOG2E, seen = maximum[h] * unit, top = fmaxf(seen, sink);
                const float weight = exp2f(seen - top);
                factor = weight / (sum[h] * weight + exp2f(sink - top));
            }
            write_row(h, factor, token, head);
        }
    }
    // The lane's elements of block `block` of row h; `at`: where those of block 0 are in rows of H * E elements.
    __device__ __forceinline__ uint32_t result(int h, int block, float factor, size_t at) const {
        const float* block_o = o + 4 * block + 2 * h;
        const float2 v = gated_output(p, at + 8 * block, block_o[0] * factor, block_o[1] * factor);
        return saturated_half2(v.x, v.y);
    }
    // Writes the lane's elements first + 8 i + 2 t and first + 8 i + 2 t + 1 of a row, up to head_size. Packed orders
    // have heads that are multiples of 32 elements: four lanes hold 32 elements, and each writes 16 bytes.
    __device__ __forceinline__ void write_row(int h, float factor, int token, int head) const {
        const bool valid = row[h] < rows.n_rows;
        const int e = p.rope.head_size;
        const int first = PARTS == 1 ? 0 : threadIdx.x / 128 * (ROW / PARTS);  // of the warpgroup
        const size_t at = (static_cast<size_t>(token) * p.rope.n_head + head) * e + first + 2 * t;
        if (p.order == PLAIN_ORDER) {
            const int end = e - first - 2 * t;  // even
#pragma unroll
            for (int i = 0; i < ROW / PARTS / 8; ++i)
                if (valid && 8 * i < end) *reinterpret_cast<uint32_t*>(p.out + at + 8 * i) = result(h, i, factor, at);
            return;
        }
#pragma unroll
        for (int i = 0; i < ROW / PARTS / 8; i += 4) {
            if (PARTS > 1 && first + 8 * i >= e) break;  // a head may be narrower than ROW
            uint32_t w[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) w[j] = result(h, i + j, factor, at);
            if (p.order == F16) {  // lanes t and t ^ 2 hold parts of the same two pieces; each writes one
                const bool second = t / 2;
                const uint32_t a = __shfl_xor_sync(0xffffffffu, second ? w[0] : w[2], 2);
                const uint32_t b = __shfl_xor_sync(0xffffffffu, second ? w[1] : w[3], 2);
                const uint32_t c = second ? w[2] : w[0], d = second ? w[3] : w[1];
                w[0] = second ? a : c, w[1] = second ? c : a, w[2] = second ? b : d, w[3] = second ? d : b;
            }
            const int column = head * e + first + 8 * i;
            const size_t piece = packed_piece(column / 64, token, column % 64 / 32 * 4 + t, p.n_tokens);
            uint8_t* out = reinterpret_cast<uint8_t*>(p.out);
            if (valid) *reinterpret_cast<uint4*>(out + piece) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
};
