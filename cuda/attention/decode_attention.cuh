// Attention of one decoded token per tile over the paged KV cache of the token's sequence; optionally the kernel first
// adds the bias, normalises and rotates the token's q, k and v, and stores k and v to the KV cache:
//
//    S[16, 8] = K[16, E] Q[8, E]^T     16 positions, up to 8 query heads of one KV head
//    P        = online softmax over positions of mask(cap(S * scale))
//    O[E, 8] += V^T[E, 16] P[16, 8]
//
// A CTA has DECODE_WARPS warps and takes one (head group, token, split of the context). A warp takes one strip of 16
// positions at a time; the strips of a split go round-robin to the warps. The query heads are the N = 8 of
// mma.m16n8k16, so a lane needs only E / 4 registers for O.
//
// S has one row per position, but P V needs one row per head; so the warp transposes the 8 x 8 blocks of P with
// shuffles. Row g of the n-th block of S is position 4 (g / 2) + 2 n + g % 2 of the strip. With this order a lane's
// operands are contiguous both in k ([position][row], 16 bytes) and in v (transposed pages, rope.cuh, 8 bytes).
//
// Dynamic shared memory, in order:
//
//     part               layout                      when             why
//     K and V strips     [warp][2][16][ROW] f16      IN_SMEM or ODD   fewer registers, so more resident CTAs
//     partial results    [warp][heads][ROW + 2] f32  always           the warps merge their results
//     q                  [8][ROW] f16                not ROTATED      every warp reads all query heads
//     newest key, value  [2][ROW] f16                not ROTATED      no warp reads them back from the page
//     q                  [warp][heads][ROW] f16      ROTATED          no warp waits for another
#pragma once
#include "attention/attention.cuh"

#ifndef DECODE_WARPS
#define DECODE_WARPS 8
#endif
#ifndef TWO_HEADS
#define TWO_HEADS 0  // 1: the first warps prepare two of the token's heads
#endif

constexpr int DECODE_THREADS = DECODE_WARPS * 32;
constexpr int DECODE_HEADS = 8;   // maximum number of query heads
constexpr int DECODE_STRIP = 16;  // positions that a warp takes at a time

__device__ __forceinline__ void decode_barrier(CALLER) { named_barrier_sync(0, DECODE_THREADS FORWARD_CALLER); }

// The positions that a CTA attends to.
struct DecodeContext {
    const int* table;
    int position;   // position of the token
    int page;       // page of that position
    int warp_page;  // page of strip `warp` of the context
    int low;        // first position that the token sees
    int from, to;   // strips [from, to) of this split
    int odd;        // remainder strips: the first strips of the split, too few for a round of the CTA's warps
    bool newest;    // the split contains the token's position

    // The page of strip `warp` is loaded together with the position, before the position says whether the warp starts
    // there: two dependent loads become one latency.
    __device__ __forceinline__ DecodeContext(const AttentionArgs& p, int token) {
        const int warp = threadIdx.x / 32;
        table = p.rope.page_tables + token * p.rope.table_stride;
        position = load_now(p.rope.positions + token);
        page = load_now(p.rope.pages + token);
        warp_page = load_now(table + min(warp * DECODE_STRIP / PAGE_SIZE, p.rope.table_stride - 1));
    }
    // Computes the range of split `split` of the tile. ODD: the split may have remainder strips.
    template <bool ODD>
    __device__ __forceinline__ void cut(const AttentionArgs& p, const AttentionTile& tile, int split) {
        low = p.window > 0 ? window_start(p, position) : 0;
        const int start = low / DECODE_STRIP, end = position / DECODE_STRIP + 1;
        const int n_strips = end - start;
        const int per_split = tile.n_split == 1 ? n_strips : (n_strips + tile.n_split - 1) / tile.n_split;
        from = kept(start + split * per_split), to = kept(min(end, from + per_split));
        odd = ODD ? kept(to - from > DECODE_WARPS ? (to - from) % DECODE_WARPS : 0) : 0;
        newest = from < to && to == end;
    }
    // The page of a strip; 0 past the end of the split.
    __device__ __forceinline__ int page_of(int strip) const {
        return strip < to ? __ldg(table + strip * DECODE_STRIP / PAGE_SIZE) : 0;
    }
    __device__ __forceinline__ int first_page(int strip) const { return from + odd == 0 ? warp_page : page_of(strip); }
};

