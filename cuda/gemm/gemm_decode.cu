// Decode GEMM: y[T, N] = x[T, K] W[N, K]^T for T <= COLS (1, 2, 4 or 8) tokens. W lies in tiles (tile.cuh), x is f16,
// or f32 that the kernel normalises first. Tiles of integers are multiplied by x in 16-bit fixed point
// (fixed_point.cuh), tiles of f16 values by x in f16, both on tensor cores.
//
// Launch: one CTA per SM, at most one per tile row; WARPS (4, 8 or 16) warps. CTA b has the tile rows b, b + gridDim.x,
// ... Chunk c (64 to 256 columns) of the CTA's i-th tile row belongs to warp (c + i * n_chunk) mod WARPS, which is
// sliced-K inside the CTA.
//
// Shared memory: a cp.async pipeline of STAGES chunks per warp (weight_pipeline.cuh), then partial sums, scales of x
// and x (shared_storage.cuh). Reading W bounds the time of this GEMM, so each warp streams its own chunks and waits for
// no other warp; the first chunk is requested before grid_dependency_wait, that is, before the kernel that makes x has
// ended. Each warp stores its partial sums of a tile row; after a batch of tile rows one barrier lets the threads
// reduce them over the warps, in a fixed order, and store the outputs. The outputs of a token are made by the same
// operations in the same order for any number of tokens.
//
// | kernel                                             | matrices                                           |
// | gemm_decode<Tile, COLS, PROLOGUE, EPILOGUE, WHOLE> | up to four of one layout                           |
// | gemm_decode_rope<Tile, COLS, PROLOGUE>             | q, k and v of one layout; epilogue QKV             |
// | gemm_decode_two<Tile, Tile, COLS, PROLOGUE>        | of two layouts, with disjoint CTAs; epilogue STORE |
// | gemm_decode_two_rope<Tile, Tile, COLS, PROLOGUE>   | q, k and v of two layouts; epilogue QKV            |
//
// | prologue  | x                                                                             |
// | PLAIN     | f16                                                                           |
// | NORM      | f32, RMS-normalised by every CTA; not rounded to f16 if x becomes fixed point |
// | POST_NORM | f32; x + norm(y) is RMS-normalised                                            |
//
// | epilogue | output                                                                         |
// | STORE    | f32 out = y                                                                    |
// | ADD      | f32 out = residual + y + bias                                                  |
// | GLU      | the segments are gate and up; f16 out = act(gate) * up                         |
// | QKV      | the segments are q, k and v: rotated and stored as f16 (rope_epilogue_row.cuh) |
// | INPUT    | f16 out = act(INPUT_RANGE * y) * input: a layer's input                        |
//
// WHOLE: all of x fits in shared memory; otherwise x comes in slabs of columns.
#include "lib/activation.cuh"
#include "gemm/decode_mma.cuh"
#include "gemm/gemm.cuh"
#include "gemm/weight_pipeline.cuh"
#include "gemm/rope_epilogue_row.cuh"

enum GemmDecodePrologue { PLAIN, NORM, POST_NORM };

// POST_NORM: the GEMM multiplies norm(x + norm(y)). CTA 0 stores x + norm(y) to `sum`, which must not overlap x,
// because other CTAs still read x.
struct PostNormArgs {
    const float* y;       // [n_tokens, k]
    const float* weight;  // [k]
    float* sum;           // [n_tokens, k]
    float eps;
};

struct GemmDecodeArgs : GemmArgs {
    const void* x;          // f32 or f16 [n_tokens, k]
    const float* norm;      // [k], the norm's weight
    const float* residual;  // ADD, and the input of INPUT: [n_tokens, n_rows] of the only segment
    const float* bias;      // ADD: [n_rows], or null
    int slab;               // columns of x in shared memory at a time: all (WHOLE), or a multiple of WARPS chunks
    float eps;
    float soft_cap;                // STORE: cap * tanh(y / cap); 0: no cap
    int slow_producer;             // the kernel that makes x takes longer than filling the pipeline
    int prefetch_two;              // each warp requests a second chunk before x
    int tiles_per_cta, remainder;  // n_tiles divided by the number of CTAs
    PostNormArgs post_norm;

