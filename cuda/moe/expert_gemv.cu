// Products of a token with the experts that it chose, for decode steps. An expert's matrix is found by its id in device
// memory, or each warp chooses from the router's logits (choose.cuh), so that the router need not wait for all of them.
//
// A CTA is small: it makes one tile row of one (token, expert) pair, GLU: of gate and of up, SUM: one or two tile rows of
// all experts of a token. Several CTAs share an SM, all CTAs of a token are resident at the same time, and each reads as
// many bytes as the others. How a tile row is split among warps does not depend on the number of tokens, so neither do
// the bits. A warp that multiplies two tile rows at once loads and prepares x for both, in fewer instructions.
//
// Work is split among warps in units of 256 columns of x, one row of x after the other; each warp has as many units as
// the others, all of them adjacent. A warp converts its units of x for itself (fixed_point.cuh) and streams the chunks
// that they meet through its own cp.async pipeline, so warps meet only once, at the barrier before partial sums are
// added. If there are only a few more tile rows of SUM than SMs, some SMs would have two and the others one: a cluster
// of CTAs then shares each tile row, or each two, and its first CTA adds the sums of all.
//
// | epilogue | grid                   | rows of x    | output                                                       |
// | STORE    | (tile rows, pairs)     | of the token | f32 out[pair] = y                                            |
// | GLU      | (tile rows, pairs)     | of the token | f16 out[pair] = act(gate + b_gate) * (up + b_up)             |
// | SUM      | (tile rows / TILES *   | of the pairs | f32 out[token] += sum of weight * (y + bias) + strength *    |
// |          | CLUSTER, tokens)       |              | shared                                                       |
//
// Shared memory: pipelines [WARPS][STAGES] of chunks (ExpertChunks::COUNT), x [WARPS][units] and its scales, then
// partial sums.
#include "moe/choose.cuh"
#include "moe/expert_act.cuh"
#include "gemm/decode_mma.cuh"
#include "gemm/gemm.cuh"
#include "gemm/weight_pipeline.cuh"
#include "lib/cluster.cuh"

#ifndef EXPERTS_PER_LANE
#define EXPERTS_PER_LANE 0  // 0: ids and weights are there; else ceil(n_expert / 32)
#endif

constexpr int SUM = QKV + 1;  // an epilogue beside enum Epilogue

struct ExpertGemvArgs : GemmArgs {
    const __half* x;        // rows of k columns
    const int* ids;         // [n_tokens, n_used]
    const float* weights;   // SUM: [n_tokens, n_used]
    const float* bias[2];   // [n_expert, n_rows] of the segments, or null
    const float* shared;    // SUM: [n_tokens, n_rows], or null
    const float* strength;  // SUM: [n_tokens], of the shared part, or null
    uint64_t expert_bytes;  // from the tiles of one expert to those of the next
    ChoiceArgs choice;      // where each warp chooses
    int n_used;
    int warp_units;  // of x that a warp has in shared memory: a multiple of WarpX::AT_ONCE, or all of them
};

constexpr int UNIT = 256;  // columns of x: eight of each lane

// The units of a warp, and the position of the first one: a row of x and a unit of that row.
template <class T>
struct WarpUnits {
    static constexpr int CHUNKS = UNIT / T::CHUNK_K;  // of a unit; the last unit of a row may have fewer
    int per_row, count, row, unit;
    int n_chunks;  // of all units

    // warp: of n_warps that share n_rows rows of x.
    __device__ __forceinline__ WarpUnits(const ExpertGemvArgs& p, int n_rows, int warp, int n_warps)
        : per_row((p.n_chunk + CHUNKS - 1) / CHUNKS) {
        const int all = n_rows * per_row, first = all * warp / n_warps, end = all * (warp + 1) / n_warps;
        count = end - first, row = first / per_row, unit = first - row * per_row;
        const int end_row = end / per_row, end_unit = end - end_row * per_row;
        n_chunks = (end_row - row) * p.n_chunk + (end_unit - unit) * CHUNKS;
    }
};

