// Attention over the paged KV cache, for decode and prefill:
//
//    o[t, h] = softmax(mask(cap(q[t, h] K[kv(h)]^T * scale))) V[kv(h)]
//
// with q [T, H, E], K and V [context, G, E] and o [T, H, E].
//
// Grid (G * head groups per KV head, tiles, splits); a CTA has ATTENTION_WARPS warps. A tile is up to 16 rows of
// (token, query head) that share a KV head: the query heads of a group, and in prefill several tokens. The rows are the
// M of mma.m16n8k16, so the kernel reads K and V once for all rows. A warp takes 32 positions at a time, round-robin
// with the CTA's other warps: S[16, 32] = Q K^T, online softmax, O[16, E] += P V. There is no T x T matrix in memory.
//
// The accumulator of S is, register for register, the A operand of P V, if position 8 t + 4 s + 2 u + c of the 32 is
// column 2 t + c of S's tile 2 s + u. With this order a lane reads 16 bytes at a time of both k ([position][row]) and v
// (transposed pages, rope.cuh).
//
// The warps merge their partial results in dynamic shared memory, [warp][16][ROW + 2] f32. A long context is cut into
// n_split splits; the last CTA to finish merges them in index order (attention.cuh). The output never depends on
// timing. It depends on the batch only through ATTENTION_WARPS and through n_split, if the plan divides the resident
// CTAs among many sequences (plan_tiles); otherwise n_split depends on the length of the sequence alone.
//
// FUSED: each tile is the only token of its sequence in the step, and the CTA rotates q, k and v itself, instead of
// rope_kv.cu; q then lies in static shared memory. decode_attention: the same for one token per tile, for up to 8 query
// heads per KV head (decode_attention.cuh). K, V: the types of the KV cache (kv_types.cuh); operands of the mma are f16
// for every type.
#include "attention/decode_attention.cuh"

#ifndef ATTENTION_WARPS
#define ATTENTION_WARPS 8
#endif

constexpr int ATTENTION_THREADS = ATTENTION_WARPS * 32;
constexpr int STRIP = 32;  // positions that a warp takes at a time

// Warps that share a strip, each with its part of every head: registers hold Q and O of 256 elements at most.
template <int ROW>
constexpr int SHARERS = ROW > 256 ? 2 : 1;

// Running softmax of rows g and g + 8. The sum adds the probabilities rounded to f16, which are the ones that P V uses.
struct Softmax {
    float maximum[2] = {NONE, NONE};
    float sum[2] = {0.0f, 0.0f};
};

// Loads Q as A operands; `from(row)` is the address of 16 * STEPS elements of a row, f16. Rows >= n_rows are 0.
template <int STEPS, class From>
__device__ __forceinline__ void load_q(int n_rows, int g, int t, uint32_t (&a)[STEPS][4], From from) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int r = g + 8 * h;
#pragma unroll
        for (int i = 0; i < STEPS / 2; ++i) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (r < n_rows) v = *(reinterpret_cast<const uint4*>(from(r)) + i * 4 + t);
            a[2 * i][h] = v.x, a[2 * i][2 + h] = v.y, a[2 * i + 1][h] = v.z, a[2 * i + 1][2 + h] = v.w;
        }
    }
}

// s[4][4] += scores of rows g and g + 8 for the 32 positions, over COUNT pieces of 32 elements from piece FIRST on.
// Column g of S's tile n is position 8 (g / 2) + 2 n + g % 2.
template <int FIRST, int COUNT, class Keys, int STEPS>
__device__ __forceinline__ void add_scores(const Keys& k, int t, const uint32_t (&q)[STEPS][4], float (&s)[4][4]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const uint4 v = k.get(n, i, t);
            mma_m16n8k16_f16(s[n], q[2 * (FIRST + i)], {v.x, v.y});
            mma_m16n8k16_f16(s[n], q[2 * (FIRST + i) + 1], {v.z, v.w});
        }
}

// `before`: pieces of the head before those of q.
template <int ROW, class K, int FIRST, int STEPS>
__device__ __forceinline__ void add_scores_by_pieces(const uint8_t* keys, int position, int before, int t,
                                                     const uint32_t (&q)[STEPS][4], float (&s)[4][4]) {
    if constexpr (FIRST < STEPS / 2) {
        constexpr int COUNT = FIRST + K::key_step <= STEPS / 2 ? K::key_step : 1;
        typename K::template Keys<ROW, 4, COUNT> k;
        k.load(keys, position, before + FIRST, t);
        add_scores<FIRST, COUNT>(k, t, q, s);
        add_scores_by_pieces<ROW, K, FIRST + COUNT>(keys, position, before, t, q, s);
    }
}