    __device__ __forceinline__ int cta() const { return blockIdx.x; }
    __device__ __forceinline__ int ctas() const { return gridDim.x; }
};
// Parameters of the CTAs first_cta ... first_cta + n_ctas - 1 of a launch (gemm_decode_two).
struct GemmDecodePartArgs : GemmDecodeArgs {
    int first_cta, n_ctas;

    __device__ __forceinline__ int cta() const { return static_cast<int>(blockIdx.x) - first_cta; }
    __device__ __forceinline__ int ctas() const { return n_ctas; }
};
// QKV: the segments are q, k and v, or only those from `first_part` on (gemm_decode_two_rope). `rope` holds their
// destinations.
template <class Args>
struct WithRope : Args {
    RopeArgs rope;
    int first_part;
};
using GemmDecodeRopeArgs = WithRope<GemmDecodeArgs>;
using GemmDecodePartRopeArgs = WithRope<GemmDecodePartArgs>;

// Address of the CTA's tile row `tile`. Tile rows are assigned to CTAs round-robin; GLU: the gate and the up row of a
// pair go to the same CTA, as tile rows 2 i and 2 i + 1.
template <class T, int EPILOGUE, class P>
__device__ __forceinline__ const uint8_t* tile_row_of(const P& p, int tile) {
    constexpr bool PAIRS = EPILOGUE == GLU;
    const int global = p.cta() + (PAIRS ? tile / 2 : tile) * p.ctas();
    const int s = PAIRS ? tile & 1 : EPILOGUE == ADD ? 0 : segment_of(p, global);
    const uint32_t row = PAIRS ? global : global - p.segment[s].first_tile;
    return p.segment[s].tiles + static_cast<uint64_t>(row) * static_cast<uint32_t>(p.n_chunk * T::BYTES);
}

// The order in which a warp copies its chunks. If all of x is in shared memory, a warp has every WARPS-th chunk of all
// chunks of the CTA's tile rows. All of the kernel waits for the first chunk, so the constructor is short.
template <class T, int COLS, int EPILOGUE, bool WHOLE, class P>
struct GemmDecodeChunks {
    const P& p;
    int n_local, tile, chunk;
    const uint8_t* tile_row;

    __device__ __forceinline__ GemmDecodeChunks(const P& args, int warp, int n_local_)
        : p(args), n_local(n_local_), tile(0), chunk(warp), tile_row(tile_row_of<T, EPILOGUE>(args, 0)) {
        if (chunk >= p.n_chunk) settle();
    }
    __device__ __forceinline__ bool done() const { return tile >= n_local; }
    // Advances to the next chunk that exists.
    __device__ __forceinline__ void settle() {
        do ++tile, chunk -= p.n_chunk;
        while (chunk >= p.n_chunk);
        if (!done()) tile_row = tile_row_of<T, EPILOGUE>(p, tile);
    }
    __device__ __forceinline__ void next() {
        chunk += WARPS;
        if (chunk >= p.n_chunk) settle();
    }
};

// Order of the chunks if x comes in slabs, from the outermost loop: batches of tile rows, slabs of columns, tile rows,
// chunks.
template <class T, int COLS, int EPILOGUE, class P>
struct GemmDecodeChunks<T, COLS, EPILOGUE, false, P> {
    static constexpr int BATCH = DecodeSharedStorage<T, COLS>::BATCH;
    const P& p;
    int warp, n_local, slab_chunks;
    int tile, chunk, end;  // end: of the slab, in chunks
    int batch, slab;
    const uint8_t* tile_row;

    __device__ __forceinline__ GemmDecodeChunks(const P& args, int warp_, int n_local_)
        : p(args), warp(warp_), n_local(n_local_), slab_chunks(args.slab / T::CHUNK_K), tile(0), chunk(warp_),
          end(min(slab_chunks, args.n_chunk)), batch(0), slab(0), tile_row(tile_row_of<T, EPILOGUE>(args, 0)) {
        if (chunk >= end) settle();
    }
    __device__ __forceinline__ bool done() const { return tile >= n_local; }
    __device__ __forceinline__ void settle() {
        while (!done() && chunk >= end) enter_part();
        if (!done()) tile_row = tile_row_of<T, EPILOGUE>(p, tile);
    }
    __device__ __forceinline__ void enter_part() {
        if (++tile >= min(batch + BATCH, n_local)) {
            slab += slab_chunks;
            if (slab >= p.n_chunk) slab = 0, batch += BATCH;
            tile = batch;
            end = min(slab + slab_chunks, p.n_chunk);
        }
        chunk = slab + first_chunk(p.n_chunk, warp, tile);
    }
    __device__ __forceinline__ void next() {
        chunk += WARPS;
        if (chunk >= end) settle();
    }
};

