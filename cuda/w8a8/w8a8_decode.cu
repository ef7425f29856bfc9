// Tiles of 8 bits x 8-bit activations (w8a8.cuh) of a decode step's few tokens: bound by reading the weights.
//
// As in gemm_decode.cu everything serves one stream: one block per multiprocessor, each warp copying its own chunks
// into its own ring in shared memory (cp.async, no barrier between warps), the first STAGES chunks before the kernel
// waits for the one that makes x. The chunks of all of the block's tile rows, one after the other, are dealt out to the
// warps in turn. A warp leaves its sums of each tile row in shared memory; after a batch of tile rows one barrier lets
// the threads add them up, in one order, and write the outputs.
//
// Instances: w8a8_decode<VALUES, COLS, PROLOGUE, EPILOGUE>; COLS is 1 (one token) or 8 (that many at most). Prologue
// CODES: x is quantised and packed. For one token, each block may quantise x by itself, which costs less than a kernel
// before it does: HALVES, of x in halves; NORM, of norm(x), x in floats.
#include "w8a8/quantize_rows.cuh"

#ifndef STAGES
#define STAGES 3
#endif

enum Prologue { CODES, HALVES, NORM };

// How the shared memory behind the rings is cut: sums of warps [2][BATCH][WARPS][16][COLS], x [step][token][128].
template <class Sum, int COLS>
struct Room {
    static constexpr int BATCH = COLS == 1 ? 8 : 2;  // tile rows between two barriers
    static constexpr int PARTIAL = BATCH * WARPS * TILE_ROWS * COLS;
    Sum* partial;
    uint8_t* x;

    __device__ __forceinline__ Room(uint8_t* memory)
        : partial(reinterpret_cast<Sum*>(memory)), x(memory + 2 * PARTIAL * sizeof(Sum)) {}
    __device__ __forceinline__ Sum* partial_of(int parity, int tile, int warp) const {
        return partial + parity * PARTIAL + (tile * WARPS + warp) * TILE_ROWS * COLS;
    }
};

// The chunks of a warp in the order in which they are copied and multiplied.
template <bool PAIRS>
struct Walk {
    const Product& p;
    int n_local, tile, chunk;
    const uint8_t* tile_row;

    __device__ __forceinline__ Walk(const Product& product, int warp, int n_local_)
        : p(product), n_local(n_local_), tile(-1), chunk(warp + product.n_chunk) {
        settle();
    }
    // To the tile row that has the chunk. Tile rows are dealt out to the blocks in turn; the gate and up rows of a pair
    // to the same block.
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
    // Starts the copy of the current chunk (one group, empty past the end) and goes on.
    __device__ __forceinline__ void copy(CopyTarget to, int lane) {
        if (tile < n_local) {
            const uint8_t* from = tile_row + static_cast<size_t>(chunk) * CODES_CHUNK + lane * 16;
#pragma unroll
            for (int i = 0; i < CODES_CHUNK / 512; ++i)
                cp_async_streaming(to + (32 * i + lane) * 16, from + 512 * i, p.streaming);
            next();
        }
        cp_async_commit();
    }
};

// The rows of the launch's tokens, as they are packed.
__device__ __forceinline__ void load_x(const Product& p, uint8_t* x) {
    const int n = p.end_token - p.first_token, all = p.n_chunk * n * (CODES_STEP / 16);
    for (int base = 0; base < all; base += 4 * THREADS) {
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = base + i * THREADS + threadIdx.x, row = at / 8;
            if (at < all)
                v[i] = __ldcg(reinterpret_cast<const uint4*>(
                                  p.x + codes_row(row / n, p.first_token + row % n, p.n_tokens)) + at % 8);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = base + i * THREADS + threadIdx.x;
            if (at < all) reinterpret_cast<uint4*>(x)[at] = v[i];
        }
    }
}

// x of one token, quantised here; its scale. `meanwhile` is called when the loads are under way. The norm's weights
// depend on no earlier kernel and are read before the wait.
template <class VALUES, class In, bool NORMED, class Function>
__device__ __forceinline__ float make_x(const Product& p, uint8_t* x, Function meanwhile) {
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
            *reinterpret_cast<uint2*>(x + piece / 16 * CODES_STEP + codes_place(piece, 0)) = words;
    }
    return row.scale;
}

// A chunk times eight tokens. `row` is where a lane's row of an ldmatrix begins, of token `token`.
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

// What an output of the block's takes beside its sums; read for the first batch while the weights stream.
template <int COLS, int EPILOGUE>
struct Output {
    static constexpr int PER_TILE = TILE_ROWS * COLS;
    int segment, row, token;
    bool valid;
    size_t at;
    float row_scale, up_scale, old;

    // Output i of the batch that begins at tile row `first` (GLU: pair of tile rows) of the block.
    __device__ __forceinline__ void find(const Product& p, int first, int i, int count) {
        const int global = blockIdx.x + (first + i / PER_TILE) * gridDim.x;
        token = p.first_token + i % PER_TILE / TILE_ROWS;
        valid = i < count * PER_TILE && token < p.end_token && global < p.n_tiles;
        if (!valid) return;
        segment = EPILOGUE == GLU ? 0 : segment_of(p, global);
        row = (global - p.segment[segment].first_tile) * TILE_ROWS + i % TILE_ROWS;
        valid = row < p.segment[segment].n_rows;
        if (!valid) return;
        at = static_cast<size_t>(token) * p.segment[segment].n_rows + row;
        row_scale = row_scale_of(p.segment[segment], row);
        if (EPILOGUE == GLU) up_scale = row_scale_of(p.segment[1], row);
        if (EPILOGUE == ADD) old = __ldcg(p.residual + at);
    }
};

