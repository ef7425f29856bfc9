// y[T, N] = x[T, K] W[N, K]^T for the few tokens of a decode step: tiles (tile.cuh) x f16 activations on tensor cores.
//
// The product is bound by reading W, so everything here serves one stream: one block per multiprocessor, each warp
// copying its own chunks into its own ring in shared memory (cp.async, no barrier between warps), the first STAGES
// chunks before the kernel waits for the one that makes x. Chunk c of the block's i-th tile row belongs to warp
// (c + i * n_chunk) mod WARPS. A warp leaves its partial sums of each tile row in shared memory; after a batch of tile
// rows one barrier lets the threads add them up, warp 0 first, and write the outputs. A token's outputs come from the
// same operations in the same order for any number of tokens.
//
// Instances: run<Tile, COLS, PROLOGUE, EPILOGUE>. COLS is 1 (one token), 8 or 16 (that many tokens at most). Prologue
// NORM: x is float and RMS-normalised here (one token); PLAIN: x is half. Epilogue STORE: float out; ADD: float out =
// residual + y; GLU: the segments are gate and up, half out = act(gate) * up.
#include "activation.cuh"
#include "norm.cuh"
#include "product.cuh"
#include "tile.cuh"

#ifndef STAGES
#define STAGES 3
#endif

enum Prologue { PLAIN, NORM };

struct Product {
    Segment segment[3];
    const void* x;          // float or half [n_tokens, k]
    const float* norm;      // [k]
    const float* residual;  // [n_tokens, n_rows] of the one segment
    int n_segments;
    int n_tiles;   // tile rows of all segments together; GLU: of each
    int n_tokens;
    int k;
    int n_chunk;
    int slab;      // columns of x in shared memory at a time: WARPS chunks or a multiple, or all n_chunk
    int activation;
    float eps;
    float soft_cap;  // STORE: cap * tanh(y / cap); 0 is none
};

// How the shared memory is cut: rings [WARPS][STAGES][chunk], partial sums [2][BATCH][WARPS][16][COLS], sums of x, x.
template <class T, int COLS>
struct Room {
    static constexpr int BATCH = COLS == 1 ? 8 : COLS == 8 ? 2 : 1;  // tile rows between two barriers
    static constexpr int RING = WARPS * STAGES * T::BYTES;
    static constexpr int PARTIAL = BATCH * WARPS * TILE_ROWS * COLS;
    static constexpr int SUM_GROUP = T::GROUP == 16 ? 16 : 32;
    static constexpr int PAD = COLS > 1 ? 32 : 0;  // 64 bytes, so that eight tokens' rows lie on different banks

    float* partial;
    float* sums;
    __half* x;
    int x_stride, sum_stride, n_tokens;

    __device__ __forceinline__ Room(uint8_t* shared, int slab, int n_tokens_) : n_tokens(n_tokens_) {
        partial = reinterpret_cast<float*>(shared + RING);
        sums = partial + 2 * PARTIAL;
        sum_stride = T::FLOAT ? 0 : slab / SUM_GROUP;
        x = reinterpret_cast<__half*>(sums + n_tokens * sum_stride);
        x_stride = slab + PAD;
    }
    // The token whose x a column of the mma takes: columns without a token repeat the last one's.
    __device__ __forceinline__ int token_of(int column) const { return COLS == 1 ? 0 : min(column, n_tokens - 1); }
    // The partial sums of (batch parity, tile row in the batch, warp): [16][COLS].
    __device__ __forceinline__ float* partial_of(int parity, int tile, int warp) const {
        return partial + parity * PARTIAL + (tile * WARPS + warp) * TILE_ROWS * COLS;
    }
};

// The first chunk that a warp takes of a slab of the block's i-th tile row.
__device__ __forceinline__ int first_chunk(const Product& p, int warp, int i) {
    return (warp - i * (p.n_chunk % WARPS)) & (WARPS - 1);
}

// The order in which a warp's chunks are copied: over batches of tile rows, slabs of columns, tile rows, chunks.
template <class T, int COLS, bool PAIRS>
struct Walk {
    static constexpr int BATCH = Room<T, COLS>::BATCH;
    const Product& p;
    int warp, n_local, slab_chunks;
    int batch, slab, tile, chunk;
    const uint8_t* tile_row;

