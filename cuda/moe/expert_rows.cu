// Grouped GEMM for few rows an expert: rows of x that are sorted by expert (sort.cu), each times the matrix of its
// expert. A CTA makes a work tile of up to ROWS rows; each of its WARPS warps makes `rounds` tile rows, GLU: of gate and
// of up.
//
// Reading weights bounds this GEMM only if few instructions are spent on each of them. Therefore integer codes become
// f16 exactly and without their scale, one AND for two of them, and f32 sums of a group are multiplied by its scale;
// formats with scales of scales multiply by the scale of a chunk once a chunk. Zero points and minimums meet the sum of
// the group's columns of x, which the CTA computes once; integer minimums do so in an MMA.
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

// x of a CTA in shared memory: f16 rows [ROWS][row_bytes], then sums of groups: f32 [groups][ROWS], or, PAIRED, the B
// operands of an MMA of eight groups, [groups / 8][lane][2]: means as f16, then what these lack.
template <class T>
struct ExpertRowsX {
    static constexpr bool PAIRED = T::PACKED_SUB;
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
    // Stores the sum of a group, times the zero point of unpacked codes (of row g), or its mean.
    __device__ __forceinline__ void put(int row, int group, float sum) const {
        if constexpr (PAIRED) {
            const float mean = sum * (1.0f / T::GROUP);
            const __half high = __float2half_rn(mean);
            __half* dst =
                reinterpret_cast<__half*>(sums) + ((group / 8 * ROWS + row) * 4 + group % 8 / 2) * 4 + group % 2;
            dst[0] = high, dst[2] = __float2half_rn(mean - __half2float(high));
        } else {
            const bool odd = group * T::GROUP / 32 & 1;
            const float zero = -T::ZERO * (odd ? T::template shift<1, 0>() : T::template shift<0, 0>());
            sums[group * ROWS + row] = sum * (CODE_UNIT * (T::MIN ? 1.0f : zero));
        }
    }
    __device__ __forceinline__ void add_up(int count) const {
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
            put(row, group, sum);
        }
    }
    // Where the lane's x and sums begin.
    __device__ __forceinline__ const uint8_t* lane_x(int lane) const {
        return x + lane / 4 * row_bytes + lane % 4 * (WIDE ? 16 : 8);
    }
    __device__ __forceinline__ const float* lane_sums(int lane) const { return sums + 2 * (PAIRED ? lane : lane % 4); }
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

// The sums of a warp's tile row: rows g and g + 8, of x's rows 2 t and 2 t + 1.
template <class T>
struct ExpertRowsSums {
    using X = ExpertRowsX<T>;
    using Step = Tile<T::BITS, T::GROUP, T::SCALES, STEP, typename T::VALUES>;
    static constexpr int STEPS = T::CHUNK_K / STEP;
    int lane;
    float acc[4];
    float part[4];  // HAS_SUB: of a chunk, without its scale
    ChunkScales<T> scales;