// s += the other warp's s, of the same strip: both then have the same bits. `shared`: 512 floats for each warp of the
// pair, which the next call may not use again. Barrier `pair` + 1 is theirs.
__device__ __forceinline__ void add_other_scores(float* shared, int half, int pair, int lane, float (&s)[4][4]) {
    float4* own = reinterpret_cast<float4*>(shared + half * 512) + lane;
    const float4* other = reinterpret_cast<const float4*>(shared + (half ^ 1) * 512) + lane;
#pragma unroll
    for (int n = 0; n < 4; ++n) own[n * 32] = make_float4(s[n][0], s[n][1], s[n][2], s[n][3]);
    named_barrier_sync(pair + 1, 64);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const float4 v = other[n * 32];
        s[n][0] += v.x, s[n][1] += v.y, s[n][2] += v.z, s[n][3] += v.w;
    }
}

// Turns scores into probabilities relative to the running maximum, as the A operands of two k16 steps. `shrink` is the
// factor 2^(old maximum - new maximum) for the earlier sums.
__device__ __forceinline__ void soften(const AttentionArgs& p, float (&s)[4][4], int first, int t, const int (&low)[2],
                                       const int (&high)[2], Softmax& softmax, uint32_t (&a)[2][4],
                                       float (&shrink)[2]) {
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
            const __half2 pair = __floats2half2_rn(x, y);
            const float2 rounded = __half22float2(pair);
            sum += rounded.x + rounded.y;
            a[n / 2][(n & 1) * 2 + h] = *reinterpret_cast<const uint32_t*>(&pair);
        }
        softmax.sum[h] = softmax.sum[h] * shrink[h] + sum;
    }
}

// o += P V for elements 8 n + g, n from `first` on, and 32 positions.
template <int COUNT, class Values, int N>
__device__ __forceinline__ void add_values(const Values& values, int first, int g, const uint32_t (&a)[2][4],
                                           const float (&shrink)[2], float (&o)[N][4]) {
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
        float (&c)[4] = o[first + n];
        const uint4 w = values.get(n, g);
        c[0] *= shrink[0], c[1] *= shrink[0], c[2] *= shrink[1], c[3] *= shrink[1];
        mma_m16n8k16_f16(c, a[0], {w.x, w.y});
        mma_m16n8k16_f16(c, a[1], {w.z, w.w});
    }
}

// Rotates the tile's queries into shared memory. The CTA whose split contains the newest position also stores its key
// and value to their pages. CTAs that share a KV head write the same bits.
template <int ROW, class K, class V>
__device__ void rotate_rows(const AttentionArgs& p, const Rows& rows, const int* table, int position, bool newest,
                            const Rotation& rotation, float* heads, __half* q) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = rows.first_token;
    float* head = heads + warp * ROW;
    for (int i = warp; i < rows.heads + (!SHARED_KV && newest ? 2 : 0); i += ATTENTION_WARPS) {
        const int part = i < rows.heads ? QUERY : i == rows.heads ? KEY : VALUE;
        prepare_head<K>(p.rope, part, part == QUERY ? rows.first_head + i : rows.kv_head, token, rotation, head, lane);
        if (part == QUERY)
            for (int e = lane; e < ROW; e += 32) q[i * ROW + e] = saturated_half(head[e]);
        else
            store_head<K, V>(p.rope, part, rows.kv_head, table[position / PAGE_SIZE], position, head, lane);
        __syncwarp();
    }
    __syncthreads();
}

