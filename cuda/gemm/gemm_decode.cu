// y[T, N] = x[T, K] W[N, K]^T for the few tokens of a decode step: tiles (tile.cuh) x activations on tensor cores.
// These are halves, which for tiles of integers become 16-bit fixed point here (fixed_point.cuh).
//
// The product is bound by reading W, so everything here serves one stream: one block per multiprocessor, each warp
// copying its own chunks into its own ring in shared memory (cp.async, no barrier between warps), the first one before
// the kernel waits for the one that makes x. Chunk c of the block's i-th tile row belongs to warp
// (c + i * n_chunk) mod WARPS. A warp leaves its partial sums of each tile row in shared memory; after a batch of tile
// rows one barrier lets the threads add them up, in one order, and write the outputs. A token's outputs come from the
// same operations in the same order for any number of tokens.
//
// Matrices of two layouts may have a launch together, gemm_decode_two, in which each layout has blocks of its own. QKV has
// kernels of its own, gemm_decode_heads and gemm_decode_two_heads, whose parameters are more.
//
// Instances: gemm_decode<Tile, COLS, PROLOGUE, EPILOGUE, WHOLE>. COLS is 1, 2, 4 or 8: that many tokens at most.
// Prologue NORM: x is float and RMS-normalised here (few tokens), without a round to halves where it becomes fixed point;
// SUM: so is what becomes of x when the norm of something else is added; PLAIN: x is half. Epilogue STORE: float out;
// ADD: float out = residual + y; GLU: the segments are gate and up, half out = act(gate) * up; QKV: they are q, k and v,
// which are rotated and go to where attention takes them (rope_epilogue_row.cuh). WHOLE: all of x is in shared memory.
#include "lib/activation.cuh"
#include "gemm/decode_mma.cuh"
#include "gemm/gemm.cuh"
#include "gemm/weight_pipeline.cuh"
#include "gemm/rope_epilogue_row.cuh"

enum Prologue { PLAIN, NORM, SUM };

// SUM: x is x + norm(y), which the first block leaves in `sum`, where x is not.
struct Added {
    const float* y;       // [n_tokens, k]
    const float* weight;  // [k]
    float* sum;           // [n_tokens, k]
    float eps;
};

struct Product : Matrices {
    const void* x;          // float or half [n_tokens, k]
    const float* norm;      // [k]
    const float* residual;  // [n_tokens, n_rows] of the one segment
    int slab;      // columns of x in shared memory at a time: WARPS chunks or a multiple, or WHOLE
    float eps;
    float soft_cap;  // STORE: cap * tanh(y / cap); 0 is none
    int patient;     // x takes longer than to copy a ring
    int early;       // a second chunk of each warp is asked for before x
    int rounds, rest;  // n_tiles over the number of blocks
    Added added;

    __device__ __forceinline__ int block() const { return blockIdx.x; }
    __device__ __forceinline__ int blocks() const { return gridDim.x; }
};
// Of some blocks of a launch.
struct PartProduct : Product {
    int first_block, n_blocks;

    __device__ __forceinline__ int block() const { return static_cast<int>(blockIdx.x) - first_block; }
    __device__ __forceinline__ int blocks() const { return n_blocks; }
};
// QKV: the segments are q, k and v, or what is left of these from `first_part` on; rope knows where they go.
template <class P>
struct HeadsProduct : P {
    RopeKv rope;
    int first_part;
};

// Where the block's tile row `tile` begins: tile rows are dealt out to the blocks in turn, the gate and up rows of a pair
// to the same block.
template <class T, int EPILOGUE, class P>
__device__ __forceinline__ const uint8_t* tile_row_of(const P& p, int tile) {
    constexpr bool PAIRS = EPILOGUE == GLU;
    const int global = p.block() + (PAIRS ? tile / 2 : tile) * p.blocks();
    const int s = PAIRS ? tile & 1 : EPILOGUE == ADD ? 0 : segment_of(p, global);
    const uint32_t row = PAIRS ? global : global - p.segment[s].first_tile;
    return p.segment[s].tiles + static_cast<uint64_t>(row) * static_cast<uint32_t>(p.n_chunk * T::BYTES);
}