    static __device__ __forceinline__ void clear(float (&sums)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[e] = 0.0f;
    }
    // acc += a chunk times the columns at `x`; `sums` are those of the chunk's groups.
    __device__ __forceinline__ void multiply(const uint8_t* chunk, const uint8_t* x, const float* sums) {
        if constexpr (T::SCALED) scales.load(chunk, lane / 4);
        if constexpr (T::HAS_SUB) clear(part);
        multiply_steps<0>(chunk + T::SCALE_BYTES, x, sums);
        if constexpr (T::HAS_SUB) {
            const float2 first = half2_to_float2(scales.dd[0]);
            const float d[2] = {first.x, T::PACKED_SUB ? half2_to_float2(scales.dd[1]).x : first.y};
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[e] = fmaf(d[e / 2], part[e], acc[e]);
        }
        if constexpr (T::PACKED_SUB) add_minimums(chunk, sums);
    }
    // The lane has the minimums of groups 2 t and 2 t + 1 of each eight. Both means and what they lack meet them.
    __device__ __forceinline__ void add_minimums(const uint8_t* chunk, const float* sums) {
        constexpr float UNIT = T::GROUP * CODE_UNIT;
        const int g = lane / 4, t = lane % 4;
        float c[4] = {};
#pragma unroll
        for (int i = 0; i < T::GROUPS / 8; ++i) {
            const int pair = (g * T::GROUPS + 8 * i) / 2 + t;
            const uint8_t* sub = chunk + TILE_ROWS * 4;
            const uint32_t fours = reinterpret_cast<const uint32_t*>(sub)[pair];
            uint32_t even = fours & 0x0f0f0000u, odd = fours >> 4 & 0x0f0f0000u;
            if constexpr (T::TWOS) {
                const uint32_t twos = reinterpret_cast<const uint32_t*>(sub + T::SUB_BYTES)[pair / 2] >> 4 * (t & 1);
                even |= twos << 4 & 0x30300000u, odd |= twos << 2 & 0x30300000u;
            }
            const uint32_t bytes = __byte_perm(even, odd, 0x7362);
            const uint32_t first = as_bits(bytes_to_half2<0>(bytes, 0.0f)),
                           second = as_bits(bytes_to_half2<1>(bytes, 0.0f));
            const uint2 b = *reinterpret_cast<const uint2*>(sums + i * 8 * ROWS);
            const uint32_t a[4] = {first, second, first, second};
            mma_m16n8k16_f16(c, a, {b.x, b.y});
        }
        const float d[2] = {half2_to_float2(scales.dd[0]).y * -UNIT, half2_to_float2(scales.dd[1]).y * -UNIT};
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[e] = fmaf(d[e / 2], c[e], acc[e]);
    }
    template <int P>
    __device__ __forceinline__ void multiply_steps(const uint8_t* main, const uint8_t* x, const float* sums) {
        if constexpr (P < STEPS) {
            ChunkCodes<Step> codes;
            codes.load(main + P * Step::BASE_BYTES, main + T::BASE_BYTES + P * Step::EXTRA_BYTES, lane);
            multiply_columns<P, 0>(codes, X::operand(x + P * STEP * 2), sums);
            multiply_columns<P, 1>(codes, X::operand(x + P * STEP * 2 + 64), sums);
            multiply_steps<P + 1>(main, x, sums);
        }
    }
    // 32 columns: those of group J of step P.
    template <int P, int J>
    __device__ __forceinline__ void multiply_columns(const ChunkCodes<Step>& codes, const uint4& b, const float* sums) {
        uint32_t a[2][4];
        codes.template unpack<J, 0>(a[0]);
        codes.template unpack<J, 1>(a[1]);
        constexpr int G = (2 * P + J) * (32 / T::GROUP);  // in the chunk
        if constexpr (!T::SCALED) {
            mma_m16n8k16_f16(acc, a[0], {b.x, b.y});
            mma_m16n8k16_f16(acc, a[1], {b.z, b.w});
        } else if constexpr (T::GROUP == 32) {
            const float2 sum = sum_of(sums, G);
            float c[4];
            begin<J>(c, sum);
            mma_m16n8k16_f16(c, a[0], {b.x, b.y});
            mma_m16n8k16_f16(c, a[1], {b.z, b.w});
            add<G, J>(c, sum);
        } else {
            const float2 sum[2] = {sum_of(sums, G), sum_of(sums, G + 1)};
            float c[2][4];
            begin<J>(c[0], sum[0]), begin<J>(c[1], sum[1]);
            mma_m16n8k16_f16(c[0], a[0], {b.x, b.y});
            mma_m16n8k16_f16(c[1], a[1], {b.z, b.w});
            add<G, J>(c[0], sum[0]), add<G + 1, J>(c[1], sum[1]);
        }
    }
    // The sums of a group, of the lane's two rows of x.
    static __device__ __forceinline__ float2 sum_of(const float* sums, int group) {
        if constexpr (!X::SUMS || X::PAIRED) return make_float2(0.0f, 0.0f);
        return *reinterpret_cast<const float2*>(sums + group * ROWS);
    }
    // What the products of a group are added to: its zero points, those of unpacked codes of 32-column group J.
    template <int J>
    static __device__ __forceinline__ void begin(float (&c)[4], const float2& sum) {
        constexpr bool ZERO = T::ZERO != 0;
        constexpr float ratio = T::template shift<J, 1>() / T::template shift<J, 0>();
        c[0] = ZERO ? sum.x : 0.0f, c[1] = ZERO ? sum.y : 0.0f;
        c[2] = c[0] * ratio, c[3] = c[1] * ratio;
    }
    // Adds the products of group G of the chunk, which lies in 32-column group J of its step.
    template <int G, int J>
    __device__ __forceinline__ void add(const float (&c)[4], const float2& sum) {
        const RowScales s = scale<G, J>();
        float (&dst)[4] = T::HAS_SUB ? part : acc;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            dst[e] = fmaf(s.d[e / 2], c[e], dst[e]);
            if (T::MIN && !T::PACKED_SUB) dst[e] = fmaf(s.m[e / 2], e % 2 ? sum.y : sum.x, dst[e]);
        }
    }
    // The scales of unpacked codes, and minimums; HAS_SUB: in units of the scale of the chunk.
    template <int G, int J>
    __device__ __forceinline__ RowScales scale() const {
        constexpr float low = 1.0f / T::template shift<J, 0>(), high = 1.0f / T::template shift<J, 1>();
        RowScales r;
        if constexpr (T::PACKED_SUB) {
            const uint32_t both = scales.template scales_and_mins<G>();
            float2 d;
            if constexpr (low == high)  // exact: the bytes have six bits
                d = __half22float2(
                    __hfma2(biased_bytes<0>(both), __float2half2_rn(low), __float2half2_rn(-1024 * low)));
            else
                d = __half22float2(bytes_to_half2<0>(both, 0.0f)), d.x *= low, d.y *= high;
            r.d[0] = d.x, r.d[1] = d.y;
        } else {
            if constexpr (T::SIGNED_SUB) {
                const float2 d = __half22float2(sub_scales<T, G & 1>(scales.sc[G / 2]));
                r.d[0] = d.x, r.d[1] = d.y;
            } else {
                r = scales.template get<G>();
            }
            r.d[0] *= low, r.d[1] *= high;
        }
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
        float y = scaled_expert(p.segment[0], work.x, sums[e] * UNIT);
        if constexpr (EPILOGUE == GLU) {
            float u = scaled_expert(p.segment[1], work.x, up[e] * UNIT);
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
    __shared__ int4 of_cta;  // `work`, which takes no registers there
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
    if (threadIdx.x == 0) of_cta = work;
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
    const uint8_t* lane_x = x.lane_x(lane);
    const float* lane_sums = x.lane_sums(lane);
    ExpertRowsSums<T> sums;
    sums.lane = lane;
    constexpr int WIDTH = EPILOGUE == GLU ? 2 : 1;
    float gate[4];
    int stage = 0;
    for (int i = 0; i < count * WIDTH; ++i) {
        sums.clear(sums.acc);
#pragma unroll 1
        for (int chunk = 0; chunk < p.n_chunk; ++chunk) {
            cp_async_wait<STAGES - 1>();
            __syncwarp();
            sums.multiply(stages + stage * T::BYTES, lane_x + chunk * T::CHUNK_K * 2,
                          lane_sums + chunk * T::GROUPS * ROWS);
            __syncwarp();
            copy_chunk<T>(ahead, dst + stage * T::BYTES, lane);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        const int tile = first + i / WIDTH * WARPS;
        if constexpr (EPILOGUE == GLU) {
            if (i & 1)
                write_rows<T, GLU>(p, tile, of_cta, lane, gate, sums.acc);
            else
                for (int e = 0; e < 4; ++e) gate[e] = sums.acc[e];
        } else {
            write_rows<T, STORE>(p, tile, of_cta, lane, sums.acc, sums.acc);
        }
    }
    cp_async_wait<0>();
}
