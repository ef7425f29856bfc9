// y[T, N] = x[T, K] W[N, K]^T for up to TOKENS (4, 8 or 16) tokens: tiles of 8 or 16 bits (tile.cuh) x packed f16 activations
// (packed.cuh), all of which lie in shared memory.
//
// One block per multiprocessor, whose warps each have a ring of weights of their own (weight_pipeline.cuh). They are two groups; in
// a round each group has a tile row (GLU: gate and up of one), whose chunk c belongs, in round i, to its warp
// (c + i * n_chunk) mod GROUP_WARPS. Where x is too long for one block, two as a cluster have a half of its columns each,
// and own the rounds in turn. Tensor cores multiply integers as halves, exactly; scales come in float32 behind that. A warp
// leaves its sums of a tile row in the shared memory of the round's owner. They are added up, in one order, a few rounds at
// a time, behind a barrier that is passed when the next round's sums are there, so that nobody waits long for others.
// Where x is too long for a cluster of two, PARTS blocks have a part of its columns each; larger clusters leave too many
// multiprocessors idle, so what such a block has of a round goes to its owner through memory.
//
// Epilogues: STORE (float out = y), ADD (float out += y), GLU (half out = act(gate) * up, in rows or packed). A norm may be
// handed on (deferred_norm.cuh).
#include "lib/activation.cuh"
#include "lib/cluster.cuh"
#include "norm/deferred_norm.cuh"
#include "lib/mma.cuh"
#include "gemm/gemm.cuh"
#include "gemm/weight_pipeline.cuh"
#include "gemm/tile_scheduler.cuh"

#ifndef BATCH
#define BATCH 1  // rounds of a block between two barriers
#endif

constexpr int EARLY = 2;  // chunks that a warp asks for before x is there
constexpr int GROUPS = 2;
constexpr int GROUP_WARPS = WARPS / GROUPS;

struct Product : Matrices {
    const uint8_t* x;  // packed
    Handed handed;     // by ADD to the product behind, to others by the one before
    float* partial;    // sums that blocks leave to each other; PARTS
    int order;         // GLU: of the output
    int patient;       // x takes longer than to copy a ring
    int each, rest;    // n_tiles over the number of clusters, or of PARTS blocks
};

// Sums [2][BATCH][GROUPS][SLOTS][16][TOKENS] of the rounds between two barriers and of those behind them, then x:
// [64 columns][TOKENS][128 bytes].
template <int TOKENS, int CLUSTER, int PARTS>
struct Shared {
    static constexpr int PER_TILE = TILE_ROWS * TOKENS;
    static constexpr int SLOTS = GROUP_WARPS * CLUSTER;  // warps that have sums of a tile row
    static constexpr int ROUNDS = BATCH * CLUSTER;       // between two barriers, of all blocks
    static constexpr int SHARERS = CLUSTER * PARTS;      // of x
    static_assert(BATCH * GROUPS * PER_TILE <= THREADS, "an output of a thread");
    static_assert(PARTS == 1 || ROUNDS == 1, "blocks that share x are a cluster or are not");
    float* sums;
    uint8_t* x;

    __device__ __forceinline__ Shared(uint8_t* memory)
        : sums(reinterpret_cast<float*>(memory)), x(memory + 2 * BATCH * GROUPS * SLOTS * PER_TILE * 4) {}
    __device__ __forceinline__ float* sums_of(int round, int group, int slot) const {
        const int of_block = round / ROUNDS % 2 * BATCH + round % ROUNDS / CLUSTER;
        return sums + ((of_block * GROUPS + group) * SLOTS + slot) * PER_TILE;
    }
    // Of (row, token), so that neither a warp's sums nor the outputs of 16 rows lie on one bank.
    static __device__ __forceinline__ int place(int row, int token) {
        return row * TOKENS + (token ^ row * TOKENS / 32 * 2);
    }
    // The block's part of the columns: one group of copies. Rows of tokens that are none stay what they are; their products are dropped.
    __device__ __forceinline__ void copy_x(const Product& p) const {
        constexpr int step_bytes = TOKENS * PACKED_ROW;
        const int steps = p.k / (PACKED_STEP * SHARERS), bytes = steps * step_bytes;
        const int pitch = packed_tokens(TOKENS) * PACKED_ROW;
        const uint8_t* from = p.x + cluster_rank<SHARERS>() * steps * pitch;
        for (int at = threadIdx.x * 16; at < bytes; at += THREADS * 16) {
            const int in_step = at % step_bytes;
            if (in_step < p.n_tokens * PACKED_ROW) cp_async<16>(x + at, from + at / step_bytes * pitch + in_step);
        }
        cp_async_commit();
    }
};

