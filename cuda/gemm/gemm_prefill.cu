// y[T, N] = x[T, K] W[N, K]^T for prompts: tiles (tile.cuh) x f16 activations, many tokens at a time.
//
// A block makes 128 rows x 128 tokens; its 8 warps stand 4 x 2, a warp has two tile rows and 64 tokens. Codes come from
// global memory straight into registers in the order of the mma's A operand, 64 columns ahead of their use, and become
// scaled halves there, once for 64 tokens: w = d * (u - zero) (+ m), rounded once. The activations of the 128 tokens go
// through a ring in shared memory (cp.async). Sums are float32 over all of K.
//
// The weights are rounded to halves, which gemm_decode.cu does not do; for the few tokens of a decode step take that.
// Epilogues as there: STORE, ADD, GLU (then a warp's two tile rows are one of gate and one of up).
#include "lib/activation.cuh"
#include "lib/mma.cuh"
#include "gemm/gemm.cuh"
#include "layout/tile.cuh"

#ifndef X_STAGES
#define X_STAGES 3
#endif

constexpr int Q_WARPS = 8;
constexpr int Q_THREADS = Q_WARPS * 32;
constexpr int M_WARPS = 4;
constexpr int TILE_ROWS_PER_BLOCK = 8;
constexpr int TOKENS = 128;      // of a block
constexpr int WARP_TOKENS = 64;
constexpr int N_TILES = WARP_TOKENS / 8;
constexpr int STEP = 64;         // columns
constexpr int X_STRIDE = STEP + 32;  // halves; rows of eight tokens lie on different banks

struct Product : Matrices {
    const __half* x;        // [n_tokens, k]
    const float* residual;  // [n_tokens, n_rows] of the one segment
    float soft_cap;  // STORE: cap * tanh(y / cap); 0 is none
};

// 64 columns of 128 tokens on their way to shared memory; columns past k are 0, tokens past the end repeat the last.
__device__ __forceinline__ void copy_x(const Product& p, __half* to, int first_token, int first_column) {
#pragma unroll
    for (int i = 0; i < TOKENS * STEP / 8 / Q_THREADS; ++i) {
        const int piece = i * Q_THREADS + threadIdx.x, token = piece / (STEP / 8), column = piece % (STEP / 8) * 8;
        const __half* from = p.x + static_cast<size_t>(min(first_token + token, p.n_tokens - 1)) * p.k;
        const bool inside = first_column + column < p.k;
        cp_async<16>(to + token * X_STRIDE + column, inside ? from + first_column + column : p.x, inside ? 16 : 0);
    }
}

// Codes of one mma as scaled halves. They come as shift * u * 2^-24 (odd groups of nibbles with a shift of 16): times
// 2^15 / shift they are u * 2^-9, and d * 512 brings them to size.
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

// The A operand of step S of group J (of the step's two), ready to multiply. P: which 64 columns of the chunk.
template <class T, class Step, int P, int J, int S>
__device__ __forceinline__ void operand(const ChunkCodes<Step>& codes, const ChunkScales<T>& scales, uint32_t (&a)[4]) {
    codes.template unpack<J, S>(a);
    if constexpr (T::SCALED) {
        constexpr int group = T::GROUP == 16 ? 2 * (2 * P + J) + S : 2 * P + J;
        scale_codes<T, J>(a, scales.template get<group>());
    }
}

// Two tile rows x 32 columns x 64 tokens; `x` is the lane's token's.
template <class T, class Step, int P, int J>
__device__ __forceinline__ void multiply_columns(const ChunkCodes<Step> (&codes)[2], const ChunkScales<T> (&scales)[2],
                                                 const __half* x, int t, float (&acc)[2][N_TILES][4]) {
    uint32_t a[2][2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        operand<T, Step, P, J, 0>(codes[m], scales[m], a[m][0]);
        operand<T, Step, P, J, 1>(codes[m], scales[m], a[m][1]);
    }
    uint4 b[N_TILES];
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        const __half* from = x + n * 8 * X_STRIDE + J * 32;
        if constexpr (T::GROUP == 16 || T::FLOAT) {
            const uint2 low = *reinterpret_cast<const uint2*>(from + 4 * t);
            const uint2 high = *reinterpret_cast<const uint2*>(from + 16 + 4 * t);
            b[n] = make_uint4(low.x, low.y, high.x, high.y);
        } else {
            b[n] = *reinterpret_cast<const uint4*>(from + 8 * t);
        }
    }
    // Products that add to the same sum are far apart.
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int m = 0; m < 2; ++m) mma_m16n8k16_f16(acc[m][n], a[m][0], {b[n].x, b[n].y});
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int m = 0; m < 2; ++m) mma_m16n8k16_f16(acc[m][n], a[m][1], {b[n].z, b[n].w});
}

