// Skinny GEMM: y[T, N] = x[T, K] W[N, K]^T for T <= TOKENS (4, 8 or 16) tokens. W lies in tiles (tile.cuh), x is packed
// f16 (packed.cuh) and stays in shared memory for the whole kernel.
//
// Launch: one CTA per SM with WARPS = 16 warps in two groups of 8. CTAs that share x (below) also share tile rows; tile
// rows are assigned to them round-robin. In each round every group of warps has one tile row (GLU: one group has gate,
// the other the same tile row of up). Chunk c of round i belongs to warp (c + i * n_chunk) mod GROUP_WARPS of the
// group.
//
// Shared memory: a cp.async pipeline of STAGES chunks per warp (weight_pipeline.cuh), sums of 2 x BATCH rounds, x, and
// the sums of its groups.
//
// | x fits into      | columns per CTA | where the sums of a round go                             |
// | one CTA          | all             | own shared memory                                        |
// | a cluster of two | half            | shared memory of the round's owner; ownership alternates |
// | SPLIT_K CTAs     | 1 / SPLIT_K     | through the split-K workspace to the round's owner       |
//
// SPLIT_K CTAs are no cluster, because clusters of more than two would leave too many SMs idle.
//
// Integer codes become f16 exactly, without their scale, and the f32 sums are multiplied by the scales after the MMA.
// The zero point of 8-bit codes is subtracted before the MMA; for other codes see scaled_sums.cuh.
//
// Each warp stores its sums of a tile row. They are reduced in a fixed order, BATCH rounds at a time, after a barrier
// that a warp reaches only when its sums of the next round are computed, so that warps rarely wait for each other.
//
// | epilogue | output                                      |
// | STORE    | f32 out = y                                 |
// | ADD      | f32 out += y                                |
// | GLU      | f16 out = act(gate) * up, as rows or packed |
//
// The norm between two GEMMs may be deferred (deferred_norm.cuh).
#include "lib/activation.cuh"
#include "lib/cluster.cuh"
#include "norm/deferred_norm.cuh"
#include "gemm/gemm.cuh"
#include "gemm/scaled_sums.cuh"
#include "gemm/weight_pipeline.cuh"
#include "gemm/tile_scheduler.cuh"

#ifndef BATCH
#define BATCH 1  // rounds of a CTA between two barriers
#endif

constexpr int PREFETCH = 2;  // chunks that a warp requests before x is available
constexpr int GROUPS = 2;
constexpr int GROUP_WARPS = WARPS / GROUPS;

struct GemmSkinnyArgs : GemmArgs {
    const uint8_t* x;  // packed f16
    // ADD defers the norm to the next GEMM; STORE and GLU apply a norm that the previous GEMM deferred
    DeferredNormArgs deferred_norm;
    float* partial;                    // SPLIT_K: the split-K workspace
    int order;                         // GLU: enum Order of the output
    int slow_producer;                 // the kernel that makes x takes longer than filling the pipeline
    int tiles_per_cluster, remainder;  // n_tiles divided by the number of clusters, or of groups of SPLIT_K CTAs
};

// Shared memory after the pipelines: sums [2][BATCH][GROUPS][SLOTS][16][TOKENS], double-buffered over the rounds
// between two barriers, then x [64-column steps][TOKENS][128 bytes], then, SUMMED, ActivationSums of eight tokens and
// those of the next eight.
template <int TOKENS, int CLUSTER, int SPLIT_K>
struct SkinnySharedStorage {
    static constexpr int PER_TILE = TILE_ROWS * TOKENS;
    static constexpr int SLOTS = GROUP_WARPS * CLUSTER;  // warps that have sums of one tile row
    static constexpr int ROUNDS = BATCH * CLUSTER;       // between two barriers, over all CTAs of the cluster
    static constexpr int SHARERS = CLUSTER * SPLIT_K;    // CTAs that share x
    static_assert(BATCH * GROUPS * PER_TILE <= THREADS, "an output of a thread");
    static_assert(SPLIT_K == 1 || ROUNDS == 1, "CTAs that share x form a cluster or split K, not both");
    float* sums;
    uint8_t* x;