// The strips of one warp. TO_ODD: the second strip of the warp is its remainder strip, if the warp has one.
template <bool TO_ODD>
struct StripIterator {
    int strip, following;  // may lie past the end of the split

    __device__ __forceinline__ StripIterator(const DecodeContext& context, int warp)
        : strip(context.from + context.odd + warp) {
        following = TO_ODD && warp < context.odd ? strip - context.odd : strip + DECODE_WARPS;
    }
    __device__ __forceinline__ int next() const { return TO_ODD ? following : strip + DECODE_WARPS; }
    // After the remainder strips, the stride is DECODE_WARPS.
    __device__ __forceinline__ int after_next() const { return max(strip, next()) + DECODE_WARPS; }
    __device__ __forceinline__ void step() {
        const int later = after_next();
        strip = next(), following = later;
    }
};

// Running softmax of heads 2t and 2t + 1. The tensor cores also sum the probabilities, with an A operand of ones: a
// reduction by shuffles takes longer.
struct DecodeSoftmax {
    float maximum[2] = {NONE, NONE};
    float sum[4] = {};  // only sum[0] and sum[1] are rescaled and read
};

// The K and V operands of a warp's strip. Loads are issued early and awaited where the operands are used. This version
// keeps them in registers, which has the lowest latency for a single token.
template <int ROW, class K, class V, bool IN_SMEM>
struct StripOperands {
    static constexpr int SHARED = 0;  // bytes of shared memory per warp
    typename K::template Keys<ROW, 2, ROW / 32> k;
    typename V::template DecodeValues<ROW, ROW / 16> v;

    __device__ __forceinline__ StripOperands(uint8_t*) {}
    __device__ __forceinline__ void load_keys(const uint8_t* page, int slot, int lane) {
        k.load(page, slot + lane / 8 * 4 + (lane / 4 & 1), 0, lane % 4);
    }
    __device__ __forceinline__ void load_values(const uint8_t* page, int slot, int lane) {
        v.load(page, slot, 0, lane / 4, lane % 4);
    }
    // keys_of, values_of (number formats only): the address of the lane's first load. load_keys_from, load_values_from:
    // issue all loads of the strip, starting at that address.
    static __device__ __forceinline__ const uint8_t* keys_of(const uint8_t* page, int slot, int lane) {
        return decltype(k)::address(page, slot + lane / 8 * 4 + (lane / 4 & 1), lane % 4);
    }
    static __device__ __forceinline__ const uint8_t* values_of(const uint8_t* page, int slot, int lane) {
        return decltype(v)::address(page, slot, lane / 4, lane % 4);
    }
    __device__ __forceinline__ void load_keys_from(const uint8_t* from, int) { k.load(from); }
    __device__ __forceinline__ void load_values_from(const uint8_t* from, int) { v.load(from); }
    __device__ __forceinline__ void end_load() const {}
    __device__ __forceinline__ void await_keys() const {}
    __device__ __forceinline__ void await_values() const {}
    __device__ __forceinline__ uint4 key(int n, int i, int lane) const { return k.get(n, i, lane % 4); }
    __device__ __forceinline__ uint4 value(int n, int lane) const { return v.get(n, lane / 4); }
    // Overwrites position `index` of the loaded strip with `key` [ROW] and `value` [ROW].
    __device__ __forceinline__ void put(int index, const __half* key, const __half* value, int lane) {
        k.put(index, key, lane / 4, lane % 4);
        v.put(index, value, lane / 4, lane % 4);
    }
};

