// Grouped GEMM for few rows an expert: rows of x that are sorted by expert (sort.cu), each times the matrix of its
// expert. A CTA makes a work tile of up to ROWS rows; each of its WARPS warps makes `rounds` times TILES tile rows, GLU:
// `rounds` tile rows of gate and of up. A warp multiplies TILES tile rows at once, so that a load of x serves all of
// them, and all ROWS of x, so that codes are unpacked once.
//
// Reading weights bounds this GEMM only if few instructions are spent on each of them: see scaled_sums.cuh.
//
// All of x lies in shared memory. Each warp streams its own chunks through a cp.async pipeline and waits for no other
// warp, and CTAS of them share an SM. The bits of a row do not depend on its place.
//
// Epilogues: STORE, f32 of one matrix, and GLU, f16 act(gate + b_gate) * (up + b_up).
//
// Launch: grid (work tiles at most, ceil(tile rows / tile rows of a CTA)). Work tiles beyond the last one end at once.
//
// Down's CTAs that fill the SMs while the last of GLU work request weights before they wait for h: the kernels before
// down let it start only when the pairs are sorted.
#include "moe/expert_act.cuh"
#include "gemm/gemm.cuh"
#include "gemm/scaled_sums.cuh"
#include "gemm/weight_pipeline.cuh"

struct ExpertRowsArgs : GemmArgs {
    const __half* x;        // rows of k columns
    const int4* work;       // (expert, first row, end row, 0); expert -1: no work
    const int* pair_of;     // [pairs], of each row, or null: x has the order of the rows
    const float* bias[2];   // GLU: [n_expert, n_rows], or null
    uint64_t expert_bytes;  // from the tiles of one expert to those of the next
    int pairs_per_x;        // pairs that multiply the same row of x
    int sorted_before;      // STORE: all kernels before the previous one have ended, and `work` is theirs
    int rounds;             // of a warp: STORE: TILES neighbouring tile rows; GLU: a tile row of gate and of up
};

#ifndef CTAS
#define CTAS 3  // of an SM
#endif

#ifndef TILES
#define TILES 1  // tile rows that a warp multiplies at once: 1 or 2
#endif

#ifndef ROWS
#define ROWS 8  // of x: 8 or 16
#endif

constexpr int N = ROWS / 8;  // MMAs for the columns of B
constexpr int STEP = 64;     // columns of codes that a lane loads at once

// The tile rows of a warp, in the order in which it makes them: TILES of them in a pass. A round is a pass; GLU with one
// tile row at once: a pass for gate, then one for up.
template <int EPILOGUE>
struct ExpertRowsPass {
    static constexpr bool BOTH = EPILOGUE == GLU && TILES == 2;           // gate and up
    static constexpr int PASSES = EPILOGUE == GLU && TILES == 1 ? 2 : 1;  // of a round
    static constexpr int ROUND_TILES = EPILOGUE == STORE ? TILES : 1;     // tile rows of each matrix

    // The first tile row of a pass; first_round: the warp's.
    static __device__ __forceinline__ int tile(int first_round, int pass) {
        return (first_round + pass / PASSES * WARPS) * ROUND_TILES;
    }
    static __device__ __forceinline__ int segment(int pass) { return pass % PASSES; }
};

// Copies the chunks of a warp's passes, in order. A stage is a chunk of each tile row of a pass.
template <class T, int EPILOGUE>
struct ExpertRowsChunks {
    using Pass = ExpertRowsPass<EPILOGUE>;
    static constexpr int LINES = T::USED / 512, REST = T::USED % 512 / 16;  // of 32 and of REST pieces of 16 bytes
    const ExpertRowsArgs& p;
    const uint64_t expert_offset;
    const int first_round, lane_offset, rest_offset;  // rest: lanes past its pieces copy those of others again
    const int passes;
    int pass = 0, left;  // stages of the pass to copy
    const uint8_t* lane_src;

