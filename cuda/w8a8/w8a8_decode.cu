// Decode GEMM of 8-bit weights and 8-bit activations (w8a8.cuh), for up to 8 tokens. It is bound by the reads of the
// weights:
//
//        y[T, N] = (q[T, K] W[N, K]^T) * x_scale[T] * row_scale[N]        T <= 8
//
// Launch: one CTA per SM, THREADS threads. The CTAs take tile rows round-robin. The chunks of all tile rows of a CTA
// form one sequence; its warps take the chunks round-robin (sliced K). As in gemm_decode.cu, each warp copies its
// chunks into its own cp.async pipeline of STAGES stages in shared memory, without barriers between warps. It issues
// the first copies before the kernel waits for the kernel that computes x (PDL).
//
// A warp stores its partial sums of each tile row in shared memory. After a batch of tile rows the CTA synchronises
// once; its threads add the partial sums in a fixed order and write the outputs.
//
// Instances: w8a8_decode<VALUES, COLS, PROLOGUE, EPILOGUE>.
//
//        COLS        1: one token; 8: up to 8 tokens
//        CODES       x is quantised and packed
//        F16         one token: x is f16, and each CTA quantises it
//        NORM        one token: x is float, and each CTA normalises and quantises it
//
// Quantising in every CTA costs less than an earlier kernel that quantises once.
#include "w8a8/quantize_rows.cuh"

#ifndef STAGES
#define STAGES 3
#endif

enum W8A8DecodePrologue { CODES, F16, NORM };

// The shared memory after the stages: partial sums [2][BATCH][WARPS][16][COLS], and x [step][token][128].
template <class Sum, int COLS>
struct W8A8DecodeSharedStorage {
    static constexpr int BATCH = COLS == 1 ? 8 : 2;  // tile rows between two barriers
    static constexpr int PARTIAL = BATCH * WARPS * TILE_ROWS * COLS;
    Sum* partial;
    uint8_t* x;

    __device__ __forceinline__ W8A8DecodeSharedStorage(uint8_t* memory)
        : partial(reinterpret_cast<Sum*>(memory)), x(memory + 2 * PARTIAL * sizeof(Sum)) {}
    __device__ __forceinline__ Sum* partial_of(int parity, int tile, int warp) const {
        return partial + parity * PARTIAL + (tile * WARPS + warp) * TILE_ROWS * COLS;
    }
};

// Iterates over the chunks of a warp. The warp copies and multiplies chunks in this order.
template <bool PAIRS>
struct W8A8DecodeChunks {
    const W8A8Args& p;
    int n_local, tile, chunk;
    const uint8_t* tile_row;

    __device__ __forceinline__ W8A8DecodeChunks(const W8A8Args& args, int warp, int n_local_)
        : p(args), n_local(n_local_), tile(-1), chunk(warp + args.n_chunk) {
        settle();
    }
    // Moves on to the tile row that holds the chunk. CTAs take tile rows round-robin; PAIRS: a CTA takes the gate and
    // the up tile row of a pair.
    __device__ __forceinline__ void settle() {
        if (chunk < p.n_chunk) return;
        while (chunk >= p.n_chunk) chunk -= p.n_chunk, ++tile;
        if (tile >= n_local) return;
        const int global = blockIdx.x + (PAIRS ? tile / 2 : tile) * gridDim.x;
        const int s = PAIRS ? tile & 1 : segment_of(p, global);
        const int row = PAIRS ? global : global - p.segment[s].first_tile;
        tile_row = p.segment[s].tiles + static_cast<size_t>(row) * p.n_chunk * CODES_CHUNK;
    }
    __device__ __forceinline__ void next() {
        chunk += WARPS;
        settle();
    }
    // Starts the copy of the current chunk and moves on to the next. Commits one cp.async group per call, an empty
    // group past the end.
    __device__ __forceinline__ void copy(CopyTarget dst, int lane) {
        if (tile < n_local) {
            const uint8_t* src = tile_row + static_cast<size_t>(chunk) * CODES_CHUNK + lane * 16;
#pragma unroll
            for (int i = 0; i < CODES_CHUNK / 512; ++i)
                cp_async_streaming(dst + (32 * i + lane) * 16, src + 512 * i, p.streaming);
            next();
        }
        cp_async_commit();
    }
};

