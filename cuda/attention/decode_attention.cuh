// Attention of one token that is alone with its sequence, over the pages of that sequence, with the rotation of its
// query, key and value before.
//
// The query heads of a key/value head, up to eight, are the N of mma.m16n8k16, so that few registers hold the sums. A
// warp takes 16 positions at a time: S[16][8] = K Q^T, online softmax over the positions, O[E][8] += V^T P. S comes by
// positions and is wanted by heads, so its 8 x 8 blocks are transposed between lanes. If row g of S's n-th block is
// position 4 (g / 2) + 2 n + g % 2, a lane's operands lie together both in k (by rows, 16 bytes) and in v (transposed
// pages, rope.cuh, 8 bytes).
#pragma once
#include "attention/attention.cuh"

#ifndef TOKEN_WARPS
#define TOKEN_WARPS 8
#endif

constexpr int TOKEN_THREADS = TOKEN_WARPS * 32;
constexpr int TOKEN_HEADS = 8;   // query heads at most
constexpr int TOKEN_STRIP = 16;  // positions a warp takes at a time

__device__ __forceinline__ void token_barrier(CALLER) { named_barrier_sync(0, TOKEN_THREADS FORWARD_CALLER); }

// Which positions a block attends to.
struct TokenContext {
    const int* table;
    int position;   // of the token
    int page;       // where that is
    int warp_page;  // where strip `warp` of the context is
    int low;        // the first position it sees
    int from, to;   // strips of this part of the context
    int odd;        // of them, the first, beside whole rounds of a block's warps
    bool newest;    // the token's own position is among the strips

    // The page of the warp's first strip, if that is not further on, is asked for beside the position.
    __device__ __forceinline__ TokenContext(const Attend& p, int token) {
        const int warp = threadIdx.x / 32;
        table = p.rope.page_tables + token * p.rope.table_stride;
        position = load_now(p.rope.positions + token);
        page = load_now(p.rope.pages + token);
        warp_page = load_now(table + min(warp * TOKEN_STRIP / PAGE_SIZE, p.rope.table_stride - 1));
    }
    // What part `split` of the tile is. ODD: there may be odd strips.
    template <bool ODD>
    __device__ __forceinline__ void cut(const Attend& p, const AttendTile& tile, int split) {
        low = p.window > 0 ? max(0, position - p.window + 1) : 0;
        const int start = low / TOKEN_STRIP, end = position / TOKEN_STRIP + 1;
        const int strips = end - start;
        const int per_split = tile.n_split == 1 ? strips : (strips + tile.n_split - 1) / tile.n_split;
        from = kept(start + split * per_split), to = kept(min(end, from + per_split));
        odd = ODD ? kept(to - from > TOKEN_WARPS ? (to - from) % TOKEN_WARPS : 0) : 0;
        newest = from < to && to == end;
    }
    // Where a strip is; 0 behind the last one.
    __device__ __forceinline__ int page_of(int strip) const {
        return strip < to ? __ldg(table + strip * TOKEN_STRIP / PAGE_SIZE) : 0;
    }
    __device__ __forceinline__ int first_page(int strip) const { return from + odd == 0 ? warp_page : page_of(strip); }
};

// The strips of a warp. TO_ODD: the odd one, if it has one, is its second.
template <bool TO_ODD>
struct Walk {
    int strip, following;  // may be behind the last

    __device__ __forceinline__ Walk(const TokenContext& context, int warp) : strip(context.from + context.odd + warp) {
        following = TO_ODD && warp < context.odd ? strip - context.odd : strip + TOKEN_WARPS;
    }
    __device__ __forceinline__ int next() const { return TO_ODD ? following : strip + TOKEN_WARPS; }
    // All others are behind the odd ones.
    __device__ __forceinline__ int behind_next() const { return max(strip, next()) + TOKEN_WARPS; }
    __device__ __forceinline__ void step() {
        const int behind = behind_next();
        strip = next(), following = behind;
    }
};

// Running softmax of heads 2t and 2t + 1. Tensor cores add up the probabilities, as if a value of each position were 1:
// to do that between lanes takes longer.
struct TokenSoftmax {
    float maximum[2] = {NONE, NONE};
    float sum[4] = {};  // of which the first two are kept up
};

