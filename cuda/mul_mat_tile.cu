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
#include "tile.cuh"

#ifndef STAGES
#define STAGES 3
#endif

enum Prologue { PLAIN, NORM };
enum Epilogue { STORE, ADD, GLU };

struct Segment {
    const uint8_t* tiles;
    void* out;       // float or half [n_tokens, n_rows]; GLU: only the first segment's
    int n_rows;
    int first_tile;  // counted over all segments
};

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
    int x_stride, sum_stride;

    __device__ __forceinline__ Room(uint8_t* shared, int slab) {
        partial = reinterpret_cast<float*>(shared + RING);
        sums = partial + 2 * PARTIAL;
        sum_stride = T::FLOAT ? 0 : slab / SUM_GROUP;
        x = reinterpret_cast<__half*>(sums + COLS * sum_stride);
        x_stride = slab + PAD;
    }
    // The partial sums of (batch parity, tile row in the batch, warp): [16][COLS].
    __device__ __forceinline__ float* partial_of(int parity, int tile, int warp) const {
        return partial + parity * PARTIAL + (tile * WARPS + warp) * TILE_ROWS * COLS;
    }
};

// Which chunks a warp takes, in which order: over batches of tile rows, slabs of columns, tile rows, chunks.
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
        chunk = slab + ((warp - to * (p.n_chunk % WARPS)) & (WARPS - 1));
        // Tile rows are dealt out to the blocks in turn; the gate and up rows of a pair to the same block.
        const int global = blockIdx.x + (PAIRS ? to / 2 : to) * gridDim.x;
        int s = PAIRS ? to & 1 : 0;
        if (!PAIRS)
            while (s + 1 < p.n_segments && global >= p.segment[s + 1].first_tile) ++s;
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

// Columns first ... first + slab of x (halves); tokens and columns past the end become 0.
template <class T, int COLS>
__device__ void load_x(const Product& p, const Room<T, COLS>& room, int first) {
    const int pieces = p.slab / 8, all = COLS * pieces;
    for (int base = 0; base < all; base += 4 * THREADS) {
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = base + i * THREADS + threadIdx.x, token = at / pieces, column = first + at % pieces * 8;
            v[i] = make_uint4(0, 0, 0, 0);
            if (token < p.n_tokens && column < p.k)
                v[i] = __ldcg(reinterpret_cast<const uint4*>(static_cast<const __half*>(p.x) +
                                                             static_cast<size_t>(token) * p.k + column));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = base + i * THREADS + threadIdx.x;
            put_x(room, at < all, at / pieces, at % pieces * 8, v[i]);
        }
    }
}

// x (float, one token), normalised. The norm's weights depend on no earlier kernel and are read before the wait.
template <class T>
__device__ void load_normalised_x(const Product& p, const Room<T, 1>& room) {
    RmsNorm norm;
    norm.load_weight(p.norm, p.k);
    grid_dependency_wait();
    norm.load(static_cast<const float*>(p.x), p.k);
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
        const float d = s.d[row] / shift;
        acc[2 * row] = fmaf(c[2 * row], d, acc[2 * row]);
        if (COLS > 1) acc[2 * row + 1] = fmaf(c[2 * row + 1], d, acc[2 * row + 1]);
        if (T::MIN) {
            acc[2 * row] = fmaf(s.m[row], sum0, acc[2 * row]);
            if (COLS > 1) acc[2 * row + 1] = fmaf(s.m[row], sum1, acc[2 * row + 1]);
        }
    }
}

// Group J (32 columns) of a chunk: two mma per eight tokens, and the scales.
template <class T, int COLS, int J>
__device__ __forceinline__ void multiply_group(const GroupCodes<T, J>& codes, const ChunkScales<T>& scales,
                                               const Room<T, COLS>& room, int column, int lane,
                                               float (&acc)[(COLS + 7) / 8][4]) {
    const int g = lane >> 2, t = lane & 3;
    uint32_t a0[4], a1[4];
    codes.template unpack<0>(a0);
    codes.template unpack<1>(a1);
#pragma unroll
    for (int n = 0; n < (COLS + 7) / 8; ++n) {
        const __half* x = room.x + (COLS == 1 ? 0 : (n * 8 + g) * room.x_stride) + column;
        uint4 b;
        if constexpr (T::GROUP == 16 || T::FLOAT) {
            const uint2 low = *reinterpret_cast<const uint2*>(x + 4 * t);
            const uint2 high = *reinterpret_cast<const uint2*>(x + 16 + 4 * t);
            b = make_uint4(low.x, low.y, high.x, high.y);
        } else {
            b = *reinterpret_cast<const uint4*>(x + 8 * t);
        }
        const uint32_t b0[2] = {b.x, b.y}, b1[2] = {b.z, b.w};
        if constexpr (T::FLOAT) {
            mma_m16n8k16_f16(acc[n], a0, b0);
            mma_m16n8k16_f16(acc[n], a1, b1);
        } else {
            constexpr float shift = GroupCodes<T, J>::SHIFT, zero = -T::ZERO * shift;
            const float* s0 = room.sums + (COLS == 1 ? 0 : (n * 8 + 2 * t) * room.sum_stride) +
                              column / Room<T, COLS>::SUM_GROUP;
            const float* s1 = COLS == 1 ? s0 : s0 + room.sum_stride;
            float c[4] = {zero * s0[0], zero * s1[0], zero * s0[0], zero * s1[0]};
            mma_m16n8k16_f16(c, a0, b0);
            if constexpr (T::GROUP == 16) {
                add_scaled<T, COLS>(acc[n], c, scales.template get<2 * J>(), shift, s0[0], s1[0]);
                c[0] = c[2] = zero * s0[1], c[1] = c[3] = zero * s1[1];
                mma_m16n8k16_f16(c, a1, b1);
                add_scaled<T, COLS>(acc[n], c, scales.template get<2 * J + 1>(), shift, s0[1], s1[1]);
            } else {
                mma_m16n8k16_f16(c, a1, b1);
                add_scaled<T, COLS>(acc[n], c, scales.template get<J>(), shift, s0[0], s1[0]);
            }
        }
    }
}