// This version keeps f16 operands in shared memory, filled by cp.async. A CTA then needs few registers, so an SM runs
// more of them. Keys are stored in lane order; values keep the layout of the page.
template <int ROW>
struct StripOperands<ROW, CacheF16, CacheF16, true> {
    static constexpr int KEYS = DECODE_STRIP * ROW * 2, SHARED = 2 * KEYS;
    static constexpr int LINE = DECODE_STRIP * 2;  // bytes of one value element at 16 positions
    uint8_t *keys, *values;

    __device__ __forceinline__ StripOperands(uint8_t* shared) : keys(shared), values(shared + KEYS) {}
    __device__ __forceinline__ uint4* key_at(int n, int i, int lane) const {
        return reinterpret_cast<uint4*>(keys) + (n * (ROW / 32) + i) * 32 + lane;
    }
    static __device__ __forceinline__ const uint8_t* keys_of(const uint8_t* page, int slot, int lane) {
        return page + ((slot + lane / 8 * 4 + (lane / 4 & 1)) * ROW + lane % 4 * 8) * 2;
    }
    static __device__ __forceinline__ const uint8_t* values_of(const uint8_t* page, int slot, int lane) {
        return page + slot * ROW * 2 + lane * 16;
    }
    __device__ __forceinline__ void load_keys_from(const uint8_t* from, int lane) {
#pragma unroll
        for (int i = 0; i < ROW / 32; ++i)
#pragma unroll
            for (int n = 0; n < 2; ++n) cp_async<16>(key_at(n, i, lane), from + (n * 2 * ROW + i * 32) * 2);
    }
    __device__ __forceinline__ void load_values_from(const uint8_t* from, int lane) {
        __syncwarp();  // all lanes have read the previous strip
#pragma unroll
        for (int i = 0; i < ROW / 16; ++i) cp_async<16>(values + (i * 32 + lane) * 16, from + i * 512);
    }
    __device__ __forceinline__ void load_keys(const uint8_t* page, int slot, int lane) {
        load_keys_from(keys_of(page, slot, lane), lane);
    }
    __device__ __forceinline__ void load_values(const uint8_t* page, int slot, int lane) {
        load_values_from(values_of(page, slot, lane), lane);
    }
    // Commits a cp.async group after each load_keys and load_values; the group is empty if no load was issued, so that
    // wait counts stay the same.
    __device__ __forceinline__ void end_load() const { cp_async_commit(); }
    __device__ __forceinline__ void await_keys() const { cp_async_wait<1>(); }
    __device__ __forceinline__ void await_values() const {
        cp_async_wait<1>();
        __syncwarp();
    }
    __device__ __forceinline__ uint4 key(int n, int i, int lane) const { return *key_at(n, i, lane); }
    __device__ __forceinline__ uint4 value(int n, int lane) const {
        const uint8_t* from = values + (n * 16 + lane / 4) * LINE + (lane % 4 * 8 ^ (lane & 16));
        const uint2 low = *reinterpret_cast<const uint2*>(from),
                    high = *reinterpret_cast<const uint2*>(from + 8 * LINE);
        return make_uint4(low.x, high.x, low.y, high.y);
    }
    __device__ __forceinline__ void put(int index, const __half* key, const __half* value, int lane) {
        cp_async_wait<0>();
        __syncwarp();
        if (lane / 4 == index / 4 * 2 + index % 2)
#pragma unroll
            for (int i = 0; i < ROW / 32; ++i)
                *key_at(index >> 1 & 1, i, lane) = *reinterpret_cast<const uint4*>(key + i * 32 + lane % 4 * 8);
#pragma unroll
        for (int e = lane; e < ROW; e += 32) reinterpret_cast<__half*>(values)[value_offset(ROW, index, e)] = value[e];
        __syncwarp();
    }
};

