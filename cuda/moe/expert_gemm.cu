// Grouped GEMM: rows of x that are sorted by expert (sort.cu), each times the matrix of its expert. A CTA makes a work
// tile of up to TOKENS (16, 32 or 64) rows x 256 rows of the matrix with 8 warps, a warp two tile rows, with the
// arithmetic of the prefill GEMM (gemm_prefill.cu), so the bits of a row depend neither on its place nor on TOKENS.
//
// With a few rows an expert this GEMM is bound by reading weights. So each warp has the codes of a whole chunk of its
// two tile rows in flight while it multiplies those before, and CTAs of few tokens share an SM. x comes chunk by chunk
// into two buffers in shared memory, with one barrier a chunk. Rows of x are found by their pair: nothing is gathered.
// A work tile with at most TOKENS / 2 rows multiplies only those.
//
// Launch: grid (work tiles at most, tile rows / 16; GLU: / 8). Tiles beyond the last one end at once.
#include "gemm/gemm_prefill.cu"

struct ExpertGemmArgs : GemmPrefillArgs {
    const int4* work;       // (expert, first row, end row, 0); expert -1: no work
    const int* pair_of;     // [pairs], of each row, or null: x has the order of the rows
    uint64_t expert_bytes;  // from the tiles of one expert to those of the next
    int pairs_per_x;        // pairs that multiply the same row of x
};

// With few tokens the registers are enough for three CTAs of four warps, which keep 55 KB of codes in flight, more than
// the 35 KB that hide a microsecond at 4.6 TB/s. They hide the loads of scales too; the others request those a chunk
// ahead.
constexpr int CTAS = TOKENS <= 16 ? 3 : TOKENS <= 32 ? 2 : 1;  // of an SM
constexpr bool SCALES_AHEAD = TOKENS > 16;
constexpr int CODES_AHEAD = TOKENS <= 32 ? 4 : 2;  // steps at most

// The mainloop of a warp over K.
template <class T>
struct ExpertMainloop {
    using Step = Tile<T::BITS, T::GROUP, T::SCALES, STEP, typename T::VALUES>;
    static constexpr int STEPS = T::CHUNK_K / STEP;
    const GemmPrefillArgs& p;
    __half* x;               // [2][STEPS][TOKENS][X_STRIDE]
    const int* rows;         // [TOKENS], rows of p.x
    const uint8_t* at[2];    // the chunks of the warp's two tile rows
    int first_token, token;  // see write_tile
    int g, t, lane;
    static constexpr int AHEAD = STEPS < CODES_AHEAD ? STEPS : CODES_AHEAD;
    ChunkCodes<Step> codes[AHEAD][2];
    ChunkScales<T> scales[2], next_scales[2];
    float acc[2][N_TILES][4];

