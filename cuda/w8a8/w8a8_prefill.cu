// Prefill GEMM of 8-bit weights and 8-bit activations (w8a8.cuh), with mma.sync:
//
//        y[T, N] = (q[T, K] W[N, K]^T) * x_scale[T] * row_scale[N]
//
// Launch: grid (T / 128, N / 128), GLU: (T / 128, N / 64); 8 warps per CTA. A CTA computes a tile of 128 rows x 128
// tokens with 4 x 2 warps; a warp computes two tile rows (32 rows) x 64 tokens. A warp loads its weights from global
// memory into the registers of the A operand, 128 columns before it multiplies them: the tile layout needs no shared
// memory. The activations of the 128 tokens go through a cp.async pipeline of X_STAGES stages in shared memory, which
// ldmatrix reads, because the warps share them.
//
//        STORE   float out = y
//        ADD     float out = residual + y
//        GLU     f16 out = act(gate) * up; the two tile rows of a warp are one of gate and one of up
#include "w8a8/w8a8.cuh"

constexpr int Q_WARPS = 8;
constexpr int Q_THREADS = Q_WARPS * 32;
constexpr int M_WARPS = 4;
constexpr int TILE_ROWS_PER_CTA = 8;
constexpr int TOKENS = 128;  // tokens per CTA
constexpr int WARP_TOKENS = 64;
constexpr int N_TILES = WARP_TOKENS / 8;
constexpr int X_BYTES = TOKENS * CODES_STEP;  // bytes of a stage

#ifndef X_STAGES
#define X_STAGES 3
#endif

// The main loop of a warp over K.
template <class VALUES>
struct W8A8PrefillMainloop {
    using C = Codes8<VALUES>;
    using Sum = typename C::Sum;
    const W8A8Args& p;
    uint8_t* stages;
    const uint8_t* chunks[2];  // the chunks of the warp's two tile rows
    int first_token, token, lane;
    uint4 codes[2][4];
    Sum acc[2][N_TILES][4];

    __device__ __forceinline__ uint8_t* stage(int step) const { return stages + step % X_STAGES * X_BYTES; }

    // Starts the copy of 128 columns of 128 tokens. Tokens past the end repeat the last token.
    __device__ __forceinline__ void copy(int step) const {
        if (step < p.n_chunk) {
            const int last = codes_tokens(p.n_tokens) - 1;
#pragma unroll
            for (int i = 0; i < X_BYTES / 16 / Q_THREADS; ++i) {
                const int piece = i * Q_THREADS + threadIdx.x, row = piece / 8;
                const uint8_t* src = p.x + codes_row(step, min(first_token + row, last), p.n_tokens);
                cp_async<16>(stage(step) + piece * 16, src + piece % 8 * 16);
            }
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void load_codes(int chunk, uint4 (&dst)[2][4]) const {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const uint4* src = reinterpret_cast<const uint4*>(chunks[m] + static_cast<size_t>(chunk) * CODES_CHUNK);
#pragma unroll
            for (int j = 0; j < 4; ++j) dst[m][j] = __ldg(src + 32 * j + lane);
        }
    }
    // sums += two tile rows x COUNT groups of eight tokens, from group FIRST on, over 64 columns: half HALF of the
    // chunk. The loop order keeps mma instructions that add to the same sum far apart.
    template <int HALF, int FIRST, int COUNT>
    __device__ __forceinline__ void multiply(const uint8_t* x, Sum (&sums)[2][COUNT][4]) const {
        uint32_t a[2][2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) operand8<VALUES>(a[m][j], codes[m][2 * HALF + j]);
        const int row = lane % 8, piece = 4 * HALF + lane / 8;
        const uint8_t* src = x + (token + 8 * FIRST + row) * CODES_STEP + ((piece ^ row) << 4);
        uint32_t b[COUNT][4];
#pragma unroll
        for (int n = 0; n < COUNT; ++n) load_matrix<4>(b[n], src + n * 8 * CODES_STEP);
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int n = 0; n < COUNT; ++n)
#pragma unroll
                for (int m = 0; m < 2; ++m) C::multiply(sums[m][n], a[m][j], {b[n][2 * j], b[n][2 * j + 1]});
    }
    // Sums this chunk in separate registers, 16 tokens at a time, and adds these sums to acc.
    template <int FIRST>
    __device__ __forceinline__ void multiply_and_add(const uint8_t* x) {
        Sum part[2][2][4] = {};
        multiply<0, FIRST>(x, part);
        multiply<1, FIRST>(x, part);
#pragma unroll
        for (int i = 0; i < 16; ++i) acc[i / 8][FIRST + i / 4 % 2][i % 4] += part[i / 8][i / 4 % 2][i % 4];
        __syncwarp();  // keeps the compiler from interleaving all groups of 16 tokens, which needs too many registers
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
            __syncthreads();  // this stage has arrived, and no warp reads the stage that is copied to next
            copy(chunk + X_STAGES - 1);
            uint4 next[2][4];
            if (C::EXACT && chunk + 1 < p.n_chunk) load_codes(chunk + 1, next);
            multiply_chunk(stage(chunk));
            if (!C::EXACT && chunk + 1 < p.n_chunk) load_codes(chunk + 1, next);  // later: E4M3 has no free registers
#pragma unroll
            for (int i = 0; i < 8; ++i) codes[i / 4][i % 4] = next[i / 4][i % 4];
        }
        cp_async_wait<0>();
    }
};