// Issues the loads of the strip that begins at `slot` of these pages.
template <int ROW, class K, class V, bool IN_SMEM>
__device__ __forceinline__ void load_strip(StripOperands<ROW, K, V, IN_SMEM>& operands, const uint8_t* keys,
                                           const uint8_t* values, int slot, int lane) {
    operands.load_keys(keys, slot, lane);
    operands.end_load();
    operands.load_values(values, slot, lane);
    operands.end_load();
}
// Issues the loads of strip `strip`, which lies on page `page`.
template <int ROW, class K, class V, bool IN_SMEM>
__device__ __forceinline__ void load_strip(const AttentionArgs& p, const Rows& rows,
                                           StripOperands<ROW, K, V, IN_SMEM>& operands, int strip, int page, int lane) {
    load_strip(operands, page_at<K>(p.rope, p.rope.k_pages, page, rows.kv_head, ROW),
               page_at<V>(p.rope, p.rope.v_pages, page, rows.kv_head, ROW), strip * DECODE_STRIP % PAGE_SIZE, lane);
}

// s = scores of the strip: (block 0's row g, heads 2t and 2t + 1), (block 1's row g, heads 2t and 2t + 1). The B
// operand is head g of `q` in shared memory; heads >= n_heads are 0. Two accumulators, so that consecutive mma do not
// depend on each other. AT_ONCE: unroll factor; a larger one takes more registers.
template <int ROW, int AT_ONCE = ROW / 32, class Operands>
__device__ __forceinline__ void strip_scores(const Operands& strip, const __half* q, int n_heads, int lane,
                                             float (&s)[4]) {
    const int g = lane / 4, t = lane % 4;
    float other[4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = 0.0f;
    __syncwarp();  // keeps the compiler from holding q in registers across the strip loop, which would spill
#pragma unroll AT_ONCE
    for (int i = 0; i < ROW / 32; ++i) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (g < n_heads) v = *(reinterpret_cast<const uint4*>(q + g * ROW) + i * 4 + t);
        const uint4 a = strip.key(0, i, lane), b = strip.key(1, i, lane);
        mma_m16n8k16_f16(s, {a.x, b.x, a.y, b.y}, {v.x, v.y});
        mma_m16n8k16_f16(other, {a.z, b.z, a.w, b.w}, {v.z, v.w});
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] += other[e];
}

// Transposes an 8 x 8 block of f16; each lane holds row g, columns 2t and 2t + 1.
__device__ __forceinline__ uint32_t transpose_block(uint32_t v, int g, int t) {
    const int from = 8 * t + g / 2;
    const uint32_t first = __shfl_sync(0xffffffffu, v, from), second = __shfl_sync(0xffffffffu, v, from + 4);
    return __byte_perm(first, second, g & 1 ? 0x7632 : 0x5410);
}

// Turns scores into probabilities relative to the running maximum, as the B operand. `shrink` is the factor 2^(old
// maximum - new maximum) for the earlier sums. Every strip has at least one visible position, so the maximum is finite.
template <bool MORE>
__device__ __forceinline__ void soften_strip(const AttentionArgs& p, const DecodeContext& context, float (&s)[4],
                                             int first, int g, int t, DecodeSoftmax& softmax, uint32_t (&b)[2],
                                             float (&shrink)[2]) {
    if (MORE && p.soft_cap > 0.0f)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] = p.soft_cap * tanhf(s[i] * p.scale / p.soft_cap);
    const float scale = MORE && p.soft_cap > 0.0f ? 1.0f : p.scale;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        float top = softmax.maximum[c];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int position = first + 4 * (g / 2) + 2 * n + (g & 1);
            float v = s[2 * n + c] * scale;
            v = position >= context.low && position <= context.position ? v * LOG2E : NONE;
            s[2 * n + c] = v;
            top = fmaxf(top, v);
        }
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
        shrink[c] = exp2_approx(softmax.maximum[c] - top);
        softmax.maximum[c] = top;
#pragma unroll
        for (int n = 0; n < 2; ++n) s[2 * n + c] = exp2_approx(s[2 * n + c] - top);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const __half2 pair = __floats2half2_rn(s[2 * n], s[2 * n + 1]);
        b[n] = transpose_block(*reinterpret_cast<const uint32_t*>(&pair), g, t);
    }
}