// Which tile rows the blocks that share x have: in turn with others.
template <int EPILOGUE, int SHARERS>
struct Rounds {
    const Product& p;
    int cluster, clusters, n_local;

    __device__ __forceinline__ Rounds(const Product& product)
        : p(product), cluster(blockIdx.x / SHARERS), clusters(gridDim.x / SHARERS),
          n_local(p.each + (cluster < p.rest)) {}
    // In which a group has a tile row.
    __device__ __forceinline__ int of(int group) const {
        return EPILOGUE == GLU ? n_local : (n_local + GROUPS - 1 - group) / GROUPS;
    }
    // Counted over all segments; GLU: of each.
    __device__ __forceinline__ int tile(int round, int group) const {
        return cluster + (EPILOGUE == GLU ? round : GROUPS * round + group) * clusters;
    }
    __device__ __forceinline__ int segment(int tile, int group) const {
        return EPILOGUE == GLU ? group : EPILOGUE == ADD ? 0 : segment_of(p, tile);
    }
    // In its segment.
    __device__ __forceinline__ int row(int tile, int segment) const {
        return EPILOGUE == STORE ? tile - p.segment[segment].first_tile : tile;
    }
};

// The order in which a warp's chunks are copied, of its block's part of the columns.
template <class T, int EPILOGUE, int SHARERS>
struct Walk {
    const Product& p;
    Rounds<EPILOGUE, SHARERS> rounds;
    int group, n, round, chunk;
    const uint8_t* tile_row;

    __device__ __forceinline__ Walk(const Product& product, int warp)
        : p(product), rounds(product), group(warp / GROUP_WARPS), n(p.n_chunk / SHARERS), round(0),
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
    // To the next chunk that exists.
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

// A lane's sums of one tile row.
template <class T, int TOKENS>
struct Sums {
    static_assert(T::FLOAT || (T::BITS == 8 && (!T::SCALED || (T::GROUP == 32 && T::ZERO == 128 && !T::MIN))), "");
    static constexpr int N = (TOKENS + 7) / 8;
    float acc[2][N][4] = {};  // of even and of odd 32 columns: rows g, g + 8, tokens 2 t, 2 t + 1 of each eight
    ChunkCodes<T> codes;
    ChunkScales<T> scales;

    __device__ __forceinline__ void load(const uint8_t* chunk, int lane) {
        codes.load(chunk, lane);
        if constexpr (T::SCALED) scales.load(chunk, lane / 4);
    }
    // The A operand of step S of group J: as tiles without scales have it.
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
    // Where a lane reads x, of even 32 columns: l gives the address of token l % 8's piece l / 8. Of odd ones it is 64
    // bytes further on or back. Of four tokens they come twice.
    struct Lane {
        int at;