// The order in which a warp copies chunks. A stage has a chunk; GLU: one of gate and the same one of up; SUM: one of
// each of TILES tile rows.
template <class T, int EPILOGUE, int TILES>
struct ExpertChunks {
    static constexpr int COUNT = EPILOGUE == GLU ? 2 : TILES;  // of a stage
    static constexpr int STAGE_BYTES = T::BYTES * COUNT;
    const ExpertGemvArgs& p;
    // tile: the CTA's first tile row; left: stages to copy; id: of the expert of x's row `lane` (SUM), or of all rows
    int tile, left, chunk, row, id;
    const uint8_t* src;  // the next chunk

    __device__ __forceinline__ ExpertChunks(const ExpertGemvArgs& args, const WarpUnits<T>& units, int tile_, int id_)
        : p(args), tile(tile_), left(units.n_chunks), chunk(units.unit * units.CHUNKS), row(units.row), id(id_) {
        find();
    }
    __device__ __forceinline__ void find() {
        const uint32_t expert = EPILOGUE == SUM ? __shfl_sync(0xffffffffu, id, row) : id;
        src = p.segment[0].tiles + expert * p.expert_bytes + tile * static_cast<uint64_t>(tile_row_bytes()) +
              static_cast<uint32_t>(chunk * T::BYTES);
    }
    __device__ __forceinline__ uint32_t tile_row_bytes() const { return p.n_chunk * T::BYTES; }
    // From the first chunk of a stage to the second one.
    __device__ __forceinline__ ptrdiff_t to_second() const {
        return EPILOGUE == GLU ? p.segment[1].tiles - p.segment[0].tiles : tile_row_bytes();
    }
    // Starts the copy of the next stage, if there is one, as one cp.async group.
    __device__ __forceinline__ void copy(CopyTarget dst, int lane) {
        if (left > 0) {
            copy_pieces<T>(dst, src, lane, p.streaming);
            if constexpr (COUNT == 2) copy_pieces<T>(dst + T::BYTES, src + to_second(), lane, p.streaming);
            src += T::BYTES, --left;
            if (EPILOGUE == SUM && ++chunk == p.n_chunk && left > 0) {
                chunk = 0, ++row;
                find();
            }
        }
        cp_async_commit();
    }
};

// The units of x of a warp, in its own part of shared memory.
template <class T>
struct WarpX : DecodeSharedStorage<T, 1> {
    static constexpr int AT_ONCE = 4;  // units that are loaded at the same time
    uint4 pieces[AT_ONCE];
    int row, unit;  // of the next load

    __device__ __forceinline__ WarpX(XScale* scales_, uint8_t* x_, const WarpUnits<T>& units)
        : DecodeSharedStorage<T, 1>(x_, 0, 1, true), row(units.row), unit(units.unit) {
        this->scales = scales_, this->x = x_;
    }
    // Requests the units from `first` on. Columns past k are 0.
    __device__ __forceinline__ void load(const ExpertGemvArgs& p, const __half* src, const WarpUnits<T>& units,
                                         int first, int lane) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int column = unit * UNIT + lane * 8;
            const bool valid = first + i < units.count && column < p.k;
            const uint4* piece = reinterpret_cast<const uint4*>(src + static_cast<size_t>(row) * p.k + column);
            pieces[i] = valid ? __ldcg(piece) : make_uint4(0, 0, 0, 0);
            if (++unit == units.per_row) unit = 0, ++row;
        }
    }
    // Stores the units from `first` on, as many as there is room for. The first ones of all are requested.
    __device__ __forceinline__ void put(const ExpertGemvArgs& p, const __half* src, const WarpUnits<T>& units,
                                        int first, int lane) {
        const int count = min(units.count - first, p.warp_units);
        __syncwarp();  // no lane reads the units before these any more
        for (int at = 0; at < count; at += AT_ONCE) {
            if (first + at > 0) load(p, src, units, first + at, lane);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (at + i < count) put_x<T>(XDst<T>(*this, 0, (at + i) * UNIT + lane * 8), true, pieces[i]);
        }
        __syncwarp();
    }
};

// What the first ROWS threads add to the sums of their row, or multiply with them.
template <int EPILOGUE, int TILES>
struct ExpertOutput {
    static constexpr int WIDTH = EPILOGUE == GLU ? 2 : 1;  // sums of a row
    static constexpr int ROWS = TILES * TILE_ROWS;         // of the CTA
    int row, expert = 0;  // its scales are loaded last, since each would take a register until then
    bool valid;
    float bias[WIDTH] = {}, old = 0.0f, shared = 0.0f, strength = 1.0f;

