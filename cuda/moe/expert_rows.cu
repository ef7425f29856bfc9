// Grouped GEMM for few rows an expert: rows of x that are sorted by expert (sort.cu), each times the matrix of its
// expert. A CTA makes a work tile of up to ROWS rows; each of its WARPS warps makes `rounds` tile rows, GLU: of gate and
// of up.
//
// Reading weights bounds this GEMM only if few instructions are spent on each of them. Therefore integer codes become
// f16 exactly and without their scale, one AND for two of them, and f32 sums of a group are multiplied by its scale;
// formats with scales of scales multiply by the scale of a chunk once a chunk. Zero points and minimums meet the sum of
// the group's columns of x, which the CTA computes once.
//
// All of x lies in shared memory. Each warp streams its own chunks through a cp.async pipeline and waits for no other
// warp, and CTAS of them share an SM. The bits of a row do not depend on its place.
//
// Epilogues: STORE, f32 of one matrix, and GLU, f16 act(gate + b_gate) * (up + b_up).
//
// Launch: grid (work tiles at most, ceil(tile rows / (WARPS * rounds))). Tiles beyond the last one end at once.
#include "lib/mma.cuh"
#include "moe/expert_act.cuh"
#include "gemm/gemm.cuh"
#include "gemm/weight_pipeline.cuh"

struct ExpertRowsArgs : GemmArgs {
    const __half* x;        // rows of k columns
    const int4* work;       // (expert, first row, end row, 0); expert -1: no work
    const int* pair_of;     // [pairs], of each row, or null: x has the order of the rows
    const float* bias[2];   // GLU: [n_expert, n_rows], or null
    uint64_t expert_bytes;  // from the tiles of one expert to those of the next
    int pairs_per_x;        // pairs that multiply the same row of x
    int rounds;             // tile rows of a warp
};

#ifndef CTAS
#define CTAS 3  // of an SM
#endif

constexpr int ROWS = 8;   // of x: the columns of an MMA's B operand
constexpr int STEP = 64;  // columns whose codes a lane holds at a time

// The order in which a warp copies chunks: one tile row after the other, GLU: that of gate before the same one of up.
template <class T, int EPILOGUE>
struct ExpertRowsChunks {
    const ExpertRowsArgs& p;
    int expert, tile, left, chunk = 0;  // left: chunks to copy
    const uint8_t* tile_row;

    __device__ __forceinline__ ExpertRowsChunks(const ExpertRowsArgs& args, int expert_, int first, int count)
        : p(args), expert(expert_), tile(EPILOGUE == GLU ? 2 * first : first),
          left(count * args.n_chunk * (EPILOGUE == GLU ? 2 : 1)) {
        find();
    }
    __device__ __forceinline__ bool done() const { return left == 0; }
    // GLU: tile rows 2 i and 2 i + 1 are tile row i of gate and of up.
    __device__ __forceinline__ void find() {
        const int row = EPILOGUE == GLU ? tile / 2 : tile, s = EPILOGUE == GLU ? tile & 1 : 0;
        tile_row = p.segment[s].tiles + expert * p.expert_bytes +
                   row * static_cast<uint64_t>(static_cast<uint32_t>(p.n_chunk * T::BYTES));
    }
    __device__ __forceinline__ void next() {
        --left;
        if (++chunk < p.n_chunk) return;
        chunk = 0;
        tile += EPILOGUE == GLU && !(tile & 1) ? 1 : EPILOGUE == GLU ? 2 * WARPS - 1 : WARPS;
        find();
    }
};