// Writes the output of one (row, token); nothing past the last row or token.
template <int EPILOGUE, class Sum>
__device__ __forceinline__ void write_one(const W8A8Args& p, const TileRow& tile, int row_in_tile, int token, Sum sum,
                                          Sum up) {
    const Segment& segment = p.segment[tile.segment];
    const int row = tile.row + row_in_tile;
    if (!tile.valid || row >= segment.n_rows || token >= p.n_tokens) return;
    const size_t index = static_cast<size_t>(token) * segment.n_rows + row;
    const float x_scale = p.x_scale[token], y = scaled(sum, x_scale, row_scale_of(segment, row));
    const float other = EPILOGUE == GLU ? scaled(up, x_scale, row_scale_of(p.segment[1], row)) : 0.0f;
    write_output<EPILOGUE>(p, segment, index, y, other, EPILOGUE == ADD ? __ldcg(p.residual + index) : 0.0f);
}

template <class VALUES, int EPILOGUE>
__global__ void __launch_bounds__(Q_THREADS, 1) w8a8_prefill(const W8A8Args p) {
    SHARED_DYNAMIC(uint8_t, stages);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m_warp = warp % M_WARPS;
    TileRow tiles[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        const int i = EPILOGUE == GLU ? m * (TILE_ROWS_PER_CTA / 2) + m_warp : m_warp * 2 + m;
        tiles[m] = TileRow::of<EPILOGUE, TILE_ROWS_PER_CTA>(p, blockIdx.y, i, CODES_CHUNK);
    }
    grid_dependency_launch();
    grid_dependency_wait();
    W8A8PrefillMainloop<VALUES> mainloop{p, stages, {tiles[0].chunks, tiles[1].chunks}};
    mainloop.first_token = blockIdx.x * TOKENS, mainloop.token = warp / M_WARPS * WARP_TOKENS, mainloop.lane = lane;
    mainloop.run();
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = lane / 4 + (e >> 1) * 8;
            const int token = mainloop.first_token + mainloop.token + n * 8 + lane % 4 * 2 + (e & 1);
            write_one<EPILOGUE>(p, tiles[0], row, token, mainloop.acc[0][n][e], mainloop.acc[1][n][e]);
            if (EPILOGUE != GLU)
                write_one<EPILOGUE>(p, tiles[1], row, token, mainloop.acc[1][n][e], mainloop.acc[1][n][e]);
        }
}
