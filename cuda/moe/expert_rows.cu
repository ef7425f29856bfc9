// Grouped GEMM for few rows an expert: rows of x that are sorted by expert (sort.cu), each times the matrix of its
// expert. A CTA makes a work tile of up to ROWS rows; each of its WARPS warps makes `rounds` times TILES tile rows, GLU:
// `rounds` tile rows of gate and of up. A warp multiplies TILES tile rows at once, so that a load of x serves all of
// them.
//
// Reading weights bounds this GEMM only if few instructions are spent on each of them. Therefore integer codes become
// f16 exactly and without their scale, one AND for two of them, and f32 sums of a group are multiplied by its scale;
// formats with scales of scales multiply by the scale of a chunk once a chunk, and each lane converts a quarter of the
// integer scales that its quad needs. Zero points and minimums meet the sum of the group's columns of x, which the CTA
// computes once; those of formats with scales of scales do so in an MMA.
//
// All of x lies in shared memory. Each warp streams its own chunks through a cp.async pipeline and waits for no other
// warp, and CTAS of them share an SM. The bits of a row do not depend on its place.
//
// Epilogues: STORE, f32 of one matrix, and GLU, f16 act(gate + b_gate) * (up + b_up).
//
// Launch: grid (work tiles at most, ceil(tile rows / tile rows of a CTA)). Work tiles beyond the last one end at once.
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
    int rounds;             // of a warp: STORE: TILES neighbouring tile rows; GLU: a tile row of gate and of up
};

#ifndef CTAS
#define CTAS 3  // of an SM
#endif

#ifndef TILES
#define TILES 1  // tile rows that a warp multiplies at once: 1 or 2
#endif

constexpr int ROWS = 8;   // of x: the columns of an MMA's B operand
constexpr int STEP = 64;  // columns whose codes a lane holds at a time

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

// x of a CTA in shared memory: f16 rows [ROWS][row_bytes], then sums of groups: f32 [groups][ROWS], or, PAIRED, the B
// operands of an MMA of eight groups, [groups / 8][lane][2]: means as f16, then what these lack.
template <class T>
struct ExpertRowsX {
    static constexpr bool PAIRED = T::HAS_SUB;
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

// The sums of a tile row of a warp: a lane has rows g and g + 8, times x's rows 2 t and 2 t + 1.
template <class T>
struct ExpertRowsSums {
    using X = ExpertRowsX<T>;
    using Step = Tile<T::BITS, T::GROUP, T::SCALES, STEP, typename T::VALUES>;
    static constexpr int STEPS = T::CHUNK_K / STEP;
    int lane;
    float acc[4];
    float part[4];  // HAS_SUB: of a chunk, without its scale
    ChunkScales<T> scales;
    uint32_t own[T::HAS_SUB ? T::GROUPS / 4 : 1];  // HAS_SUB: scales that the lane converts: f16 (row g, row g + 8)

