// The recurrence of a gated delta net over chunks of 64 tokens, on tensor cores: for heads of 128 elements, in place of
// delta_scan (delta_net.cu), which takes the rest of each sequence.
//
// kernel               grid                                 a CTA takes
// delta_chunk_solve    (Hv, ceil(T / 64))                   a chunk of one value head
// delta_chunk_scan     (Hv S / COLUMNS, as many as run)     COLUMNS columns of one value head, chunk after chunk
//
// With e(t, j) the decay of M from token j to token t of a chunk (j = -1: from before the chunk), and K, Q, V[64, S]:
//
//     A[t][j] = beta_t e(t, j) (k_t k_j) for j < t          P[t][j] = e(t, j) (q_t k_j) for j <= t
//     D = (I + A)^-1 diag(beta) (V - e(t, -1) K M)          what the tokens change M by is k_t D_t^T
//     O = e(t, -1) Q M + P D                                M = e(63, -1) M + K^T e(63, t) D
//
// (Yang et al. 2024, arXiv 2412.06464, section 3.) delta_chunk_solve makes (I + A)^-1 diag(beta) and P of all chunks at
// once; delta_chunk_scan goes from chunk to chunk. Each operand is the sum of two bf16 numbers, so that a
// product takes three bf16 products and has the error of 16 bits. Sums are f32, and decays are exponentials of
// differences of f64 sums.
#include "delta/delta.cuh"
#include "lib/mma.cuh"

constexpr int SIZE = 128;
constexpr int CHUNK_THREADS = 256, CHUNK_WARPS = CHUNK_THREADS / 32;
constexpr int COLUMNS = 32;  // of a CTA of delta_chunk_scan

// A pair of floats as two pairs of bf16: each float is the sum of two bf16 numbers.
struct Split {
    uint32_t high, low;

    __device__ __forceinline__ Split(float x, float y) {
        high = floats_to_bf16(x, y);
        low = floats_to_bf16(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
    }
};

// An A operand [16][16] of one warp: f32 until it is multiplied. Lane (g, t) has rows g and g + 8, columns 2t, 2t + 1,
// 2t + 8 and 2t + 9.
struct RawOperand {
    float2 v[4];

    // From rows `pitch` floats apart; src is the warp's first.
    __device__ __forceinline__ void load(const float* src, int pitch, int g, int t) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            v[i] = __ldcg(reinterpret_cast<const float2*>(src + (g + i % 2 * 8) * pitch + 2 * t + i / 2 * 8));
    }
    // From columns `pitch` floats apart.
    __device__ __forceinline__ void load_transposed(const float* src, int pitch, int g, int t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* first = src + (2 * t + i / 2 * 8) * pitch + g + i % 2 * 8;
            v[i] = make_float2(__ldcg(first), __ldcg(first + pitch));
        }
    }
};

// Rows of COLUMNS bf16, as B operands: [rows][PITCH] of the upper parts, then of the lower ones. With this pitch the
// eight rows of a matrix, or of a lane's words, are in different banks.
template <int ROWS>
struct SplitRows {
    static constexpr int PITCH = COLUMNS + 8;
    uint16_t high[ROWS][PITCH], low[ROWS][PITCH];

    __device__ __forceinline__ void put(int row, int column, const Split& pair) {
        *reinterpret_cast<uint32_t*>(&high[row][column]) = pair.high;
        *reinterpret_cast<uint32_t*>(&low[row][column]) = pair.low;
    }
    // Rows g and g + 8 of D operands, from row `first` on.
    template <int N>
    __device__ __forceinline__ void put(int first, int column, const float (&d)[N][4], int g, int t) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            put(first + g, column + 8 * n + 2 * t, Split(d[n][0], d[n][1]));
            put(first + g + 8, column + 8 * n + 2 * t, Split(d[n][2], d[n][3]));
        }
    }
};