    __device__ __forceinline__ ExpertRowsChunks(const ExpertRowsArgs& args, int expert, int first, int count, int lane)
        : p(args), expert_offset(expert * args.expert_bytes), first_round(first), lane_offset(lane * 16),
          rest_offset(LINES * 512 + (REST > 0 ? lane % max(REST, 1) - lane : 0) * 16), passes(count) {
        find();
    }
    __device__ __forceinline__ uint32_t tile_row_bytes() const { return p.n_chunk * T::BYTES; }
    __device__ __forceinline__ void find() {
        lane_src = p.segment[Pass::segment(pass)].tiles + expert_offset + lane_offset +
                   Pass::tile(first_round, pass) * static_cast<uint64_t>(tile_row_bytes());
        left = p.n_chunk;
    }
    __device__ __forceinline__ void copy_chunk(CopyTarget lane_dst, const uint8_t* src) const {
#pragma unroll
        for (int i = 0; i < LINES; ++i) cp_async_streaming(lane_dst + i * 512, src + i * 512, p.streaming);
        if constexpr (REST > 0) cp_async_streaming(lane_dst + rest_offset, src + rest_offset, p.streaming);
    }
    // Starts the copies of the next stage, if there is one, as one cp.async group.
    __device__ __forceinline__ void copy(CopyTarget lane_dst) {
        if (pass < passes) {
            copy_chunk(lane_dst, lane_src);
            if constexpr (Pass::BOTH)
                copy_chunk(lane_dst + T::BYTES, lane_src + (p.segment[1].tiles - p.segment[0].tiles));
            else if constexpr (TILES == 2)
                copy_chunk(lane_dst + T::BYTES, lane_src + tile_row_bytes());
            lane_src += T::BYTES;
            if (--left == 0) ++pass, find();
        }
        cp_async_commit();
    }
};

// x of a CTA in shared memory: f16 rows [ROWS][row_bytes], then the ActivationSums of groups.
template <class T>
struct ExpertRowsX {
    using Sums = ActivationSums<T>;
    // Lanes read 16 bytes of each row, or twice 8 bytes, without bank conflicts.
    static constexpr bool WIDE = T::GROUP == 32 && !T::FLOAT;
    int row_bytes, n_groups;
    uint8_t* x;
    float* sums;

    __device__ __forceinline__ ExpertRowsX(const ExpertRowsArgs& p, uint8_t* memory)
        : row_bytes(p.n_chunk * T::CHUNK_K * 2 + (WIDE ? 64 : 32)), n_groups(p.n_chunk * T::GROUPS), x(memory),
          sums(reinterpret_cast<float*>(memory + ROWS * row_bytes)) {}
    // Starts the copy of `count` rows, whose numbers are `rows`. Columns past k become 0.
    __device__ __forceinline__ void copy(const ExpertRowsArgs& p, const int* rows, int count) const {
        const int pieces = p.n_chunk * (T::CHUNK_K / 8);
        for (int row = threadIdx.x / 32; row < count; row += WARPS) {
            const __half* src = p.x + static_cast<size_t>(rows[row]) * p.k;
            for (int piece = threadIdx.x % 32; piece < pieces; piece += 32) {
                const bool inside = piece * 8 < p.k;
                cp_async<16>(x + row * row_bytes + piece * 16, inside ? src + piece * 8 : p.x, inside ? 16 : 0);
            }
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void add_up(int count) const {
        for (int i = threadIdx.x; i < n_groups * ROWS; i += THREADS) {
            const int row = i % ROWS, group = i / ROWS;
            if (row >= count) continue;
            const uint4* src = reinterpret_cast<const uint4*>(x + row * row_bytes + group * T::GROUP * 2);
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < T::GROUP / 8; ++j) sum += sum_of_halves(src[j]);
            Sums::put(sums + row / 8 * sums_pitch(), row % 8, group, sum);
        }
    }
    // From the sums of eight rows to those of the next eight.
    __device__ __forceinline__ int sums_pitch() const { return n_groups * Sums::FLOATS; }
    // Where the lane's x and sums begin.
    __device__ __forceinline__ const uint8_t* lane_x(int lane) const {
        return x + lane / 4 * row_bytes + lane % 4 * (WIDE ? 16 : 8);
    }
    __device__ __forceinline__ const float* lane_sums(int lane) const { return sums + Sums::lane_offset(lane); }
    // The B operands of a lane for 32 columns, for both steps of 16.
    static __device__ __forceinline__ uint4 operand(const uint8_t* src) {
        if constexpr (WIDE) {
            return *reinterpret_cast<const uint4*>(src);
        } else {
            const uint2 low = *reinterpret_cast<const uint2*>(src), high = *reinterpret_cast<const uint2*>(src + 32);
            return make_uint4(low.x, low.y, high.x, high.y);
        }
    }
};

template <class T>
using StepTile = Tile<T::BITS, T::GROUP, T::SCALES, STEP, typename T::VALUES>;

// The columns of a chunk of x, as a lane reads them: its x, and its sums of groups. Those of the next eight rows are
// `pitch` bytes and `sums_pitch` floats further on.
struct ExpertRowsColumns {
    const uint8_t* x;
    const float* sums;
    int pitch, sums_pitch;
};

// sums += 32-column group J of the chunks of a stage, which is group J % 2 of `codes`, times the columns of x.
template <int J, class T, class Codes>
__device__ __forceinline__ void multiply_group(ScaledSums<T, N> (&sums)[TILES], const Codes (&codes)[TILES],
                                               const ExpertRowsColumns& at) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const uint4 b = ExpertRowsX<T>::operand(at.x + n * at.pitch + J * 64);
#pragma unroll
        for (int i = 0; i < TILES; ++i)
            sums[i].template multiply_columns<J, J % 2>(codes[i], n, b, at.sums + n * at.sums_pitch);
    }
}