// Copies the packed rows of the launch's tokens to shared memory.
__device__ __forceinline__ void load_x(const W8A8Args& p, uint8_t* x) {
    const int n = p.end_token - p.first_token, all = p.n_chunk * n * (CODES_STEP / 16);
    for (int base = 0; base < all; base += 4 * THREADS) {
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int index = base + i * THREADS + threadIdx.x, row = index / 8;
            if (index < all)
                v[i] = __ldcg(
                    reinterpret_cast<const uint4*>(p.x + codes_row(row / n, p.first_token + row % n, p.n_tokens)) +
                    index % 8);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int index = base + i * THREADS + threadIdx.x;
            if (index < all) reinterpret_cast<uint4*>(x)[index] = v[i];
        }
    }
}

// Quantises x of one token into shared memory and returns the scale. Calls `meanwhile` after issuing the loads of x.
// Reads the weight of the norm before the PDL wait, because no earlier kernel writes it.
template <class VALUES, class In, bool NORMED, class Function>
__device__ __forceinline__ float make_x(const W8A8Args& p, uint8_t* x, Function meanwhile) {
    RmsNorm norm;
    if constexpr (NORMED) norm.load_weight(p.norm, p.k);
    grid_dependency_wait();
    QuantizedRow<VALUES, In, NORMED> row;
    row.load(norm, reinterpret_cast<const In*>(p.x), p.k, p.eps, true, meanwhile);
#pragma unroll
    for (int i = 0; i < NORM_PIECES; ++i) {
        const int piece = row.column(i) / 8;
        const uint2 words = exchange_codes(row.codes(i));
        if (piece < p.n_chunk * (CODES_STEP / 8))
            *reinterpret_cast<uint2*>(x + piece / 16 * CODES_STEP + codes_offset(piece, 0)) = words;
    }
    return row.scale;
}

// acc += chunk * x for eight tokens. `row` points to the row of x that the lane loads with ldmatrix, the row of
// `token`.
template <class VALUES>
__device__ __forceinline__ void multiply_chunk(const uint4 (&codes)[4], const uint8_t* row, int token, int lane,
                                               typename Codes8<VALUES>::Sum (&acc)[4]) {
    typename Codes8<VALUES>::Sum sum[4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t b[4];
        load_matrix<4>(b, row + (((4 * half + lane / 8) ^ (token & 7)) << 4));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            uint32_t a[4];
            operand8<VALUES>(a, codes[2 * half + j]);
            Codes8<VALUES>::multiply(sum, a, {b[2 * j], b[2 * j + 1]});
        }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[e] += sum[e];
}

// The indices, scales and residual of one output of the CTA. The kernel reads those of the first batch while the
// weights stream.
template <int COLS, int EPILOGUE>
struct W8A8DecodeOutput {
    static constexpr int PER_TILE = TILE_ROWS * COLS;
    int segment, row, token;
    bool valid;
    size_t index;
    float row_scale, up_scale, old;

    // Finds output i of the batch whose first tile row (GLU: pair of tile rows) is the CTA's tile row `first`.
    __device__ __forceinline__ void find(const W8A8Args& p, int first, int i, int count) {
        const int global = blockIdx.x + (first + i / PER_TILE) * gridDim.x;
        token = p.first_token + i % PER_TILE / TILE_ROWS;
        valid = i < count * PER_TILE && token < p.end_token && global < p.n_tiles;
        if (!valid) return;
        segment = EPILOGUE == GLU ? 0 : segment_of(p, global);
        row = (global - p.segment[segment].first_tile) * TILE_ROWS + i % TILE_ROWS;
        valid = row < p.segment[segment].n_rows;
        if (!valid) return;
        index = static_cast<size_t>(token) * p.segment[segment].n_rows + row;
        row_scale = row_scale_of(p.segment[segment], row);
        if (EPILOGUE == GLU) up_scale = row_scale_of(p.segment[1], row);
        if (EPILOGUE == ADD) old = __ldcg(p.residual + index);
    }
};

// Adds the partial sums of the warps for a batch of tile rows and writes the outputs.
template <class Sum, int COLS, int EPILOGUE>
__device__ __forceinline__ void write_batch(const W8A8Args& p, const W8A8DecodeSharedStorage<Sum, COLS>& storage,
                                            int parity, int batch, int count,
                                            const W8A8DecodeOutput<COLS, EPILOGUE>& first_output,
                                            const float* x_scale) {
    constexpr int PER_TILE = TILE_ROWS * COLS, WIDTH = EPILOGUE == GLU ? 2 : 1;
    for (int i = threadIdx.x; i < count / WIDTH * PER_TILE; i += THREADS) {
        W8A8DecodeOutput<COLS, EPILOGUE> o = first_output;
        if (batch > 0 || i >= THREADS) o.find(p, batch / WIDTH, i, count / WIDTH);
        if (!o.valid) continue;
        const int in_tile = i % TILE_ROWS * COLS + i % PER_TILE / TILE_ROWS;
        const Sum* part = storage.partial_of(parity, i / PER_TILE * WIDTH, 0) + in_tile;
        const float by = x_scale[o.token - p.first_token];
        const float y = scaled(sum_of_parts(part, PER_TILE), by, o.row_scale);
        float up = 0.0f;
        if constexpr (EPILOGUE == GLU) up = scaled(sum_of_parts(part + WARPS * PER_TILE, PER_TILE), by, o.up_scale);
        write_output<EPILOGUE>(p, p.segment[o.segment], o.index, y, up, o.old);
    }
}