// Grid (G * head groups per KV head, tiles, splits).
template <int ROW, bool FUSED, class K = CacheF16, class V = CacheF16>
__global__ void __launch_bounds__(ATTENTION_THREADS, 1) paged_attention(const AttentionArgs p) {
    constexpr int SHARE = SHARERS<ROW>, N = ROW / SHARE / 8, TEAMS = ATTENTION_WARPS / SHARE;
    SHARED_DYNAMIC(float, parts);  // [TEAMS][ROWS][ROW + 2]
    __shared__ __align__(16) __half q_shared[FUSED ? ROWS * ROW : 8];
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int team = threadIdx.x / (32 * SHARE), half = SHARE == 1 ? 0 : threadIdx.x / 32 % SHARE;
    grid_dependency_launch();
    const AttentionTile tile = p.tiles[blockIdx.y];
    if (static_cast<int>(blockIdx.z) >= tile.n_split) return;
    const Rows rows(p, tile, blockIdx.x);

    int low[2], high[2];  // range of positions that rows g and g + 8 see
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int r = g + 8 * h;
        const int position = r < rows.n_rows ? p.rope.positions[rows.token(r)] : -1;
        low[h] = p.window > 0 ? window_start(p, position) : 0;
        high[h] = last_seen(p, tile.first_token, position);
    }
    const int first = p.rope.positions[tile.first_token];
    const int last = p.rope.positions[tile.first_token + tile.n_tokens - 1];
    const int start = p.window > 0 ? window_start(p, first) / STRIP : 0;
    const int end = last_seen(p, tile.first_token, last) / STRIP + 1;
    const int per_split = (end - start + tile.n_split - 1) / tile.n_split;
    const int from = start + blockIdx.z * per_split, to = min(end, from + per_split);
    const int* table = p.rope.page_tables + p.rope.sequences[tile.first_token] * p.rope.table_stride;
    // The values read above do not depend on earlier kernels of the step. Nor does the KV cache, except for the tokens
    // of the step. So the warp prefetches its first strip to L2 before the wait.
    if (from + team < to) {
        const int position = (from + team) * STRIP, slot = position % PAGE_SIZE;
        const uint8_t* keys = page_of<K>(p.rope, p.rope.k_pages, table, rows.kv_head, position, ROW);
        const uint8_t* values = page_of<V>(p.rope, p.rope.v_pages, table, rows.kv_head, position, ROW);
        K::prefetch_keys(keys, ROW, slot, STRIP, lane);
        V::prefetch_values(values, ROW, slot, STRIP, lane);
    }
    Rotation rotation;
    if constexpr (FUSED) rotation.prepare(p.rope, last, lane);
    grid_dependency_wait();

    uint32_t q[ROW / SHARE / 16][4];
    const int first_element = half * (ROW / SHARE);
    if constexpr (FUSED) {
        rotate_rows<ROW, K, V>(p, rows, table, last, from < to && to == end, rotation, parts, q_shared);
        load_q(rows.n_rows, g, t, q, [&](int r) { return q_shared + r * ROW + first_element; });
        __syncthreads();  // `parts` held the heads during the rotation
    } else {
        load_q(rows.n_rows, g, t, q, [&](int r) {
            return p.rope.q + (static_cast<size_t>(rows.token(r)) * p.rope.n_head + rows.head(r)) * ROW + first_element;
        });
    }
    const int n_teams = max(1, min(TEAMS, to - from));  // that have a strip
    Softmax softmax;
    float o[N][4] = {};
    for (int strip = from + team; strip < to; strip += TEAMS) {
        const int position = strip * STRIP, slot = position % PAGE_SIZE;
        const uint8_t* keys = page_of<K>(p.rope, p.rope.k_pages, table, rows.kv_head, position, ROW);
        const int lane_slot = slot + 8 * (g / 2) + (g & 1);
        float s[4][4] = {}, shrink[2];
        uint32_t a[2][4];
        if constexpr (ROW <= 128) {  // all loads are in flight before the softmax
            constexpr int FIRST = N < 8 ? N : 8, REST = N - FIRST;
            const uint8_t* values = page_of<V>(p.rope, p.rope.v_pages, table, rows.kv_head, position, ROW);
            typename K::template Keys<ROW, 4, ROW / 32> k;
            typename V::template Values<ROW, FIRST> w;
            typename V::template Values<ROW, (REST > 0 ? REST : 4)> rest;
            k.load(keys, lane_slot, 0, t);
            w.load(values, slot, 0, g, t);
            add_scores<0, ROW / 32>(k, t, q, s);
            __syncwarp();  // keeps the compiler from moving the loads below up: there are no registers for them
            if constexpr (REST > 0) rest.load(values, slot, FIRST, g, t);
            soften(p, s, position, t, low, high, softmax, a, shrink);
            add_values<FIRST>(w, 0, g, a, shrink, o);
            if constexpr (REST > 0) add_values<REST>(rest, FIRST, g, a, shrink, o);
        } else {  // in pieces, because registers are short
            add_scores_by_pieces<ROW, K, 0>(keys, lane_slot, first_element / 32, t, q, s);
            if constexpr (SHARE > 1)  // `parts` is not used before the last strip; two buffers, used alternately
                add_other_scores(parts + team * ROWS * (ROW + 2) + (strip / TEAMS & 1) * 1024, half, team, lane, s);
            __syncwarp();  // as above
            soften(p, s, position, t, low, high, softmax, a, shrink);
            constexpr int PIECES = N % 16 == 0 && SHARE == 1 ? 16 : N % 8 == 0 ? 8 : 4;
            static_assert(N % PIECES == 0, "pieces end with the head");
#pragma unroll
            for (int n = 0; n < N; n += PIECES) {
                typename V::template Values<ROW, PIECES> w;
                const uint8_t* values = page_of<V>(p.rope, p.rope.v_pages, table, rows.kv_head, position, ROW);
                w.load(values, slot, first_element / 8 + n, g, t);
                add_values<PIECES>(w, n, g, a, shrink, o);
                __syncwarp();
            }
        }
    }
    if constexpr (SHARE > 1) named_barrier_sync(team + 1, 64);  // both have read the other's last scores