    __device__ __forceinline__ SkinnySharedStorage(uint8_t* memory)
        : sums(reinterpret_cast<float*>(memory)), x(memory + 2 * BATCH * GROUPS * SLOTS * PER_TILE * 4) {}
    __device__ __forceinline__ float* sums_of(int round, int group, int slot) const {
        const int of_block = round / ROUNDS % 2 * BATCH + round % ROUNDS / CLUSTER;
        return sums + ((of_block * GROUPS + group) * SLOTS + slot) * PER_TILE;
    }
    // Index of (row, token), swizzled so that neither the sums of a warp nor the outputs of 16 rows are on one bank.
    static __device__ __forceinline__ int offset(int row, int token) {
        return row * TOKENS + (token ^ row * TOKENS / 32 * 2);
    }
    // Starts the copy of the CTA's columns of x as one cp.async group. Rows past n_tokens keep their old contents; the
    // sums of these tokens are dropped.
    __device__ __forceinline__ void copy_x(const GemmSkinnyArgs& p) const {
        constexpr int step_bytes = TOKENS * PACKED_ROW;
        const int steps = p.k / (PACKED_STEP * SHARERS), bytes = steps * step_bytes;
        const int pitch = packed_tokens(TOKENS) * PACKED_ROW;
        const uint8_t* src = p.x + cluster_rank<SHARERS>() * steps * pitch;
        for (int offset = threadIdx.x * 16; offset < bytes; offset += THREADS * 16) {
            const int in_step = offset % step_bytes;
            if (in_step < p.n_tokens * PACKED_ROW)
                cp_async<16>(x + offset, src + offset / step_bytes * pitch + in_step);
        }
        cp_async_commit();
    }
    // The number of floats from the ActivationSums of eight tokens to those of the next eight.
    template <class T>
    static __device__ __forceinline__ int sums_pitch(const GemmSkinnyArgs& p) {
        return p.k / (T::GROUP * SHARERS) * ActivationSums<T>::FLOATS;
    }
    __device__ __forceinline__ float* x_sums(const GemmSkinnyArgs& p) const {
        return reinterpret_cast<float*>(x + p.k / (PACKED_STEP * SHARERS) * (TOKENS * PACKED_ROW));
    }
    // Computes the ActivationSums of the CTA's columns of x. Call it between two barriers.
    template <class T>
    __device__ __forceinline__ void add_up_x(const GemmSkinnyArgs& p) const {
        constexpr int PIECES = T::GROUP / 8;
        float* dst = x_sums(p);
        for (int i = threadIdx.x; i < p.k / (T::GROUP * SHARERS) * TOKENS; i += THREADS) {
            const int token = i % TOKENS, group = i / TOKENS, first = group * PIECES;
            if (token >= p.n_tokens) continue;
            const uint8_t* row = x + (first / 8 * TOKENS + token) * PACKED_ROW;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < PIECES; ++j)
                sum += sum_of_halves(*reinterpret_cast<const uint4*>(row + ((first + j) % 8 ^ token % 8) * 16));
            ActivationSums<T>::put(dst + token / 8 * sums_pitch<T>(p), token % 8, group, sum);
        }
    }
};

// The tile rows of the CTAs that share x, assigned round-robin over all such groups of CTAs.
template <int EPILOGUE, int SHARERS>
struct Rounds {
    const GemmSkinnyArgs& p;
    int cluster, clusters, n_local;

    __device__ __forceinline__ Rounds(const GemmSkinnyArgs& args)
        : p(args), cluster(blockIdx.x / SHARERS), clusters(gridDim.x / SHARERS),
          n_local(p.tiles_per_cluster + (cluster < p.remainder)) {}
    // Number of rounds in which a group of warps has a tile row.
    __device__ __forceinline__ int of(int group) const {
        return EPILOGUE == GLU ? n_local : (n_local + GROUPS - 1 - group) / GROUPS;
    }
    // Tile row of (round, group), counted over all segments; GLU: within gate and within up.
    __device__ __forceinline__ int tile(int round, int group) const {
        return cluster + (EPILOGUE == GLU ? round : GROUPS * round + group) * clusters;
    }
    __device__ __forceinline__ int segment(int tile, int group) const {
        return EPILOGUE == GLU ? group : EPILOGUE == ADD ? 0 : segment_of(p, tile);
    }
    // Tile row within its segment.
    __device__ __forceinline__ int row(int tile, int segment) const {
        return EPILOGUE == STORE ? tile - p.segment[segment].first_tile : tile;
    }
};

