// Prefill GEMM for any GPU: y[T, N] = x[T, K] W[N, K]^T, with W in tiles (tile.cuh), x f16 [T, K] and f32 accumulation
// over all of K.
//
// Launch: grid (ceil(T / 128), tile rows / 8; GLU: / 4). A CTA makes 128 rows x 128 tokens with 8 warps, 4 along the
// rows x 2 along the tokens; a warp makes two tile rows (32 rows) x 64 tokens.
//
// A warp loads codes from global memory directly into registers, in the order of the MMA's A operand, 64 columns ahead
// of their use, and converts them to scaled f16, once for 64 tokens: w = d * (u - zero) (+ m), rounded once. Shared
// memory holds only x: a cp.async pipeline of X_STAGES stages, each of 64 columns of the CTA's 128 tokens, because all
// warps of a row of warps need the same x.
//
// Rounding weights to f16 is less exact than gemm_decode.cu, which multiplies codes as integers; decode steps use that
// kernel.
//
// Epilogues STORE, ADD and GLU as in gemm_decode.cu. GLU: the two tile rows of a warp are one of gate and the same one
// of up.
#include "lib/activation.cuh"
#include "lib/mma.cuh"
#include "gemm/gemm.cuh"
#include "layout/tile.cuh"

#ifndef X_STAGES
#define X_STAGES 3
#endif
#ifndef TILE_TOKENS  // fewer for experts (moe/expert_gemm.cu): all warps are then along the rows
#define TILE_TOKENS 128
#endif

constexpr int TOKENS = TILE_TOKENS;  // tokens of a CTA
constexpr int Q_WARPS = TOKENS <= 32 ? 4 : 8;
constexpr int Q_THREADS = Q_WARPS * 32;
constexpr int M_WARPS = TOKENS < 128 ? Q_WARPS : 4;
constexpr int TILE_ROWS_PER_CTA = 2 * M_WARPS;
constexpr int WARP_TOKENS = TOKENS / (Q_WARPS / M_WARPS);
constexpr int N_TILES = WARP_TOKENS / 8;
constexpr int STEP = 64;  // columns of a stage
constexpr int NO_EXPERT = -1;
// f16 elements per token; the padding puts the rows of eight tokens on different banks
constexpr int X_STRIDE = STEP + 32;

struct GemmPrefillArgs : GemmArgs {
    const __half* x;        // [n_tokens, k]
    const float* residual;  // ADD: [n_tokens, n_rows] of the only segment
    float soft_cap;         // STORE: cap * tanh(y / cap); 0: no cap
};

// Starts the copy of 64 columns of the CTA's 128 tokens to a stage. Columns past k become 0; tokens past the end repeat
// the last token, and their outputs are not stored.
__device__ __forceinline__ void copy_x(const GemmPrefillArgs& p, __half* dst, int first_token, int first_column) {
#pragma unroll
    for (int i = 0; i < TOKENS * STEP / 8 / Q_THREADS; ++i) {
        const int piece = i * Q_THREADS + threadIdx.x, token = piece / (STEP / 8), column = piece % (STEP / 8) * 8;
        const __half* src = p.x + static_cast<size_t>(min(first_token + token, p.n_tokens - 1)) * p.k;
        const bool inside = first_column + column < p.k;
        cp_async<16>(dst + token * X_STRIDE + column, inside ? src + first_column + column : p.x, inside ? 16 : 0);
    }
}

// Scales the codes of one MMA. unpack() returns shift * u * 2^-24 as f16, where shift is 16 for odd groups of nibbles.
// Multiplying by 2^15 / shift gives u * 2^-9, and d * 512 gives d * u.
template <class T, int J>
__device__ __forceinline__ void scale_codes(uint32_t (&a)[4], const RowScales& s) {
    constexpr float shift_of[2] = {T::template shift<J, 0>(), T::template shift<J, 1>()};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const __half2 up = __float2half2_rn(32768.0f / shift_of[h]);
        const __half2 d = __float2half2_rn(s.d[h] * 512.0f);
        const __half2 shift = __float2half2_rn(T::MIN ? s.m[h] : -static_cast<float>(T::ZERO) * s.d[h]);
#pragma unroll
        for (int i = 0; i < 2; ++i) a[2 * i + h] = as_bits(__hfma2(__hmul2(as_half2(a[2 * i + h]), up), d, shift));
    }
}