#pragma unroll
    for (int h = 0; h < 2; ++h) {
        softmax.sum[h] += __shfl_xor_sync(0xffffffffu, softmax.sum[h], 1);
        softmax.sum[h] += __shfl_xor_sync(0xffffffffu, softmax.sum[h], 2);
        if (g + 8 * h >= rows.n_rows || team >= n_teams) continue;
        float* row = parts + (team * ROWS + g + 8 * h) * (ROW + 2);
#pragma unroll
        for (int n = 0; n < N; ++n)
            *reinterpret_cast<float2*>(row + first_element + n * 8 + 2 * t) = make_float2(o[n][2 * h], o[n][2 * h + 1]);
        if (t == 0 && half == 0) row[ROW] = softmax.maximum[h], row[ROW + 1] = softmax.sum[h];
    }
    __syncthreads();
    merge_and_write<ROW, ATTENTION_WARPS, true>(p, tile, rows, blockIdx.x, gridDim.x, blockIdx.z, parts, n_teams, ROWS);
}

// Resident warps per SM that the registers are limited for. Short heads leave registers to the previous GEMM, because
// these CTAs start (PDL) while that GEMM's CTAs still run. LEAN: no head norm, soft cap or sink, and a number format.
template <int ROW, bool IN_SMEM, bool ODD, bool ROTATED, bool LEAN>
constexpr int RESIDENT_WARPS = ROW > 256  ? 8
                               : IN_SMEM  ? (ROW > 128        ? 12
                                             : ODD || ROTATED ? 16
                                                              : 20)
                               : ROW > 64 ? (ROW > 128 ? 8 : 12)
                                          : (LEAN && !ODD ? 20 : 16);

// Grid (G * head groups per KV head, tiles, splits); tile i is token i, of sequence i.
//
//    IN_SMEM  K and V operands are in shared memory
//    ODD      remainder strips (fewer than a round of the CTA's warps) come second, through shared memory
//    MORE     there may be head norms, a soft cap or sinks
//    ROTATED  the previous GEMM has rotated q, k and v in its epilogue
template <int ROW, bool IN_SMEM = false, bool ODD = false, bool MORE = true, bool ROTATED = false, class K = CacheF16,
          class V = CacheF16>
__global__ void __launch_bounds__(
    RESIDENT_WARPS<ROW, IN_SMEM, ODD, ROTATED, !MORE && K::independent && V::independent> * 32)
    decode_attention(const AttentionArgs p) {
    SHARED_DYNAMIC(uint8_t, shared);
    const int token = blockIdx.y, split = blockIdx.z;
    const AttentionTile tile = load_now(p.tiles + token);
    DecodeContext context(p, token);
    // no position is negative: the comparison makes the CTA wait for all the loads together
    if (split >= tile.n_split || (context.position | context.warp_page) < 0) return;
    const Rows rows(p, tile, blockIdx.x);
    context.cut<ODD>(p, tile, split);
    attend_token<ROW, IN_SMEM, ODD, MORE, ROTATED, K, V>(p, tile, rows, context, blockIdx.x, gridDim.x, split,
                                                         kept_shared(shared));
}