// d[N] += A B for rows `first` to first + 15 of B, and 8 N columns from `column` on.
template <int N, int ROWS>
__device__ __forceinline__ void add_product(float (&d)[N][4], const RawOperand& a, const SplitRows<ROWS>& b, int first,
                                            int column, int lane) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Split pair(a.v[i].x, a.v[i].y);
        high[i] = pair.high, low[i] = pair.low;
    }
    const int row = first + lane % 16, offset = column + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        uint32_t upper[4], lower[4];
        load_matrix<4, true>(upper, &b.high[row][offset + 8 * n]);
        load_matrix<4, true>(lower, &b.low[row][offset + 8 * n]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t of_high[2] = {upper[2 * i], upper[2 * i + 1]};
            const uint32_t of_low[2] = {lower[2 * i], lower[2 * i + 1]};
            mma_m16n8k16_bf16(d[n + i], low, of_high);
            mma_m16n8k16_bf16(d[n + i], high, of_low);
            mma_m16n8k16_bf16(d[n + i], high, of_high);
        }
    }
}

// Where delta_chunk_solve leaves the rows of a token and value head: 64 of (I + A)^-1 diag(beta), and 64 of P.
__device__ __forceinline__ float* solved_row(const DeltaArgs& p, int token, int head) {
    return p.solved + (static_cast<size_t>(token) * p.n_v_head + head) * 2 * CHUNK;
}

// The first token of the only whole chunk that begins among the tokens first ... first + 63 of a step, or -1. A chunk
// has 64 tokens, so there cannot be two.
__device__ __forceinline__ int chunk_among(const DeltaArgs& p, int first) {
    const int sequence = p.sequences[first], start = p.first[sequence];
    const int chunk = start + (first - start + CHUNK - 1) / CHUNK * CHUNK;
    if (chunk < first + CHUNK && chunk + CHUNK <= p.first[sequence + 1]) return chunk;
    // The last of these tokens belongs to the one sequence that may begin here and have a chunk.
    const int last = p.sequences[min(first + CHUNK, p.n_tokens) - 1];
    return last != sequence && p.first[last] + CHUNK <= p.first[last + 1] ? p.first[last] : -1;
}

// First the keys and the queries of a chunk: both are A operands, and the keys are also the B operand. Then the matrix
// A and the inverse.
union SolveStorage {
    static constexpr int PITCH = SIZE + 8, SQUARE_PITCH = CHUNK + 4;
    struct {
        uint16_t high[2 * CHUNK][PITCH], low[2 * CHUNK][PITCH];
    } rows;
    struct {
        float system[CHUNK][SQUARE_PITCH];  // A transposed: [j][t]
        float inverse[CHUNK][CHUNK];        // [t][j]
    } squares;
};

// A lane's words of 16 columns. Rows g and g + 8 make an A operand, rows g alone make a B operand.
__device__ __forceinline__ uint32_t word_of(const uint16_t (&rows)[2 * CHUNK][SolveStorage::PITCH], int row,
                                            int column) {
    return *reinterpret_cast<const uint32_t*>(&rows[row][column]);
}