        __device__ __forceinline__ Lane(int lane, bool keep) {
            const int token = lane % min(TOKENS, 8);
            at = token * PACKED_ROW + (lane / 8 ^ token) * 16;
            if (keep) at = kept(at);
        }
    };
    // Four products' B operands: 32 columns of eight tokens.
    template <int J>
    static __device__ __forceinline__ void load_x(uint32_t (&b)[4], const uint8_t* x, int n, const Lane& lane) {
        load_matrix(b, x + (J / 2 * TOKENS + 8 * n) * PACKED_ROW + (J & 1 ? lane.at ^ 64 : lane.at));
    }
    // x: of the chunk's first column. 64 columns at a time, so that products that wait for each other are apart.
    template <int J = 0>
    __device__ __forceinline__ void multiply(const uint8_t* x, const Lane& lane) {
        if constexpr (J * 32 < T::CHUNK_K) {
            uint32_t a[2][2][4];
            unpack<J, 0>(a[0][0]), unpack<J, 1>(a[0][1]), unpack<J + 1, 0>(a[1][0]), unpack<J + 1, 1>(a[1][1]);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                uint32_t b[2][4];
                load_x<J>(b[0], x, n, lane), load_x<J + 1>(b[1], x, n, lane);
                if constexpr (T::SCALED) {
                    float c[2][4] = {};
                    multiply_step(c[0], c[1], a, b);
                    add<J>(acc[0][n], c[0]), add<J + 1>(acc[1][n], c[1]);
                } else {
                    multiply_step(acc[0][n], acc[1][n], a, b);
                }
            }
            multiply<J + 2>(x, lane);
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
    __device__ __forceinline__ void add(float (&to)[4], const float (&sums)[4]) const {
        const RowScales s = scales.template get<J>();
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e] = fmaf(s.d[e / 2], sums[e], to[e]);
    }
    template <class Room, class Floats>
    __device__ __forceinline__ void finish(const Floats& to, int lane) const {
        if (lane % 4 * 2 >= TOKENS) return;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                to.put(Room::place(lane / 4 + 8 * h, 8 * n + lane % 4 * 2),
                       make_float2(acc[0][n][2 * h] + acc[1][n][2 * h], acc[0][n][2 * h + 1] + acc[1][n][2 * h + 1]));
    }
};

// What tokens' sums are multiplied by, where a norm was handed on: found by all threads.
template <int TOKENS>
struct Factors {
    static constexpr int PITCH = HANDED_PITCH<TOKENS>, FOURS = PITCH / 4;
    float4 squares;
    float before;  // of the thread's token
    // The thread's part of the squares, of tokens 4 (threadIdx % FOURS) ... + 3.
    __device__ __forceinline__ void load(const Handed& handed, int token) {
        before = __ldcg(handed.before + token);
        squares = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int i = threadIdx.x; i < handed.parts * FOURS; i += THREADS) {
            const float4 v = __ldcg(reinterpret_cast<const float4*>(handed.squares) + i);
            squares.x += v.x, squares.y += v.y, squares.z += v.z, squares.w += v.w;
        }
    }
    // The sums of the warps, [WARPS][PITCH].
    __device__ __forceinline__ void leave(float* to) const {
        float sums[4] = {squares.x, squares.y, squares.z, squares.w};
#pragma unroll
        for (int offset = FOURS; offset < 32; offset *= 2)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], offset);
        if (threadIdx.x % 32 < FOURS)
            *reinterpret_cast<float4*>(to + threadIdx.x / 32 * PITCH + threadIdx.x % FOURS * 4) =
                make_float4(sums[0], sums[1], sums[2], sums[3]);
    }
    // Of the thread's token; behind a barrier.
    __device__ __forceinline__ float find(const Product& p, const float* from, int token) const {
        const float sum = sum_of_parts(from + token, PITCH);
        const float inverse = rsqrtf(fmaf(sum, fast_reciprocal(static_cast<float>(p.k)), p.handed.eps));
        if (blockIdx.x == 0 && threadIdx.x % TILE_ROWS == 0) p.handed.after[token] = inverse * HEADROOM;
        return inverse * fast_reciprocal(before);
    }
};