// A thread's pieces of x (8 f16 columns each), four at a time. Pieces are numbered token after token within a slab;
// thread i takes pieces i, i + THREADS, ... locate() advances by subtraction, because a division takes long.
template <int COLS>
struct XPieces {
    int token[4] = {}, piece[4];  // piece: index in the token's slab
    int index[4];                 // index of the piece in x [n_tokens][k / 8], or -1 past the end
    uint4 v[4];

    // Locates the first (next = false) or the next four pieces of the slab that begins at column `first`.
    __device__ __forceinline__ void locate(const GemmDecodeArgs& p, int first, bool next) {
        const int pieces = p.slab / 8;
        int in_slab = next ? piece[3] : static_cast<int>(threadIdx.x) - THREADS, of = token[3];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            in_slab += THREADS;
            if (COLS > 1)
                while (in_slab >= pieces) in_slab -= pieces, ++of;
            token[i] = of, piece[i] = in_slab;
            const bool valid = of < p.n_tokens && in_slab < pieces && first + in_slab * 8 < p.k;
            index[i] = valid ? (of * p.k + first) / 8 + in_slab : -1;
        }
    }
    __device__ __forceinline__ int made() const { return (index[0] | index[1] | index[2] | index[3]) & 0x7fffffff; }
    __device__ __forceinline__ void load(const void* x) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            v[i] = index[i] >= 0 ? __ldcg(static_cast<const uint4*>(x) + index[i]) : make_uint4(0, 0, 0, 0);
    }
};

// Stores columns first ... first + slab - 1 of x (f16) in shared memory; columns past k become 0. `pieces` holds the
// thread's first four pieces, whose loads are in flight. COLS == 1: `first_dst` is the destination of the first piece,
// and the others follow at fixed distances.
template <class T, int COLS>
__device__ __forceinline__ void put_all_x(const GemmDecodeArgs& p, const DecodeSharedStorage<T, COLS>& storage,
                                          int first, XPieces<COLS>& pieces, const XDst<T>& first_dst) {
    const int all = (COLS == 1 ? 1 : p.n_tokens) * (p.slab / 8);
    for (int base = 0; base < all; base += 4 * THREADS) {
        if (base > 0) pieces.locate(p, first, true), pieces.load(p.x);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (base + i * THREADS >= all) break;  // the same for all threads
            const bool valid = base + i * THREADS + static_cast<int>(threadIdx.x) < all;
            const auto dst = COLS == 1 ? first_dst.offset_by((base + i * THREADS) * 8)
                                       : XDst<T>(storage, pieces.token[i], pieces.piece[i] * 8);
            put_x<T>(dst, valid, pieces.v[i]);
        }
    }
}

// Whether `token` is past the end. With COLS == 1, token 0 always exists.
template <int COLS>
__device__ __forceinline__ bool past_end(const GemmDecodeArgs& p, int token) {
    return COLS > 1 && token >= p.n_tokens;
}

// Reduces the squares of the loaded rows over the CTA and scales the rows by 1 / rms. norm[0] holds the norm's weight,
// which the other tokens copy.
template <int COLS>
__device__ __forceinline__ void scale_rows(RmsNorm (&norm)[COLS], const GemmDecodeArgs& p, float eps, int parity) {
    float sums[COLS];
#pragma unroll
    for (int token = 0; token < COLS; ++token) sums[token] = token < p.n_tokens ? norm[token].squares(p.k) : 0.0f;
    cta_sums<false>(sums, parity);
#pragma unroll
    for (int token = 0; token < COLS; ++token) {
        if (token >= p.n_tokens) break;
        if (token > 0) norm[token].copy_weight(norm[0]);
        norm[token].scale_by(sums[token], p.k, eps);
    }
}
// x += norm(post_norm). The loads of both may still be in flight.
template <int COLS>
__device__ __forceinline__ void add_norm(RmsNorm (&x)[COLS], RmsNorm (&post_norm)[COLS], const GemmDecodeArgs& p) {
    scale_rows(post_norm, p, p.post_norm.eps, 0);
#pragma unroll
    for (int token = 0; token < COLS; ++token) {
        if (token >= p.n_tokens) break;
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i) {
            float (&v)[8] = x[token].x[i];
            const int column = RmsNorm::column(i);
            if (column >= p.k) continue;
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = post_norm[token].added_to(v[j], i, j);
            if (blockIdx.x > 0) continue;  // only CTA 0 of the launch stores the sum
            float4* dst = reinterpret_cast<float4*>(p.post_norm.sum + token * static_cast<size_t>(p.k) + column);
            dst[0] = make_float4(v[0], v[1], v[2], v[3]), dst[1] = make_float4(v[4], v[5], v[6], v[7]);
        }
    }
}

