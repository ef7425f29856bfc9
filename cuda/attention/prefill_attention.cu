// Attention of prompts (prefill_attention.cuh) on any GPU: o = softmax(mask(cap(q k^T * scale))) v over the pages of rope.cuh.
//
// A tile is up to 16 rows of (token, query head) a warp that share a key/value head: the heads of one group and as many
// tokens of one sequence as fit. A block's warps take pages of keys, [position][E], and values (they lie transposed), from
// shared memory, where the next page arrives meanwhile; both are B operands as they lie.
#include "attention/prefill_attention.cuh"

#ifndef PROMPT_WARPS
#define PROMPT_WARPS 8
#endif

constexpr int PROMPT_THREADS = PROMPT_WARPS * 32;

// Shared memory of one page: keys in boxes of 64 elements, and values.
template <int ROW>
struct Page {
    static constexpr int K_BYTES = (ROW + 63) / 64 * KEY_BOX, BYTES = K_BYTES + ROW * PACKED_ROW;
};

template <int ROW>
__device__ __forceinline__ void copy_page(const Attend& p, const int* table, int kv_head, int page, uint8_t* to) {
    const size_t head = page_offset(p.rope, table, kv_head, page * PAGE_SIZE);
    const uint4* keys = reinterpret_cast<const uint4*>(p.rope.k_pages + head);
    const uint4* values = reinterpret_cast<const uint4*>(p.rope.v_pages + head);
    constexpr int PIECES = ROW / 8;  // of a key
    for (int i = threadIdx.x; i < PAGE_SIZE * PIECES; i += PROMPT_THREADS)
        cp_async<16>(to + swizzled(i / PIECES, i % PIECES), keys + i);
    to += Page<ROW>::K_BYTES;
    for (int i = threadIdx.x; i < ROW * 8; i += PROMPT_THREADS)
        cp_async<16>(to + i * 16, values + i);
}

// d[4] += A B.
__device__ __forceinline__ void multiply(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    float sums[4] = {d[0], d[1], d[2], d[3]};
    mma_m16n8k16_f16(sums, a, {b0, b1});
    d[0] = sums[0], d[1] = sums[1], d[2] = sums[2], d[3] = sums[3];
}

// grid (G * tiles of a head group, tiles)
template <int ROW>
__global__ void __launch_bounds__(PROMPT_THREADS, 1) prefill_attention(const Attend p) {
    SHARED_DYNAMIC(uint8_t, shared);  // two pages
    const int lane = threadIdx.x % 32;
    grid_dependency_launch();
    const AttendTile tile = p.tiles[blockIdx.y];
    const Rows tile_rows(p, tile, blockIdx.x);
    const Span span(p, tile);
    const int* table = p.rope.page_tables + p.rope.sequences[tile.first_token] * p.rope.table_stride;
    PromptRows<ROW> rows(p, tile_rows);
    grid_dependency_wait();
    copy_page<ROW>(p, table, tile_rows.kv_head, span.from, shared);
    cp_async_commit();
    uint32_t q[ROW / 16][4];
    rows.load_q(q);
    for (int page = span.from; page < span.to; ++page) {
        const uint8_t* here = shared + (page - span.from) % 2 * Page<ROW>::BYTES;
        uint8_t* next = shared + (page + 1 - span.from) % 2 * Page<ROW>::BYTES;
        if (page + 1 < span.to) copy_page<ROW>(p, table, tile_rows.kv_head, page + 1, next);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        float s[32] = {};
#pragma unroll
        for (int i = 0; i < ROW / 32; ++i)
#pragma unroll
            for (int n = 0; n < 8; ++n) {  // positions 8 n ... 8 n + 7, elements 32 i ... 32 i + 31
                uint32_t b[4];
                load_matrix(b, here + swizzled(8 * n + lane % 8, 4 * i + lane / 8));
                multiply(s + 4 * n, q[2 * i], b[0], b[1]);
                multiply(s + 4 * n, q[2 * i + 1], b[2], b[3]);
            }
        rows.soften(s, page);
        rows.rescale();
        rows.take_weights(s);
        const uint8_t* values = here + Page<ROW>::K_BYTES;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int n = 0; n < ROW / 8; ++n) {  // elements 8 n ... 8 n + 7, positions 32 i ... 32 i + 31
                uint32_t b[4];
                load_matrix(b, values + value_place(ROW, 32 * i + lane / 8 * 8, 8 * n + lane % 8) * 2);
                multiply(rows.o + 4 * n, rows.weights[2 * i], b[0], b[1]);
                multiply(rows.o + 4 * n, rows.weights[2 * i + 1], b[2], b[3]);
            }
        __syncthreads();  // the page may be overwritten
    }
    cp_async_wait<0>();
    rows.write();
}