// The order in which a warp copies its chunks, of the CTA's part of the columns.
template <class T, int EPILOGUE, int SHARERS>
struct GemmSkinnyChunks {
    const GemmSkinnyArgs& p;
    Rounds<EPILOGUE, SHARERS> rounds;
    int group, n, round, chunk;
    const uint8_t* tile_row;

    __device__ __forceinline__ GemmSkinnyChunks(const GemmSkinnyArgs& args, int warp)
        : p(args), rounds(args), group(warp / GROUP_WARPS), n(p.n_chunk / SHARERS), round(0),
          chunk(warp % GROUP_WARPS) {
        enter();
        if (chunk >= n) settle();
    }
    __device__ __forceinline__ bool done() const { return round >= rounds.of(group); }
    __device__ __forceinline__ void enter() {
        if (done()) return;
        const int tile = rounds.tile(round, group), s = rounds.segment(tile, group);
        const uint32_t first = rounds.row(tile, s) * p.n_chunk + cluster_rank<SHARERS>() * n;
        tile_row = p.segment[s].tiles + static_cast<uint64_t>(first) * T::BYTES;
    }
    // Advances to the next chunk that exists.
    __device__ __forceinline__ void settle() {
        do ++round, chunk -= n;
        while (chunk >= n);
        enter();
    }
    __device__ __forceinline__ void next() {
        chunk += GROUP_WARPS;
        if (chunk >= n) settle();
    }
};

// The rows of x that a lane addresses in ldmatrix, of N times eight tokens.
template <int TOKENS>
struct SkinnyXRows {
    static constexpr int N = (TOKENS + 7) / 8;
    const uint8_t* row[N][2];  // of even and odd groups of 32 columns

    // Loads the B operands of two MMAs: group J of 32 columns of the n-th eight tokens.
    template <int J>
    __device__ __forceinline__ void load(uint32_t (&b)[4], int n) const {
        load_matrix<4, false, J / 2 * TOKENS * PACKED_ROW>(b, row[n][J & 1]);
    }
};
template <int TOKENS>
struct SkinnyXReader {
    // Offset of a lane's row of even groups: lane l addresses piece l / 8 of token l % 8. Odd groups are 64 bytes further
    // on or back (XOR 64). With four tokens, two lanes address the same row.
    int offset;

    __device__ __forceinline__ SkinnyXReader(int lane, bool keep) {
        const int token = lane % min(TOKENS, 8);
        offset = token * PACKED_ROW + (lane / 8 ^ token) * 16;
        if (keep) offset = kept(offset);
    }
    __device__ __forceinline__ SkinnyXRows<TOKENS> rows(const uint8_t* x) const {
        SkinnyXRows<TOKENS> rows;
#pragma unroll
        for (int n = 0; n < rows.N; ++n)
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) rows.row[n][odd] = x + 8 * n * PACKED_ROW + (odd ? offset ^ 64 : offset);
        return rows;
    }
};

// Whether codes are multiplied as unpack() returns them (scaled_sums.cuh). Codes of 8 bits lose their zero point instead.
template <class T>
constexpr bool SUMMED = T::SCALED && T::BITS < 8;

// A lane's accumulators of one tile row.
template <class T, int TOKENS, bool IS_SUMMED = SUMMED<T>>
struct SkinnySums {
    static_assert(T::FLOAT || (T::BITS == 8 && (!T::SCALED || (T::GROUP == 32 && T::ZERO == 128 && !T::MIN))), "");
    static constexpr int N = (TOKENS + 7) / 8;
    float acc[2][N][4] = {};  // [even or odd group of 32 columns][8 tokens][rows g and g + 8, tokens 2 t and 2 t + 1]
    ChunkCodes<T> codes;
    ChunkScales<T> scales;