// o += V^T P for elements 16 n + g and 16 n + g + 8 and 16 positions. SHRINKS: o is nonzero and must be rescaled first.
template <bool SHRINKS, class Operands, int N>
__device__ __forceinline__ void add_strip_values(const Operands& strip, int lane, const uint32_t (&b)[2],
                                                 const float (&shrink)[2], DecodeSoftmax& softmax, float (&o)[N][4]) {
    constexpr uint32_t ones = 0x3c003c00;
    if (SHRINKS) softmax.sum[0] *= shrink[0], softmax.sum[1] *= shrink[1];
    mma_m16n8k16_f16(softmax.sum, {ones, ones, ones, ones}, b);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float (&c)[4] = o[n];
        if (SHRINKS) c[0] *= shrink[0], c[1] *= shrink[1], c[2] *= shrink[0], c[3] *= shrink[1];
        const uint4 a = strip.value(n, lane);
        mma_m16n8k16_f16(c, {a.x, a.y, a.z, a.w}, b);
    }
}

// Adds the strip in `operands` to o. Unless the strip is the warp's LAST, the function issues the loads of the next
// strip, which lies on page `ahead`: its keys as soon as the current keys are used, its values as soon as the current
// values are used. Memory is then never idle. FIRST: o is zero.
template <int ROW, bool FIRST, bool LAST, bool MORE, class K, class V, bool IN_SMEM, bool TO_ODD, int N>
__device__ __forceinline__ void add_strip(const AttentionArgs& p, const DecodeContext& context, const Rows& rows,
                                          const __half* queries, StripOperands<ROW, K, V, IN_SMEM>& operands,
                                          const StripIterator<TO_ODD>& strips, int& ahead, int lane,
                                          DecodeSoftmax& softmax, float (&o)[N][4]) {
    const int page = ahead, slot = strips.next() * DECODE_STRIP % PAGE_SIZE;
    const bool more = !LAST && strips.next() < context.to;
    float s[4], shrink[2];
    uint32_t b[2];
    operands.await_keys();
    strip_scores<ROW>(operands, queries, rows.heads, lane, s);
    if (more) operands.load_keys(page_at<K>(p.rope, p.rope.k_pages, page, rows.kv_head, ROW), slot, lane);
    operands.end_load();
    if constexpr (!LAST) ahead = context.page_of(strips.after_next());
    soften_strip<MORE>(p, context, s, strips.strip * DECODE_STRIP, lane / 4, lane % 4, softmax, b, shrink);
    operands.await_values();
    add_strip_values<!FIRST>(operands, lane, b, shrink, softmax, o);
    if (more) operands.load_values(page_at<V>(p.rope, p.rope.v_pages, page, rows.kv_head, ROW), slot, lane);
    operands.end_load();
}

// The same for a remainder strip in shared memory, while the warp's other strips are in registers.
template <int ROW, bool MORE, class K, class V, int N>
__device__ __forceinline__ void add_odd_strip(const AttentionArgs& p, const DecodeContext& context, const Rows& rows,
                                              const __half* queries, const StripOperands<ROW, K, V, true>& operands,
                                              int strip, int lane, DecodeSoftmax& softmax, float (&o)[N][4]) {
    float s[4], shrink[2];
    uint32_t b[2];
    cp_async_wait<0>();
    __syncwarp();
    strip_scores<ROW, MORE ? 1 : ROW / 32>(operands, queries, rows.heads, lane, s);
    soften_strip<MORE>(p, context, s, strip * DECODE_STRIP, lane / 4, lane % 4, softmax, b, shrink);
    add_strip_values<true>(operands, lane, b, shrink, softmax, o);
}

// Head i of a CTA: first the query heads, then the key, then the value.
template <int ROW, bool MORE>
struct DecodeHead {
    static constexpr int COUNT = Pairs<ROW>::COUNT;
    int part;
    bool normalised;
    float2 weight[COUNT];  // weights of the head norm
    LocatedPairs<ROW> pairs;

