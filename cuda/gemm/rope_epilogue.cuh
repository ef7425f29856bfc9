// q, k and v on their way from the sums of a product to rows of halves and to pages: bias and rotation, as rope_kv.cu
// does that behind a product, with the same bits.
//
// A block's 128 rows are all of q, of k or of v. What is rotated goes through shared memory, some pieces (of eight tokens)
// at a time. There a warp has all rows of a token, a lane two pairs of them; so heads whose pairs are half a head apart
// lie in these rows in whole. Values go from where they are to their pages, two tokens' at a time. What is known of the
// tokens of some pieces is asked for while those before are written.
#pragma once
#include "gemm/gemm.cuh"
#include "attention/rope.cuh"

constexpr int HEAD_ROWS = 128;                // of a block
constexpr int STAGED_PITCH = HEAD_ROWS + 4;   // floats from token to token, so that a warp writes to all banks
constexpr int PIECES_AT_ONCE = 4;
constexpr int STAGED_HEADS_BYTES = PIECES_AT_ONCE * 8 * STAGED_PITCH * 4;

// The Out (tile_scheduler.cuh) of a block whose THREADS threads multiply, warp w rows 16 w ... 16 w + 15: sums e = 0 ... 3 of
// piece i are of row g + 8 (e / 2) of the warp and token 8 i + 2 t + e % 2 of the block. SCALES knows what makes outputs of
// sums of two rows that are 8 apart: SCALES(product, segment, row), then scaled(sums, of_tokens(token)), where what belongs
// to a token and the one behind it is asked for ahead.
template <class SCALES, int THREADS>
struct TurnedHeads {
    const Matrices& p;
    const Turning& turning;
    float* staged;  // in shared memory, [token][STAGED_PITCH]
    int part, first_token;
    SCALES scales;
    float bias[2];
    int row;      // of v the thread's first in the block; of q and k the lane's
    int element;  // of its head, that row
    __half* to;   // there
    bool turns;   // the lane's pairs do

    // `block` is its first tile row.
    template <class Product>
    __device__ __forceinline__ TurnedHeads(const Product& product, const TileRow& block, int first_token_, void* memory)
        : p(product), turning(product.turning), staged(static_cast<float*>(memory)), part(block.segment),
          first_token(first_token_), scales(product, product.segment[part], block.row + first_row()), row(first_row()) {
        const int size = turning.head_size;
#pragma unroll
        for (int h = 0; h < 2; ++h)  // -0 changes nothing, not even -0
            bias[h] = turning.bias[part] != nullptr ? __ldg(turning.bias[part] + block.row + row + 8 * h) : -0.0f;
        if (part != VALUE) {
            const int in_head = (block.row + 4 * lane()) % size;
            turns = in_head / 2 < turning.n_pairs;
            row = 4 * lane() - (apart() ? in_head / 2 : 0);
        }
        const int head = (block.row + row) / size;
        element = block.row + row - head * size;
        to = static_cast<__half*>(p.segment[part].out);
        if (part == QUERY)
            to += block.row + row;
        else
            to += static_cast<size_t>(head) * turning.page_size * size + (part == KEY ? element : 0);
    }
    static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    // Of the thread's sums.
    static __device__ __forceinline__ int first_row() { return warp() * TILE_ROWS + lane() / 4; }
    // Whether the lane's pairs are `row` and row + 1 with what is n_pairs behind; else they are four rows.
    __device__ __forceinline__ bool apart() const { return turning.neox && turns; }
    __device__ __forceinline__ int last_token() const { return p.n_tokens - 1; }
    __device__ __forceinline__ int row_of(int token) const { return __ldg(turning.rows + min(token, last_token())); }
    // The thread's first token of a piece, of two that its sums are of; and that which its warp writes.
    __device__ __forceinline__ int token_of_sums(int piece) const { return first_token + 8 * piece + lane() % 4 * 2; }
    __device__ __forceinline__ int token_of_warp(int piece) const { return first_token + 8 * piece + warp(); }
    // Each output is rounded as if it had been in memory before its bias.
    __device__ __forceinline__ float4 biased(const float4& y) const {
        return make_float4(__fadd_rn(y.x, bias[0]), __fadd_rn(y.y, bias[0]), __fadd_rn(y.z, bias[1]),
                           __fadd_rn(y.w, bias[1]));
    }

    // q and k, COUNT pieces at a time.
    template <int COUNT>
    struct Rotated {
        typename SCALES::OfTokens of_tokens[COUNT];
        int row[COUNT];  // from `to` on
        float4 turns[COUNT];