// x of a CTA in shared memory: f16 rows [ROWS][row_bytes], then f32 sums of groups [groups][ROWS].
template <class T>
struct ExpertRowsX {
    // Lanes read 16 bytes of each row, or twice 8 bytes, without bank conflicts.
    static constexpr bool WIDE = T::GROUP == 32 && !T::FLOAT;
    static constexpr bool SUMS = T::SCALED && (T::MIN || T::ZERO != 0);
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
    // Adds up groups, in units of codes: see unpack().
    __device__ __forceinline__ void add_up(int count) const {
        constexpr float UNIT = T::MIN ? CODE_UNIT : -T::ZERO * CODE_UNIT;
        for (int i = threadIdx.x; i < n_groups * ROWS; i += THREADS) {
            const int row = i % ROWS, group = i / ROWS;
            if (row >= count) continue;
            const uint4* src = reinterpret_cast<const uint4*>(x + row * row_bytes + group * T::GROUP * 2);
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < T::GROUP / 8; ++j) {
                const uint4 v = src[j];
                const float2 a = half2_to_float2(v.x), b = half2_to_float2(v.y), c = half2_to_float2(v.z),
                             d = half2_to_float2(v.w);
                sum += ((a.x + a.y) + (b.x + b.y)) + ((c.x + c.y) + (d.x + d.y));
            }
            sums[i] = sum * UNIT;
        }
    }
    // The B operands of a lane for 32 columns, for both steps of 16.
    static __device__ __forceinline__ uint4 operand(const uint8_t* lane_x, int column) {
        const uint8_t* src = lane_x + column * 2;
        if constexpr (WIDE) {
            return *reinterpret_cast<const uint4*>(src);
        } else {
            const uint2 low = *reinterpret_cast<const uint2*>(src), high = *reinterpret_cast<const uint2*>(src + 32);
            return make_uint4(low.x, low.y, high.x, high.y);
        }
    }
    __device__ __forceinline__ const uint8_t* lane_x(int g, int t) const {
        return x + g * row_bytes + t * (WIDE ? 16 : 8);
    }
};

// The sums of a warp's tile row: rows g and g + 8, of x's rows 2 t and 2 t + 1.
template <class T>
struct ExpertRowsSums {
    using X = ExpertRowsX<T>;
    using Step = Tile<T::BITS, T::GROUP, T::SCALES, STEP, typename T::VALUES>;
    static constexpr int STEPS = T::CHUNK_K / STEP;
    const uint8_t* lane_x;
    const float* lane_sums;
    int lane;
    float acc[4];
    float part[4], minimums[4];  // HAS_SUB: of a chunk, without its scale and minimum
    ChunkScales<T> scales;