// sums += the chunks of a stage times the columns of x, from step P of STEP columns on.
template <int P, class T>
__device__ __forceinline__ void multiply_steps(ScaledSums<T, N> (&sums)[TILES], const uint8_t* stage,
                                               const ExpertRowsColumns& at) {
    using Step = StepTile<T>;
    if constexpr (P * STEP < T::CHUNK_K) {
        ChunkCodes<Step> codes[TILES];
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const uint8_t* main = stage + i * T::BYTES + T::SCALE_BYTES;
            codes[i].load(main + P * Step::BASE_BYTES, main + T::BASE_BYTES + P * Step::EXTRA_BYTES, sums[i].lane);
        }
        multiply_group<2 * P>(sums, codes, at);
        multiply_group<2 * P + 1>(sums, codes, at);
        multiply_steps<P + 1>(sums, stage, at);
    }
}
template <class T>
__device__ __forceinline__ void multiply(ScaledSums<T, N> (&sums)[TILES], const uint8_t* stage,
                                         const ExpertRowsColumns& at) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) sums[i].begin_chunk(stage + i * T::BYTES, at.sums, at.sums_pitch);
    multiply_steps<0>(sums, stage, at);
#pragma unroll
    for (int i = 0; i < TILES; ++i) sums[i].end_chunk();
}

// Stores the sums of a tile row; GLU: of gate, and of up.
template <class T, int EPILOGUE>
__device__ __forceinline__ void write_rows(const ExpertRowsArgs& p, int tile, const int4& work, int lane,
                                           const float (&sums)[N][4], const float (&up)[N][4]) {
    constexpr float UNIT = ScaledSums<T, N>::UNIT;
    const ExpertGated gated(p.activation);
    const int n_rows = p.segment[0].n_rows;
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) {
        const int n = i / 4, e = i % 4;
        const int pair = work.y + 8 * n + lane % 4 * 2 + e % 2, row = tile * TILE_ROWS + lane / 4 + e / 2 * 8;
        if (pair >= work.z || row >= n_rows) continue;
        const size_t index = static_cast<size_t>(pair) * n_rows + row,
                     bias = static_cast<size_t>(work.x) * n_rows + row;
        float y = scaled_expert(p.segment[0], work.x, sums[n][e] * UNIT);
        if constexpr (EPILOGUE == GLU) {
            float u = scaled_expert(p.segment[1], work.x, up[n][e] * UNIT);
            if (p.bias[0]) y += __ldg(p.bias[0] + bias);
            if (p.bias[1]) u += __ldg(p.bias[1] + bias);
            static_cast<__half*>(p.segment[0].out)[index] = saturated_half(gated(y, u));
        } else {
            static_cast<float*>(p.segment[0].out)[index] = y;
        }
    }
}