    __device__ __forceinline__ void load(const uint8_t* chunk, int lane, const float*, int) {
        codes.load(chunk, lane);
        if constexpr (T::SCALED) scales.load(chunk, lane / 4);
    }
    // The unscaled A operand of the S-th 16 columns of group J, in the order of tiles without scales.
    template <int J, int S>
    __device__ __forceinline__ void unpack(uint32_t (&a)[4]) const {
        if constexpr (T::SCALED) {
            const uint32_t low = codes.template bytes<J, S, 0>(), high = codes.template bytes<J, S, 1>();
            a[0] = integers_to_half2<0>(low), a[1] = integers_to_half2<0>(high);
            a[2] = integers_to_half2<1>(low), a[3] = integers_to_half2<1>(high);
        } else {
            codes.template unpack<J, S>(a);
        }
    }
    // x: rows of the chunk's first column. Two groups (64 columns) at a time, so that dependent MMAs are far apart.
    template <int J = 0>
    __device__ __forceinline__ void multiply(const SkinnyXRows<TOKENS>& x, const float*) {
        if constexpr (J * 32 < T::CHUNK_K) {
            uint32_t a[2][2][4];
            unpack<J, 0>(a[0][0]), unpack<J, 1>(a[0][1]), unpack<J + 1, 0>(a[1][0]), unpack<J + 1, 1>(a[1][1]);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                uint32_t b[2][4];
                x.template load<J>(b[0], n), x.template load<J + 1>(b[1], n);
                if constexpr (T::SCALED) {
                    float c[2][4] = {};
                    multiply_step(c[0], c[1], a, b);
                    add<J>(acc[0][n], c[0]), add<J + 1>(acc[1][n], c[1]);
                } else {
                    multiply_step(acc[0][n], acc[1][n], a, b);
                }
            }
            multiply<J + 2>(x, nullptr);
        }
    }
    static __device__ __forceinline__ void multiply_step(float (&even)[4], float (&odd)[4],
                                                         const uint32_t (&a)[2][2][4], const uint32_t (&b)[2][4]) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            mma_m16n8k16_f16(even, a[0][s], {b[0][2 * s], b[0][2 * s + 1]});
            mma_m16n8k16_f16(odd, a[1][s], {b[1][2 * s], b[1][2 * s + 1]});
        }
    }
    template <int J>
    __device__ __forceinline__ void add(float (&dst)[4], const float (&sums)[4]) const {
        const RowScales s = scales.template get<J>();
#pragma unroll
        for (int e = 0; e < 4; ++e) dst[e] = fmaf(s.d[e / 2], sums[e], dst[e]);
    }
    // Rows g (h = 0) or g + 8, tokens 2 t and 2 t + 1 of the n-th eight.
    __device__ __forceinline__ float2 sum(int n, int h) const {
        return make_float2(acc[0][n][2 * h] + acc[1][n][2 * h], acc[0][n][2 * h + 1] + acc[1][n][2 * h + 1]);
    }
};

template <class T, int TOKENS>
struct SkinnySums<T, TOKENS, true> {
    static constexpr int N = (TOKENS + 7) / 8;
    ScaledSums<T, N> sums;
    ChunkCodes<T> codes;
    int pitch;

    __device__ __forceinline__ SkinnySums() { sums.clear(); }
    // x_sums: the lane's ActivationSums of the chunk. The next eight tokens' are pitch_ floats further on.
    __device__ __forceinline__ void load(const uint8_t* chunk, int lane, const float* x_sums, int pitch_) {
        pitch = pitch_, sums.lane = lane;
        codes.load(chunk, lane);
        sums.begin_chunk(chunk, x_sums, pitch);
    }
    template <int J = 0>
    __device__ __forceinline__ void multiply(const SkinnyXRows<TOKENS>& x, const float* x_sums) {
        if constexpr (J * 32 < T::CHUNK_K) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                uint32_t b[4];
                x.template load<J>(b, n);
                const uint4 operands = make_uint4(b[0], b[1], b[2], b[3]);
                sums.template multiply_columns<J, J>(codes, n, operands, x_sums + n * pitch);
            }
            multiply<J + 1>(x, x_sums);
        } else {
            sums.end_chunk();
        }
    }
    __device__ __forceinline__ float2 sum(int n, int h) const {
        return make_float2(sums.acc[n][2 * h] * sums.UNIT, sums.acc[n][2 * h + 1] * sums.UNIT);
    }
};