// Whether outputs instead of x are divided by the rms of x. The rms is the same for all columns of a token, and fixed
// point takes x of any magnitude, so x is stored before the reduction of its squares has ended.
template <class T, int PROLOGUE>
constexpr bool OUTPUTS_SCALED = T::SCALED && PROLOGUE != PLAIN;

// The sums of squares of a token, one per warp, in shared memory.
template <int COLS>
__device__ __forceinline__ float* squares_of(int token) {
    __shared__ float parts[COLS][WARPS];
    return parts[token];
}

// Loads x (f32), applies the norm, and stores x in shared memory, all tokens together. No earlier kernel of the step
// writes the norm's weight, so it is loaded before the wait. `made`: see grid_dependency_wait. `meanwhile` runs while
// the loads of x are in flight.
template <int PROLOGUE, class T, int COLS, class Function>
__device__ __forceinline__ void load_normalised_x(const GemmDecodeArgs& p, const DecodeSharedStorage<T, COLS>& storage,
                                                  int made, Function meanwhile) {
    constexpr bool HAS_POST_NORM = PROLOGUE == POST_NORM, SCALED = OUTPUTS_SCALED<T, PROLOGUE>;
    const float* x = static_cast<const float*>(p.x);
    RmsNorm norm[COLS], post_norm[COLS];
    norm[0].load_weight(p.norm, p.k);
    if (HAS_POST_NORM) post_norm[0].load_weight(p.post_norm.weight, p.k);
    XDst<T> first_dst(storage, 0, RmsNorm::column(0));
    if (COLS == 1) first_dst.keep();
    grid_dependency_wait(made | made_of(x + RmsNorm::column(0)) | (COLS == 1 ? first_dst.made() : 0));
#pragma unroll
    for (int token = 0; token < COLS; ++token) {
        if (past_end<COLS>(p, token)) break;
        const size_t first = token * static_cast<size_t>(p.k);
        if (HAS_POST_NORM) post_norm[token].load(p.post_norm.y + first, p.k);
        norm[token].load(x + first, p.k);
    }
    meanwhile();
    if (HAS_POST_NORM) add_norm(norm, post_norm, p);
    if (!SCALED) scale_rows(norm, p, p.eps, HAS_POST_NORM);
#pragma unroll
    for (int token = 0; token < COLS; ++token) {
        if (past_end<COLS>(p, token)) break;
        if (SCALED && token > 0) norm[token].copy_weight(norm[0]);
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i) {
            const int column = norm[token].column(i);
            const bool valid = column < p.k;
            const auto dst = COLS == 1 ? first_dst.offset_by(i * THREADS * 8) : XDst<T>(storage, token, column);
            if constexpr (SCALED) {
                float2 v[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) v[j] = valid ? norm[token].weighted(i, 2 * j) : make_float2(0.0f, 0.0f);
                put_fixed_point(dst, column < p.slab, v);
            } else {
                put_x<T>(dst, column < p.slab, valid ? norm[token].f16x8(i) : make_uint4(0, 0, 0, 0));
            }
        }
        if constexpr (SCALED) {
            const float sum = warp_sum(norm[token].squares(p.k));
            if (threadIdx.x % 32 == 0) squares_of<COLS>(token)[threadIdx.x / 32] = sum;
        }
    }
}