template <class T, int EPILOGUE>
__global__ void __launch_bounds__(THREADS, CTAS) expert_rows(const ExpertRowsArgs p) {
    using Pass = ExpertRowsPass<EPILOGUE>;
    constexpr int STAGE_BYTES = TILES * T::BYTES;
    __shared__ int rows[ROWS];
    __shared__ int4 of_cta;  // `work`, which takes no registers there
    SHARED_DYNAMIC(uint8_t, shared);
    const int warp = kept(static_cast<int>(threadIdx.x / 32)), lane = kept(static_cast<int>(threadIdx.x % 32));
    uint8_t* stages = kept_shared(shared + warp * STAGES * STAGE_BYTES);
    const CopyTarget dst = copy_target(stages + lane * 16);
    const ExpertRowsX<T> x(p, shared + WARPS * STAGES * STAGE_BYTES);
    const int first = blockIdx.y * p.rounds * WARPS + warp;
    const int n_rounds = p.n_tiles / Pass::ROUND_TILES - first;  // from the warp's first one on
    const int passes = Pass::PASSES * max(0, min(p.rounds, (n_rounds + WARPS - 1) / WARPS));
    const bool waits_late = EPILOGUE == STORE && p.sorted_before;
    if (!waits_late) grid_dependency_wait();
    grid_dependency_launch();  // after the wait of GLU: the next kernel reads `work` without waiting
    const int4 work = __ldcg(p.work + blockIdx.x);
    if (work.x < 0) return;
    const int n_rows = work.z - work.y;
    if (threadIdx.x == 0) of_cta = work;
    if (threadIdx.x < n_rows) {
        const int row = work.y + threadIdx.x;
        rows[threadIdx.x] = p.pair_of ? __ldcg(p.pair_of + row) / p.pairs_per_x : row;
    }
    ExpertRowsChunks<T, EPILOGUE> ahead(p, work.x, first, passes, lane);
    for (int i = 0; i < STAGES; ++i) ahead.copy(dst + i * STAGE_BYTES);
    if (waits_late) grid_dependency_wait();
    __syncthreads();
    x.copy(p, rows, n_rows);
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (ActivationSums<T>::NEEDED) {
        x.add_up(n_rows);
        __syncthreads();
    }
    const uint8_t* lane_x = x.lane_x(lane);
    const float* lane_sums = x.lane_sums(lane);
    const auto words = T::VALUES::Words::kept(lane);
    ScaledSums<T, N> sums[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) sums[i].lane = lane, sums[i].words = words;
    float gate[N][4];
    int stage = 0;
    for (int pass = 0; pass < passes; ++pass) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) sums[i].clear();
#pragma unroll 1
        for (int chunk = 0; chunk < p.n_chunk; ++chunk) {
            cp_async_wait<STAGES - 1>();
            __syncwarp();
            multiply(sums, stages + stage * STAGE_BYTES,
                     {lane_x + chunk * T::CHUNK_K * 2, lane_sums + chunk * T::GROUPS * ActivationSums<T>::FLOATS,
                      8 * x.row_bytes, x.sums_pitch()});
            __syncwarp();
            ahead.copy(dst + stage * STAGE_BYTES);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        const int tile = Pass::tile(first, pass);
        if constexpr (EPILOGUE == STORE) {
#pragma unroll
            for (int i = 0; i < TILES; ++i) write_rows<T, STORE>(p, tile + i, of_cta, lane, sums[i].acc, sums[i].acc);
        } else if constexpr (Pass::BOTH) {
            write_rows<T, GLU>(p, tile, of_cta, lane, sums[0].acc, sums[TILES - 1].acc);
        } else if (Pass::segment(pass)) {
            write_rows<T, GLU>(p, tile, of_cta, lane, gate, sums[0].acc);
        } else {
#pragma unroll
            for (int i = 0; i < 4 * N; ++i) gate[i / 4][i % 4] = sums[0].acc[i / 4][i % 4];
        }
    }
    cp_async_wait<0>();
}
