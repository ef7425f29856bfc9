// Tiles of 8 bits x 8-bit activations (w8a8.cuh), many tokens at a time: for prompts.
//
// A block makes 128 rows x 128 tokens; its 8 warps stand 4 x 2, a warp has two tile rows and 64 tokens. Weights come
// from global memory straight into registers as the mma's A operand, 128 columns ahead of their use; the activations of
// the 128 tokens go through a ring in shared memory (cp.async) and from there by ldmatrix.
//
// Epilogues: STORE (float out), ADD (float out = residual + y), GLU (half out = act(gate) * up; then a warp's two tile
// rows are one of gate and one of up).
#include "w8a8/w8a8.cuh"

constexpr int Q_WARPS = 8;
constexpr int Q_THREADS = Q_WARPS * 32;
constexpr int M_WARPS = 4;
constexpr int TILE_ROWS_PER_BLOCK = 8;
constexpr int TOKENS = 128;  // of a block
constexpr int WARP_TOKENS = 64;
constexpr int N_TILES = WARP_TOKENS / 8;
constexpr int X_BYTES = TOKENS * CODES_STEP;  // of a stage

#ifndef X_STAGES
#define X_STAGES 3
#endif

// The K loop of a warp.
template <class VALUES>
struct Loop {
    using C = Codes8<VALUES>;
    using Sum = typename C::Sum;
    const Product& p;
    uint8_t* ring;
    const uint8_t* chunks[2];  // of the warp's tile rows
    int first_token, token, lane;
    uint4 codes[2][4];
    Sum acc[2][N_TILES][4];

    __device__ __forceinline__ uint8_t* stage(int step) const { return ring + step % X_STAGES * X_BYTES; }

    // 128 columns of 128 tokens on their way; tokens past the end repeat the last.
    __device__ __forceinline__ void copy(int step) const {
        if (step < p.n_chunk) {
            const int last = codes_tokens(p.n_tokens) - 1;
#pragma unroll
            for (int i = 0; i < X_BYTES / 16 / Q_THREADS; ++i) {
                const int piece = i * Q_THREADS + threadIdx.x, row = piece / 8;
                const uint8_t* from = p.x + codes_row(step, min(first_token + row, last), p.n_tokens);
                cp_async<16>(stage(step) + piece * 16, from + piece % 8 * 16);
            }
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void load_codes(int chunk, uint4 (&to)[2][4]) const {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const uint4* from = reinterpret_cast<const uint4*>(chunks[m] + static_cast<size_t>(chunk) * CODES_CHUNK);
#pragma unroll
            for (int j = 0; j < 4; ++j) to[m][j] = __ldg(from + 32 * j + lane);
        }
    }
    // Two tile rows x COUNT times eight tokens from the FIRST eight on x 64 columns, half HALF of the chunk. Products that
    // add to one sum are far apart.
    template <int HALF, int FIRST, int COUNT>
    __device__ __forceinline__ void multiply(const uint8_t* x, Sum (&sums)[2][COUNT][4]) const {
        uint32_t a[2][2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) operand8<VALUES>(a[m][j], codes[m][2 * HALF + j]);
        const int row = lane % 8, piece = 4 * HALF + lane / 8;
        const uint8_t* from = x + (token + 8 * FIRST + row) * CODES_STEP + ((piece ^ row) << 4);
        uint32_t b[COUNT][4];
#pragma unroll
        for (int n = 0; n < COUNT; ++n) load_matrix<4>(b[n], from + n * 8 * CODES_STEP);
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int n = 0; n < COUNT; ++n)
#pragma unroll
                for (int m = 0; m < 2; ++m) C::multiply(sums[m][n], a[m][j], {b[n][2 * j], b[n][2 * j + 1]});
    }
    // Sums of their own for this chunk, of sixteen tokens after sixteen.
    template <int FIRST>
    __device__ __forceinline__ void multiply_and_add(const uint8_t* x) {
        Sum part[2][2][4] = {};
        multiply<0, FIRST>(x, part);
        multiply<1, FIRST>(x, part);
#pragma unroll
        for (int i = 0; i < 16; ++i) acc[i / 8][FIRST + i / 4 % 2][i % 4] += part[i / 8][i / 4 % 2][i % 4];
        __syncwarp();  // keeps the compiler from doing all of them at once, for which registers are too few
        if constexpr (FIRST + 2 < N_TILES) multiply_and_add<FIRST + 2>(x);
    }
    __device__ __forceinline__ void multiply_chunk(const uint8_t* x) {
        if constexpr (C::EXACT) {
            multiply<0, 0>(x, acc);
            multiply<1, 0>(x, acc);
        } else {
            multiply_and_add<0>(x);
        }
    }
    __device__ __forceinline__ void run() {
#pragma unroll
        for (int i = 0; i < 2 * N_TILES * 4; ++i) acc[i / (N_TILES * 4)][i / 4 % N_TILES][i % 4] = 0;
        load_codes(0, codes);
#pragma unroll
        for (int i = 0; i < X_STAGES - 1; ++i) copy(i);
        for (int chunk = 0; chunk < p.n_chunk; ++chunk) {
            cp_async_wait<X_STAGES - 2>();
            __syncthreads();  // everybody's pieces are there, and nobody reads the stage that is copied to next
            copy(chunk + X_STAGES - 1);
            uint4 next[2][4];
            if (C::EXACT && chunk + 1 < p.n_chunk) load_codes(chunk + 1, next);
            multiply_chunk(stage(chunk));
            if (!C::EXACT && chunk + 1 < p.n_chunk) load_codes(chunk + 1, next);  // floats have no registers to spare
#pragma unroll
            for (int i = 0; i < 8; ++i) codes[i / 4][i % 4] = next[i / 4][i % 4];
        }
        cp_async_wait<0>();
    }
};