// A thread's output of the rounds between two barriers: row i % 16 of token i / 16 of a group's tile row (GLU: of both).
// Found before its sums are there.
template <int TOKENS, int EPILOGUE, class Room>
struct Output {
    using Rounds_ = Rounds<EPILOGUE, Room::SHARERS>;
    static constexpr int WIDTH = EPILOGUE == GLU ? 2 : 1;
    int part;           // the first warp's sum in the room, of gate and behind it of up; -1 where there is no output
    float* to;          // not of GLU
    __half* half_to;    // GLU, or what is handed on
    float scale[WIDTH];
    float old, weight, before;
    int tile;

    static __device__ __forceinline__ int token() { return threadIdx.x / TILE_ROWS % TOKENS; }

    __device__ __forceinline__ void find(const Product& p, const Rounds_& rounds, const Room& room, int first_round) {
        const int tile_of_batch = threadIdx.x / Room::PER_TILE, group = tile_of_batch % GROUPS;
        const int round = first_round + tile_of_batch / GROUPS * (Room::ROUNDS / BATCH);
        const int row_in_tile = threadIdx.x % TILE_ROWS;
        part = -1;
        tile = rounds.tile(round, group);
        if (tile_of_batch >= BATCH * GROUPS || group >= GROUPS / WIDTH || round >= rounds.of(group)) return;
        if (token() >= p.n_tokens) return;
        const int s = EPILOGUE == GLU ? 0 : rounds.segment(tile, group);
        const int row = rounds.row(tile, s) * TILE_ROWS + row_in_tile;
        if (row >= p.segment[s].n_rows) return;
        part = static_cast<int>(room.sums_of(round, group, 0) - room.sums) + Room::place(row_in_tile, token());
        to = static_cast<float*>(p.segment[s].out) + static_cast<size_t>(token()) * p.segment[s].n_rows + row;
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) scale[w] = scaled_row(p.segment[s + w], row, 1.0f);
        if (EPILOGUE == GLU) half_to = place(static_cast<__half*>(p.segment[0].out), p, p.order, row);
        if (hands_on(p)) {
            half_to = place(p.handed.normed, p, p.handed.order, row);
            weight = __ldg(p.handed.weight + row);
        }
    }
    static __device__ __forceinline__ bool hands_on(const Product& p) {
        return EPILOGUE == ADD && p.handed.squares != nullptr;
    }
    static __device__ __forceinline__ __half* place(__half* out, const Product& p, int order, int row) {
        if (order == PLAIN_ORDER) return out + static_cast<size_t>(token()) * p.segment[0].n_rows + row;
        return out + packed_half(order, row, token(), TOKENS);
    }
    __device__ __forceinline__ int made() const {
        return part < 0 ? 0 : (EPILOGUE == GLU ? made_of(half_to) : made_of(to)) | part;
    }
    // What earlier kernels write.
    __device__ __forceinline__ void load(const Product& p) {
        if (EPILOGUE != ADD || part < 0) return;
        old = __ldcg(to);
        if (hands_on(p)) before = __ldcg(p.handed.before + token());
    }
    static __device__ __forceinline__ float sum(const float* part) {
        float sums[4] = {};
#pragma unroll
        for (int slot = 0; slot < Room::SLOTS; ++slot) sums[slot % 4] += part[slot * Room::PER_TILE];
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
    // sum_of(w): the sum of gate, and of up.
    template <class Function>
    __device__ __forceinline__ void write(const Product& p, float factor, Function sum_of) const {
        float y[WIDTH], v = 0.0f;
        if (part >= 0) {
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) y[w] = __fmul_rn(sum_of(w), scale[w]) * factor;
            if constexpr (EPILOGUE == GLU)
                *half_to = gated(p.activation, y[0], y[1]);
            else
                *to = v = EPILOGUE == ADD ? old + y[0] : y[0];
        }
        if (!hands_on(p)) return;
        if (part >= 0) *half_to = saturated_half(v * weight * before);
        v *= v;
#pragma unroll
        for (int offset = 1; offset < TILE_ROWS; offset *= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
        if (part >= 0 && threadIdx.x % TILE_ROWS == 0) p.handed.squares[tile * HANDED_PITCH<TOKENS> + token()] = v;
    }
};