// Stores a warp's sums of a tile row.
template <class Storage, int TOKENS, class Sums, class Floats>
__device__ __forceinline__ void store_sums(const Sums& sums, const Floats& dst, int lane) {
    if (lane % 4 * 2 >= TOKENS) return;
#pragma unroll
    for (int n = 0; n < Sums::N; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) dst.put(Storage::offset(lane / 4 + 8 * h, 8 * n + lane % 4 * 2), sums.sum(n, h));
}

// The factor of each token's sums for a deferred norm, computed by all threads of the CTA.
template <int TOKENS>
struct Factors {
    static constexpr int PITCH = DEFERRED_NORM_PITCH<TOKENS>, FOURS = PITCH / 4;
    float4 squares;
    float prescale;  // of the token of the thread's output
    // Loads the thread's part of the squares, of tokens 4 (threadIdx.x % FOURS) ... + 3.
    __device__ __forceinline__ void load(const DeferredNormArgs& deferred_norm, int token) {
        prescale = __ldcg(deferred_norm.prescale + token);
        squares = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int i = threadIdx.x; i < deferred_norm.parts * FOURS; i += THREADS) {
            const float4 v = __ldcg(reinterpret_cast<const float4*>(deferred_norm.squares) + i);
            squares.x += v.x, squares.y += v.y, squares.z += v.z, squares.w += v.w;
        }
    }
    // Stores the sum of each warp, [WARPS][PITCH].
    __device__ __forceinline__ void store(float* dst) const {
        float sums[4] = {squares.x, squares.y, squares.z, squares.w};
#pragma unroll
        for (int offset = FOURS; offset < 32; offset *= 2)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], offset);
        if (threadIdx.x % 32 < FOURS)
            *reinterpret_cast<float4*>(dst + threadIdx.x / 32 * PITCH + threadIdx.x % FOURS * 4) =
                make_float4(sums[0], sums[1], sums[2], sums[3]);
    }
    // The factor of the thread's token. Call it after a barrier.
    __device__ __forceinline__ float find(const GemmSkinnyArgs& p, const float* src, int token) const {
        const float sum = sum_of_parts(src + token, PITCH);
        const float inverse = rsqrtf(fmaf(sum, fast_reciprocal(static_cast<float>(p.k)), p.deferred_norm.eps));
        if (blockIdx.x == 0 && threadIdx.x % TILE_ROWS == 0) p.deferred_norm.next_prescale[token] = inverse * HEADROOM;
        return inverse * fast_reciprocal(prescale);
    }
};

// A thread's output of the rounds between two barriers: row i % 16 of token i / 16 of one group's tile row (GLU: of
// gate and up). find() runs before the sums are complete.
template <int TOKENS, int EPILOGUE, class Storage>
struct GemmSkinnyOutput {
    using Rounds_ = Rounds<EPILOGUE, Storage::SHARERS>;
    static constexpr int WIDTH = EPILOGUE == GLU ? 2 : 1;
    // index of warp 0's sum in SkinnySharedStorage::sums, GLU: of gate, then of up; -1: the thread has no output
    int part;
    float* dst;       // STORE and ADD
    __half* f16_dst;  // GLU: the output; deferred norm: the next GEMM's x
    float scale[WIDTH];
    float old, weight, prescale;
    int tile;

    static __device__ __forceinline__ int token() { return threadIdx.x / TILE_ROWS % TOKENS; }