    __device__ __forceinline__ Walk(const Product& product, int warp_, int n_local_)
        : p(product), warp(warp_), n_local(n_local_), slab_chunks(product.slab / T::CHUNK_K), batch(0), slab(0) {
        enter(0);
        settle();
    }
    __device__ __forceinline__ bool done() const { return batch >= n_local; }
    __device__ __forceinline__ int batch_end() const { return min(batch + BATCH, n_local); }
    __device__ __forceinline__ int slab_end() const { return min(slab + slab_chunks, p.n_chunk); }

    __device__ __forceinline__ void enter(int to) {
        tile = to;
        chunk = slab + first_chunk(p, warp, to);
        // Tile rows are dealt out to the blocks in turn; the gate and up rows of a pair to the same block.
        const int global = blockIdx.x + (PAIRS ? to / 2 : to) * gridDim.x;
        const int s = PAIRS ? to & 1 : segment_of(p, global);
        const int row = PAIRS ? global : global - p.segment[s].first_tile;
        tile_row = p.segment[s].tiles + static_cast<size_t>(row) * p.n_chunk * T::BYTES;
    }
    // To the next chunk that exists.
    __device__ __forceinline__ void settle() {
        while (!done() && chunk >= slab_end()) {
            if (tile + 1 < batch_end()) {
                enter(tile + 1);
            } else {
                slab += slab_chunks;
                if (slab >= p.n_chunk) slab = 0, batch += BATCH;
                if (!done()) enter(batch);
            }
        }
    }
    __device__ __forceinline__ void next() {
        chunk += WARPS;
        if (chunk >= slab_end()) settle();
    }
    // Starts the copy of the current chunk (one group, empty past the end) and goes on.
    __device__ __forceinline__ void copy(uint8_t* to, int lane) {
        if (!done()) {
            constexpr int pieces = T::BYTES / 16;
            const uint8_t* from = tile_row + static_cast<size_t>(chunk) * T::BYTES + lane * 16;
#pragma unroll
            for (int i = 0; i < pieces; i += 32)
                if (pieces - i >= 32 || lane < pieces - i) cp_async<16>(to + (i + lane) * 16, from + i * 16);
            next();
        }
        cp_async_commit();
    }
};

// Eight halves of a token go to shared memory, and the sum of their group, in units of a code, beside them. Every lane
// of the warp calls it, since sums pass between lanes; those that are not `valid` write nothing.
template <class T, int COLS>
__device__ __forceinline__ void put_x(const Room<T, COLS>& room, bool valid, int token, int column,
                                      const uint4& halves) {
    if (valid) *reinterpret_cast<uint4*>(room.x + token * room.x_stride + column) = halves;
    if constexpr (!T::FLOAT) {
        const float2 a = half2_to_float2(halves.x), b = half2_to_float2(halves.y);
        const float2 c = half2_to_float2(halves.z), d = half2_to_float2(halves.w);
        float sum = ((a.x + a.y) + (b.x + b.y)) + ((c.x + c.y) + (d.x + d.y));
        constexpr int lanes = Room<T, COLS>::SUM_GROUP / 8;
#pragma unroll
        for (int offset = 1; offset < lanes; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (valid && threadIdx.x % lanes == 0) room.sums[token * room.sum_stride + column / (8 * lanes)] = sum * CODE_UNIT;
    }
}

// Columns first ... first + slab of x (halves); columns past the end become 0. `meanwhile` is called when
// the first loads are under way.
template <class T, int COLS, class Function>
__device__ __forceinline__ void load_x(const Product& p, const Room<T, COLS>& room, int first, Function meanwhile) {
    const int pieces = p.slab / 8, all = p.n_tokens * pieces;
    for (int base = 0; base < all; base += 4 * THREADS) {
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = base + i * THREADS + threadIdx.x, token = at / pieces, column = first + at % pieces * 8;
            v[i] = make_uint4(0, 0, 0, 0);
            if (at < all && column < p.k)
                v[i] = __ldcg(reinterpret_cast<const uint4*>(static_cast<const __half*>(p.x) +
                                                             static_cast<size_t>(token) * p.k + column));
        }
        if (base == 0) meanwhile();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = base + i * THREADS + threadIdx.x;
            put_x(room, at < all, at / pieces, at % pieces * 8, v[i]);
        }
    }
}