// A column of (I + A)^-1 by forward substitution, a block of 16 rows at a time.
__device__ __forceinline__ void substitute(SolveStorage& storage, int column) {
    auto& system = storage.squares.system;
    auto& inverse = storage.squares.inverse;
    constexpr int ROWS = 16;
    for (int block = 0; block < CHUNK; block += ROWS) {
        float x[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) x[r] = block + r == column ? 1.0f : 0.0f;
        for (int j = 0; j < block; ++j) {
            const float known = inverse[j][column];
#pragma unroll
            for (int r = 0; r < ROWS; r += 4) {
                const float4 a = *reinterpret_cast<const float4*>(&system[j][block + r]);
                x[r] = fmaf(-a.x, known, x[r]), x[r + 1] = fmaf(-a.y, known, x[r + 1]);
                x[r + 2] = fmaf(-a.z, known, x[r + 2]), x[r + 3] = fmaf(-a.w, known, x[r + 3]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            inverse[block + r][column] = x[r];
#pragma unroll
            for (int below = r + 1; below < ROWS; ++below)
                x[below] = fmaf(-system[block + r][block + below], x[r], x[below]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS) delta_chunk_solve(const DeltaArgs p) {
    SHARED_DYNAMIC(SolveStorage, shared);
    SolveStorage& storage = *shared;
    __shared__ float2 total[CHUNK];  // the logarithm of the decay up to each token, as a sum of two
    __shared__ float beta[CHUNK];
    grid_dependency_launch();
    const int head = blockIdx.x, start = chunk_among(p, blockIdx.y * CHUNK);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    grid_dependency_wait();  // all CTAs wait, for the next kernel takes the end of this one for that of those before
    if (start < 0) return;
    const size_t pitch = p.channels();
    const float* const query = p.u + start * pitch + p.key_head(head) * SIZE;
    float2* const decays = p.decay + static_cast<size_t>(start) * p.n_v_head + head;
    // A warp has a row at a time.
#pragma unroll 8
    for (int i = 0; i < 2 * CHUNK / CHUNK_WARPS; ++i) {
        const int row = i * CHUNK_WARPS + warp, token = row % CHUNK;
        const float* src = query + token * pitch + (row < CHUNK ? p.n_k_head * SIZE : 0);
        const float4 v = __ldcg(reinterpret_cast<const float4*>(src) + lane);
        const Split a(v.x, v.y), b(v.z, v.w);
        *reinterpret_cast<uint2*>(&storage.rows.high[row][4 * lane]) = make_uint2(a.high, b.high);
        *reinterpret_cast<uint2*>(&storage.rows.low[row][4 * lane]) = make_uint2(a.low, b.low);
    }
    if (warp == 0) {  // a lane has two tokens
        const float2 first = __ldcg(decays + 2 * lane * p.n_v_head),
                     second = __ldcg(decays + (2 * lane + 1) * p.n_v_head);
        double sum = static_cast<double>(first.x) + second.x;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const double before = __shfl_up_sync(0xffffffffu, sum, step);
            if (lane >= step) sum += before;
        }
        const double sums[2] = {sum - second.x, sum};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float high = static_cast<float>(sums[i]);
            total[2 * lane + i] = make_float2(high, static_cast<float>(sums[i] - high));
            beta[2 * lane + i] = i ? second.y : first.y;
        }
    }
    __syncthreads();

    // Warps 0 to 3: k_t k_j, the others: q_t k_j, both for 16 tokens t.
    const int tile = warp % 4;
    float d[8][4] = {};
#pragma unroll
    for (int s = 0; s < SIZE / 16; ++s) {
        uint32_t high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 16 * warp + g + i % 2 * 8, column = 16 * s + 2 * t + i / 2 * 8;
            high[i] = word_of(storage.rows.high, row, column), low[i] = word_of(storage.rows.low, row, column);
        }
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            if (n > 2 * tile + 1) break;  // later tokens than those of the tile
            uint32_t upper[2], lower[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = 8 * n + g, column = 16 * s + 2 * t + 8 * i;
                upper[i] = word_of(storage.rows.high, row, column), lower[i] = word_of(storage.rows.low, row, column);
            }
            mma_m16n8k16_bf16(d[n], low, upper);
            mma_m16n8k16_bf16(d[n], high, lower);
            mma_m16n8k16_bf16(d[n], high, upper);
        }
    }
    __syncthreads();  // the rows are no longer needed
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int token = 16 * tile + g + 8 * r, j = 8 * n + 2 * t;
            float v[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float since = (total[token].x - total[j + i].x) + (total[token].y - total[j + i].y);
                v[i] = j + i < token + (warp >= 4) ? d[n][2 * r + i] * expf(since) : 0.0f;
            }
            if (warp >= 4) {
                *reinterpret_cast<float2*>(solved_row(p, start + token, head) + CHUNK + j) = make_float2(v[0], v[1]);
            } else {
                storage.squares.system[j][token] = v[0] * beta[token];
                storage.squares.system[j + 1][token] = v[1] * beta[token];
            }
        }
    __syncthreads();
    const int column = threadIdx.x;
    if (column >= CHUNK) return;
    substitute(storage, column);
    for (int token = 0; token < CHUNK; ++token)
        solved_row(p, start + token, head)[column] = storage.squares.inverse[token][column] * beta[column];
    const float2 last = total[CHUNK - 1], own = total[column];
    decays[column * p.n_v_head] = make_float2(expf(own.x + own.y), expf((last.x - own.x) + (last.y - own.y)));
}