// A strip's keys and values of a warp, which are asked for first and awaited where they are wanted. In registers, from
// where one token has them sooner;
template <int ROW, class K, class V, bool SHARES>
struct StripOperands {
    static constexpr int SHARED = 0;  // bytes of a warp
    typename K::template Keys<ROW, 2, ROW / 32> k;
    typename V::template TokenValues<ROW, ROW / 16> v;

    __device__ __forceinline__ StripOperands(uint8_t*) {}
    __device__ __forceinline__ void load_keys(const uint8_t* page, int slot, int lane) {
        k.load(page, slot + lane / 8 * 4 + (lane / 4 & 1), 0, lane % 4);
    }
    __device__ __forceinline__ void load_values(const uint8_t* page, int slot, int lane) {
        v.load(page, slot, 0, lane / 4, lane % 4);
    }
    // Of numbers: where the lane's first ones are, and all of them from there on.
    static __device__ __forceinline__ const uint8_t* keys_of(const uint8_t* page, int slot, int lane) {
        return decltype(k)::place(page, slot + lane / 8 * 4 + (lane / 4 & 1), lane % 4);
    }
    static __device__ __forceinline__ const uint8_t* values_of(const uint8_t* page, int slot, int lane) {
        return decltype(v)::place(page, slot, lane / 4, lane % 4);
    }
    __device__ __forceinline__ void load_keys_from(const uint8_t* from, int) { k.load(from); }
    __device__ __forceinline__ void load_values_from(const uint8_t* from, int) { v.load(from); }
    __device__ __forceinline__ void end_load() const {}
    __device__ __forceinline__ void await_keys() const {}
    __device__ __forceinline__ void await_values() const {}
    __device__ __forceinline__ uint4 key(int n, int i, int lane) const { return k.get(n, i, lane % 4); }
    __device__ __forceinline__ uint4 value(int n, int lane) const { return v.get(n, lane / 4); }
    // Position `at` of the strip, which is there, becomes `key` [ROW] and `value` [ROW].
    __device__ __forceinline__ void put(int at, const __half* key, const __half* value, int lane) {
        k.put(at, key, lane / 4, lane % 4);
        v.put(at, value, lane / 4, lane % 4);
    }
};

// or halves in shared memory, so that a block takes few registers and a multiprocessor runs many of them: keys as lanes
// take them, values as they lie.
template <int ROW>
struct StripOperands<ROW, CacheF16, CacheF16, true> {
    static constexpr int KEYS = TOKEN_STRIP * ROW * 2, SHARED = 2 * KEYS;
    static constexpr int LINE = TOKEN_STRIP * 2;  // bytes of a value
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
        __syncwarp();  // what was there has been read
#pragma unroll
        for (int i = 0; i < ROW / 16; ++i) cp_async<16>(values + (i * 32 + lane) * 16, from + i * 512);
    }
    __device__ __forceinline__ void load_keys(const uint8_t* page, int slot, int lane) {
        load_keys_from(keys_of(page, slot, lane), lane);
    }
    __device__ __forceinline__ void load_values(const uint8_t* page, int slot, int lane) {
        load_values_from(values_of(page, slot, lane), lane);
    }
    // Behind each of the two, also where none was.
    __device__ __forceinline__ void end_load() const { cp_async_commit(); }
    __device__ __forceinline__ void await_keys() const { cp_async_wait<1>(); }
    __device__ __forceinline__ void await_values() const {
        cp_async_wait<1>();
        __syncwarp();
    }
    __device__ __forceinline__ uint4 key(int n, int i, int lane) const { return *key_at(n, i, lane); }
    __device__ __forceinline__ uint4 value(int n, int lane) const {
        const uint8_t* from = values + (n * 16 + lane / 4) * LINE + (lane % 4 * 8 ^ (lane & 16));
        const uint2 low = *reinterpret_cast<const uint2*>(from), high = *reinterpret_cast<const uint2*>(from + 8 * LINE);
        return make_uint4(low.x, high.x, low.y, high.y);
    }
    __device__ __forceinline__ void put(int at, const __half* key, const __half* value, int lane) {
        cp_async_wait<0>();
        __syncwarp();
        if (lane / 4 == at / 4 * 2 + at % 2)
#pragma unroll
            for (int i = 0; i < ROW / 32; ++i)
                *key_at(at >> 1 & 1, i, lane) = *reinterpret_cast<const uint4*>(key + i * 32 + lane % 4 * 8);
#pragma unroll
        for (int e = lane; e < ROW; e += 32) reinterpret_cast<__half*>(values)[value_place(ROW, at, e)] = value[e];
        __syncwarp();
    }
};