// x (float, one token), normalised. The norm's weights depend on no earlier kernel and are read before the wait.
template <class T, class Function>
__device__ __forceinline__ void load_normalised_x(const Product& p, const Room<T, 1>& room, Function meanwhile) {
    RmsNorm norm;
    norm.load_weight(p.norm, p.k);
    grid_dependency_wait();
    norm.load(static_cast<const float*>(p.x), p.k);
    meanwhile();
    norm.scale(p.k, p.eps);
#pragma unroll
    for (int i = 0; i < NORM_PIECES; ++i) {
        const int column = norm.column(i);
        put_x(room, column < p.slab, 0, column, column < p.k ? norm.halves(i) : make_uint4(0, 0, 0, 0));
    }
}

// acc += d * (codes . x - zero * sum(x)) + m * sum(x), all in units of a code; acc rows g, g + 8, columns 2t, 2t + 1.
template <class T, int COLS>
__device__ __forceinline__ void add_scaled(float (&acc)[4], const float (&c)[4], const RowScales& s, float shift,
                                           float sum0, float sum1) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float d = s.d[row] * (1.0f / shift);
        acc[2 * row] = fmaf(c[2 * row], d, acc[2 * row]);
        if (COLS > 1) acc[2 * row + 1] = fmaf(c[2 * row + 1], d, acc[2 * row + 1]);
        if (T::MIN) {
            acc[2 * row] = fmaf(s.m[row], sum0, acc[2 * row]);
            if (COLS > 1) acc[2 * row + 1] = fmaf(s.m[row], sum1, acc[2 * row + 1]);
        }
    }
}

// The sums of x over the groups of a chunk, of columns 2t and 2t + 1.
template <class T, int COLS>
struct ChunkSums {
    static constexpr int N = T::FLOAT ? 4 : T::CHUNK_K / Room<T, COLS>::SUM_GROUP;
    float of[COLS > 1 ? 2 : 1][N];

    __device__ __forceinline__ void load(const Room<T, COLS>& room, int n, int column, int t) {
        if constexpr (!T::FLOAT) {
#pragma unroll
            for (int c = 0; c < (COLS > 1 ? 2 : 1); ++c) {
                const float* from = room.sums + room.token_of(n * 8 + 2 * t + c) * room.sum_stride +
                                    column / Room<T, COLS>::SUM_GROUP;
#pragma unroll
                for (int i = 0; i < N; i += 4) {
                    const float4 v = *reinterpret_cast<const float4*>(from + i);
                    of[c][i] = v.x, of[c][i + 1] = v.y, of[c][i + 2] = v.z, of[c][i + 3] = v.w;
                }
            }
        }
    }
};

// Group J (32 columns) of a chunk times eight tokens: two mma, and the scales. `x` is the lane's token's.
template <class T, int COLS, int J>
__device__ __forceinline__ void multiply_group(const ChunkCodes<T>& codes, const ChunkScales<T>& scales,
                                               const ChunkSums<T, COLS>& sums, const __half* x, int t,
                                               float (&acc)[4]) {
    uint32_t a0[4], a1[4];
    codes.template unpack<J, 0>(a0);
    codes.template unpack<J, 1>(a1);
    uint4 b;
    if constexpr (T::GROUP == 16 || T::FLOAT) {
        const uint2 low = *reinterpret_cast<const uint2*>(x + J * 32 + 4 * t);
        const uint2 high = *reinterpret_cast<const uint2*>(x + J * 32 + 16 + 4 * t);
        b = make_uint4(low.x, low.y, high.x, high.y);
    } else {
        b = *reinterpret_cast<const uint4*>(x + J * 32 + 8 * t);
    }
    const uint32_t b0[2] = {b.x, b.y}, b1[2] = {b.z, b.w};
    if constexpr (T::FLOAT) {
        mma_m16n8k16_f16(acc, a0, b0);
        mma_m16n8k16_f16(acc, a1, b1);
    } else {
        constexpr int per_group = T::GROUP == 16 ? 2 : 1, last = COLS > 1 ? 1 : 0;
        constexpr float shift = ChunkCodes<T>::template shift<J>(), zero = -T::ZERO * shift;
        const float s0 = sums.of[0][J * per_group], s1 = sums.of[last][J * per_group];
        float c[4] = {};
        if constexpr (T::ZERO != 0) c[0] = c[2] = zero * s0, c[1] = c[3] = zero * s1;
        mma_m16n8k16_f16(c, a0, b0);
        if constexpr (T::GROUP == 16) {
            add_scaled<T, COLS>(acc, c, scales.template get<2 * J>(), shift, s0, s1);
            const float r0 = sums.of[0][2 * J + 1], r1 = sums.of[last][2 * J + 1];
            float d[4] = {};
            if constexpr (T::ZERO != 0) d[0] = d[2] = zero * r0, d[1] = d[3] = zero * r1;
            mma_m16n8k16_f16(d, a1, b1);
            add_scaled<T, COLS>(acc, d, scales.template get<2 * J + 1>(), shift, r0, r1);
        } else {
            mma_m16n8k16_f16(c, a1, b1);
            add_scaled<T, COLS>(acc, c, scales.template get<J>(), shift, s0, s1);
        }
    }
}