// Shared memory of delta_chunk_scan.
struct ChunkStorage {
    SplitRows<SIZE> m;
    SplitRows<CHUNK> x, change;  // V - e(t, -1) K M, and D
    float2 decay[2][CHUNK];      // e(t, -1) and e(63, t), of this chunk and of the next one
};

// COLUMNS columns of one value head, over the chunks of a sequence that has some.
__device__ __forceinline__ void scan_chunks(const DeltaArgs& p, ChunkStorage& storage, int sequence, int head,
                                            int column) {
    constexpr int N = COLUMNS / 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int start = p.first[sequence], n_chunk = (p.first[sequence + 1] - start) / CHUNK;
    const int read = p.pages[2 * sequence], written = p.pages[2 * sequence + 1];
    const int pitch = p.channels(), solved_pitch = p.n_v_head * 2 * CHUNK;
    // Rows of K for warps 0 to 3, of Q for the others: 16 tokens each.
    const int tile = warp % 4, first = 16 * tile;
    const bool has_queries = warp >= 4;
    const int of_key = (p.n_k_head + p.key_head(head)) * SIZE, of_rows = of_key - (has_queries ? p.n_k_head * SIZE : 0);
    const auto rows_of = [&](int token) { return p.u + static_cast<size_t>(token + first) * pitch + of_rows; };
    // The lane's first element of M: row 16 warp + g, column `column` + 2 t.
    const auto state = [&](int page) {
        const size_t at = (static_cast<size_t>(page) * p.n_v_head + head) * SIZE + column + 2 * t;
        return p.matrices + at * SIZE + 16 * warp + g;
    };
    // Element i of block n of a D operand, from there.
    const auto element = [](int n, int i) { return (8 * n + i % 2) * SIZE + i / 2 * 8; };
    RawOperand raw[SIZE / 16];
#pragma unroll
    for (int s = 0; s < SIZE / 16; ++s) raw[s].load(rows_of(start) + 16 * s, pitch, g, t);
    float m[N][4];
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) m[n][i] = read == NO_STATE ? 0.0f : __ldcg(state(read) + element(n, i));

    for (int chunk = 0; chunk < n_chunk; ++chunk) {
        // The first token, not known to grow by 64: the compiler would keep an address for each load of the loop.
        const int token = start + kept(chunk) * CHUNK;
        const float* const of_u = p.u + static_cast<size_t>(token) * pitch;
        float2(&decay)[CHUNK] = storage.decay[chunk % 2];
        storage.m.put(16 * warp, 0, m, g, t);
        if (threadIdx.x < CHUNK)
            decay[threadIdx.x] = __ldcg(p.decay + static_cast<size_t>(token + threadIdx.x) * p.n_v_head + head);
        // Operands of the second product, and values.
        const float* const solved = solved_row(p, token + first, head);
        const float* const value = of_u + (first + g) * pitch + (2 * p.n_k_head + head) * SIZE + column + 2 * t;
        RawOperand inverse[CHUNK / 16];
#pragma unroll
        for (int s = 0; s < CHUNK / 16; ++s)
            if (s <= tile) inverse[s].load(solved + 16 * s, solved_pitch, g, t);
        float2 v[N][2] = {};
        if (!has_queries)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    v[n][r] = __ldcg(reinterpret_cast<const float2*>(value + 8 * r * pitch + 8 * n));
        __syncthreads();

        // K M and Q M.
        float of_state[N][4] = {};
#pragma unroll
        for (int s = 0; s < SIZE / 16; ++s) add_product(of_state, raw[s], storage.m, 16 * s, 0, lane);
        const float before[2] = {decay[first + g].x, decay[first + g + 8].x};
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float scaled = before[i / 2] * of_state[n][i], of_v = i % 2 ? v[n][i / 2].y : v[n][i / 2].x;
                of_state[n][i] = has_queries ? scaled : of_v - scaled;
            }
        if (!has_queries) storage.x.put(first, 0, of_state, g, t);
        // Operands of the last products.
        RawOperand within[CHUNK / 16], keys[CHUNK / 16];
        if (has_queries)