// The strip that begins at `slot` of these pages is asked for.
template <int ROW, class K, class V, bool SHARES>
__device__ __forceinline__ void load_strip(StripOperands<ROW, K, V, SHARES>& operands, const uint8_t* keys,
                                           const uint8_t* values, int slot, int lane) {
    operands.load_keys(keys, slot, lane);
    operands.end_load();
    operands.load_values(values, slot, lane);
    operands.end_load();
}
// The strip, which is on page `page`, is asked for.
template <int ROW, class K, class V, bool SHARES>
__device__ __forceinline__ void load_strip(const Attend& p, const Rows& rows, StripOperands<ROW, K, V, SHARES>& operands,
                                           int strip, int page, int lane) {
    load_strip(operands, page_at<K>(p.rope, p.rope.k_pages, page, rows.kv_head, ROW),
               page_at<V>(p.rope, p.rope.v_pages, page, rows.kv_head, ROW), strip * TOKEN_STRIP % PAGE_SIZE, lane);
}

// s = scores of the strip: (block 0's row g, heads 2t, 2t + 1), (block 1's row g, ...). The B operand is head g of `q`,
// in shared memory, zeros for heads that are none. Two sums, so that products that add to the same one are apart. So many
// pieces AT_ONCE take registers.
template <int ROW, int AT_ONCE = ROW / 32, class Operands>
__device__ __forceinline__ void strip_scores(const Operands& strip, const __half* q, int n_heads, int lane,
                                             float (&s)[4]) {
    const int g = lane / 4, t = lane % 4;
    float other[4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = 0.0f;
    __syncwarp();  // the compiler shall not keep q in registers that the loop has no room for
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

// An 8 x 8 block of halves, row g and columns 2t, 2t + 1 in each lane, transposed.
__device__ __forceinline__ uint32_t transpose_block(uint32_t v, int g, int t) {
    const int from = 8 * t + g / 2;
    const uint32_t first = __shfl_sync(0xffffffffu, v, from), second = __shfl_sync(0xffffffffu, v, from + 4);
    return __byte_perm(first, second, g & 1 ? 0x7632 : 0x5410);
}

// Scores to probabilities (relative to the running maximum), as the B operand; `shrink` is by how much what was
// accumulated before must shrink. A position of each strip is seen, so that there is a maximum.
template <bool MORE>
__device__ __forceinline__ void soften_strip(const Attend& p, const TokenContext& context, float (&s)[4], int first,
                                             int g, int t, TokenSoftmax& softmax, uint32_t (&b)[2], float (&shrink)[2]) {
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

// o += the values of elements 16 n + g and 16 n + g + 8 of 16 positions, weighted. SHRINKS: o is not zero before.
template <bool SHRINKS, class Operands, int N>
__device__ __forceinline__ void add_strip_values(const Operands& strip, int lane, const uint32_t (&b)[2],
                                                 const float (&shrink)[2], TokenSoftmax& softmax, float (&o)[N][4]) {
    constexpr uint32_t ones = 0x3c003c00;
    if (SHRINKS) softmax.sum[0] *= shrink[0], softmax.sum[1] *= shrink[1];
    mma_m16n8k16_f16(softmax.sum, {ones, ones, ones, ones}, b);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float(&c)[4] = o[n];
        if (SHRINKS) c[0] *= shrink[0], c[1] *= shrink[1], c[2] *= shrink[0], c[3] *= shrink[1];
        const uint4 a = strip.value(n, lane);
        mma_m16n8k16_f16(c, {a.x, a.y, a.z, a.w}, b);
    }
}

// A strip whose keys and values are in `operands`: o += what it gives. Unless it is known to be the warp's LAST, the keys of
// its next strip, which is on page `ahead`, are asked for as soon as these are used, its values likewise, so that memory
// is never idle. FIRST: o is zero.
template <int ROW, bool FIRST, bool LAST, bool MORE, class K, class V, bool SHARES, bool TO_ODD, int N>
__device__ __forceinline__ void add_strip(const Attend& p, const TokenContext& context, const Rows& rows,
                                          const __half* queries, StripOperands<ROW, K, V, SHARES>& operands,
                                          const Walk<TO_ODD>& walk, int& ahead, int lane, TokenSoftmax& softmax,
                                          float (&o)[N][4]) {
    const int page = ahead, slot = walk.next() * TOKEN_STRIP % PAGE_SIZE;
    const bool more = !LAST && walk.next() < context.to;
    float s[4], shrink[2];
    uint32_t b[2];
    operands.await_keys();
    strip_scores<ROW>(operands, queries, rows.heads, lane, s);
    if (more) operands.load_keys(page_at<K>(p.rope, p.rope.k_pages, page, rows.kv_head, ROW), slot, lane);
    operands.end_load();
    if constexpr (!LAST) ahead = context.page_of(walk.behind_next());
    soften_strip<MORE>(p, context, s, walk.strip * TOKEN_STRIP, lane / 4, lane % 4, softmax, b, shrink);
    operands.await_values();
    add_strip_values<!FIRST>(operands, lane, b, shrink, softmax, o);
    if (more) operands.load_values(page_at<V>(p.rope, p.rope.v_pages, page, rows.kv_head, ROW), slot, lane);
    operands.end_load();
}

// The same for an odd strip that is in shared memory beside others in registers.
template <int ROW, bool MORE, class K, class V, int N>
__device__ __forceinline__ void add_odd_strip(const Attend& p, const TokenContext& context, const Rows& rows,
                                              const __half* queries, const StripOperands<ROW, K, V, true>& operands,
                                              int strip, int lane, TokenSoftmax& softmax, float (&o)[N][4]) {
    float s[4], shrink[2];
    uint32_t b[2];
    cp_async_wait<0>();
    __syncwarp();
    strip_scores<ROW, MORE ? 1 : ROW / 32>(operands, queries, rows.heads, lane, s);
    soften_strip<MORE>(p, context, s, strip * TOKEN_STRIP, lane / 4, lane % 4, softmax, b, shrink);
    add_strip_values<true>(operands, lane, b, shrink, softmax, o);
}

// The i-th of a block's heads, of which its queries are the first.
template <int ROW, bool MORE>
struct TokenHead {
    static constexpr int COUNT = Pairs<ROW>::COUNT;
    int part;
    bool normalised;
    float2 weight[COUNT];  // of the norm
    LocatedPairs<ROW> pairs;

    __device__ __forceinline__ void locate(const Attend& p, const Rows& rows, int i, int lane) {
        part = i < rows.heads ? QUERY : i == rows.heads ? KEY : VALUE;
        normalised = MORE && part != VALUE && p.rope.norm[part == KEY] != nullptr;
        pairs.locate(p.rope, part, part == QUERY ? rows.first_head + i : rows.kv_head, rows.first_token, lane);
        if (!MORE || !normalised) return;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) weight[j] = pairs.load_weight(p.rope, p.rope.norm[part == KEY], lane, j);
    }
};

// The queries, rotated, to shared memory `q` [TOKEN_HEADS][ROW]; and, where the newest position is attended to, its key
// and value to their pages, and as they will be read from there to `newest` [2][ROW], unless that takes more than
// rounding. Blocks that share a key/value head write the same bits. `mine` is the warp's first head, on its way.
template <int ROW, bool MORE, class K, class V>
__device__ __forceinline__ void rotate_token(const Attend& p, const Rows& rows, const TokenContext& context,
                                             const RotationOf<Pairs<ROW>::COUNT>& rotation, TokenHead<ROW, MORE>& mine,
                                             uint8_t* const (&pages)[2], float* heads, __half* q, __half* newest,
                                             int warp, int lane) {
    constexpr bool ALONE = K::alone && V::alone;
    const int slot = context.position % PAGE_SIZE;
    for (int i = warp; i < rows.heads + (context.newest ? 2 : 0); i += TOKEN_WARPS) {
        LocatedPairs<ROW>& pairs = mine.pairs;
        if (i > warp) mine.locate(p, rows, i, lane), pairs.load();
        pairs.add_bias(p.rope, lane);
        const int part = mine.part;
        if constexpr (ALONE) {  // need not pass through shared memory
            if (MORE && mine.normalised)
                pairs.normalise(p.rope, p.rope.eps[part == KEY], [&](int j) { return mine.weight[j]; });
            // By i, not by part: three cases of a number become a jump through a table in memory.
            if (i <= rows.heads) pairs.turn(p.rope, rotation, lane);
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
            float* head = heads + warp * ROW;
            pairs.each(p.rope, lane, [&](int e, float v) { head[e] = v; });
            __syncwarp();
            turn_head<K>(p.rope, part, rotation, head, lane);
            if (part == QUERY)
                for (int j = lane; j < ROW; j += 32) q[i * ROW + j] = saturated_half(head[j]);
            else
                store_head<K, V>(p.rope, part, rows.kv_head, context.page, context.position, head, lane);
            __syncwarp();
        }
    }
}

// The queries of a block's heads, which the product before has rotated, on their way to a copy of each warp in shared
// memory, [heads][ROW]: no warp waits for others. Four heads' at a time, which is all that most models have.
template <int ROW>
struct TurnedQueries {
    static constexpr int PIECES = ROW / 8, AT_ONCE = (PIECES * 4 + 31) / 32;  // of 16 bytes: of a head, of a lane
    const uint4* from;
    int left;  // from the lane's first one on
    uint4 v[AT_ONCE];

    __device__ __forceinline__ TurnedQueries(const Attend& p, const Rows& rows, int lane) {
        const __half* first = p.rope.q + static_cast<uint32_t>((rows.first_token * p.rope.n_head + rows.first_head) * ROW);
        from = reinterpret_cast<const uint4*>(first) + lane;
        left = rows.heads * PIECES - lane;
    }
    __device__ __forceinline__ int made() const { return made_of(from) | left & 0x7fffffff; }
    // The first ones.
    __device__ __forceinline__ void load() {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (i * 32 < left) v[i] = __ldcg(from + i * 32);
    }
    // These, and all others.
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

// Head group `index` of `count`, part `split` of the context. `shared`: the warps' strips, then floats
// [TOKEN_WARPS][rows.heads][ROW + 2], then q, then the newest key and value; TURNED: q of each warp. Only these wait for the
// kernels before: each warp's first strip is on its way by then, and the odd ones, which would take as long as a whole
// round if they were asked for when all others have come. TURNED: the kernel before has rotated q and the newest key, which
// is in its page, as the value is.
template <int ROW, bool SHARES, bool ODD, bool MORE, bool TURNED, class K, class V>
__device__ void attend_token(const Attend& p, const AttendTile& tile, const Rows& rows, const TokenContext& context,
                             int index, int count, int split, uint8_t* shared) {
    constexpr int N = ROW / 16;
    constexpr bool PUT = K::alone && V::alone && !TURNED;  // the newest position does not come from its page
    const int warp = kept(static_cast<int>(threadIdx.x / 32)), lane = kept(static_cast<int>(threadIdx.x % 32));
    const int g = lane / 4, t = lane % 4;
    constexpr bool ASIDE = ODD && !SHARES;  // odd strips are in shared memory, all others in registers
    using Shared = StripOperands<ROW, K, V, SHARES || ODD>;
    StripOperands<ROW, K, V, SHARES> ahead(shared + warp * Shared::SHARED);
    Shared aside(shared + warp * Shared::SHARED);
    float* parts = reinterpret_cast<float*>(shared + TOKEN_WARPS * Shared::SHARED);
    __half* queries = reinterpret_cast<__half*>(parts + TOKEN_WARPS * rows.heads * (ROW + 2));
    if (TURNED) queries += warp * rows.heads * ROW;
    __half* newest = queries + TOKEN_HEADS * ROW;
    const TurnsOf<TURNED ? 0 : Pairs<ROW>::COUNT> turns(p.rope, lane);
    Walk<ODD && SHARES> walk(context, warp);
    const bool has_aside = ASIDE && warp < context.odd;
    const bool has_newest = context.newest && walk.strip == context.to - 1;
    uint8_t* const pages[2] = {page_at<K>(p.rope, p.rope.k_pages, context.page, rows.kv_head, ROW),
                               page_at<V>(p.rope, p.rope.v_pages, context.page, rows.kv_head, ROW)};  // of the newest
    const int newest_slot = context.position % PAGE_SIZE / TOKEN_STRIP * TOKEN_STRIP;  // the first of its strip
    if (walk.strip < context.to) {
        const int odd = walk.strip - context.odd;
        const int page = context.first_page(walk.strip), odd_page = has_aside ? context.page_of(odd) : 0;
        if (has_aside) load_strip<ROW>(p, rows, aside, odd, odd_page, lane);
        if (PUT || !has_newest) {
            load_strip<ROW>(p, rows, ahead, walk.strip, page, lane);
        } else {  // all but the token's own are there, and come nearer
            K::prefetch_keys(pages[0], ROW, newest_slot, TOKEN_STRIP, lane);
            V::prefetch_values(pages[1], ROW, newest_slot, TOKEN_STRIP, lane);
        }
    }
    int page = context.page_of(walk.next());
    if constexpr (TURNED) {
        TurnedQueries<ROW> mine(p, rows, lane);
        // Found here: instructions behind the wait take the longest.
        const uint8_t* const keys = ahead.keys_of(pages[0], newest_slot, lane);
        const uint8_t* const values = ahead.values_of(pages[1], newest_slot, lane);
        grid_dependency_launch();  // the next product's blocks begin while this waits
        grid_dependency_wait(mine.made() | made_of(keys) | made_of(values));
        mine.load();
        if (has_newest) {
            ahead.load_keys_from(keys, lane);
            ahead.end_load();
            ahead.load_values_from(values, lane);
            ahead.end_load();
        }
        mine.store(queries, lane);
    } else {
        RotationOf<Pairs<ROW>::COUNT> rotation;
        rotation.prepare(p.rope, turns, context.position);
        TokenHead<ROW, MORE> mine;
        mine.locate(p, rows, warp, lane);
        grid_dependency_launch();  // as above
        grid_dependency_wait(mine.pairs.made() | rotation.made() | made_of(pages[0]) | made_of(pages[1]));
        mine.pairs.load();
        rotate_token<ROW, MORE, K, V>(p, rows, context, rotation, mine, pages, parts, queries, newest, warp, lane);
        token_barrier();
        if (!PUT && has_newest) load_strip(ahead, pages[0], pages[1], newest_slot, lane);
    }

    TokenSoftmax softmax;
    float o[N][4] = {};
    if (walk.strip < context.to) {
        if constexpr (PUT)
            if (has_newest) ahead.put(context.position % TOKEN_STRIP, newest, newest + ROW, lane);
        if (!ASIDE && walk.next() >= context.to) {
            add_strip<ROW, true, true, MORE>(p, context, rows, queries, ahead, walk, page, lane, softmax, o);
        } else {
            if constexpr (ASIDE) {
                add_strip<ROW, true, false, MORE>(p, context, rows, queries, ahead, walk, page, lane, softmax, o);
                const int odd = walk.strip - context.odd;
                if (has_aside) add_odd_strip<ROW, MORE>(p, context, rows, queries, aside, odd, lane, softmax, o);
                walk.step();
            }
            for (; walk.strip < context.to; walk.step())
                add_strip<ROW, false, false, MORE>(p, context, rows, queries, ahead, walk, page, lane, softmax, o);
        }
    }

    const int n_parts = max(1, min(TOKEN_WARPS, context.to - context.from));  // warps that have a strip
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        if (2 * t + c >= rows.heads || warp >= n_parts) continue;
        float* row = parts + (warp * rows.heads + 2 * t + c) * (ROW + 2);
#pragma unroll
        for (int n = 0; n < N; ++n) row[n * 16 + g] = o[n][c], row[n * 16 + g + 8] = o[n][2 + c];
        if (g == 0) row[ROW] = softmax.maximum[c], row[ROW + 1] = softmax.sum[c];
    }
    token_barrier();
    merge_and_write<ROW, TOKEN_WARPS, MORE>(p, tile, rows, index, count, split, parts, n_parts, rows.heads);
}