// One output of a batch of tile rows: its destination and its operands besides the sums. find() runs before the sums
// are complete, so that at the end only the sums are awaited.
template <class T, int COLS, int PROLOGUE, int EPILOGUE>
struct GemmDecodeOutput {
    static constexpr int PER_TILE = TILE_ROWS * COLS, WIDTH = EPILOGUE == GLU ? 2 : 1;
    void* dst;  // f32 or f16 (QKV: only null or not null matters); null: the thread has no output
    int token;
    int part;  // index of warp 0's partial sum in DecodeSharedStorage::sums; GLU: of gate, then of up
    float scale[WIDTH];
    const float* old;
    float residual, bias;
    RopeEpilogueRow rope_row;  // QKV

    // Locates output i of the batch of `count` tile rows that begins at the CTA's tile row `batch`.
    template <class P>
    __device__ __forceinline__ void find(const P& p, const DecodeSharedStorage<T, COLS>& storage, int parity, int batch,
                                         int count, int i) {
        dst = nullptr;
        const int tile = i / PER_TILE, row_in_tile = i % TILE_ROWS;
        token = i % PER_TILE / TILE_ROWS;
        const int global = p.cta() + (batch / WIDTH + tile) * p.ctas();
        if (tile >= count / WIDTH || token >= p.n_tokens) return;
        const int s = EPILOGUE == GLU ? 0 : segment_of(p, global);
        const int row = (global - (EPILOGUE == GLU ? 0 : p.segment[s].first_tile)) * TILE_ROWS + row_in_tile;
        if (row >= p.segment[s].n_rows) return;
        const size_t index = static_cast<size_t>(token) * p.segment[s].n_rows + row;
        if constexpr (EPILOGUE == QKV)
            dst = p.rope.q, rope_row.locate(p.rope, p.first_part + s, token, row);
        else
            dst = EPILOGUE == GLU || EPILOGUE == INPUT
                      ? static_cast<void*>(static_cast<__half*>(p.segment[s].out) + index)
                      : static_cast<void*>(static_cast<float*>(p.segment[s].out) + index);
        part =
            static_cast<int>(storage.partial_of(parity, tile * WIDTH, 0) - storage.sums) + row_in_tile * COLS + token;
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) scale[w] = scaled_row(p.segment[s + w], row, 1.0f);
        old = p.residual + index;
        if constexpr (EPILOGUE == ADD) bias = p.bias ? __ldg(p.bias + row) : 0.0f;
    }
    __device__ __forceinline__ int made() const {
        if (dst == nullptr) return 0;
        return (EPILOGUE == QKV ? rope_row.made() : made_of(dst) | made_of(old)) | part;
    }
    // Loads what earlier kernels of the step write.
    __device__ __forceinline__ void load() {
        residual = (EPILOGUE == ADD || EPILOGUE == INPUT) && dst != nullptr ? __ldcg(old) : 0.0f;
    }
    // Work that is not needed before the wait and overlaps with the mainloop.
    __device__ __forceinline__ void prepare() {
        if constexpr (EPILOGUE == QKV)
            if (dst != nullptr) rope_row.prepare();
    }
    // Reduces the warps' partial sums, applies the epilogue and stores the output.
    template <class P>
    __device__ __forceinline__ void write(const P& p, const DecodeSharedStorage<T, COLS>& storage) const {
        float y[WIDTH] = {};
        if (dst != nullptr) add_up(p, storage, y);
        if constexpr (EPILOGUE == QKV) y[0] = rope_row.rotate_with_next(y[0]);
        if (dst == nullptr) return;
        if constexpr (EPILOGUE == QKV)
            *rope_row.dst = saturated_half(y[0]);
        else if constexpr (EPILOGUE == GLU)
            *static_cast<__half*>(dst) = gated(p.activation, y[0], y[1]);
        else if constexpr (EPILOGUE == INPUT)
            *static_cast<__half*>(dst) = gated(p.activation, INPUT_RANGE * y[0], residual);
        else if constexpr (EPILOGUE == ADD)
            *static_cast<float*>(dst) = residual + y[0] + bias;
        else
            *static_cast<float*>(dst) = p.soft_cap > 0.0f ? p.soft_cap * tanhf(y[0] / p.soft_cap) : y[0];
    }
    __device__ __forceinline__ void add_up(const GemmDecodeArgs& p, const DecodeSharedStorage<T, COLS>& storage,
                                           float (&y)[WIDTH]) const {
#pragma unroll
        for (int w = 0; w < WIDTH; ++w)
            y[w] = __fmul_rn(sum_of_parts(storage.sums + part + w * WARPS * storage.part_stride, storage.part_stride),
                             scale[w]);
        if constexpr (OUTPUTS_SCALED<T, PROLOGUE>) {
            const float squares = sum_of_parts(squares_of<COLS>(token), 1);
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) y[w] = __fmul_rn(y[w], RmsNorm::inverse_of(squares, p.k, p.eps));
        }
    }
};

