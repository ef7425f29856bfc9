// The RoPE epilogue of the prefill GEMMs: adds the bias to a tile of q, k or v, rotates q and k, and stores f16 to the
// rows of q or to the KV pages. The results are bitwise equal to those of rope_kv.cu after a GEMM without the epilogue.
//
// The 128 rows of a CTA all belong to q, all to k or all to v. q and k are staged in shared memory, PIECES_AT_ONCE
// pieces (of 8 tokens each) at a time. There a warp reads all 128 rows of one token, and each lane reads two pairs, so
// both elements of a pair are at hand also in neox style, where a pair is half a head apart. v goes from registers to
// its pages directly, two tokens at a time. The rows and angles of the next pieces are loaded while the current pieces
// are stored.
#pragma once
#include "gemm/gemm.cuh"
#include "attention/rope.cuh"

constexpr int HEAD_ROWS = 128;               // rows of a CTA
constexpr int STAGED_PITCH = HEAD_ROWS + 4;  // floats per token; the padding spreads a warp's writes over all banks
constexpr int PIECES_AT_ONCE = 4;
constexpr int STAGED_HEADS_BYTES = PIECES_AT_ONCE * 8 * STAGED_PITCH * 4;

// The Out (tile_scheduler.cuh) of a CTA whose first THREADS threads multiply. Warp w has rows 16 w ... 16 w + 15. Sum e
// = 0 ... 3 of piece i belongs to row g + 8 (e / 2) of the warp and token 8 i + 2 t + e % 2 of the CTA.
//
// SCALES turns sums into outputs: SCALES(args, segment, row) loads the scales of rows `row` and row + 8;
// of_tokens(token) loads, ahead of use, the scales of `token` and the next one; scaled(sums, of_tokens) applies both.
template <class SCALES, int THREADS>
struct RopeEpilogueTile {
    const GemmArgs& p;
    const RopeEpilogueArgs& rope_epilogue;
    float* staged;  // shared memory, [token][STAGED_PITCH]
    int part, first_token;
    SCALES scales;
    float bias[2];
    int row;       // row of the CTA; v: the first row of the thread's sums; q and k: the first row that the lane stores
    int element;   // element of the head that `row` is
    __half* out;   // output address of `row`, for token or slot 0
    bool rotates;  // whether the lane's pairs are rotated

    // `block` is the CTA's first tile row.
    template <class Args>
    __device__ __forceinline__ RopeEpilogueTile(const Args& args, const TileRow& block, int first_token_, void* memory)
        : p(args), rope_epilogue(args.rope_epilogue), staged(static_cast<float*>(memory)), part(block.segment),
          first_token(first_token_), scales(args, args.segment[part], block.row + first_row()), row(first_row()) {
        const int size = rope_epilogue.head_size;
#pragma unroll
        for (int h = 0; h < 2; ++h)  // -0 is the neutral element of addition
            bias[h] =
                rope_epilogue.bias[part] != nullptr ? __ldg(rope_epilogue.bias[part] + block.row + row + 8 * h) : -0.0f;
        if (part != VALUE) {
            const int in_head = (block.row + 4 * lane()) % size;
            rotates = in_head / 2 < rope_epilogue.n_pairs;
            row = 4 * lane() - (apart() ? in_head / 2 : 0);
        }
        const int head = (block.row + row) / size;
        element = block.row + row - head * size;
        out = static_cast<__half*>(p.segment[part].out);
        if (part == QUERY)
            out += block.row + row;
        else
            out += static_cast<size_t>(head) * rope_epilogue.page_size * size + (part == KEY ? element : 0);
    }
    static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    // First row of the thread's sums.
    static __device__ __forceinline__ int first_row() { return warp() * TILE_ROWS + lane() / 4; }
    // Whether the lane's two pairs are (row, row + n_pairs) and (row + 1, row + 1 + n_pairs), as in neox style.
    // Otherwise the lane's pairs are four adjacent rows.
    __device__ __forceinline__ bool apart() const { return rope_epilogue.neox && rotates; }
    __device__ __forceinline__ int last_token() const { return p.n_tokens - 1; }
    __device__ __forceinline__ int row_of(int token) const {
        return __ldg(rope_epilogue.rows + min(token, last_token()));
    }
    // token_of_sums: the first of the two tokens that the thread's sums of a piece belong to. token_of_warp: the token
    // of the piece that the thread's warp stores.
    __device__ __forceinline__ int token_of_sums(int piece) const { return first_token + 8 * piece + lane() % 4 * 2; }
    __device__ __forceinline__ int token_of_warp(int piece) const { return first_token + 8 * piece + warp(); }
    // Adds the bias to sums already rounded to f32, as if the output had been stored before the bias was added.
    __device__ __forceinline__ float4 biased(const float4& y) const {
        return make_float4(__fadd_rn(y.x, bias[0]), __fadd_rn(y.y, bias[0]), __fadd_rn(y.z, bias[1]),
                           __fadd_rn(y.w, bias[1]));
    }