// The K loop of a warp.
template <class T>
struct Loop {
    using Step = Tile<T::BITS, T::GROUP, T::SCALES, STEP, typename T::VALUES>;
    static constexpr int STEPS = T::CHUNK_K / STEP;
    const Product& p;
    __half* ring;
    const uint8_t* chunks[2];  // of the warp's tile rows
    int first_token, token, g, t, lane, n_steps;
    ChunkCodes<Step> codes[2];
    ChunkScales<T> scales[2];
    float acc[2][N_TILES][4];

    __device__ __forceinline__ __half* stage(int step) const { return ring + step % X_STAGES * TOKENS * X_STRIDE; }

    __device__ __forceinline__ void copy(int step) {
        if (step < n_steps) copy_x(p, stage(step), first_token, step * STEP);
        cp_async_commit();
    }
    __device__ __forceinline__ void load_codes(int step, ChunkCodes<Step> (&to)[2]) const {
        const size_t offset = static_cast<size_t>(step / STEPS) * T::BYTES + T::SCALE_BYTES;
#pragma unroll
        for (int m = 0; m < 2; ++m)
            to[m].load(chunks[m] + offset + step % STEPS * Step::BASE_BYTES,
                       chunks[m] + offset + T::BASE_BYTES + step % STEPS * Step::EXTRA_BYTES, lane);
    }
    __device__ __forceinline__ void load_scales(int chunk) {
        if constexpr (T::SCALED)
            for (int m = 0; m < 2; ++m) scales[m].load(chunks[m] + static_cast<size_t>(chunk) * T::BYTES, g);
    }
    // Step P of a chunk, and those behind it.
    template <int P>
    __device__ __forceinline__ void steps(int chunk) {
        if constexpr (P < STEPS) {
            const int step = chunk * STEPS + P;
            cp_async_wait<X_STAGES - 2>();
            __syncthreads();  // everybody's pieces are there, and nobody reads the stage that is copied to next
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

template <int EPILOGUE>
__device__ __forceinline__ void write_one(const Product& p, const TileRow& tile, int row_in_tile, int token, float y,
                                          float up) {
    const Segment& segment = p.segment[tile.segment];
    const int row = tile.row + row_in_tile;
    if (!tile.valid || row >= segment.n_rows || token >= p.n_tokens) return;
    const size_t at = static_cast<size_t>(token) * segment.n_rows + row;
    y = scaled_row(segment, row, y);
    if constexpr (EPILOGUE == GLU) up = scaled_row(p.segment[1], row, up);
    if constexpr (EPILOGUE == GLU)
        static_cast<__half*>(segment.out)[at] = gated(p.activation, y, up);
    else if constexpr (EPILOGUE == ADD)
        static_cast<float*>(segment.out)[at] = __ldcg(p.residual + at) + y;
    else
        static_cast<float*>(segment.out)[at] = p.soft_cap > 0.0f ? p.soft_cap * tanhf(y / p.soft_cap) : y;
}

// grid (tokens / TOKENS, tile rows / 8; GLU: / 4)
template <class T, int EPILOGUE>
__global__ void __launch_bounds__(Q_THREADS, 1) gemm_prefill(const Product p) {
    SHARED_DYNAMIC(__half, ring);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m_warp = warp % M_WARPS, n_warp = warp / M_WARPS;
    TileRow tiles[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        const int i = EPILOGUE == GLU ? m * (TILE_ROWS_PER_BLOCK / 2) + m_warp : m_warp * 2 + m;
        tiles[m] = TileRow::of<EPILOGUE, TILE_ROWS_PER_BLOCK>(p, blockIdx.y, i, T::BYTES);
    }
    grid_dependency_launch();
    grid_dependency_wait();
    Loop<T> loop{p, ring, {tiles[0].chunks, tiles[1].chunks}};
    loop.first_token = blockIdx.x * TOKENS, loop.token = n_warp * WARP_TOKENS;
    loop.g = lane / 4, loop.t = lane % 4, loop.lane = lane, loop.n_steps = p.n_chunk * Loop<T>::STEPS;
    loop.run();
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = loop.g + (e >> 1) * 8, token = loop.first_token + loop.token + n * 8 + 2 * loop.t + (e & 1);
            const float first = loop.acc[0][n][e], second = loop.acc[1][n][e];
            write_one<EPILOGUE>(p, tiles[0], row, token, first, second);
            if (EPILOGUE != GLU) write_one<EPILOGUE>(p, tiles[1], row, token, second, 0.0f);
        }
}