template <class T, int COLS, int J>
__device__ __forceinline__ void multiply_chunk(const uint8_t* chunk, const ChunkScales<T>& scales,
                                               const Room<T, COLS>& room, int column, int lane,
                                               float (&acc)[(COLS + 7) / 8][4]) {
    if constexpr (J * 32 < T::CHUNK_K) {
        GroupCodes<T, J> codes;
        codes.load(chunk, lane);
        multiply_group<T, COLS, J>(codes, scales, room, column + J * 32, lane, acc);
        multiply_chunk<T, COLS, J + 1>(chunk, scales, room, column, lane, acc);
    }
}

// Adds up the warps' partial sums of a batch of tile rows and writes the outputs.
template <class T, int COLS, int EPILOGUE>
__device__ void write_batch(const Product& p, const Room<T, COLS>& room, int parity, int batch, int count) {
    constexpr int PER_TILE = TILE_ROWS * COLS, WIDTH = EPILOGUE == GLU ? 2 : 1;
    for (int i = threadIdx.x; i < count / WIDTH * PER_TILE; i += THREADS) {
        const int tile = i / PER_TILE, row_in_tile = i % TILE_ROWS, token = i % PER_TILE / TILE_ROWS;
        const int global = blockIdx.x + (batch / WIDTH + tile) * gridDim.x;
        int s = 0;
        if (EPILOGUE != GLU)
            while (s + 1 < p.n_segments && global >= p.segment[s + 1].first_tile) ++s;
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
            static_cast<float*>(segment.out)[at] = __ldcg(p.residual + at) + y[0];
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
    const Room<T, COLS> room(shared, p.slab);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    uint8_t* ring = shared + warp * STAGES * T::BYTES;
    const int blocks = gridDim.x;
    const int n_local = (p.n_tiles - static_cast<int>(blockIdx.x) + blocks - 1) / blocks * (PAIRS ? 2 : 1);
    const bool whole = p.slab >= p.n_chunk * T::CHUNK_K;

    grid_dependency_launch();
    Walk<T, COLS, PAIRS> ahead(p, warp, n_local), now(p, warp, n_local);
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) ahead.copy(ring + stage * T::BYTES, lane);

    if constexpr (PROLOGUE == NORM) {
        load_normalised_x<T>(p, room);
        __syncthreads();
    } else {
        grid_dependency_wait();
        if (whole) {
            load_x(p, room, 0);
            __syncthreads();
        }
    }

    int stage = 0, parity = 0;
    for (int batch = 0; batch < n_local; batch += BATCH, parity ^= 1) {
        const int count = min(BATCH, n_local - batch);
        for (int slab = 0; slab < p.n_chunk; slab += p.slab / T::CHUNK_K) {
            if (!whole) {
                __syncthreads();
                load_x(p, room, slab * T::CHUNK_K);
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
                while (!now.done() && now.batch == batch && now.slab == slab && now.tile == batch + i) {
                    cp_async_wait<STAGES - 1>();
                    __syncwarp();
                    const uint8_t* chunk = ring + stage * T::BYTES;
                    ChunkScales<T> scales;
                    if constexpr (!T::FLOAT) scales.load(chunk, g);
                    multiply_chunk<T, COLS, 0>(chunk, scales, room, (now.chunk - slab) * T::CHUNK_K, lane, acc);
                    __syncwarp();
                    ahead.copy(ring + stage * T::BYTES, lane);
                    stage = stage + 1 == STAGES ? 0 : stage + 1;
                    now.next();
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
        write_batch<T, COLS, EPILOGUE>(p, room, parity, batch, count);
    }
    cp_async_wait<0>();
}