template <class VALUES, int COLS, int PROLOGUE, int EPILOGUE>
__global__ void __launch_bounds__(THREADS, 1) w8a8_decode(const W8A8Args p) {
    using Sum = typename Codes8<VALUES>::Sum;
    constexpr bool PAIRS = EPILOGUE == GLU;
    constexpr int BATCH = W8A8DecodeSharedStorage<Sum, COLS>::BATCH;
    static_assert(COLS == 1 || PROLOGUE == CODES, "a block quantises one token");
    __shared__ float x_scale[COLS];
    SHARED_DYNAMIC(uint8_t, shared);
    const W8A8DecodeSharedStorage<Sum, COLS> storage(shared + WARPS * STAGES * CODES_CHUNK);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint8_t* stages = shared + warp * STAGES * CODES_CHUNK;
    const CopyTarget dst = copy_target(stages);
    const int ctas = gridDim.x;
    const int n_local = (p.n_tiles - static_cast<int>(blockIdx.x) + ctas - 1) / ctas * (PAIRS ? 2 : 1);

    grid_dependency_launch();
    W8A8DecodeChunks<PAIRS> ahead(p, warp, n_local), chunks(p, warp, n_local);
    // Copies of weights that precede the loads of x delay x. Prologues that load x right after the PDL wait therefore
    // issue the last copies after these loads.
    constexpr int PREFETCH = PROLOGUE != CODES && STAGES > 2 ? 2 : STAGES;
#pragma unroll
    for (int stage = 0; stage < PREFETCH; ++stage) ahead.copy(dst + stage * CODES_CHUNK, lane);
    const auto remaining_copies = [&] {
#pragma unroll
        for (int stage = PREFETCH; stage < STAGES; ++stage) ahead.copy(dst + stage * CODES_CHUNK, lane);
    };
    if constexpr (PROLOGUE == CODES) {
        grid_dependency_wait();
        if (threadIdx.x < p.end_token - p.first_token)
            x_scale[threadIdx.x] = __ldcg(p.x_scale + p.first_token + threadIdx.x);
        load_x(p, storage.x);
    } else {
        float scale;
        if constexpr (PROLOGUE == NORM)
            scale = make_x<VALUES, float, true>(p, storage.x, remaining_copies);
        else
            scale = make_x<VALUES, __half, false>(p, storage.x, remaining_copies);
        if (threadIdx.x == 0) x_scale[0] = scale;
    }
    __syncthreads();
    W8A8DecodeOutput<COLS, EPILOGUE> first_output;
    first_output.find(p, 0, threadIdx.x, min(BATCH, n_local) / (PAIRS ? 2 : 1));

    // mma columns past the last token repeat the last token.
    const int n = p.end_token - p.first_token, column = COLS == 1 ? 0 : min(lane % 8, n - 1);
    const uint8_t* row = storage.x + column * CODES_STEP;
    int stage = 0, parity = 0;
    for (int batch = 0; batch < n_local; batch += BATCH, parity ^= 1) {
        const int count = min(BATCH, n_local - batch);
        for (int i = 0; i < count; ++i) {
            Sum acc[4] = {};
            while (chunks.tile == batch + i) {
                uint8_t* slot = stages + stage * CODES_CHUNK;
                cp_async_wait<STAGES - 1>();
                __syncwarp();
                uint4 codes[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) codes[j] = reinterpret_cast<const uint4*>(slot)[32 * j + lane];
                __syncwarp();
                ahead.copy(dst + stage * CODES_CHUNK, lane);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                multiply_chunk<VALUES>(codes, row + chunks.chunk * n * CODES_STEP, p.first_token + column, lane, acc);
                chunks.next();
            }
            Sum* part = storage.partial_of(parity, i, warp);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int c = 2 * t + (e & 1);
                if (COLS > 1 || c == 0) part[(g + (e >> 1) * 8) * COLS + c] = acc[e];
            }
        }
        __syncthreads();
        write_batch<Sum, COLS, EPILOGUE>(p, storage, parity, batch, count, first_output, x_scale);
    }
    cp_async_wait<0>();
}