    static __device__ __forceinline__ void clear(float (&sums)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[e] = 0.0f;
    }
    // Reads the scales of a chunk. `sums` are those of the columns of its groups.
    __device__ __forceinline__ void begin_chunk(const uint8_t* chunk, const float* sums) {
        if constexpr (T::HAS_SUB)
            convert_scales(chunk, sums);
        else if constexpr (T::SCALED)
            scales.load(chunk, lane / 4);
    }
    // Multiplies what was added since begin_chunk by the scale of the chunk.
    __device__ __forceinline__ void end_chunk() {
        if constexpr (T::HAS_SUB) {
            const float2 first = half2_to_float2(scales.dd[0]);
            const float d[2] = {first.x, T::PACKED_SUB ? half2_to_float2(scales.dd[1]).x : first.y};
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[e] = fmaf(d[e / 2], part[e], acc[e]);
        }
    }
    // A lane converts the scales of groups 2 t and 2 t + 1 of each eight. Minimums, or scales, which zero points are
    // multiplied by, meet the means of the groups, and what these lack, in an MMA of eight groups.
    __device__ __forceinline__ void convert_scales(const uint8_t* chunk, const float* sums) {
        constexpr int D_WORDS = T::PACKED_SUB ? 2 : 1;
        constexpr float UNIT = -T::GROUP * CODE_UNIT * (T::PACKED_SUB ? 1.0f : T::ZERO * T::SUB_UNIT);
        const int g = lane / 4, t = lane % 4;
        scales.template load_words<D_WORDS>(scales.dd, chunk + g * D_WORDS * 4);
        float c[4] = {};
#pragma unroll
        for (int i = 0; i < T::GROUPS / 8; ++i) {
            uint32_t a[2];
            if constexpr (T::PACKED_SUB)
                convert_packed(chunk, (g * T::GROUPS + 8 * i) / 2 + t, own + 2 * i, a);
            else
                convert_signed(chunk, (g * T::GROUPS + 8 * i) / 2 + t, own + 2 * i, a);
            const uint2 b = *reinterpret_cast<const uint2*>(sums + i * 8 * ROWS);
            mma_m16n8k16_f16(c, {a[0], a[1], a[0], a[1]}, {b.x, b.y});
        }
        if constexpr (T::PACKED_SUB) {
            const float m[2] = {half2_to_float2(scales.dd[0]).y * UNIT, half2_to_float2(scales.dd[1]).y * UNIT};
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[e] = fmaf(m[e / 2], c[e], acc[e]), part[e] = 0.0f;
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) part[e] = UNIT * c[e];
        }
    }
    // d: the scales of an even and an odd group as f16. a: their minimums, of row g, of row g + 8.
    __device__ __forceinline__ void convert_packed(const uint8_t* chunk, int pair, uint32_t* d, uint32_t* a) const {
        const uint8_t* sub = chunk + TILE_ROWS * 4;
        const uint32_t fours = reinterpret_cast<const uint32_t*>(sub)[pair];
        uint32_t even = fours & 0x0f0f0f0fu, odd = fours >> 4 & 0x0f0f0f0fu;
        if constexpr (T::TWOS) {
            const uint32_t twos = reinterpret_cast<const uint32_t*>(sub + T::SUB_BYTES)[pair / 2] >> 4 * (pair & 1);
            even |= twos << 4 & 0x30303030u, odd |= twos << 2 & 0x30303030u;
        }
        d[0] = in_units<0>(biased_bytes<0>(even), 1024.0f), d[1] = in_units<1>(biased_bytes<0>(odd), 1024.0f);
        const uint32_t minimums = __byte_perm(even, odd, 0x7362);
        a[0] = as_bits(bytes_to_half2<0>(minimums, 0.0f)), a[1] = as_bits(bytes_to_half2<1>(minimums, 0.0f));
    }
    // d: the scales of an even and an odd group as f16. a: the same ones in units of 1, of row g, of row g + 8.
    __device__ __forceinline__ void convert_signed(const uint8_t* chunk, int pair, uint32_t* d, uint32_t* a) const {
        const uint32_t bytes = reinterpret_cast<const uint32_t*>(chunk + TILE_ROWS * 2)[pair] ^ 0x80808080u;
        d[0] = in_units<0>(biased_bytes<0>(bytes), 1152.0f), d[1] = in_units<1>(biased_bytes<1>(bytes), 1152.0f);
        const uint32_t by_row = __byte_perm(bytes, 0, 0x3120);
        a[0] = as_bits(bytes_to_half2<0>(by_row, 128.0f)), a[1] = as_bits(bytes_to_half2<1>(by_row, 128.0f));
    }
    // Subtracts `bias` from the scales of an even or ODD group, and divides them by the factor by which unpack() returns
    // codes too large. Both are exact.
    template <int ODD>
    __device__ __forceinline__ uint32_t in_units(half2 biased, float bias) const {
        const half2 even = unit_of<0>(1.0f), odd = unit_of<1>(1.0f);
        const half2 even_bias = unit_of<0>(-bias), odd_bias = unit_of<1>(-bias);
        const bool is_odd = T::GROUP == 32 ? ODD : lane & 1;  // of the 32 columns
        return as_bits(__hfma2(biased, is_odd ? odd : even, is_odd ? odd_bias : even_bias));
    }
    template <int J>
    static __device__ __forceinline__ half2 unit_of(float x) {
        constexpr float low = T::SUB_UNIT / T::template shift<J, 0>(), high = T::SUB_UNIT / T::template shift<J, 1>();
        return __floats2half2_rn(low * x, high * x);
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
    // What the products of a group are added to: 0, or its zero points, those of unpacked codes of 32-column group J.
    template <int J>
    static __device__ __forceinline__ void begin(float (&c)[4], const float2& sum) {
        constexpr bool ZERO = T::ZERO != 0 && !X::PAIRED;
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
            if (T::MIN && !T::HAS_SUB) dst[e] = fmaf(s.m[e / 2], e % 2 ? sum.y : sum.x, dst[e]);
        }
    }
    // The scales of unpacked codes, and minimums; HAS_SUB: in units of the scale of the chunk.
    template <int G, int J>
    __device__ __forceinline__ RowScales scale() const {
        if constexpr (T::HAS_SUB) {
            const float2 d = half2_to_float2(__shfl_sync(0xffffffffu, own[G / 8 * 2 + G % 2], G % 8 / 2, 4));
            return {{d.x, d.y}, {0.0f, 0.0f}};
        } else {
            RowScales r = scales.template get<G>();
            r.d[0] *= 1.0f / T::template shift<J, 0>(), r.d[1] *= 1.0f / T::template shift<J, 1>();
            return r;
        }
    }
};