// A thread's sum of a round, of a part of the columns; GLU: of gate and of up. The owner of the round keeps it, and adds
// what others leave in memory, [tile row][PARTS][PER_TILE], a word of which is EMPTY until then, and behind (tile_scheduler.cuh).
template <int TOKENS, int EPILOGUE, int PARTS, class Room>
struct PartSums {
    using Out = Output<TOKENS, EPILOGUE, Room>;
    using Left = LeftSums<float, 4, THREADS>;
    static constexpr int WIDTH = Out::WIDTH;
    const Product& p;
    const typename Out::Rounds_& rounds;
    const int rank = cluster_rank<PARTS>();
    int awaited = -1;  // the round of which others' sums are
    float own[WIDTH];  // of that

    __device__ __forceinline__ PartSums(const Product& product, const typename Out::Rounds_& all)
        : p(product), rounds(all) {}
    static __device__ __forceinline__ int group() { return threadIdx.x / Room::PER_TILE; }
    __device__ __forceinline__ bool has(int round) const {
        return group() < GROUPS / WIDTH && round < rounds.of(group()) && Out::token() < p.n_tokens;
    }
    __device__ __forceinline__ volatile float* left(int round, int w, int by) const {
        const int tile = rounds.tile(round, group()) * WIDTH + w;
        return p.partial + (tile * PARTS + by) * Room::PER_TILE + threadIdx.x % Room::PER_TILE;
    }
    // Behind a barrier: the block's warps have their sums of the round there.
    __device__ __forceinline__ void add_up(const Room& room, int round) {
        const bool mine = round % PARTS == rank;
        if (mine) awaited = round;
        if (!has(round)) return;
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            const int place = Room::place(threadIdx.x % TILE_ROWS, Out::token());
            const float sum = Out::sum(room.sums_of(round, group() + w, 0) + place);
            if (mine)
                own[w] = sum;
            else
                *left(round, w, rank) = Left::not_empty(sum);
        }
    }
    // Of all columns, of the round that is awaited, by the parts' order.
    __device__ __forceinline__ void take(float (&sums)[WIDTH]) const {
        if (!has(awaited)) return;
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            float parts[PARTS];
            for (bool all = false; !all;) {
                all = true;
#pragma unroll
                for (int i = 0; i < PARTS; ++i) parts[i] = i == rank ? own[w] : *left(awaited, w, i);
#pragma unroll
                for (int i = 0; i < PARTS; ++i) all = all && (i == rank || !Left::empty(parts[i]));
                if (!all) spin_wait();
            }
            sums[w] = 0.0f;
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                sums[w] += parts[i];
                if (i != rank) *left(awaited, w, i) = __uint_as_float(Left::EMPTY);
            }
        }
    }
};