// The scaled A operand of the S-th 16 columns of group J (0 or 1) of a step. P: the step in the chunk.
template <class T, class Step, int P, int J, int S>
__device__ __forceinline__ void operand(const ChunkCodes<Step>& codes, const ChunkScales<T>& scales, uint32_t (&a)[4]) {
    codes.template unpack<J, S>(a);
    if constexpr (T::SCALED) {
        constexpr int group = T::GROUP == 16 ? 2 * (2 * P + J) + S : 2 * P + J;
        scale_codes<T, J>(a, scales.template get<group>());
    }
}

// acc += two tile rows x 32 columns x N * 8 tokens. `x` points at the first token of this lane.
template <class T, class Step, int P, int J, int N = N_TILES>
__device__ __forceinline__ void multiply_columns(const ChunkCodes<Step> (&codes)[2], const ChunkScales<T> (&scales)[2],
                                                 const __half* x, int t, float (&acc)[2][N_TILES][4]) {
    uint32_t a[2][2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        operand<T, Step, P, J, 0>(codes[m], scales[m], a[m][0]);
        operand<T, Step, P, J, 1>(codes[m], scales[m], a[m][1]);
    }
    uint4 b[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const __half* src = x + n * 8 * X_STRIDE + J * 32;
        if constexpr (T::GROUP == 16 || T::FLOAT) {
            const uint2 low = *reinterpret_cast<const uint2*>(src + 4 * t);
            const uint2 high = *reinterpret_cast<const uint2*>(src + 16 + 4 * t);
            b[n] = make_uint4(low.x, low.y, high.x, high.y);
        } else {
            b[n] = *reinterpret_cast<const uint4*>(src + 8 * t);
        }
    }
    // MMAs that add to the same accumulators are far apart, so that they do not wait for each other.
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int m = 0; m < 2; ++m) mma_m16n8k16_f16(acc[m][n], a[m][0], {b[n].x, b[n].y});
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int m = 0; m < 2; ++m) mma_m16n8k16_f16(acc[m][n], a[m][1], {b[n].z, b[n].w});
}

// The mainloop of a warp over K.
template <class T>
struct GemmPrefillMainloop {
    using Step = Tile<T::BITS, T::GROUP, T::SCALES, STEP, typename T::VALUES>;
    static constexpr int STEPS = T::CHUNK_K / STEP;
    const GemmPrefillArgs& p;
    __half* stages;
    const uint8_t* chunks[2];  // the chunks of the warp's two tile rows
    int first_token, token, g, t, lane, n_steps;
    ChunkCodes<Step> codes[2];
    ChunkScales<T> scales[2];
    float acc[2][N_TILES][4];

    __device__ __forceinline__ __half* stage(int step) const { return stages + step % X_STAGES * TOKENS * X_STRIDE; }

    __device__ __forceinline__ void copy(int step) {
        if (step < n_steps) copy_x(p, stage(step), first_token, step * STEP);
        cp_async_commit();
    }
    __device__ __forceinline__ void load_codes(int step, ChunkCodes<Step> (&dst)[2]) const {
        const size_t offset = static_cast<size_t>(step / STEPS) * T::BYTES + T::SCALE_BYTES;
#pragma unroll
        for (int m = 0; m < 2; ++m)
            dst[m].load(chunks[m] + offset + step % STEPS * Step::BASE_BYTES,
                        chunks[m] + offset + T::BASE_BYTES + step % STEPS * Step::EXTRA_BYTES, lane);
    }
    __device__ __forceinline__ void load_scales(int chunk) {
        if constexpr (T::SCALED)
            for (int m = 0; m < 2; ++m) scales[m].load(chunks[m] + static_cast<size_t>(chunk) * T::BYTES, g);
    }
    // Steps P, P + 1, ... of a chunk.
    template <int P>
    __device__ __forceinline__ void steps(int chunk) {
        if constexpr (P < STEPS) {
            const int step = chunk * STEPS + P;
            cp_async_wait<X_STAGES - 2>();
            // all threads' copies of this stage are complete, and no thread reads the stage that is refilled next
            __syncthreads();
            copy(step + X_STAGES - 1);
            ChunkCodes<Step> next[2];
            if (step + 1 < n_steps) load_codes(step + 1, next);
            const __half* x = stage(step) + (token + g) * X_STRIDE;
            multiply_columns<T, Step, P, 0>(codes, scales, x, t, acc);
            multiply_columns<T, Step, P, 1>(codes, scales, x, t, acc);
            codes[0] = next[0], codes[1] = next[1];
            steps<P + 1>(chunk);
        }
    }
    __device__ __forceinline__ void run() {
        for (int m = 0; m < 2; ++m)
            for (int n = 0; n < N_TILES; ++n)
                for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.0f;
        load_codes(0, codes);
#pragma unroll
        for (int i = 0; i < X_STAGES - 1; ++i) copy(i);
        for (int chunk = 0; chunk < p.n_chunk; ++chunk) {
            load_scales(chunk);
            steps<0>(chunk);
        }
        cp_async_wait<0>();
    }
};