    __device__ __forceinline__ ExpertOutput(const ExpertGemvArgs& p, int tile) : row(tile * TILE_ROWS + threadIdx.x) {
        valid = threadIdx.x < ROWS && row < p.segment[0].n_rows;
    }
    __device__ __forceinline__ size_t index(const ExpertGemvArgs& p) const {
        return static_cast<size_t>(blockIdx.y) * p.segment[0].n_rows + row;
    }
    // Loads what does not depend on the sums. id: of the expert.
    __device__ __forceinline__ void load(const ExpertGemvArgs& p, int id) {
        expert = id;
        if (!valid) return;
        if constexpr (EPILOGUE == SUM) {
            old = __ldcg(static_cast<const float*>(p.segment[0].out) + index(p));
            if (p.shared) shared = __ldcg(p.shared + index(p));
            if (p.strength) strength = __ldcg(p.strength + blockIdx.y);
        } else {
#pragma unroll
            for (int w = 0; w < WIDTH; ++w)
                if (p.bias[w]) bias[w] = load_now(p.bias[w] + static_cast<size_t>(id) * p.segment[0].n_rows + row);
        }
    }
    // from_others: SUM: sums of the other n_others CTAs of the cluster, in pairs of floats, the second of them unused.
    __device__ __forceinline__ void write(const ExpertGemvArgs& p, const float* parts, const float* from_others,
                                          int n_others) const {
        if (!valid) return;
        float y[WIDTH];
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            float sum = sum_of_parts(parts + w * ROWS + threadIdx.x, WIDTH * ROWS);
            for (int i = 0; i < n_others; ++i) sum += from_others[2 * (i * ROWS + threadIdx.x)];
            y[w] = EPILOGUE == SUM ? sum : scaled_expert(p.segment[w], expert, sum) + bias[w];
        }
        if constexpr (EPILOGUE == GLU) {
            static_cast<__half*>(p.segment[0].out)[index(p)] = saturated_half(ExpertGated(p.activation)(y[0], y[1]));
        } else if constexpr (EPILOGUE == SUM) {
            if (p.bias[0])
                for (int j = 0; j < p.n_used; ++j) y[0] += parts[(WARPS + j) * ROWS + threadIdx.x];
            if (p.shared) y[0] = fmaf(strength, shared, y[0]);
            static_cast<float*>(p.segment[0].out)[index(p)] = old + y[0];
        } else {
            static_cast<float*>(p.segment[0].out)[index(p)] = y[0];
        }
    }
};

// SUM: stores weight * bias of the experts of a token, for ROWS rows, after the sums of the warps. `id` and `weight`
// are those of expert `lane`.
template <int ROWS>
__device__ __forceinline__ void put_biases(const ExpertGemvArgs& p, float* parts, int tile, int id, float weight) {
    const int row_of_cta = threadIdx.x % ROWS, row = tile * TILE_ROWS + row_of_cta;
    const int n_rows = p.segment[0].n_rows;
    for (int first = 0; first < p.n_used; first += THREADS / ROWS) {
        const int j = first + threadIdx.x / ROWS;
        const int of = __shfl_sync(0xffffffffu, id, j % 32);
        const float factor = __shfl_sync(0xffffffffu, weight, j % 32);
        if (j >= p.n_used) continue;
        const float bias = row < n_rows ? __ldg(p.bias[0] + static_cast<size_t>(of) * n_rows + row) : 0.0f;
        parts[j * ROWS + row_of_cta] = factor * bias;
    }
}