    __device__ __forceinline__ void find(const GemmSkinnyArgs& p, const Rounds_& rounds, const Storage& storage,
                                         int first_round) {
        const int tile_of_batch = threadIdx.x / Storage::PER_TILE, group = tile_of_batch % GROUPS;
        const int round = first_round + tile_of_batch / GROUPS * (Storage::ROUNDS / BATCH);
        const int row_in_tile = threadIdx.x % TILE_ROWS;
        part = -1;
        tile = rounds.tile(round, group);
        if (tile_of_batch >= BATCH * GROUPS || group >= GROUPS / WIDTH || round >= rounds.of(group)) return;
        if (token() >= p.n_tokens) return;
        const int s = EPILOGUE == GLU ? 0 : rounds.segment(tile, group);
        const int row = rounds.row(tile, s) * TILE_ROWS + row_in_tile;
        if (row >= p.segment[s].n_rows) return;
        part =
            static_cast<int>(storage.sums_of(round, group, 0) - storage.sums) + Storage::offset(row_in_tile, token());
        dst = static_cast<float*>(p.segment[s].out) + static_cast<size_t>(token()) * p.segment[s].n_rows + row;
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) scale[w] = scaled_row(p.segment[s + w], row, 1.0f);
        if (EPILOGUE == GLU) f16_dst = address(static_cast<__half*>(p.segment[0].out), p, p.order, row);
        if (defers_norm(p)) {
            f16_dst = address(p.deferred_norm.normed, p, p.deferred_norm.order, row);
            weight = __ldg(p.deferred_norm.weight + row);
        }
    }
    static __device__ __forceinline__ bool defers_norm(const GemmSkinnyArgs& p) {
        return EPILOGUE == ADD && p.deferred_norm.squares != nullptr;
    }
    static __device__ __forceinline__ __half* address(__half* out, const GemmSkinnyArgs& p, int order, int row) {
        if (order == PLAIN_ORDER) return out + static_cast<size_t>(token()) * p.segment[0].n_rows + row;
        return out + packed_half(order, row, token(), TOKENS);
    }
    __device__ __forceinline__ int made() const {
        return part < 0 ? 0 : (EPILOGUE == GLU ? made_of(f16_dst) : made_of(dst)) | part;
    }
    // Loads what earlier kernels of the step write.
    __device__ __forceinline__ void load(const GemmSkinnyArgs& p) {
        if (EPILOGUE != ADD || part < 0) return;
        old = __ldcg(dst);
        if (defers_norm(p)) prescale = __ldcg(p.deferred_norm.prescale + token());
    }
    static __device__ __forceinline__ float sum(const float* part) {
        float sums[4] = {};
#pragma unroll
        for (int slot = 0; slot < Storage::SLOTS; ++slot) sums[slot % 4] += part[slot * Storage::PER_TILE];
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
    // Applies the epilogue and stores the output. sum_of(w) returns the sum, GLU: of gate (w = 0) and of up (w = 1).
    template <class Function>
    __device__ __forceinline__ void write(const GemmSkinnyArgs& p, float factor, Function sum_of) const {
        float y[WIDTH], v = 0.0f;
        if (part >= 0) {
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) y[w] = __fmul_rn(sum_of(w), scale[w]) * factor;
            if constexpr (EPILOGUE == GLU)
                *f16_dst = gated(p.activation, y[0], y[1]);
            else
                *dst = v = EPILOGUE == ADD ? old + y[0] : y[0];
        }
        if (!defers_norm(p)) return;
        if (part >= 0) *f16_dst = saturated_half(v * weight * prescale);
        v *= v;
#pragma unroll
        for (int offset = 1; offset < TILE_ROWS; offset *= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
        if (part >= 0 && threadIdx.x % TILE_ROWS == 0)
            p.deferred_norm.squares[tile * DEFERRED_NORM_PITCH<TOKENS> + token()] = v;
    }
};

// Split-K: a thread's sum of a round over the CTA's columns; GLU: one of gate and one of up. The owner of a round keeps
// its own sum and adds the other CTAs' sums from the workspace, f32 [tile row][SPLIT_K][PER_TILE], whose words are
// EMPTY until stored and again after they are read (tile_scheduler.cuh).
template <int TOKENS, int EPILOGUE, int SPLIT_K, class Storage>
struct SplitKSums {
    using Out = GemmSkinnyOutput<TOKENS, EPILOGUE, Storage>;
    using Workspace = SplitKWorkspace<float, 4, THREADS>;
    static constexpr int WIDTH = Out::WIDTH;
    const GemmSkinnyArgs& p;
    const typename Out::Rounds_& rounds;
    const int rank = cluster_rank<SPLIT_K>();
    int awaited = -1;  // round whose sums of other CTAs are outstanding, or -1
    float own[WIDTH];  // this CTA's sums of that round