// expert: whose scale is applied; NO_EXPERT: that of the row is.
template <int EPILOGUE>
__device__ __forceinline__ void write_one(const GemmPrefillArgs& p, const TileRow& tile, int row_in_tile, int token,
                                          int end, int expert, float y, float up) {
    const Segment& segment = p.segment[tile.segment];
    const int row = tile.row + row_in_tile;
    if (!tile.valid || row >= segment.n_rows || token >= end) return;
    const size_t index = static_cast<size_t>(token) * segment.n_rows + row;
    const int scale = expert == NO_EXPERT ? row : expert;
    y = scaled_row(segment, scale, y);
    if constexpr (EPILOGUE == GLU) up = scaled_row(p.segment[1], scale, up);
    if constexpr (EPILOGUE == GLU)
        static_cast<__half*>(segment.out)[index] = gated(p.activation, y, up);
    else if constexpr (EPILOGUE == ADD)
        static_cast<float*>(segment.out)[index] = __ldcg(p.residual + index) + y;
    else
        static_cast<float*>(segment.out)[index] = p.soft_cap > 0.0f ? p.soft_cap * tanhf(y / p.soft_cap) : y;
}

// The two tile rows of warp m_warp in a row block (blockIdx.y).
template <class T, int EPILOGUE>
__device__ __forceinline__ void find_tiles(const GemmPrefillArgs& p, int row_block, int m_warp, TileRow (&tiles)[2]) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        const int i = EPILOGUE == GLU ? m * (TILE_ROWS_PER_CTA / 2) + m_warp : m_warp * 2 + m;
        tiles[m] = TileRow::of<EPILOGUE, TILE_ROWS_PER_CTA>(p, row_block, i, T::BYTES);
    }
}

// Stores the sums of a warp for the tokens before `end`; expert: see write_one.
template <int EPILOGUE, class Mainloop>
__device__ __forceinline__ void write_tile(const GemmPrefillArgs& p, const TileRow (&tiles)[2],
                                           const Mainloop& mainloop, int end, int expert = NO_EXPERT) {
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = mainloop.g + (e >> 1) * 8,
                      token = mainloop.first_token + mainloop.token + n * 8 + 2 * mainloop.t + (e & 1);
            const float first = mainloop.acc[0][n][e], second = mainloop.acc[1][n][e];
            write_one<EPILOGUE>(p, tiles[0], row, token, end, expert, first, second);
            if (EPILOGUE != GLU) write_one<EPILOGUE>(p, tiles[1], row, token, end, expert, second, 0.0f);
        }
}

// grid (ceil(tokens / TOKENS), ceil(tile rows / 8; GLU: / 4)), Q_THREADS threads
template <class T, int EPILOGUE>
__global__ void __launch_bounds__(Q_THREADS, 1) gemm_prefill(const GemmPrefillArgs p) {
    SHARED_DYNAMIC(__half, stages);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m_warp = warp % M_WARPS, n_warp = warp / M_WARPS;
    TileRow tiles[2];
    find_tiles<T, EPILOGUE>(p, blockIdx.y, m_warp, tiles);
    grid_dependency_launch();
    grid_dependency_wait();
    GemmPrefillMainloop<T> mainloop{p, stages, {tiles[0].chunks, tiles[1].chunks}};
    mainloop.first_token = blockIdx.x * TOKENS, mainloop.token = n_warp * WARP_TOKENS;
    mainloop.g = lane / 4, mainloop.t = lane % 4, mainloop.lane = lane,
    mainloop.n_steps = p.n_chunk * GemmPrefillMainloop<T>::STEPS;
    mainloop.run();
    write_tile<EPILOGUE>(p, tiles, mainloop, p.n_tokens);
}