// The order in which a warp's chunks are copied. Where x is in shared memory in whole, these are every WARPS-th of all
// chunks of the block's tile rows. A kernel's first chunk is awaited by all that follows: getting to it takes little.
template <class T, int COLS, int EPILOGUE, bool WHOLE, class P>
struct Walk {
    const P& p;
    int n_local, tile, chunk;
    const uint8_t* tile_row;

    __device__ __forceinline__ Walk(const P& product, int warp, int n_local_)
        : p(product), n_local(n_local_), tile(0), chunk(warp), tile_row(tile_row_of<T, EPILOGUE>(product, 0)) {
        if (chunk >= p.n_chunk) settle();
    }
    __device__ __forceinline__ bool done() const { return tile >= n_local; }
    // To the next chunk that exists.
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

// Where x is there in parts: over batches of tile rows, slabs of columns, tile rows, chunks.
template <class T, int COLS, int EPILOGUE, class P>
struct Walk<T, COLS, EPILOGUE, false, P> {
    static constexpr int BATCH = Room<T, COLS>::BATCH;
    const P& p;
    int warp, n_local, slab_chunks;
    int tile, chunk, end;  // the end of the slab
    int batch, slab;
    const uint8_t* tile_row;

    __device__ __forceinline__ Walk(const P& product, int warp_, int n_local_)
        : p(product), warp(warp_), n_local(n_local_), slab_chunks(product.slab / T::CHUNK_K), tile(0), chunk(warp_),
          end(min(slab_chunks, product.n_chunk)), batch(0), slab(0), tile_row(tile_row_of<T, EPILOGUE>(product, 0)) {
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

// A thread's pieces of x (eight halves), of which it takes four at a time, one after the other over the tokens: without
// a division, which takes long.
template <int COLS>
struct XPieces {
    int token[4] = {}, piece[4];  // in the slab
    int at[4];                    // pieces from the first token's first one on, or -1: past the end
    uint4 v[4];

    // The first four, or the next four, of the slab's columns first ...
    __device__ __forceinline__ void locate(const Product& p, int first, bool next) {
        const int pieces = p.slab / 8;
        int in_slab = next ? piece[3] : static_cast<int>(threadIdx.x) - THREADS, of = token[3];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            in_slab += THREADS;
            if (COLS > 1)
                while (in_slab >= pieces) in_slab -= pieces, ++of;
            token[i] = of, piece[i] = in_slab;
            const bool there = of < p.n_tokens && in_slab < pieces && first + in_slab * 8 < p.k;
            at[i] = there ? (of * p.k + first) / 8 + in_slab : -1;
        }
    }
    __device__ __forceinline__ int made() const { return (at[0] | at[1] | at[2] | at[3]) & 0x7fffffff; }
    __device__ __forceinline__ void load(const void* x) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            v[i] = at[i] >= 0 ? __ldcg(static_cast<const uint4*>(x) + at[i]) : make_uint4(0, 0, 0, 0);
    }
};

// Columns first ... first + slab of x (halves); columns past the end become 0. `mine` are the thread's first pieces, on
// their way, of which the first one goes to `place`, as all others of one token do, further on.
template <class T, int COLS>
__device__ __forceinline__ void put_all_x(const Product& p, const Room<T, COLS>& room, int first, XPieces<COLS>& mine,
                                          const XPlace<T>& place) {
    const int all = (COLS == 1 ? 1 : p.n_tokens) * (p.slab / 8);
    for (int base = 0; base < all; base += 4 * THREADS) {
        if (base > 0) mine.locate(p, first, true), mine.load(p.x);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (base + i * THREADS >= all) break;  // so for all threads
            const bool there = base + i * THREADS + static_cast<int>(threadIdx.x) < all;
            const auto to = COLS == 1 ? place.behind((base + i * THREADS) * 8)
                                      : XPlace<T>(room, mine.token[i], mine.piece[i] * 8);
            put_x<T>(to, there, mine.v[i]);
        }
    }
}