// grid: clusters x CLUSTER, or x PARTS: no more than run at the same time
template <class T, int TOKENS, int EPILOGUE, int CLUSTER, int PARTS>
__global__ void __launch_bounds__(THREADS, 1) gemm_skinny(const Product p) {
    using Room = Shared<TOKENS, CLUSTER, PARTS>;
    SHARED_DYNAMIC(uint8_t, memory);
    __shared__ __align__(16) float squares[WARPS * HANDED_PITCH<TOKENS>];
    const int warp = kept(static_cast<int>(threadIdx.x / 32)), lane = kept(static_cast<int>(threadIdx.x % 32));
    const int rank = cluster_rank<Room::SHARERS>(), group = warp / GROUP_WARPS;
    uint8_t* ring = kept_shared(memory + warp * STAGES * T::BYTES);
    const CopyTarget to = copy_target(ring);

    grid_dependency_launch();
    cluster_arrive<CLUSTER>();  // its blocks run: passed before any sums are left with them
    Walk<T, EPILOGUE, Room::SHARERS> ahead(p, warp);
    int asked = 0;
    const auto ask = [&](int until) {
        for (; asked < until; ++asked) copy_chunk<T>(ahead, to + asked * T::BYTES, lane);
    };
    ask(EARLY);
    if (p.patient) {
        while (asked < STAGES) {
            cp_async_wait<0>();
            ask(asked + 1);
        }
    }
    const Room room(kept_shared(memory + WARPS * STAGES * T::BYTES));
    const typename Sums<T, TOKENS>::Lane reader(lane, TOKENS <= 8 || CLUSTER == 1);  // else no register is left
    const Rounds<EPILOGUE, Room::SHARERS> rounds(p);
    const bool takes = EPILOGUE != ADD && p.handed.squares != nullptr;
    Output<TOKENS, EPILOGUE, Room> output;
    output.find(p, rounds, room, rank);
    grid_dependency_wait(output.made());
    room.copy_x(p);
    output.load(p);
    Factors<TOKENS> factors;
    const auto token = [&] { return min(output.token(), p.n_tokens - 1); };  // again, where no register is left
    if (takes) factors.load(p.handed, token());
    ask(STAGES);
    if (takes) factors.leave(squares);
    if (p.patient)
        cp_async_wait<0>();
    else
        cp_async_wait<STAGES - EARLY>();
    __syncthreads();

    const int n_chunk = p.n_chunk / Room::SHARERS, all = rounds.of(0);
    float factor = 1.0f;
    int stage = 0;
    PartSums<TOKENS, EPILOGUE, PARTS, Room> part(p, rounds);
    const auto own_sum = [&](int w) { return output.sum(room.sums + output.part + w * room.SLOTS * room.PER_TILE); };
    const auto write_awaited = [&] {
        if (part.awaited < 0) return;
        float whole[decltype(output)::WIDTH];
        part.take(whole);
        output.write(p, factor, [&](int w) { return whole[w]; });
        output.find(p, rounds, room, part.awaited + PARTS);
        output.load(p);
        part.awaited = -1;
    };
    for (int round = 0; round < all; ++round) {
        Sums<T, TOKENS> sums;
        if (round < rounds.of(group))
            for (int chunk = (warp - round * n_chunk) & (GROUP_WARPS - 1); chunk < n_chunk; chunk += GROUP_WARPS) {
                cp_async_wait<STAGES - 1>();
                __syncwarp();
                sums.load(ring + stage * T::BYTES, lane);
                __syncwarp();
                copy_chunk<T>(ahead, to + stage * T::BYTES, lane);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                sums.multiply(room.x + chunk * (T::CHUNK_K / PACKED_STEP * TOKENS * PACKED_ROW), reader);
            }
        const int turn = round % room.ROUNDS, owner = turn % CLUSTER;
        if (takes && round == 0) factor = factors.find(p, squares, token());
        if (turn == 0 && (round > 0 || CLUSTER > 1)) cluster_wait<CLUSTER>();
        if (turn == 0 && round > 0) {
            if constexpr (PARTS > 1) {
                part.add_up(room, round - 1);
                if (part.awaited < round - 1) write_awaited();  // of this one others' sums are not there yet
            } else {
                output.write(p, factor, own_sum);
                output.find(p, rounds, room, round + rank);
                output.load(p);
            }
        }
        if (round < rounds.of(group)) {
            const int slot = cluster_rank<CLUSTER>() * GROUP_WARPS + warp % GROUP_WARPS;
            sums.template finish<Room>(RemoteFloats<CLUSTER>(room.sums_of(round, group, slot), owner), lane);
        }
        if (turn == room.ROUNDS - 1 || round == all - 1) cluster_arrive<CLUSTER>();
    }
    cluster_wait<CLUSTER>();
    if constexpr (PARTS > 1) {
        part.add_up(room, all - 1);
        write_awaited();
    } else {
        output.write(p, factor, own_sum);
    }
    cp_async_wait<0>();
}