    __device__ __forceinline__ ExpertRowsSums(const X& x, int lane_)
        : lane_x(x.lane_x(lane_ / 4, lane_ % 4)), lane_sums(x.sums + lane_ % 4 * 2), lane(lane_) {}
    static __device__ __forceinline__ void clear(float (&sums)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[e] = 0.0f;
    }
    // acc += the chunk at columns `column` ...
    __device__ __forceinline__ void multiply(const uint8_t* chunk, int column) {
        if constexpr (T::SCALED) scales.load(chunk, lane / 4);
        if constexpr (T::HAS_SUB) clear(part), clear(minimums);
        multiply_steps<0>(chunk + T::SCALE_BYTES, column);
        if constexpr (T::HAS_SUB) scale_chunk();
    }
    __device__ __forceinline__ void scale_chunk() {
        const float2 first = half2_to_float2(scales.dd[0]);
        if constexpr (T::PACKED_SUB) {
            const float2 second = half2_to_float2(scales.dd[1]);
            const float d[2] = {first.x, second.x}, minimum[2] = {-first.y, -second.y};
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[e] = fmaf(minimum[e / 2], minimums[e], fmaf(d[e / 2], part[e], acc[e]));
        } else {
            const float d[2] = {first.x, first.y};
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[e] = fmaf(d[e / 2], part[e], acc[e]);
        }
    }
    template <int P>
    __device__ __forceinline__ void multiply_steps(const uint8_t* main, int column) {
        if constexpr (P < STEPS) {
            ChunkCodes<Step> codes;
            codes.load(main + P * Step::BASE_BYTES, main + T::BASE_BYTES + P * Step::EXTRA_BYTES, lane);
            multiply_columns<P, 0>(codes, column + P * STEP);
            multiply_columns<P, 1>(codes, column + P * STEP + 32);
            multiply_steps<P + 1>(main, column);
        }
    }
    // 32 columns: those of group J of step P.
    template <int P, int J>
    __device__ __forceinline__ void multiply_columns(const ChunkCodes<Step>& codes, int column) {
        const uint4 b = X::operand(lane_x, column);
        uint32_t a[2][4];
        codes.template unpack<J, 0>(a[0]);
        codes.template unpack<J, 1>(a[1]);
        if constexpr (!T::SCALED) {
            mma_m16n8k16_f16(acc, a[0], {b.x, b.y});
            mma_m16n8k16_f16(acc, a[1], {b.z, b.w});
        } else if constexpr (T::GROUP == 32) {
            const float2 sum = sum_of(column);
            float c[4];
            begin<J>(c, sum);
            mma_m16n8k16_f16(c, a[0], {b.x, b.y});
            mma_m16n8k16_f16(c, a[1], {b.z, b.w});
            add<2 * P + J, J>(c, sum);
        } else {
            const float2 sum[2] = {sum_of(column), sum_of(column + 16)};
            float c[2][4];
            begin<J>(c[0], sum[0]), begin<J>(c[1], sum[1]);
            mma_m16n8k16_f16(c[0], a[0], {b.x, b.y});
            mma_m16n8k16_f16(c[1], a[1], {b.z, b.w});
            add<4 * P + 2 * J, J>(c[0], sum[0]), add<4 * P + 2 * J + 1, J>(c[1], sum[1]);
        }
    }
    // The sums of the group at `column`, of the lane's two rows of x.
    __device__ __forceinline__ float2 sum_of(int column) const {
        if constexpr (!X::SUMS) return make_float2(0.0f, 0.0f);
        return *reinterpret_cast<const float2*>(lane_sums + column / T::GROUP * ROWS);
    }
    // The factor of unpacked codes in 32-column group J, of row half H.
    template <int J, int H>
    static __device__ __forceinline__ constexpr float shift() {
        return T::template shift<J, H>();
    }
    // What the products of a group are added to: their zero points.
    template <int J>
    static __device__ __forceinline__ void begin(float (&c)[4], const float2& sum) {
        constexpr bool ZERO = T::ZERO != 0;
        c[0] = ZERO ? sum.x * shift<J, 0>() : 0.0f, c[1] = ZERO ? sum.y * shift<J, 0>() : 0.0f;
        c[2] = ZERO ? sum.x * shift<J, 1>() : 0.0f, c[3] = ZERO ? sum.y * shift<J, 1>() : 0.0f;
    }
    // Adds the products of group G of the chunk, which lies in 32-column group J of its step.
    template <int G, int J>
    __device__ __forceinline__ void add(const float (&c)[4], const float2& sum) {
        const RowScales s = scale<G, J>();
        float (&dst)[4] = T::HAS_SUB ? part : acc;
        float (&minimum)[4] = T::HAS_SUB ? minimums : acc;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            dst[e] = fmaf(s.d[e / 2], c[e], dst[e]);
            if (T::MIN) minimum[e] = fmaf(s.m[e / 2], e % 2 ? sum.y : sum.x, minimum[e]);
        }
    }
    // The scales of unpacked codes, and minimums; HAS_SUB: in units of those of the chunk.
    template <int G, int J>
    __device__ __forceinline__ RowScales scale() const {
        RowScales r;
        if constexpr (T::PACKED_SUB) {
            const uint32_t both = scales.template scales_and_mins<G>();
            const float2 d = __half22float2(bytes_to_half2<0>(both, 0.0f));
            const float2 m = __half22float2(bytes_to_half2<1>(both, 0.0f));
            r.d[0] = d.x, r.d[1] = d.y, r.m[0] = m.x, r.m[1] = m.y;
        } else if constexpr (T::SIGNED_SUB) {
            const float2 d = __half22float2(sub_scales<T, G & 1>(scales.sc[G / 2]));
            r.d[0] = d.x, r.d[1] = d.y, r.m[0] = r.m[1] = 0.0f;
        } else {
            r = scales.template get<G>();
        }
        r.d[0] *= 1.0f / shift<J, 0>(), r.d[1] *= 1.0f / shift<J, 1>();
        return r;
    }
};