#pragma unroll
            for (int s = 0; s < CHUNK / 16; ++s)
                if (s <= tile) within[s].load(solved + CHUNK + 16 * s, solved_pitch, g, t);
#pragma unroll
        for (int s = 0; s < CHUNK / 16; ++s)
            keys[s].load_transposed(of_u + of_key + 16 * warp + 16 * s * pitch, pitch, g, t);
        __syncthreads();

        // D: each warp computes 16 columns.
        const int side = warp / 4 * 16;
        float change[N / 2][4] = {};
#pragma unroll
        for (int s = 0; s < CHUNK / 16; ++s)
            if (s <= tile) add_product(change, inverse[s], storage.x, 16 * s, side, lane);
        storage.change.put(first, side, change, g, t);
        if (chunk + 1 < n_chunk)
#pragma unroll
            for (int s = 0; s < SIZE / 32; ++s) raw[s].load(rows_of(token + CHUNK) + 16 * s, pitch, g, t);
        __syncthreads();

        const float whole = decay[CHUNK - 1].x;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) m[n][i] *= whole;
#pragma unroll
        for (int s = 0; s < CHUNK / 16; ++s) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = 16 * s + 2 * t + i / 2 * 8;
                keys[s].v[i].x *= decay[at].y, keys[s].v[i].y *= decay[at + 1].y;
            }
            add_product(m, keys[s], storage.change, 16 * s, 0, lane);
        }
        if (chunk + 1 < n_chunk)  // in registers that the keys had
#pragma unroll
            for (int s = SIZE / 32; s < SIZE / 16; ++s) raw[s].load(rows_of(token + CHUNK) + 16 * s, pitch, g, t);
        if (has_queries) {
            float* const o = p.o + (static_cast<size_t>(token + first + g) * p.n_v_head + head) * SIZE + column + 2 * t;
#pragma unroll
            for (int s = 0; s < CHUNK / 16; ++s)
                if (s <= tile) add_product(of_state, within[s], storage.change, 16 * s, 0, lane);
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    *reinterpret_cast<float2*>(o + 8 * r * p.n_v_head * SIZE + 8 * n) =
                        make_float2(of_state[n][2 * r], of_state[n][2 * r + 1]);
        }
    }
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) state(written)[element(n, i)] = m[n][i];
}

// CTAs with the same columns share the sequences that have chunks, in turn.
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, 1) delta_chunk_scan(const DeltaArgs p) {
    __shared__ __align__(16) ChunkStorage storage;
    grid_dependency_launch();
    constexpr int PARTS = SIZE / COLUMNS;
    const int head = blockIdx.x / PARTS, column = blockIdx.x % PARTS * COLUMNS, lane = threadIdx.x % 32;
    grid_dependency_wait();  // all CTAs wait: see delta_chunk_solve
    int turn = 0;
    for (int first = 0; first < p.n_sequences; first += 32) {
        const int own = first + lane;
        const bool has_chunks = own < p.n_sequences && p.first[own + 1] - p.first[own] >= CHUNK;
        for (uint32_t left = __ballot_sync(0xffffffffu, has_chunks); left != 0; left &= left - 1) {
            const bool is_own = turn == static_cast<int>(blockIdx.y);
            if (++turn == static_cast<int>(gridDim.y)) turn = 0;
            if (!is_own) continue;
            scan_chunks(p, storage, first + __ffs(left) - 1, head, column);
            __syncthreads();  // other warps may still read the last chunk's decays
        }
    }
}