// Adds up the warps' sums of a batch of tile rows and writes the outputs.
template <class Sum, int COLS, int EPILOGUE>
__device__ __forceinline__ void write_batch(const Product& p, const Room<Sum, COLS>& room, int parity, int batch,
                                            int count, const Output<COLS, EPILOGUE>& early, const float* x_scale) {
    constexpr int PER_TILE = TILE_ROWS * COLS, WIDTH = EPILOGUE == GLU ? 2 : 1;
    for (int i = threadIdx.x; i < count / WIDTH * PER_TILE; i += THREADS) {
        Output<COLS, EPILOGUE> o = early;
        if (batch > 0 || i >= THREADS) o.find(p, batch / WIDTH, i, count / WIDTH);
        if (!o.valid) continue;
        const int in_tile = i % TILE_ROWS * COLS + i % PER_TILE / TILE_ROWS;
        const Sum* part = room.partial_of(parity, i / PER_TILE * WIDTH, 0) + in_tile;
        const float by = x_scale[o.token - p.first_token];
        const float y = scaled(sum_of_parts(part, PER_TILE), by, o.row_scale);
        float up = 0.0f;
        if constexpr (EPILOGUE == GLU)
            up = scaled(sum_of_parts(part + WARPS * PER_TILE, PER_TILE), by, o.up_scale);
        write_output<EPILOGUE>(p, p.segment[o.segment], o.at, y, up, o.old);
    }
}

template <class VALUES, int COLS, int PROLOGUE, int EPILOGUE>
__global__ void __launch_bounds__(THREADS, 1) w8a8_decode(const Product p) {
    using Sum = typename Codes8<VALUES>::Sum;
    constexpr bool PAIRS = EPILOGUE == GLU;
    constexpr int BATCH = Room<Sum, COLS>::BATCH;
    static_assert(COLS == 1 || PROLOGUE == CODES, "a block quantises one token");
    __shared__ float x_scale[COLS];
    SHARED_DYNAMIC(uint8_t, shared);
    const Room<Sum, COLS> room(shared + WARPS * STAGES * CODES_CHUNK);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint8_t* ring = shared + warp * STAGES * CODES_CHUNK;
    const CopyTarget to = copy_target(ring);
    const int blocks = gridDim.x;
    const int n_local = (p.n_tiles - static_cast<int>(blockIdx.x) + blocks - 1) / blocks * (PAIRS ? 2 : 1);

    grid_dependency_launch();
    Walk<PAIRS> ahead(p, warp, n_local), walk(p, warp, n_local);
    // Chunks asked for before x delay it. Where x comes right after the wait the last ones are asked for behind it.
    constexpr int EARLY = PROLOGUE != CODES && STAGES > 2 ? 2 : STAGES;
#pragma unroll
    for (int stage = 0; stage < EARLY; ++stage) ahead.copy(to + stage * CODES_CHUNK, lane);
    const auto late_copies = [&] {
#pragma unroll
        for (int stage = EARLY; stage < STAGES; ++stage) ahead.copy(to + stage * CODES_CHUNK, lane);
    };
    if constexpr (PROLOGUE == CODES) {
        grid_dependency_wait();
        if (threadIdx.x < p.end_token - p.first_token) x_scale[threadIdx.x] = __ldcg(p.x_scale + p.first_token + threadIdx.x);
        load_x(p, room.x);
    } else {
        float scale;
        if constexpr (PROLOGUE == NORM)
            scale = make_x<VALUES, float, true>(p, room.x, late_copies);
        else
            scale = make_x<VALUES, __half, false>(p, room.x, late_copies);
        if (threadIdx.x == 0) x_scale[0] = scale;
    }
    __syncthreads();
    Output<COLS, EPILOGUE> early;
    early.find(p, 0, threadIdx.x, min(BATCH, n_local) / (PAIRS ? 2 : 1));

    // Columns of the mma without a token repeat the last one's.
    const int n = p.end_token - p.first_token, column = COLS == 1 ? 0 : min(lane % 8, n - 1);
    const uint8_t* row = room.x + column * CODES_STEP;
    int stage = 0, parity = 0;
    for (int batch = 0; batch < n_local; batch += BATCH, parity ^= 1) {
        const int count = min(BATCH, n_local - batch);
        for (int i = 0; i < count; ++i) {
            Sum acc[4] = {};
            while (walk.tile == batch + i) {
                uint8_t* slot = ring + stage * CODES_CHUNK;
                cp_async_wait<STAGES - 1>();
                __syncwarp();
                uint4 codes[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) codes[j] = reinterpret_cast<const uint4*>(slot)[32 * j + lane];
                __syncwarp();
                ahead.copy(to + stage * CODES_CHUNK, lane);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                multiply_chunk<VALUES>(codes, row + walk.chunk * n * CODES_STEP, p.first_token + column, lane, acc);
                walk.next();
            }
            Sum* part = room.partial_of(parity, i, warp);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int to = 2 * t + (e & 1);
                if (COLS > 1 || to == 0) part[(g + (e >> 1) * 8) * COLS + to] = acc[e];
            }
        }
        __syncthreads();
        write_batch<Sum, COLS, EPILOGUE>(p, room, parity, batch, count, early, x_scale);
    }
    cp_async_wait<0>();
}