// Of one token there is no other.
template <int COLS>
__device__ __forceinline__ bool is_none(const Product& p, int token) {
    return COLS > 1 && token >= p.n_tokens;
}

// What becomes of rows that were loaded, of which the first one has the weight, once their squares are added up.
template <int COLS>
__device__ __forceinline__ void scale_rows(RmsNorm (&norm)[COLS], const Product& p, float eps, int turn) {
    float sums[COLS];
#pragma unroll
    for (int token = 0; token < COLS; ++token) sums[token] = token < p.n_tokens ? norm[token].squares(p.k) : 0.0f;
    block_sums<false>(sums, turn);
#pragma unroll
    for (int token = 0; token < COLS; ++token) {
        if (token >= p.n_tokens) break;
        if (token > 0) norm[token].take_weight(norm[0]);
        norm[token].scale_by(sums[token], p.k, eps);
    }
}
// x becomes the sum of x and `added`, which are on their way.
template <int COLS>
__device__ __forceinline__ void add_norm(RmsNorm (&x)[COLS], RmsNorm (&added)[COLS], const Product& p) {
    scale_rows(added, p, p.added.eps, 0);
#pragma unroll
    for (int token = 0; token < COLS; ++token) {
        if (token >= p.n_tokens) break;
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i) {
            float(&v)[8] = x[token].x[i];
            const int column = RmsNorm::column(i);
            if (column >= p.k) continue;
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = added[token].added_to(v[j], i, j);
            if (blockIdx.x > 0) continue;  // of the launch
            float4* to = reinterpret_cast<float4*>(p.added.sum + token * static_cast<size_t>(p.k) + column);
            to[0] = make_float4(v[0], v[1], v[2], v[3]), to[1] = make_float4(v[4], v[5], v[6], v[7]);
        }
    }
}

// What a norm divides x by is the same for all of a token's columns, so where x becomes fixed point, whose scale is any,
// outputs are divided instead: x is there before its squares are added up.
template <class T, int PROLOGUE>
constexpr bool OUTPUTS_SCALED = T::SCALED && PROLOGUE != PLAIN;

// Sums of a token's squares, of each warp, in shared memory.
template <int COLS>
__device__ __forceinline__ float* squares_of(int token) {
    __shared__ float parts[COLS][WARPS];
    return parts[token];
}

// x (float), normalised, all tokens together. The norm's weights depend on no earlier kernel and are read before the wait.
// made: see grid_dependency_wait. `meanwhile` is called when x is under way.
template <int PROLOGUE, class T, int COLS, class Function>
__device__ __forceinline__ void load_normalised_x(const Product& p, const Room<T, COLS>& room, int made,
                                                  Function meanwhile) {
    constexpr bool SUMS = PROLOGUE == SUM, SCALED = OUTPUTS_SCALED<T, PROLOGUE>;
    const float* x = static_cast<const float*>(p.x);
    RmsNorm norm[COLS], added[COLS];
    norm[0].load_weight(p.norm, p.k);
    if (SUMS) added[0].load_weight(p.added.weight, p.k);
    XPlace<T> first_place(room, 0, RmsNorm::column(0));
    if (COLS == 1) first_place.keep();
    grid_dependency_wait(made | made_of(x + RmsNorm::column(0)) | (COLS == 1 ? first_place.made() : 0));
#pragma unroll
    for (int token = 0; token < COLS; ++token) {
        if (is_none<COLS>(p, token)) break;
        const size_t first = token * static_cast<size_t>(p.k);
        if (SUMS) added[token].load(p.added.y + first, p.k);
        norm[token].load(x + first, p.k);
    }
    meanwhile();
    if (SUMS) add_norm(norm, added, p);
    if (!SCALED) scale_rows(norm, p, p.eps, SUMS);
#pragma unroll
    for (int token = 0; token < COLS; ++token) {
        if (is_none<COLS>(p, token)) break;
        if (SCALED && token > 0) norm[token].take_weight(norm[0]);
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i) {
            const int column = norm[token].column(i);
            const bool there = column < p.k;
            const auto place = COLS == 1 ? first_place.behind(i * THREADS * 8) : XPlace<T>(room, token, column);
            if constexpr (SCALED) {
                float2 v[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) v[j] = there ? norm[token].weighted(i, 2 * j) : make_float2(0.0f, 0.0f);
                put_fixed_point(place, column < p.slab, v);
            } else {
                put_x<T>(place, column < p.slab, there ? norm[token].halves(i) : make_uint4(0, 0, 0, 0));
            }
        }
        if constexpr (SCALED) {
            const float sum = warp_sum(norm[token].squares(p.k));
            if (threadIdx.x % 32 == 0) squares_of<COLS>(token)[threadIdx.x / 32] = sum;
        }
    }
}