template <class T, int COLS, int PROLOGUE, int EPILOGUE, bool WHOLE, class P>
__device__ __forceinline__ void multiply(const P& p) {
    constexpr bool PAIRS = EPILOGUE == GLU;
    constexpr int BATCH = DecodeSharedStorage<T, COLS>::BATCH;
    SHARED_DYNAMIC(uint8_t, shared);
    const int warp = kept(static_cast<int>(threadIdx.x / 32)), lane = kept(static_cast<int>(threadIdx.x % 32));
    uint8_t* stages = kept_shared(shared + warp * STAGES * T::BYTES);
    const CopyTarget dst = copy_target(stages);
    const int n_local = (p.tiles_per_cta + (p.cta() < p.remainder)) * (PAIRS ? 2 : 1);

    grid_dependency_launch();
    GemmDecodeChunks<T, COLS, EPILOGUE, WHOLE, P> ahead(p, warp, n_local);
    // Requests issued before x delay x, which waits in the same memory queues. One chunk per warp is small enough; the
    // host decides whether a second one is (prefetch_two). If the kernel that makes x takes long (slow_producer), each
    // warp fills its pipeline before x, one chunk at a time.
    int n_prefetched = 0;
    const auto prefetch = [&](int until) {
        for (; n_prefetched < until; ++n_prefetched) copy_chunk<T>(ahead, dst + n_prefetched * T::BYTES, lane);
    };
    prefetch(1);
    if (p.prefetch_two) prefetch(min(2, STAGES));
    if (p.slow_producer) {
        while (n_prefetched < STAGES && !ahead.done()) {
            cp_async_wait<0>();
            prefetch(n_prefetched + 1);
        }
    }
    const DecodeSharedStorage<T, COLS> storage(kept_shared(shared) + WARPS * STAGES * T::BYTES, p.slab, p.n_tokens,
                                               WHOLE);
    const typename DecodeSums<T, COLS>::Lane lane_storage{storage, lane};

    GemmDecodeOutput<T, COLS, PROLOGUE, EPILOGUE> output;
    static_assert((WARPS & (WARPS - 1)) == 0, "a power of two");
    const int output_index =
        threadIdx.x ^ (THREADS - 32);  // the last warps have the fewest chunks, so they write the first outputs
    const auto find_first = [&] { output.find(p, storage, 0, 0, min(BATCH, n_local), output_index); };
    constexpr bool WIDE = PROLOGUE != PLAIN && COLS * NORM_PIECES > 4;  // x occupies all registers
    if constexpr (!WIDE) find_first();
    const auto meanwhile = [&] {  // runs while the loads of x are in flight
        prefetch(STAGES);
        if constexpr (!WIDE) output.prepare();
    };
    if constexpr (PROLOGUE != PLAIN) {
        load_normalised_x<PROLOGUE, T>(p, storage, WIDE ? 0 : output.made(), meanwhile);
        if constexpr (WIDE) find_first(), output.prepare();
        output.load();
        __syncthreads();
    } else {
        XPieces<COLS> pieces;
        pieces.locate(p, 0, false);
        XDst<T> first_dst(storage, 0, pieces.piece[0] * 8);
        if (COLS == 1) first_dst.keep();
        grid_dependency_wait(pieces.made() | output.made() | (COLS == 1 ? first_dst.made() : 0));
        if constexpr (WHOLE) pieces.load(p.x);
        output.load();
        meanwhile();
        if constexpr (WHOLE) {
            put_all_x(p, storage, 0, pieces, first_dst);
            __syncthreads();
        }
    }

    int stage = 0, parity = 0;
    for (int batch = 0; batch < n_local; batch += BATCH, parity ^= 1) {
        const int count = min(BATCH, n_local - batch);
        for (int slab = 0; slab < (WHOLE ? 1 : p.n_chunk); slab += p.slab / T::CHUNK_K) {
            if constexpr (!WHOLE) {
                __syncthreads();
                XPieces<COLS> pieces;
                pieces.locate(p, slab * T::CHUNK_K, false);
                pieces.load(p.x);
                put_all_x(p, storage, slab * T::CHUNK_K, pieces, XDst<T>(storage, 0, pieces.piece[0] * 8));
                __syncthreads();
            }
            for (int i = 0; i < count; ++i) {
                DecodeSums<T, COLS> sums;
                start_sums(sums, storage.carried_of(i, warp), WHOLE || slab == 0, lane);
                const int end = WHOLE ? p.n_chunk : min(p.slab / T::CHUNK_K, p.n_chunk - slab);
                for (int chunk = first_chunk(p.n_chunk, warp, batch + i); chunk < end; chunk += WARPS) {
                    uint8_t* slot = stages + stage * T::BYTES;
                    cp_async_wait<STAGES - 1>();
                    __syncwarp();
                    sums.load(slot, lane);
                    if constexpr (sums.IN_STAGE) sums.multiply(lane_storage, chunk * T::CHUNK_K);
                    __syncwarp();
                    copy_chunk<T>(ahead, dst + stage * T::BYTES, lane);
                    stage = stage + 1 == STAGES ? 0 : stage + 1;
                    if constexpr (!sums.IN_STAGE) sums.multiply(lane_storage, chunk * T::CHUNK_K);
                }
                if constexpr (!WHOLE) __syncwarp();  // other lanes may still read the carried sums
                if (!WHOLE && slab + p.slab / T::CHUNK_K < p.n_chunk)
                    carry_sums(sums, storage.carried_of(i, warp), lane);
                else
                    sums.finish(storage.partial_of(parity, i, warp), lane);
            }
        }
        __syncthreads();
        output.write(p, storage);
        if constexpr (BATCH * output.PER_TILE > THREADS)
            for (int i = output_index + THREADS; i < BATCH * output.PER_TILE; i += THREADS) {
                output.find(p, storage, parity, batch, count, i);
                output.load();
                output.prepare();
                output.write(p, storage);
            }
        if (batch + BATCH < n_local) {
            output.find(p, storage, parity ^ 1, batch + BATCH, min(BATCH, n_local - batch - BATCH), output_index);
            output.load();
            output.prepare();
        }
    }
    cp_async_wait<0>();
}