template <class T, int COLS, int J>
__device__ __forceinline__ void multiply_groups(const ChunkCodes<T>& codes, const ChunkScales<T>& scales,
                                                const ChunkSums<T, COLS>& sums, const __half* x, int t,
                                                float (&acc)[4]) {
    if constexpr (J * 32 < T::CHUNK_K) {
        multiply_group<T, COLS, J>(codes, scales, sums, x, t, acc);
        multiply_groups<T, COLS, J + 1>(codes, scales, sums, x, t, acc);
    }
}

// The residual of the output that this thread writes in the first batch, read while the weights stream.
template <class T, int COLS>
__device__ __forceinline__ float early_residual(const Product& p, int n_local) {
    const int tile = threadIdx.x / TILE_ROWS, row = (blockIdx.x + tile * gridDim.x) * TILE_ROWS + threadIdx.x % TILE_ROWS;
    const bool mine = tile < min(n_local, Room<T, COLS>::BATCH) && row < p.segment[0].n_rows;
    return mine ? __ldcg(p.residual + row) : 0.0f;
}

// Adds up the warps' partial sums of a batch of tile rows and writes the outputs.
template <class T, int COLS, int EPILOGUE>
__device__ void write_batch(const Product& p, const Room<T, COLS>& room, int parity, int batch, int count,
                            float residual) {
    constexpr int PER_TILE = TILE_ROWS * COLS, WIDTH = EPILOGUE == GLU ? 2 : 1;
    for (int i = threadIdx.x; i < count / WIDTH * PER_TILE; i += THREADS) {
        const int tile = i / PER_TILE, row_in_tile = i % TILE_ROWS, token = i % PER_TILE / TILE_ROWS;
        const int global = blockIdx.x + (batch / WIDTH + tile) * gridDim.x;
        const int s = EPILOGUE == GLU ? 0 : segment_of(p, global);
        const int row = (global - (EPILOGUE == GLU ? 0 : p.segment[s].first_tile)) * TILE_ROWS + row_in_tile;
        float y[WIDTH];
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            const float* part = room.partial_of(parity, tile * WIDTH + w, 0) + row_in_tile * COLS + token;
            y[w] = 0.0f;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) y[w] += part[warp * PER_TILE];
            if (!T::FLOAT) y[w] *= 1.0f / CODE_UNIT;
        }
        const Segment& segment = p.segment[s];
        if (token >= p.n_tokens || row >= segment.n_rows) continue;
        const size_t at = static_cast<size_t>(token) * segment.n_rows + row;
        if constexpr (EPILOGUE == GLU) {
            static_cast<__half*>(segment.out)[at] = gated(p.activation, y[0], y[1]);
        } else if constexpr (EPILOGUE == ADD) {
            const float old = COLS == 1 && batch == 0 ? residual : __ldcg(p.residual + at);
            static_cast<float*>(segment.out)[at] = old + y[0];
        } else {
            static_cast<float*>(segment.out)[at] = p.soft_cap > 0.0f ? p.soft_cap * tanhf(y[0] / p.soft_cap) : y[0];
        }
    }
}