// An output of a batch of tile rows: where it goes, and what it takes beside its sums. Found before these are there, so
// that nothing else is awaited at the end.
template <class T, int COLS, int PROLOGUE, int EPILOGUE>
struct Output {
    static constexpr int PER_TILE = TILE_ROWS * COLS, WIDTH = EPILOGUE == GLU ? 2 : 1;
    void* to;  // float or half (of QKV any); null where there is no such output
    int token;
    int part;  // the first warp's partial sum in the room, of gate and behind it of up
    float scale[WIDTH];
    const float* old;
    float residual;
    TurnedRow turned;  // QKV

    // Output i of the batch of `count` tile rows that begins at the block's tile row `batch`.
    template <class P>
    __device__ __forceinline__ void find(const P& p, const Room<T, COLS>& room, int parity, int batch, int count, int i) {
        to = nullptr;
        const int tile = i / PER_TILE, row_in_tile = i % TILE_ROWS;
        token = i % PER_TILE / TILE_ROWS;
        const int global = p.block() + (batch / WIDTH + tile) * p.blocks();
        if (tile >= count / WIDTH || token >= p.n_tokens) return;
        const int s = EPILOGUE == GLU ? 0 : segment_of(p, global);
        const int row = (global - (EPILOGUE == GLU ? 0 : p.segment[s].first_tile)) * TILE_ROWS + row_in_tile;
        if (row >= p.segment[s].n_rows) return;
        const size_t at = static_cast<size_t>(token) * p.segment[s].n_rows + row;
        if constexpr (EPILOGUE == QKV)
            to = p.rope.q, turned.locate(p.rope, p.first_part + s, token, row);
        else
            to = EPILOGUE == GLU ? static_cast<void*>(static_cast<__half*>(p.segment[s].out) + at)
                                 : static_cast<void*>(static_cast<float*>(p.segment[s].out) + at);
        part = static_cast<int>(room.partial_of(parity, tile * WIDTH, 0) - room.sums) + row_in_tile * COLS + token;
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) scale[w] = scaled_row(p.segment[s + w], row, 1.0f);
        old = p.residual + at;
    }
    __device__ __forceinline__ int made() const {
        if (to == nullptr) return 0;
        return (EPILOGUE == QKV ? turned.made() : made_of(to) | made_of(old)) | part;
    }
    // What earlier kernels write.
    __device__ __forceinline__ void load() { residual = EPILOGUE == ADD && to != nullptr ? __ldcg(old) : 0.0f; }
    // What can wait until then, and has time until the sums are there.
    __device__ __forceinline__ void prepare() {
        if constexpr (EPILOGUE == QKV)
            if (to != nullptr) turned.prepare();
    }
    // Adds up the warps' partial sums.
    template <class P>
    __device__ __forceinline__ void write(const P& p, const Room<T, COLS>& room) const {
        float y[WIDTH] = {};
        if (to != nullptr) add_up(p, room, y);
        if constexpr (EPILOGUE == QKV) y[0] = turned.turn_with_next(y[0]);
        if (to == nullptr) return;
        if constexpr (EPILOGUE == QKV)
            *turned.to = saturated_half(y[0]);
        else if constexpr (EPILOGUE == GLU)
            *static_cast<__half*>(to) = gated(p.activation, y[0], y[1]);
        else if constexpr (EPILOGUE == ADD)
            *static_cast<float*>(to) = residual + y[0];
        else
            *static_cast<float*>(to) = p.soft_cap > 0.0f ? p.soft_cap * tanhf(y[0] / p.soft_cap) : y[0];
    }
    __device__ __forceinline__ void add_up(const Product& p, const Room<T, COLS>& room, float (&y)[WIDTH]) const {
#pragma unroll
        for (int w = 0; w < WIDTH; ++w)
            y[w] = __fmul_rn(sum_of_parts(room.sums + part + w * WARPS * room.part_stride, room.part_stride), scale[w]);
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
    constexpr int BATCH = Room<T, COLS>::BATCH;
    SHARED_DYNAMIC(uint8_t, shared);
    const int warp = kept(static_cast<int>(threadIdx.x / 32)), lane = kept(static_cast<int>(threadIdx.x % 32));
    uint8_t* ring = kept_shared(shared + warp * STAGES * T::BYTES);
    const CopyTarget to = copy_target(ring);
    const int n_local = (p.rounds + (p.block() < p.rest)) * (PAIRS ? 2 : 1);

    grid_dependency_launch();
    Walk<T, COLS, EPILOGUE, WHOLE, P> ahead(p, warp, n_local);
    // What is asked for before x delays it: x waits in the same queues. One chunk of each warp is little enough; two are
    // where the host says so. Where x takes long, more come one after the other.
    int asked = 0;
    const auto ask = [&](int until) {
        for (; asked < until; ++asked) copy_chunk<T>(ahead, to + asked * T::BYTES, lane);
    };
    ask(1);
    if (p.early) ask(min(2, STAGES));
    if (p.patient) {
        while (asked < STAGES && !ahead.done()) {
            cp_async_wait<0>();
            ask(asked + 1);
        }
    }
    const Room<T, COLS> room(kept_shared(shared) + WARPS * STAGES * T::BYTES, p.slab, p.n_tokens, WHOLE);
    const typename TokenSums<T, COLS>::Lane at{room, lane};

    Output<T, COLS, PROLOGUE, EPILOGUE> output;
    static_assert((WARPS & (WARPS - 1)) == 0, "a power of two");
    const int mine = threadIdx.x ^ (THREADS - 32);  // the last warps, which have fewest chunks, write the first outputs
    const auto find_first = [&] { output.find(p, room, 0, 0, min(BATCH, n_local), mine); };
    constexpr bool WIDE = PROLOGUE != PLAIN && COLS * NORM_PIECES > 4;  // x takes all registers
    if constexpr (!WIDE) find_first();
    const auto meanwhile = [&] {  // x is under way
        ask(STAGES);
        if constexpr (!WIDE) output.prepare();
    };
    if constexpr (PROLOGUE != PLAIN) {
        load_normalised_x<PROLOGUE, T>(p, room, WIDE ? 0 : output.made(), meanwhile);
        if constexpr (WIDE) find_first(), output.prepare();
        output.load();
        __syncthreads();
    } else {
        XPieces<COLS> pieces;
        pieces.locate(p, 0, false);
        XPlace<T> place(room, 0, pieces.piece[0] * 8);
        if (COLS == 1) place.keep();
        grid_dependency_wait(pieces.made() | output.made() | (COLS == 1 ? place.made() : 0));
        if constexpr (WHOLE) pieces.load(p.x);
        output.load();
        meanwhile();
        if constexpr (WHOLE) {
            put_all_x(p, room, 0, pieces, place);
            __syncthreads();
        }
    }

    int stage = 0, parity = 0;
    for (int batch = 0; batch < n_local; batch += BATCH, parity ^= 1) {
        const int count = min(BATCH, n_local - batch);
        for (int slab = 0; slab < (WHOLE ? 1 : p.n_chunk); slab += p.slab / T::CHUNK_K) {
            if constexpr (!WHOLE) {
                __syncthreads();
                XPieces<COLS> mine;
                mine.locate(p, slab * T::CHUNK_K, false);
                mine.load(p.x);
                put_all_x(p, room, slab * T::CHUNK_K, mine, XPlace<T>(room, 0, mine.piece[0] * 8));
                __syncthreads();
            }
            for (int i = 0; i < count; ++i) {
                TokenSums<T, COLS> sums;
                start_sums(sums, room.carried_of(i, warp), WHOLE || slab == 0, lane);
                const int end = WHOLE ? p.n_chunk : min(p.slab / T::CHUNK_K, p.n_chunk - slab);
                for (int chunk = first_chunk(p.n_chunk, warp, batch + i); chunk < end; chunk += WARPS) {
                    uint8_t* slot = ring + stage * T::BYTES;
                    cp_async_wait<STAGES - 1>();
                    __syncwarp();
                    sums.load(slot, lane);
                    if constexpr (sums.IN_RING) sums.multiply(at, chunk * T::CHUNK_K);
                    __syncwarp();
                    copy_chunk<T>(ahead, to + stage * T::BYTES, lane);
                    stage = stage + 1 == STAGES ? 0 : stage + 1;
                    if constexpr (!sums.IN_RING) sums.multiply(at, chunk * T::CHUNK_K);
                }
                if constexpr (!WHOLE) __syncwarp();  // other lanes may still have to read what they carried
                if (!WHOLE && slab + p.slab / T::CHUNK_K < p.n_chunk)
                    carry_sums(sums, room.carried_of(i, warp), lane);
                else
                    sums.finish(room.partial_of(parity, i, warp), lane);
            }
        }
        __syncthreads();
        output.write(p, room);
        if constexpr (BATCH * output.PER_TILE > THREADS)
            for (int i = mine + THREADS; i < BATCH * output.PER_TILE; i += THREADS) {
                output.find(p, room, parity, batch, count, i);
                output.load();
                output.prepare();
                output.write(p, room);
            }
        if (batch + BATCH < n_local) {
            output.find(p, room, parity ^ 1, batch + BATCH, min(BATCH, n_local - batch - BATCH), mine);
            output.load();
            output.prepare();
        }
    }
    cp_async_wait<0>();
}