    __device__ __forceinline__ SplitKSums(const GemmSkinnyArgs& args, const typename Out::Rounds_& all)
        : p(args), rounds(all) {}
    static __device__ __forceinline__ int group() { return threadIdx.x / Storage::PER_TILE; }
    __device__ __forceinline__ bool has(int round) const {
        return group() < GROUPS / WIDTH && round < rounds.of(group()) && Out::token() < p.n_tokens;
    }
    __device__ __forceinline__ volatile float* workspace(int round, int w, int by) const {
        const int tile = rounds.tile(round, group()) * WIDTH + w;
        return p.partial + (tile * SPLIT_K + by) * Storage::PER_TILE + threadIdx.x % Storage::PER_TILE;
    }
    // Reduces the sums of a round over the warps of this CTA; keeps them if the CTA owns the round, else stores them to
    // the workspace. Call it after a barrier.
    __device__ __forceinline__ void add_up(const Storage& storage, int round) {
        const bool is_owner = round % SPLIT_K == rank;
        if (is_owner) awaited = round;
        if (!has(round)) return;
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            const int offset = Storage::offset(threadIdx.x % TILE_ROWS, Out::token());
            const float sum = Out::sum(storage.sums_of(round, group() + w, 0) + offset);
            if (is_owner)
                own[w] = sum;
            else
                *workspace(round, w, rank) = Workspace::not_empty(sum);
        }
    }
    // Reduces the awaited round over all columns, in the order of the CTAs' columns.
    __device__ __forceinline__ void reduce(float (&sums)[WIDTH]) const {
        if (!has(awaited)) return;
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            float parts[SPLIT_K];
            for (bool all = false; !all;) {
                all = true;
#pragma unroll
                for (int i = 0; i < SPLIT_K; ++i) parts[i] = i == rank ? own[w] : *workspace(awaited, w, i);
#pragma unroll
                for (int i = 0; i < SPLIT_K; ++i) all = all && (i == rank || !Workspace::is_empty(parts[i]));
                if (!all) spin_wait();
            }
            sums[w] = 0.0f;
#pragma unroll
            for (int i = 0; i < SPLIT_K; ++i) {
                sums[w] += parts[i];
                if (i != rank) *workspace(awaited, w, i) = __uint_as_float(Workspace::EMPTY);
            }
        }
    }
};