// sums += the chunks of a stage times the columns at `x`, from step P of STEP columns on. `x_sums` are those of the
// columns of groups.
template <int P, class T>
__device__ __forceinline__ void multiply_steps(ExpertRowsSums<T> (&sums)[TILES], const uint8_t* stage, const uint8_t* x,
                                               const float* x_sums) {
    using Sums = ExpertRowsSums<T>;
    using Step = typename Sums::Step;
    if constexpr (P < Sums::STEPS) {
        ChunkCodes<Step> codes[TILES];
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const uint8_t* main = stage + i * T::BYTES + T::SCALE_BYTES;
            codes[i].load(main + P * Step::BASE_BYTES, main + T::BASE_BYTES + P * Step::EXTRA_BYTES, sums[i].lane);
        }
        const uint4 first = Sums::X::operand(x + P * STEP * 2);
#pragma unroll
        for (int i = 0; i < TILES; ++i) sums[i].template multiply_columns<P, 0>(codes[i], first, x_sums);
        const uint4 second = Sums::X::operand(x + P * STEP * 2 + 64);
#pragma unroll
        for (int i = 0; i < TILES; ++i) sums[i].template multiply_columns<P, 1>(codes[i], second, x_sums);
        multiply_steps<P + 1>(sums, stage, x, x_sums);
    }
}
template <class T>
__device__ __forceinline__ void multiply(ExpertRowsSums<T> (&sums)[TILES], const uint8_t* stage, const uint8_t* x,
                                         const float* x_sums) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) sums[i].begin_chunk(stage + i * T::BYTES, x_sums);
    multiply_steps<0>(sums, stage, x, x_sums);
#pragma unroll
    for (int i = 0; i < TILES; ++i) sums[i].end_chunk();
}

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
    ExpertRowsChunks<T, EPILOGUE> ahead(p, work.x, first, passes, lane);
    for (int i = 0; i < STAGES; ++i) ahead.copy(dst + i * STAGE_BYTES);
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
    ExpertRowsSums<T> sums[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) sums[i].lane = lane;
    float gate[4];
    int stage = 0;
    for (int pass = 0; pass < passes; ++pass) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) sums[i].clear(sums[i].acc);
#pragma unroll 1
        for (int chunk = 0; chunk < p.n_chunk; ++chunk) {
            cp_async_wait<STAGES - 1>();
            __syncwarp();
            multiply(sums, stages + stage * STAGE_BYTES, lane_x + chunk * T::CHUNK_K * 2,
                     lane_sums + chunk * T::GROUPS * ROWS);
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
            for (int e = 0; e < 4; ++e) gate[e] = sums[0].acc[e];
        }
    }
    cp_async_wait<0>();
}