    __device__ __forceinline__ void locate(const AttentionArgs& p, const Rows& rows, int i, int lane) {
        if (SHARED_KV) i = min(i, rows.heads - 1);  // a warp without a head loads the last one
        part = i < rows.heads ? QUERY : i == rows.heads ? KEY : VALUE;
        normalised = MORE && part != VALUE && p.rope.norm[part == KEY] != nullptr;
        pairs.locate(p.rope, part, part == QUERY ? rows.first_head + i : rows.kv_head, rows.first_token, lane);
        if (!MORE || !normalised) return;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) weight[j] = pairs.load_weight(p.rope, p.rope.norm[part == KEY], lane, j);
    }
};

// Prepares the token's heads, n_heads in all. The rotated queries go to shared memory `q` [DECODE_HEADS][ROW]. If the
// split contains the newest position, its key and value go to their pages and, for number formats, also to `newest`
// [2][ROW] with the rounding of the KV cache. CTAs that share a KV head write the same bits. The loads of the warp's
// first head are in flight; TWO: those of its second, if it has one, too.
template <int ROW, bool MORE, bool TWO, class K, class V>
__device__ __forceinline__ void rotate_token(const AttentionArgs& p, const Rows& rows, const DecodeContext& context,
                                             const RotationOf<Pairs<ROW>::COUNT>& rotation, DecodeHead<ROW, MORE>& head,
                                             const DecodeHead<ROW, MORE>& second, uint8_t* const (&pages)[2],
                                             float* heads, int n_heads, __half* q, __half* newest, int warp, int lane) {
    constexpr bool INDEPENDENT = K::independent && V::independent;
    const int slot = context.position % PAGE_SIZE;
    for (int i = warp; i < n_heads; i += DECODE_WARPS) {
        LocatedPairs<ROW>& pairs = head.pairs;
        if (TWO && i == warp + DECODE_WARPS)
            head = second;
        else if (i > warp)
            head.locate(p, rows, i, lane), pairs.load();
        pairs.add_bias(p.rope, lane);
        const int part = head.part;
        if constexpr (INDEPENDENT) {  // each lane stores its elements to the page: no pass through shared memory
            if (MORE && head.normalised)
                pairs.normalise(p.rope, p.rope.eps[part == KEY], [&](int j) { return head.weight[j]; });
            if (VALUE_NORM && i > rows.heads)
                pairs.normalise(p.rope, p.rope.eps[VALUE], [](int) { return make_float2(1.0f, 1.0f); });
            // Branch on i, not on part: three cases of a number compile to a jump table in memory.
            if (i <= rows.heads) pairs.rotate(p.rope, rotation, lane);
            if (i < rows.heads) {
                pairs.store(p.rope, q + i * ROW, lane);
            } else if (i == rows.heads) {
                pairs.each(p.rope, lane, [&](int e, float v) {
                    newest[e] = K::as_read(v);
                    K::template store_key_element<ROW>(pages[0], slot, e, v);
                });
            } else {
                pairs.each(p.rope, lane, [&](int e, float v) {
                    newest[ROW + e] = V::as_read(v);
                    V::template store_value_element<ROW>(pages[1], slot, e, v);
                });
            }
        } else {
            float* values = heads + warp * ROW;
            pairs.each(p.rope, lane, [&](int e, float v) { values[e] = v; });
            __syncwarp();
            rotate_head<K>(p.rope, part, rotation, values, lane);
            if (part == QUERY)
                for (int j = lane; j < ROW; j += 32) q[i * ROW + j] = saturated_half(values[j]);
            else
                store_head<K, V>(p.rope, part, rows.kv_head, context.page, context.position, values, lane);
            __syncwarp();
        }
    }
}

// The query heads of a CTA, which the previous GEMM has rotated. Each warp copies them to its part of shared memory,
// [heads][ROW], so no warp waits for another. A copy takes four heads at a time; most models have no more than four per
// KV head.
template <int ROW>
struct RotatedQueries {
    // 16-byte pieces: of a head; of a lane in flight
    static constexpr int PIECES = ROW / 8, AT_ONCE = (PIECES * 4 + 31) / 32;
    const uint4* from;
    int left;  // pieces left, counted from the lane's first piece
    uint4 v[AT_ONCE];