// The sums of a warp, for the chunks of a stage: GLU: of gate and of up. SUM: of an expert, and those of the experts
// before.
template <class T, int COUNT>
struct ExpertSums {
    using Sums = DecodeSums<T, 1>;
    Sums of[COUNT];
    float before[COUNT][Sums::FLOATS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int w = 0; w < COUNT; ++w)
#pragma unroll
            for (int i = 0; i < Sums::FLOATS; ++i) before[w][i] = of[w].floats()[i] = 0.0f;
    }
    // Adds the products of the chunks of a stage with x from `column` on.
    __device__ __forceinline__ void multiply(const uint8_t* stage, const typename Sums::Lane& lane_storage,
                                             int column) {
#pragma unroll
        for (int w = 0; w < COUNT; ++w) {
            of[w].load(stage + w * T::BYTES, lane_storage.lane);
            of[w].multiply(lane_storage, column);
        }
    }
    __device__ __forceinline__ void end_expert(float weight) {
#pragma unroll
        for (int w = 0; w < COUNT; ++w)
#pragma unroll
            for (int i = 0; i < Sums::FLOATS; ++i)
                before[w][i] = fmaf(weight, of[w].floats()[i], before[w][i]), of[w].floats()[i] = 0.0f;
    }
    __device__ __forceinline__ void end_experts() {
#pragma unroll
        for (int w = 0; w < COUNT; ++w)
#pragma unroll
            for (int i = 0; i < Sums::FLOATS; ++i) of[w].floats()[i] = before[w][i];
    }
    __device__ __forceinline__ void finish(float* parts, int lane) {
#pragma unroll
        for (int w = 0; w < COUNT; ++w) of[w].finish(parts + w * TILE_ROWS, lane);
    }
};

// The experts of a token: lane j has that of number j. Its loads are requested by the constructor.
#if EXPERTS_PER_LANE > 0
struct TokenExperts : ExpertChoice<EXPERTS_PER_LANE> {
    float weight = 0.0f;

    __device__ __forceinline__ TokenExperts(const ExpertGemvArgs& args, int token)
        : ExpertChoice<EXPERTS_PER_LANE>(args.choice, token) {}
    __device__ __forceinline__ void find_all() {
        choose(p.n_used);
        weight = ExpertChoice<EXPERTS_PER_LANE>::weight();
    }
    __device__ __forceinline__ int find(int j) {
        choose(j + 1);
        return __shfl_sync(0xffffffffu, id, j);
    }
};
#else
struct TokenExperts {
    int id;
    float weight = 0.0f;

    __device__ __forceinline__ TokenExperts(const ExpertGemvArgs& p, int token) {
        const size_t pair =
            static_cast<size_t>(token) * p.n_used + min(static_cast<int>(threadIdx.x % 32), p.n_used - 1);
        id = __ldcg(p.ids + pair);
        if (p.weights) weight = __ldcg(p.weights + pair);
    }
    __device__ __forceinline__ void find_all() {}
    __device__ __forceinline__ int find(int j) { return __shfl_sync(0xffffffffu, id, j); }
};
#endif

// Warps of an SM for which registers are enough.
template <class T, int EPILOGUE, bool WHOLE, int TILES>
constexpr int RESIDENT_WARPS = !WHOLE              ? 16
                               : T::CHUNK_K < UNIT ? 24
                               : TILES == 2        ? 16
                               : EPILOGUE != GLU   ? 24
                               : T::GROUP == 16    ? 16
                                                   : 20;