template <class T, int COLS, int PROLOGUE, int EPILOGUE, bool WHOLE>
__global__ void __launch_bounds__(THREADS, 1) gemm_decode(const GemmDecodeArgs p) {
    multiply<T, COLS, PROLOGUE, EPILOGUE, WHOLE>(p);
}

// q, k and v of a decode step: one token per sequence.
template <class T, int COLS, int PROLOGUE>
__global__ void __launch_bounds__(THREADS, 1) gemm_decode_rope(const GemmDecodeRopeArgs p) {
    multiply<T, COLS, PROLOGUE, QKV, true>(p);
}

// Two layouts that multiply the same x. CTAs from q.first_cta on multiply the matrices of q, in tiles U; the others
// multiply those of p, in tiles T.
template <class T, class U, int COLS, int PROLOGUE, int EPILOGUE, class P>
__device__ __forceinline__ void multiply_two_layouts(const P& p, const P& q) {
    if (static_cast<int>(blockIdx.x) < q.first_cta)
        multiply<T, COLS, PROLOGUE, EPILOGUE, true>(p);
    else
        multiply<U, COLS, PROLOGUE, EPILOGUE, true>(q);
}
template <class T, class U, int COLS, int PROLOGUE>
__global__ void __launch_bounds__(THREADS, 1) gemm_decode_two(const GemmDecodePartArgs p, const GemmDecodePartArgs q) {
    multiply_two_layouts<T, U, COLS, PROLOGUE, STORE>(p, q);
}
template <class T, class U, int COLS, int PROLOGUE>
__global__ void __launch_bounds__(THREADS, 1)
    gemm_decode_two_rope(const GemmDecodePartRopeArgs p, const GemmDecodePartRopeArgs q) {
    multiply_two_layouts<T, U, COLS, PROLOGUE, QKV>(p, q);
}