        __device__ __forceinline__ void ask(const TurnedHeads& heads, int piece) {
            const Turning& turning = heads.turning;
            const int pair = heads.apart() ? heads.element : heads.turns ? heads.element / 2 : 0;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int token = min(heads.token_of_warp(piece + i), heads.last_token());
                of_tokens[i] = heads.scales.of_tokens(heads.token_of_sums(piece + i));
                row[i] = heads.part == KEY ? heads.row_of(token) : token;
                const float2* from = turning.turns + static_cast<size_t>(token) * turning.n_pairs + pair;
                turns[i] = __ldg(reinterpret_cast<const float4*>(from));
            }
        }
    };
    template <int COUNT, class Sums>
    __device__ __forceinline__ void put(const Rotated<COUNT>& known, int piece, Sums sums) const {
        named_barrier_sync(1, THREADS);  // what was staged has been read
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            float* at = staged + (8 * i + lane() % 4 * 2) * STAGED_PITCH + first_row();
            const float4 y = biased(scales.scaled(sums(piece + i), known.of_tokens[i]));
            at[0] = y.x, at[STAGED_PITCH] = y.y, at[8] = y.z, at[STAGED_PITCH + 8] = y.w;
        }
        named_barrier_sync(1, THREADS);
        const int stride = part == QUERY ? p.segment[QUERY].n_rows : turning.head_size;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float* from = staged + (8 * i + warp()) * STAGED_PITCH + row;
            __half* at = to + static_cast<size_t>(known.row[i]) * stride;
            const bool there = token_of_warp(piece + i) <= last_token();
            const float4& by = known.turns[i];
            if (apart()) {
                const float2 x = *reinterpret_cast<const float2*>(from);
                const float2 y = *reinterpret_cast<const float2*>(from + turning.n_pairs);
                const float2 a = turned(make_float2(x.x, y.x), by.x, by.y, turning.magnitude);
                const float2 b = turned(make_float2(x.y, y.y), by.z, by.w, turning.magnitude);
                if (!there) continue;
                *reinterpret_cast<uint32_t*>(at) = saturated_half2(a.x, b.x);
                *reinterpret_cast<uint32_t*>(at + turning.n_pairs) = saturated_half2(a.y, b.y);
            } else {
                const float4 v = *reinterpret_cast<const float4*>(from);
                float2 a = make_float2(v.x, v.y), b = make_float2(v.z, v.w);
                if (turns) a = turned(a, by.x, by.y, turning.magnitude), b = turned(b, by.z, by.w, turning.magnitude);
                if (there) *reinterpret_cast<uint2*>(at) = make_uint2(saturated_half2(a.x, a.y), saturated_half2(b.x, b.y));
            }
        }
    }

    // v: the thread's two tokens of each of COUNT pieces.
    template <int COUNT>
    struct Placed {
        typename SCALES::OfTokens of_tokens[COUNT];
        int2 rows[COUNT];

        __device__ __forceinline__ void ask(const TurnedHeads& heads, int piece) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int token = heads.token_of_sums(piece + i);
                of_tokens[i] = heads.scales.of_tokens(token);
                rows[i] = make_int2(heads.row_of(token), heads.row_of(token + 1));
            }
        }
    };
    template <int COUNT, class Sums>
    __device__ __forceinline__ void put(const Placed<COUNT>& known, int piece, Sums sums) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float4 y = biased(scales.scaled(sums(piece + i), known.of_tokens[i]));
            const int token = token_of_sums(piece + i), place = known.rows[i].x, next = known.rows[i].y;
            const bool one = token <= last_token(), two = token < last_token();
            const bool together = two && next == place + 1 && place % 2 == 0;
            __half *to_one = value_at(place), *to_two = value_at(next);
#pragma unroll
            for (int h = 0; h < 2; ++h) {  // elements that are 8 apart
                const uint32_t values = h ? saturated_half2(y.z, y.w) : saturated_half2(y.x, y.y);
                __half *low = to_one + 8 * 16 * h, *high = to_two + 8 * 16 * h;
                if (together) *reinterpret_cast<uint32_t*>(low) = values;
                if (one && !together) *low = __ushort_as_half(static_cast<unsigned short>(values));
                if (two && !together) *high = __ushort_as_half(static_cast<unsigned short>(values >> 16));
            }
        }
    }
    __device__ __forceinline__ __half* value_at(int place) const {
        const int size = turning.head_size;
        return to + static_cast<size_t>(place & ~15) * size + value_place(size, place & 15, element);
    }

    template <class Sums>
    __device__ __forceinline__ void put(int piece, const Sums& sum) const {
        put_some<1, 1>(piece, [&](int) { return sum; });
    }
    template <int N, class Sums>
    __device__ __forceinline__ void put_pieces(Sums sums) const {
        put_some<N, PIECES_AT_ONCE>(0, sums);
    }
    __device__ __forceinline__ void end(int, int) const {}

    // N pieces from `piece` on, COUNT at a time.
    template <int N, int COUNT, class Sums>
    __device__ __forceinline__ void put_some(int piece, Sums sums) const {
        if (part == VALUE)
            put_ahead<N, COUNT, Placed<COUNT>>(piece, sums);
        else
            put_ahead<N, COUNT, Rotated<COUNT>>(piece, sums);
    }
    template <int N, int COUNT, class Known, class Sums>
    __device__ __forceinline__ void put_ahead(int piece, Sums sums) const {
        Known known[2];
        known[0].ask(*this, piece);
#pragma unroll
        for (int i = 0; i < N; i += COUNT) {
            if (i + COUNT < N) known[i / COUNT + 1 & 1].ask(*this, piece + i + COUNT);
            put(known[i / COUNT & 1], piece + i, sums);
        }
    }
};