// WHOLE: a warp has all of its units of x in shared memory at once.
template <class T, int EPILOGUE, bool WHOLE, int CLUSTER = 1, int TILES = 1>
__global__ void __launch_bounds__(THREADS, RESIDENT_WARPS<T, EPILOGUE, WHOLE, TILES> / WARPS)
    expert_gemv(const ExpertGemvArgs p) {
    static_assert((CLUSTER == 1 && TILES == 1) || EPILOGUE == SUM,
                  "a token has enough tile rows of its experts' gate and up, whose stages have two chunks");
    using Chunks = ExpertChunks<T, EPILOGUE, TILES>;
    using Output = ExpertOutput<EPILOGUE, TILES>;
    constexpr int SCALE_BYTES = T::SCALED ? UNIT / T::GROUP * sizeof(XScale) : 0;  // of a unit
    SHARED_DYNAMIC(uint8_t, shared);
    const int warp = kept(static_cast<int>(threadIdx.x / 32)), lane = kept(static_cast<int>(threadIdx.x % 32));
    uint8_t* stages = kept_shared(shared + warp * STAGES * Chunks::STAGE_BYTES);
    const CopyTarget dst = copy_target(stages);
    uint8_t* scales = shared + WARPS * STAGES * Chunks::STAGE_BYTES;
    uint8_t* all_x = scales + WARPS * p.warp_units * SCALE_BYTES;
    float* parts = reinterpret_cast<float*>(all_x + WARPS * p.warp_units * 2 * UNIT);

    const int tile = blockIdx.x / CLUSTER * TILES, rank = cluster_rank<CLUSTER>();
    const WarpUnits<T> units(p, EPILOGUE == SUM ? p.n_used : 1, rank * WARPS + warp, CLUSTER * WARPS);
    WarpX<T> x(reinterpret_cast<XScale*>(scales + warp * p.warp_units * SCALE_BYTES),
               all_x + warp * p.warp_units * 2 * UNIT, units);
    const typename DecodeSums<T, 1>::Lane lane_storage{x, lane};
    Output output(p, tile);
    const int token = EPILOGUE == SUM ? blockIdx.y : blockIdx.y / p.n_used;
    const __half* src = p.x + static_cast<size_t>(EPILOGUE == SUM ? token * p.n_used : token) * p.k;

    cluster_arrive<CLUSTER>();  // the CTAs of the cluster run; waited for before sums are stored in their shared memory
    // The kernel before SUM lets it start only when all kernels before that one have ended, so ids and logits are there.
    if constexpr (EPILOGUE != SUM) grid_dependency_wait();
    grid_dependency_launch();
    TokenExperts experts(p, token);
    constexpr bool WIDE = EXPERTS_PER_LANE > 4;  // the choice takes the registers of x
    if constexpr (EPILOGUE != SUM && !WIDE) x.load(p, src, units, 0, lane);
    int id;
    float weight = 0.0f;
    if constexpr (EPILOGUE == SUM)
        experts.find_all(), id = experts.id, weight = experts.weight;
    else
        id = experts.find(blockIdx.y - token * p.n_used);
    if constexpr (EPILOGUE != SUM && WIDE) x.load(p, src, units, 0, lane);
    Chunks ahead(p, units, tile, id);
    for (int i = 0; i < STAGES; ++i) ahead.copy(dst + i * Chunks::STAGE_BYTES, lane);
    if constexpr (EPILOGUE == SUM) {
        if (p.bias[0]) put_biases<Output::ROWS>(p, parts + WARPS * Output::ROWS, tile, id, weight);
        weight = scaled_expert(p.segment[0], id, weight);  // of products, not of biases
        grid_dependency_wait();
        x.load(p, src, units, 0, lane);
    }
    output.load(p, id);

    ExpertSums<T, Chunks::COUNT> sums;
    sums.clear();
    int stage = 0, chunk = units.unit * units.CHUNKS, row = units.row, left = units.n_chunks;
    for (int first = 0; first < (WHOLE ? 1 : units.count); first += WHOLE ? 1 : p.warp_units) {
        x.put(p, src, units, first, lane);
        // column: of x in shared memory
        for (int column = 0; left > 0 && (WHOLE || column < p.warp_units * UNIT); --left) {
            cp_async_wait<STAGES - 1>();
            __syncwarp();
            sums.multiply(stages + stage * Chunks::STAGE_BYTES, lane_storage, column);
            __syncwarp();
            ahead.copy(dst + stage * Chunks::STAGE_BYTES, lane);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            column += T::CHUNK_K;
            if (EPILOGUE == SUM && (++chunk == p.n_chunk || left == 1)) {
                sums.end_expert(__shfl_sync(0xffffffffu, weight, row));
                column = (column + UNIT - 1) / UNIT * UNIT, chunk = 0, ++row;
            }
        }
    }
    cp_async_wait<0>();
    if constexpr (EPILOGUE == SUM) sums.end_experts();
    sums.finish(parts + warp * Chunks::COUNT * TILE_ROWS, lane);
    __syncthreads();
    if constexpr (CLUSTER > 1) {
        __shared__ __align__(8) float from_others[(CLUSTER - 1) * Output::ROWS * 2];
        cluster_wait<CLUSTER>();
        if (rank > 0 && threadIdx.x < Output::ROWS)
            RemoteFloats<CLUSTER>(from_others, 0)
                .put(2 * ((rank - 1) * Output::ROWS + threadIdx.x),
                     make_float2(sum_of_parts(parts + threadIdx.x, Output::ROWS), 0.0f));
        cluster_arrive<CLUSTER>();
        cluster_wait<CLUSTER>();
        if (rank == 0) output.write(p, parts, from_others, CLUSTER - 1);
    } else {
        output.write(p, parts, nullptr, 0);
    }
}