    __device__ __forceinline__ __half* step_of(int chunk, int step) const {
        return x + ((chunk & 1) * STEPS + step) * TOKENS * X_STRIDE;
    }
    // Starts the copy of a chunk's columns of x. Columns past k become 0.
    __device__ __forceinline__ void copy(int chunk) const {
        constexpr int PER_ROW = T::CHUNK_K / 8, ALL = TOKENS * PER_ROW;
#pragma unroll
        for (int i = 0; i < (ALL + Q_THREADS - 1) / Q_THREADS; ++i) {
            const int piece = i * Q_THREADS + threadIdx.x, row = piece / PER_ROW, column = piece % PER_ROW * 8;
            if (ALL % Q_THREADS != 0 && piece >= ALL) break;
            const bool inside = chunk * T::CHUNK_K + column < p.k;
            const __half* src = p.x + static_cast<size_t>(rows[row]) * p.k + chunk * T::CHUNK_K + column;
            __half* dst = step_of(chunk, column / STEP) + row * X_STRIDE + column % STEP;
            cp_async<16>(dst, inside ? src : p.x, inside ? 16 : 0);
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void load_codes(int chunk, int step) {
        const size_t offset = static_cast<size_t>(chunk) * T::BYTES + T::SCALE_BYTES;
#pragma unroll
        for (int m = 0; m < 2; ++m)
            codes[step % AHEAD][m].load(at[m] + offset + step * Step::BASE_BYTES,
                                        at[m] + offset + T::BASE_BYTES + step * Step::EXTRA_BYTES, lane);
    }
    __device__ __forceinline__ void load_scales(int chunk, ChunkScales<T> (&dst)[2]) const {
        if constexpr (T::SCALED)
            for (int m = 0; m < 2; ++m) dst[m].load(at[m] + static_cast<size_t>(chunk) * T::BYTES, g);
    }
    // Steps P, P + 1, ... of a chunk; each is followed by the load of the same step of the next chunk.
    template <int N, int P>
    __device__ __forceinline__ void steps(int chunk, bool more) {
        if constexpr (P < STEPS) {
            const __half* from = step_of(chunk, P) + g * X_STRIDE;
            multiply_columns<T, Step, P, 0, N>(codes[P % AHEAD], scales, from, t, acc);
            multiply_columns<T, Step, P, 1, N>(codes[P % AHEAD], scales, from, t, acc);
            if (P + AHEAD < STEPS || more) load_codes(chunk + (P + AHEAD) / STEPS, (P + AHEAD) % STEPS);
            steps<N, P + 1>(chunk, more);
        }
    }
    template <int N>
    __device__ __forceinline__ void multiply() {
        for (int chunk = 0; chunk < p.n_chunk; ++chunk) {
            const bool more = chunk + 1 < p.n_chunk;
            if (SCALES_AHEAD)
                scales[0] = next_scales[0], scales[1] = next_scales[1];
            else
                load_scales(chunk, scales);
            cp_async_wait<0>();
            __syncthreads();  // all have this chunk of x, and none reads the one before it
            if (more) copy(chunk + 1);
            if (SCALES_AHEAD && more) load_scales(chunk + 1, next_scales);
            steps<N, 0>(chunk, more);
        }
    }
    __device__ __forceinline__ void run(int n_rows) {
        for (int m = 0; m < 2; ++m)
            for (int n = 0; n < N_TILES; ++n)
                for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.0f;
        if (SCALES_AHEAD) load_scales(0, next_scales);
#pragma unroll
        for (int step = 0; step < AHEAD; ++step) load_codes(0, step);
        __syncthreads();  // rows
        copy(0);
        if (n_rows <= TOKENS / 2)
            multiply<N_TILES / 2>();
        else
            multiply<N_TILES>();
    }
};

template <class T, int EPILOGUE>
__global__ void __launch_bounds__(Q_THREADS, CTAS) expert_gemm(const ExpertGemmArgs p) {
    __shared__ int rows[TOKENS];
    SHARED_DYNAMIC(__half, x);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    grid_dependency_launch();
    grid_dependency_wait();
    const int4 work = __ldcg(p.work + blockIdx.x);
    if (work.x < 0) return;
    if (threadIdx.x < TOKENS) {
        const int row = min(work.y + static_cast<int>(threadIdx.x), work.z - 1);
        rows[threadIdx.x] = p.pair_of ? __ldcg(p.pair_of + row) / p.pairs_per_x : row;
    }
    TileRow tiles[2];
    find_tiles<T, EPILOGUE>(p, blockIdx.y, warp, tiles);
    const uint64_t offset = static_cast<uint64_t>(work.x) * p.expert_bytes;
    ExpertMainloop<T> mainloop{p, x, rows, {tiles[0].chunks + offset, tiles[1].chunks + offset}};
    mainloop.first_token = work.y, mainloop.token = 0;
    mainloop.g = lane / 4, mainloop.t = lane % 4, mainloop.lane = lane;
    mainloop.run(work.z - work.y);
    write_tile<EPILOGUE>(p, tiles, mainloop, work.z, work.x);
}