template <class T, int COLS, int PROLOGUE, int EPILOGUE, bool WHOLE>
__global__ void __launch_bounds__(THREADS, 1) gemm_decode(const Product p) {
    multiply<T, COLS, PROLOGUE, EPILOGUE, WHOLE>(p);
}

// q, k and v of tokens that are alone with their sequences.
template <class T, int COLS, int PROLOGUE>
__global__ void __launch_bounds__(THREADS, 1) gemm_decode_heads(const HeadsProduct<Product> p) {
    multiply<T, COLS, PROLOGUE, QKV, true>(p);
}

// Of the same x. Blocks from q.first_block on multiply q's matrices, in tiles U, the others p's.
template <class T, class U, int COLS, int PROLOGUE, int EPILOGUE, class P>
__device__ __forceinline__ void multiply_two(const P& p, const P& q) {
    if (static_cast<int>(blockIdx.x) < q.first_block)
        multiply<T, COLS, PROLOGUE, EPILOGUE, true>(p);
    else
        multiply<U, COLS, PROLOGUE, EPILOGUE, true>(q);
}
template <class T, class U, int COLS, int PROLOGUE>
__global__ void __launch_bounds__(THREADS, 1) gemm_decode_two(const PartProduct p, const PartProduct q) {
    multiply_two<T, U, COLS, PROLOGUE, STORE>(p, q);
}
template <class T, class U, int COLS, int PROLOGUE>
__global__ void __launch_bounds__(THREADS, 1)
    gemm_decode_two_heads(const HeadsProduct<PartProduct> p, const HeadsProduct<PartProduct> q) {
    multiply_two<T, U, COLS, PROLOGUE, QKV>(p, q);
}