template <class T, int COLS, int PROLOGUE, int EPILOGUE>
__global__ void __launch_bounds__(THREADS, 1) mul_mat_tile(const Product p) {
    constexpr bool PAIRS = EPILOGUE == GLU;
    constexpr int BATCH = Room<T, COLS>::BATCH;
    SHARED_DYNAMIC(uint8_t, shared);
    const Room<T, COLS> room(shared, p.slab, p.n_tokens);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    uint8_t* ring = shared + warp * STAGES * T::BYTES;
    const int blocks = gridDim.x;
    const int n_local = (p.n_tiles - static_cast<int>(blockIdx.x) + blocks - 1) / blocks * (PAIRS ? 2 : 1);
    const bool whole = p.slab >= p.n_chunk * T::CHUNK_K;

    grid_dependency_launch();
    Walk<T, COLS, PAIRS> ahead(p, warp, n_local);
    // Chunks asked for before x delay it. Where x comes right after the wait the last ones are asked for behind it.
    constexpr int EARLY = PROLOGUE == NORM && STAGES > 2 ? 2 : STAGES;
#pragma unroll
    for (int stage = 0; stage < EARLY; ++stage) ahead.copy(ring + stage * T::BYTES, lane);
    const auto late_copies = [&] {
#pragma unroll
        for (int stage = EARLY; stage < STAGES; ++stage) ahead.copy(ring + stage * T::BYTES, lane);
    };

    if constexpr (PROLOGUE == NORM) {
        load_normalised_x<T>(p, room, late_copies);
        __syncthreads();
    } else {
        grid_dependency_wait();
        if (whole) {
            load_x(p, room, 0, late_copies);
            __syncthreads();
        } else {
            late_copies();
        }
    }
    const float residual = EPILOGUE == ADD && COLS == 1 ? early_residual<T, COLS>(p, n_local) : 0.0f;

    int stage = 0, parity = 0;
    for (int batch = 0; batch < n_local; batch += BATCH, parity ^= 1) {
        const int count = min(BATCH, n_local - batch);
        for (int slab = 0; slab < p.n_chunk; slab += p.slab / T::CHUNK_K) {
            if (!whole) {
                __syncthreads();
                load_x(p, room, slab * T::CHUNK_K, [] {});
                __syncthreads();
            }
            for (int i = 0; i < count; ++i) {
                float acc[(COLS + 7) / 8][4];
                float* part = room.partial_of(parity, i, warp);
#pragma unroll
                for (int n = 0; n < (COLS + 7) / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int column = n * 8 + 2 * t + (e & 1);
                        const bool mine = COLS > 1 || column == 0;
                        acc[n][e] = slab > 0 && mine ? part[(g + (e >> 1) * 8) * COLS + column] : 0.0f;
                    }
                const int end = min(p.slab / T::CHUNK_K, p.n_chunk - slab);
                for (int chunk = first_chunk(p, warp, batch + i); chunk < end; chunk += WARPS) {
                    uint8_t* slot = ring + stage * T::BYTES;
                    cp_async_wait<STAGES - 1>();
                    __syncwarp();
                    ChunkCodes<T> codes;
                    ChunkScales<T> scales;
                    codes.load(slot, lane);
                    if constexpr (!T::FLOAT) scales.load(slot, g);
                    __syncwarp();
                    ahead.copy(slot, lane);
                    stage = stage + 1 == STAGES ? 0 : stage + 1;
#pragma unroll
                    for (int n = 0; n < (COLS + 7) / 8; ++n) {
                        const int column = chunk * T::CHUNK_K;
                        ChunkSums<T, COLS> sums;
                        sums.load(room, n, column, t);
                        const __half* x = room.x + room.token_of(n * 8 + g) * room.x_stride + column;
                        multiply_groups<T, COLS, 0>(codes, scales, sums, x, t, acc[n]);
                    }
                }
#pragma unroll
                for (int n = 0; n < (COLS + 7) / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int column = n * 8 + 2 * t + (e & 1);
                        if (COLS > 1 || column == 0) part[(g + (e >> 1) * 8) * COLS + column] = acc[n][e];
                    }
            }
        }
        __syncthreads();
        write_batch<T, COLS, EPILOGUE>(p, room, parity, batch, count, residual);
    }
    cp_async_wait<0>();
}