// grid: (number of groups of CTAs that share x) x CLUSTER, or x SPLIT_K; all CTAs must be resident, since owners wait
// for other CTAs
template <class T, int TOKENS, int EPILOGUE, int CLUSTER, int SPLIT_K>
__global__ void __launch_bounds__(THREADS, 1) gemm_skinny(const GemmSkinnyArgs p) {
    using Storage = SkinnySharedStorage<TOKENS, CLUSTER, SPLIT_K>;
    SHARED_DYNAMIC(uint8_t, memory);
    __shared__ __align__(16) float squares[WARPS * DEFERRED_NORM_PITCH<TOKENS>];
    const int warp = kept(static_cast<int>(threadIdx.x / 32)), lane = kept(static_cast<int>(threadIdx.x % 32));
    const int rank = cluster_rank<Storage::SHARERS>(), group = warp / GROUP_WARPS;
    uint8_t* stages = kept_shared(memory + warp * STAGES * T::BYTES);
    const CopyTarget dst = copy_target(stages);

    grid_dependency_launch();
    // the CTAs of the cluster run; waited for before sums are stored in another CTA's shared memory
    cluster_arrive<CLUSTER>();
    GemmSkinnyChunks<T, EPILOGUE, Storage::SHARERS> ahead(p, warp);
    int n_prefetched = 0;
    const auto prefetch = [&](int until) {
        for (; n_prefetched < until; ++n_prefetched) copy_chunk<T>(ahead, dst + n_prefetched * T::BYTES, lane);
    };
    prefetch(PREFETCH);
    if (p.slow_producer) {
        while (n_prefetched < STAGES) {
            cp_async_wait<0>();
            prefetch(n_prefetched + 1);
        }
    }
    const Storage storage(kept_shared(memory + WARPS * STAGES * T::BYTES));
    // otherwise no register is free
    const SkinnyXReader<TOKENS> reader(lane, TOKENS <= 8 || CLUSTER == 1);
    const Rounds<EPILOGUE, Storage::SHARERS> rounds(p);
    const bool applies_norm = EPILOGUE != ADD && p.deferred_norm.squares != nullptr;
    GemmSkinnyOutput<TOKENS, EPILOGUE, Storage> output;
    output.find(p, rounds, storage, rank);
    grid_dependency_wait(output.made());
    storage.copy_x(p);
    output.load(p);
    Factors<TOKENS> factors;
    // computed again at each use, because no register is free
    const auto token = [&] { return min(output.token(), p.n_tokens - 1); };
    if (applies_norm) factors.load(p.deferred_norm, token());
    prefetch(STAGES);
    if (applies_norm) factors.store(squares);
    if (p.slow_producer)
        cp_async_wait<0>();
    else
        cp_async_wait<STAGES - PREFETCH>();
    __syncthreads();
    const float* lane_sums = nullptr;
    if constexpr (SUMMED<T> && ActivationSums<T>::NEEDED) {
        storage.template add_up_x<T>(p);
        __syncthreads();
        lane_sums = storage.x_sums(p) + ActivationSums<T>::template lane_offset<TOKENS>(lane);
    }

    const int n_chunk = p.n_chunk / Storage::SHARERS, all = rounds.of(0);
    float factor = 1.0f;
    int stage = 0;
    SplitKSums<TOKENS, EPILOGUE, SPLIT_K, Storage> part(p, rounds);
    const auto own_sum = [&](int w) {
        return output.sum(storage.sums + output.part + w * storage.SLOTS * storage.PER_TILE);
    };
    const auto write_awaited = [&] {
        if (part.awaited < 0) return;
        float whole[decltype(output)::WIDTH];
        part.reduce(whole);
        output.write(p, factor, [&](int w) { return whole[w]; });
        output.find(p, rounds, storage, part.awaited + SPLIT_K);
        output.load(p);
        part.awaited = -1;
    };
    for (int round = 0; round < all; ++round) {
        SkinnySums<T, TOKENS> sums;
        if (round < rounds.of(group))
            for (int chunk = (warp - round * n_chunk) & (GROUP_WARPS - 1); chunk < n_chunk; chunk += GROUP_WARPS) {
                cp_async_wait<STAGES - 1>();
                __syncwarp();
                const float* x_sums = lane_sums + chunk * T::GROUPS * ActivationSums<T>::FLOATS;
                sums.load(stages + stage * T::BYTES, lane, x_sums, storage.template sums_pitch<T>(p));
                __syncwarp();
                copy_chunk<T>(ahead, dst + stage * T::BYTES, lane);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                constexpr int x_bytes = T::CHUNK_K / PACKED_STEP * TOKENS * PACKED_ROW;
                sums.multiply(reader.rows(storage.x + chunk * x_bytes), x_sums);
            }
        const int turn = round % storage.ROUNDS, owner = turn % CLUSTER;
        if (applies_norm && round == 0) factor = factors.find(p, squares, token());
        if (turn == 0 && (round > 0 || CLUSTER > 1)) cluster_wait<CLUSTER>();
        if (turn == 0 && round > 0) {
            if constexpr (SPLIT_K > 1) {
                part.add_up(storage, round - 1);
                // the sums that other CTAs have of round - 1 are not stored yet
                if (part.awaited < round - 1) write_awaited();
            } else {
                output.write(p, factor, own_sum);
                output.find(p, rounds, storage, round + rank);
                output.load(p);
            }
        }
        if (round < rounds.of(group)) {
            const int slot = cluster_rank<CLUSTER>() * GROUP_WARPS + warp % GROUP_WARPS;
            store_sums<Storage, TOKENS>(sums, RemoteFloats<CLUSTER>(storage.sums_of(round, group, slot), owner), lane);
        }
        if (turn == storage.ROUNDS - 1 || round == all - 1) cluster_arrive<CLUSTER>();
    }
    cluster_wait<CLUSTER>();
    if constexpr (SPLIT_K > 1) {
        part.add_up(storage, all - 1);
        write_awaited();
    } else {
        output.write(p, factor, own_sum);
    }
    cp_async_wait<0>();
}