    __device__ __forceinline__ RotatedQueries(const AttentionArgs& p, const Rows& rows, int lane) {
        const __half* first =
            p.rope.q + static_cast<uint32_t>((rows.first_token * p.rope.n_head + rows.first_head) * ROW);
        from = reinterpret_cast<const uint4*>(first) + lane;
        left = rows.heads * PIECES - lane;
    }
    __device__ __forceinline__ int made() const { return made_of(from) | left & 0x7fffffff; }
    // Issues the first AT_ONCE loads.
    __device__ __forceinline__ void load() {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (i * 32 < left) v[i] = __ldcg(from + i * 32);
    }
    // Stores the loaded pieces, then loads and stores the rest.
    __device__ __forceinline__ void store(__half* q, int lane) {
        for (uint4* to = reinterpret_cast<uint4*>(q) + lane;; to += AT_ONCE * 32) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (i * 32 < left) to[i * 32] = v[i];
            left -= AT_ONCE * 32, from += AT_ONCE * 32;
            if (left <= 0) break;
            load();
        }
        __syncwarp();
    }
};

// Attention of head group `index` (of `count`) over split `split` of the context. `shared`: see the table at the top.
//
// Only the token's q, k and v depend on previous kernels (PDL), so everything else comes before grid_dependency_wait:
// each warp issues the loads of its first strip, and of its remainder strip, which would cost as much as a whole round
// if it were loaded last. ROTATED: the previous kernel has rotated q and the newest key, and has stored the newest key
// and value in their page.
template <int ROW, bool IN_SMEM, bool ODD, bool MORE, bool ROTATED, class K, class V>
__device__ void attend_token(const AttentionArgs& p, const AttentionTile& tile, const Rows& rows,
                             const DecodeContext& context, int index, int count, int split, uint8_t* shared) {
    constexpr int N = ROW / 16;
    // the newest position comes from `newest`, not from its page
    constexpr bool PUT = K::independent && V::independent && !ROTATED && !SHARED_KV;
    const int warp = kept(static_cast<int>(threadIdx.x / 32)), lane = kept(static_cast<int>(threadIdx.x % 32));
    const int g = lane / 4, t = lane % 4;
    constexpr bool ASIDE = ODD && !IN_SMEM;  // remainder strips are in shared memory, all others in registers
    using Shared = StripOperands<ROW, K, V, IN_SMEM || ODD>;
    StripOperands<ROW, K, V, IN_SMEM> ahead(shared + warp * Shared::SHARED);
    Shared aside(shared + warp * Shared::SHARED);
    float* parts = reinterpret_cast<float*>(shared + DECODE_WARPS * Shared::SHARED);
    __half* queries = reinterpret_cast<__half*>(parts + DECODE_WARPS * rows.heads * (ROW + 2));
    if (ROTATED) queries += warp * rows.heads * ROW;
    __half* newest = queries + DECODE_HEADS * ROW;
    const AnglesOf<ROTATED ? 0 : Pairs<ROW>::COUNT> angles(p.rope, lane);
    StripIterator<ODD && IN_SMEM> strips(context, warp);
    const bool has_aside = ASIDE && warp < context.odd;
    const bool has_newest = context.newest && strips.strip == context.to - 1;
    // K and V pages of the newest position.
    uint8_t* const pages[2] = {page_at<K>(p.rope, p.rope.k_pages, context.page, rows.kv_head, ROW),
                               page_at<V>(p.rope, p.rope.v_pages, context.page, rows.kv_head, ROW)};
    // first slot of the newest position's strip
    const int newest_slot = context.position % PAGE_SIZE / DECODE_STRIP * DECODE_STRIP;
    if (strips.strip < context.to) {
        const int odd = strips.strip - context.odd;
        const int page = context.first_page(strips.strip), odd_page = has_aside ? context.page_of(odd) : 0;
        if (has_aside) load_strip<ROW>(p, rows, aside, odd, odd_page, lane);
        if (PUT || !has_newest) {
            load_strip<ROW>(p, rows, ahead, strips.strip, page, lane);
        } else {  // the strip lacks only the newest position: prefetch it to L2 now, load it after the wait
            K::prefetch_keys(pages[0], ROW, newest_slot, DECODE_STRIP, lane);
            V::prefetch_values(pages[1], ROW, newest_slot, DECODE_STRIP, lane);
        }
    }
    int page = context.page_of(strips.next());
    if constexpr (ROTATED) {
        RotatedQueries<ROW> rotated_queries(p, rows, lane);
        // Computed before the wait: instructions after it are on the critical path.
        const uint8_t* const keys = ahead.keys_of(pages[0], newest_slot, lane);
        const uint8_t* const values = ahead.values_of(pages[1], newest_slot, lane);
        grid_dependency_launch();  // the next GEMM's CTAs start while this CTA waits
        grid_dependency_wait(rotated_queries.made() | made_of(keys) | made_of(values));
        rotated_queries.load();
        if (has_newest) {
            ahead.load_keys_from(keys, lane);
            ahead.end_load();
            ahead.load_values_from(values, lane);
            ahead.end_load();
        }
        rotated_queries.store(queries, lane);
    } else {
        RotationOf<Pairs<ROW>::COUNT> rotation;
        rotation.prepare(p.rope, angles, context.position);
        const int n_heads = rows.heads + (!SHARED_KV && context.newest ? 2 : 0);
        constexpr bool TWO = TWO_HEADS && !IN_SMEM;  // elsewhere they would take registers
        const bool has_two = TWO && warp + DECODE_WARPS < n_heads;
        DecodeHead<ROW, MORE> head, second;
        head.locate(p, rows, warp, lane);
        if (has_two) second.locate(p, rows, warp + DECODE_WARPS, lane);
        grid_dependency_launch();  // as above
        grid_dependency_wait(head.pairs.made() | rotation.made() | made_of(pages[0]) | made_of(pages[1]));
        head.pairs.load();
        if (has_two) second.pairs.load();
        rotate_token<ROW, MORE, TWO, K, V>(p, rows, context, rotation, head, second, pages, parts, n_heads, queries,
                                           newest, warp, lane);
        decode_barrier();
        if (!PUT && has_newest) load_strip(ahead, pages[0], pages[1], newest_slot, lane);
    }

    DecodeSoftmax softmax;
    float o[N][4] = {};
    if (strips.strip < context.to) {
        if constexpr (PUT)
            if (has_newest) ahead.put(context.position % DECODE_STRIP, newest, newest + ROW, lane);
        if (!ASIDE && strips.next() >= context.to) {
            add_strip<ROW, true, true, MORE>(p, context, rows, queries, ahead, strips, page, lane, softmax, o);
        } else {
            if constexpr (ASIDE) {
                add_strip<ROW, true, false, MORE>(p, context, rows, queries, ahead, strips, page, lane, softmax, o);
                const int odd = strips.strip - context.odd;
                if (has_aside) add_odd_strip<ROW, MORE>(p, context, rows, queries, aside, odd, lane, softmax, o);
                strips.step();
            }
            for (; strips.strip < context.to; strips.step())
                add_strip<ROW, false, false, MORE>(p, context, rows, queries, ahead, strips, page, lane, softmax, o);
        }
    }

    const int n_parts = max(1, min(DECODE_WARPS, context.to - context.from));  // warps that have a strip
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        if (2 * t + c >= rows.heads || warp >= n_parts) continue;
        float* row = parts + (warp * rows.heads + 2 * t + c) * (ROW + 2);
#pragma unroll
        for (int n = 0; n < N; ++n) row[n * 16 + g] = o[n][c], row[n * 16 + g + 8] = o[n][2 + c];
        if (g == 0) row[ROW] = softmax.maximum[c], row[ROW + 1] = softmax.sum[c];
    }
    decode_barrier();
    merge_and_write<ROW, DECODE_WARPS, MORE>(p, tile, rows, index, count, split, parts, n_parts, rows.heads);
}