    // q and k: what is loaded ahead for COUNT pieces.
    template <int COUNT>
    struct Rotated {
        typename SCALES::OfTokens of_tokens[COUNT];
        int row[COUNT];  // row of the output, relative to `out`
        float4 angles[COUNT];

        __device__ __forceinline__ void ask(const RopeEpilogueTile& heads, int piece) {
            const RopeEpilogueArgs& rope_epilogue = heads.rope_epilogue;
            const int pair = heads.apart() ? heads.element : heads.rotates ? heads.element / 2 : 0;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int token = min(heads.token_of_warp(piece + i), heads.last_token());
                of_tokens[i] = heads.scales.of_tokens(heads.token_of_sums(piece + i));
                row[i] = heads.part == KEY ? heads.row_of(token) : token;
                const float2* src = rope_epilogue.angles + static_cast<size_t>(token) * rope_epilogue.n_pairs + pair;
                angles[i] = __ldg(reinterpret_cast<const float4*>(src));
            }
        }
    };
    template <int COUNT, class Sums>
    __device__ __forceinline__ void put(const Rotated<COUNT>& known, int piece, Sums sums) const {
        named_barrier_sync(1, THREADS);  // all warps have read the staged rows of the previous pieces
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            float* dst = staged + (8 * i + lane() % 4 * 2) * STAGED_PITCH + first_row();
            const float4 y = biased(scales.scaled(sums(piece + i), known.of_tokens[i]));
            dst[0] = y.x, dst[STAGED_PITCH] = y.y, dst[8] = y.z, dst[STAGED_PITCH + 8] = y.w;
        }
        named_barrier_sync(1, THREADS);
        const int stride = part == QUERY ? p.segment[QUERY].n_rows : rope_epilogue.head_size;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float* src = staged + (8 * i + warp()) * STAGED_PITCH + row;
            __half* dst = out + static_cast<size_t>(known.row[i]) * stride;
            const bool valid = token_of_warp(piece + i) <= last_token();
            const float4& by = known.angles[i];
            if (apart()) {
                const float2 x = *reinterpret_cast<const float2*>(src);
                const float2 y = *reinterpret_cast<const float2*>(src + rope_epilogue.n_pairs);
                const float2 a = rotated(make_float2(x.x, y.x), by.x, by.y, rope_epilogue.magnitude);
                const float2 b = rotated(make_float2(x.y, y.y), by.z, by.w, rope_epilogue.magnitude);
                if (!valid) continue;
                *reinterpret_cast<uint32_t*>(dst) = saturated_half2(a.x, b.x);
                *reinterpret_cast<uint32_t*>(dst + rope_epilogue.n_pairs) = saturated_half2(a.y, b.y);
            } else {
                const float4 v = *reinterpret_cast<const float4*>(src);
                float2 a = make_float2(v.x, v.y), b = make_float2(v.z, v.w);
                if (rotates)
                    a = rotated(a, by.x, by.y, rope_epilogue.magnitude),
                    b = rotated(b, by.z, by.w, rope_epilogue.magnitude);
                if (valid)
                    *reinterpret_cast<uint2*>(dst) = make_uint2(saturated_half2(a.x, a.y), saturated_half2(b.x, b.y));
            }
        }
    }

    // v: what is loaded ahead for the thread's two tokens of each of COUNT pieces.
    template <int COUNT>
    struct Placed {
        typename SCALES::OfTokens of_tokens[COUNT];
        int2 rows[COUNT];

        __device__ __forceinline__ void ask(const RopeEpilogueTile& heads, int piece) {
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
            const int token = token_of_sums(piece + i), slot = known.rows[i].x, next_slot = known.rows[i].y;
            const bool one = token <= last_token(), two = token < last_token();
            const bool together = two && next_slot == slot + 1 && slot % 2 == 0;
            __half *dst_first = value_at(slot), *dst_second = value_at(next_slot);
#pragma unroll
            for (int h = 0; h < 2; ++h) {  // elements e and e + 8
                const uint32_t values = h ? saturated_half2(y.z, y.w) : saturated_half2(y.x, y.y);
                __half *low = dst_first + 8 * 16 * h, *high = dst_second + 8 * 16 * h;
                if (together) *reinterpret_cast<uint32_t*>(low) = values;
                if (one && !together) *low = __ushort_as_half(static_cast<unsigned short>(values));
                if (two && !together) *high = __ushort_as_half(static_cast<unsigned short>(values >> 16));
            }
        }
    }
    __device__ __forceinline__ __half* value_at(int slot) const {
        const int size = rope_epilogue.head_size;
        return out + static_cast<size_t>(slot & ~15) * size + value_offset(size, slot & 15, element);
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

    // Stores N pieces from `piece` on, COUNT at a time.
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