// Sum e of the warp's n-th eight tokens.
template <int EPILOGUE, class Sum>
__device__ __forceinline__ void write_one(const Product& p, const TileRow& tile, int row_in_tile, int token, Sum sum,
                                          Sum up) {
    const Segment& segment = p.segment[tile.segment];
    const int row = tile.row + row_in_tile;
    if (!tile.valid || row >= segment.n_rows || token >= p.n_tokens) return;
    const size_t at = static_cast<size_t>(token) * segment.n_rows + row;
    const float x_scale = p.x_scale[token], y = scaled(sum, x_scale, row_scale_of(segment, row));
    const float other = EPILOGUE == GLU ? scaled(up, x_scale, row_scale_of(p.segment[1], row)) : 0.0f;
    write_output<EPILOGUE>(p, segment, at, y, other, EPILOGUE == ADD ? __ldcg(p.residual + at) : 0.0f);
}

// grid (tokens / TOKENS, tile rows / 8; GLU: / 4)
template <class VALUES, int EPILOGUE>
__global__ void __launch_bounds__(Q_THREADS, 1) w8a8_prefill(const Product p) {
    SHARED_DYNAMIC(uint8_t, ring);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m_warp = warp % M_WARPS;
    TileRow tiles[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        const int i = EPILOGUE == GLU ? m * (TILE_ROWS_PER_BLOCK / 2) + m_warp : m_warp * 2 + m;
        tiles[m] = TileRow::of<EPILOGUE, TILE_ROWS_PER_BLOCK>(p, blockIdx.y, i, CODES_CHUNK);
    }
    grid_dependency_launch();
    grid_dependency_wait();
    Loop<VALUES> loop{p, ring, {tiles[0].chunks, tiles[1].chunks}};
    loop.first_token = blockIdx.x * TOKENS, loop.token = warp / M_WARPS * WARP_TOKENS, loop.lane = lane;
    loop.run();
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = lane / 4 + (e >> 1) * 8;
            const int token = loop.first_token + loop.token + n * 8 + lane % 4 * 2 + (e & 1);
            write_one<EPILOGUE>(p, tiles[0], row, token, loop.acc[0][n][e], loop.acc[1][n][e]);
            if (EPILOGUE != GLU) write_one<EPILOGUE>(p, tiles[1], row, token, loop.acc[1][n][e], loop.acc[1][n][e]);
        }
}