// Stores the sums of a tile row; GLU: of gate, and of up.
template <class T, int EPILOGUE>
__device__ __forceinline__ void write_rows(const ExpertRowsArgs& p, int tile, const int4& work, int lane,
                                           const float (&sums)[4], const float (&up)[4]) {
    constexpr float UNIT = T::SCALED ? 1.0f / CODE_UNIT : 1.0f;
    const int n_rows = p.segment[0].n_rows;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const int pair = work.y + lane % 4 * 2 + e % 2, row = tile * TILE_ROWS + lane / 4 + e / 2 * 8;
        if (pair >= work.z || row >= n_rows) continue;
        const size_t index = static_cast<size_t>(pair) * n_rows + row,
                     bias = static_cast<size_t>(work.x) * n_rows + row;
        float y = scaled_row(p.segment[0], row, sums[e] * UNIT);
        if constexpr (EPILOGUE == GLU) {
            float u = scaled_row(p.segment[1], row, up[e] * UNIT);
            if (p.bias[0]) y += __ldg(p.bias[0] + bias);
            if (p.bias[1]) u += __ldg(p.bias[1] + bias);
            static_cast<__half*>(p.segment[0].out)[index] = saturated_half(expert_gated(p.activation, y, u));
        } else {
            static_cast<float*>(p.segment[0].out)[index] = y;
        }
    }
}

template <class T, int EPILOGUE>
__global__ void __launch_bounds__(THREADS, CTAS) expert_rows(const ExpertRowsArgs p) {
    __shared__ int rows[ROWS];
    SHARED_DYNAMIC(uint8_t, shared);
    const int warp = kept(static_cast<int>(threadIdx.x / 32)), lane = kept(static_cast<int>(threadIdx.x % 32));
    uint8_t* stages = kept_shared(shared + warp * STAGES * T::BYTES);
    const CopyTarget dst = copy_target(stages);
    const ExpertRowsX<T> x(p, shared + WARPS * STAGES * T::BYTES);
    const int first = blockIdx.y * p.rounds * WARPS + warp;
    const int count = max(0, min(p.rounds, (p.n_tiles - first + WARPS - 1) / WARPS));
    grid_dependency_launch();
    grid_dependency_wait();
    const int4 work = __ldcg(p.work + blockIdx.x);
    if (work.x < 0) return;
    const int n_rows = work.z - work.y;
    if (threadIdx.x < n_rows) {
        const int row = work.y + threadIdx.x;
        rows[threadIdx.x] = p.pair_of ? __ldcg(p.pair_of + row) / p.pairs_per_x : row;
    }
    ExpertRowsChunks<T, EPILOGUE> ahead(p, work.x, first, count);
    for (int i = 0; i < STAGES; ++i) copy_chunk<T>(ahead, dst + i * T::BYTES, lane);
    __syncthreads();
    x.copy(p, rows, n_rows);
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (x.SUMS) {
        x.add_up(n_rows);
        __syncthreads();
    }
    ExpertRowsSums<T> sums(x, lane);
    constexpr int WIDTH = EPILOGUE == GLU ? 2 : 1;
    float gate[4];
    int stage = 0;
    for (int i = 0; i < count * WIDTH; ++i) {
        sums.clear(sums.acc);
        for (int chunk = 0; chunk < p.n_chunk; ++chunk) {
            cp_async_wait<STAGES - 1>();
            __syncwarp();
            sums.multiply(stages + stage * T::BYTES, chunk * T::CHUNK_K);
            __syncwarp();
            copy_chunk<T>(ahead, dst + stage * T::BYTES, lane);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        const int tile = first + i / WIDTH * WARPS;
        if constexpr (EPILOGUE == GLU) {
            if (i & 1)
                write_rows<T, GLU>(p, tile, work, lane, gate, sums.acc);
            else
                for (int e = 0; e < 4; ++e) gate[e] = sums.acc[e];
        } else {
            write_rows<T, STORE>(p, tile, work, lane, sums.acc, sums.acc);
        }
    }
    cp_async_wait<0>();
}
