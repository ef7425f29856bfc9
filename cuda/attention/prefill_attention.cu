// Prefill attention with mma.m16n8k16, for any GPU (prefill_attention.cuh has the softmax and the output):
//
//    o[t, h] = softmax(mask(cap(q[t, h] K[kv(h)]^T * scale))) V[kv(h)]
//
// with q [T, H, E], K and V in the f16 pages of rope.cuh, and o [T, H, E].
//
// Grid (G * head groups per KV head, tiles); a CTA has PREFILL_WARPS warps. A tile is up to 16 rows per warp of (token,
// query head) that share a KV head: the query heads of a group, and as many tokens of one sequence as fit. The CTA
// walks the context page by page; a warp multiplies its 16 rows by the page's 64 positions.
//
// Dynamic shared memory holds two pages, [K boxes, V] each: cp.async loads the next page while the warps multiply the
// current one, and all warps read the same page, so the KV cache is read once per tile. K, [position][E], and V,
// transposed, are both B operands as they lie, so ldmatrix needs no transpose; the swizzle avoids bank conflicts.
#include "attention/prefill_attention.cuh"

#ifndef PREFILL_WARPS
#define PREFILL_WARPS 8
#endif

constexpr int PREFILL_THREADS = PREFILL_WARPS * 32;

// Shared memory of one page: keys in boxes of 64 elements, then values.
template <int ROW>
struct Page {
    static constexpr int K_BYTES = (ROW + 63) / 64 * KEY_BOX, BYTES = K_BYTES + ROW * PACKED_ROW;
};

template <int ROW>
__device__ __forceinline__ void copy_page(const AttentionArgs& p, const int* table, int kv_head, int page,
                                          uint8_t* dst) {
    const size_t head = page_offset(p.rope, table, kv_head, page * PAGE_SIZE);
    const uint4* keys = reinterpret_cast<const uint4*>(p.rope.k_pages + head);
    const uint4* values = reinterpret_cast<const uint4*>(p.rope.v_pages + head);
    constexpr int PIECES = ROW / 8;  // 16-byte pieces of a key
    for (int i = threadIdx.x; i < PAGE_SIZE * PIECES; i += PREFILL_THREADS)
        cp_async<16>(dst + swizzled(i / PIECES, i % PIECES), keys + i);
    dst += Page<ROW>::K_BYTES;
    for (int i = threadIdx.x; i < ROW * 8; i += PREFILL_THREADS) cp_async<16>(dst + i * 16, values + i);
}

// d[4] += A B for one m16n8k16 tile.
__device__ __forceinline__ void multiply(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    float sums[4] = {d[0], d[1], d[2], d[3]};
    mma_m16n8k16_f16(sums, a, {b0, b1});
    d[0] = sums[0], d[1] = sums[1], d[2] = sums[2], d[3] = sums[3];
}

// Grid (G * head groups per KV head, tiles).
template <int ROW>
__global__ void __launch_bounds__(PREFILL_THREADS, 1) prefill_attention(const AttentionArgs p) {
    SHARED_DYNAMIC(uint8_t, shared);  // two pages
    const int lane = threadIdx.x % 32;
    grid_dependency_launch();
    const AttentionTile tile = p.tiles[blockIdx.y];
    const Rows tile_rows(p, tile, blockIdx.x);
    const Span span(p, tile);
    const int* table = p.rope.page_tables + p.rope.sequences[tile.first_token] * p.rope.table_stride;
    PrefillRows<ROW> rows(p, tile_rows);
    grid_dependency_wait();
    copy_page<ROW>(p, table, tile_rows.kv_head, span.first, shared);
    cp_async_commit();
    uint32_t q[ROW / 16][4];
    rows.load_q(q);
    for (int page = span.first; page < span.end; ++page) {
        const uint8_t* current = shared + (page - span.first) % 2 * Page<ROW>::BYTES;
        uint8_t* next = shared + (page + 1 - span.first) % 2 * Page<ROW>::BYTES;
        if (page + 1 < span.end) copy_page<ROW>(p, table, tile_rows.kv_head, page + 1, next);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        float s[32] = {};
#pragma unroll
        for (int i = 0; i < ROW / 32; ++i)
#pragma unroll
            for (int n = 0; n < 8; ++n) {  // positions 8 n ... 8 n + 7, elements 32 i ... 32 i + 31
                uint32_t b[4];
                load_matrix(b, current + swizzled(8 * n + lane % 8, 4 * i + lane / 8));
                multiply(s + 4 * n, q[2 * i], b[0], b[1]);
                multiply(s + 4 * n, q[2 * i + 1], b[2], b[3]);
            }
        rows.soften(s, page);
        rows.rescale();
        rows.set_weights(s);
        const uint8_t* values = current + Page<ROW>::K_BYTES;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int n = 0; n < ROW / 8; ++n) {  // elements 8 n ... 8 n + 7, positions 32 i ... 32 i + 31
                uint32_t b[4];
                load_matrix(b, values + value_offset(ROW, 32 * i + lane / 8 * 8, 8 * n + lane % 8) * 2);
                multiply(rows.o + 4 * n, rows.weights[2 * i], b[0], b[1]);
                multiply(rows.o + 4 * n, rows.weights[2 * i + 1], b[2], b[3]);
            }
        __syncthreads();  // the next iteration overwrites the page
    }
    cp_async_wait<0>();
    rows.write();
}
