// Router of a mixture of experts: n = norm(x), and the experts that each token chooses, with their weights. Nothing is
// read back by the host: the kernels that multiply experts read ids[] in device memory.
//
//        l = n weight^T + bias        p = softmax(l), sigmoid(l), or l (CHOSEN)
//
// The n_used experts with the largest p + choice_bias are chosen, of equal ones the first, in falling order; their
// weights are p, or a softmax over the chosen l, or their sigmoids with SIGMOID_OF_CHOSEN. Experts outside of the best n_group_used groups
// are not looked at.
//
// Launch: grid (CTAs of the experts, ceil(tokens / TOKENS)) of WARPS warps. One SM would read the router's rows too
// slowly for few tokens, so they are spread over CTAs, each of which normalises its TOKENS tokens itself. A warp
// multiplies ROWS experts at a time; a single one's row is requested before grid_dependency_wait. Logits go to global
// memory; the CTA that arrives last at the counter of its tokens chooses. The operations of a token do not depend on the
// others, nor on the launch. Everything is f32; n is also stored as f16, which the experts multiply.
//
// BESIDE: experts beside a dense feed-forward, whose router has a norm of its own. Experts take the norm of x with
// other weights, and the weights of the chosen ones are multiplied by expert_scale.
#include "lib/activation.cuh"
#include "norm/norm.cuh"

#ifndef BESIDE
#define BESIDE 0
#endif
#ifndef SIGMOID_OF_CHOSEN
#define SIGMOID_OF_CHOSEN 0
#endif

enum Score { SOFTMAX, SIGMOID, CHOSEN };

constexpr float LOWEST = -3.402823466e38f;
constexpr float REMOVED = LOWEST;  // what is never chosen

struct RouteArgs {
    const float* x;             // [n_tokens, k]
    const float* norm;          // [k]
    const float* weight;        // [n_expert, k]
    const float* bias;          // [n_expert], or null
    const float* choice_bias;   // [n_expert], or null
    const float* shared_gate;   // [k], or null
    __half* normed;             // [n_tokens, k]
    int* ids;                   // [n_tokens, n_used]
    float* weights;             // [n_tokens, n_used]
    float* strength;            // [n_tokens], sigmoid(n shared_gate)
    float* logits;              // [n_tokens, n_expert]
    int* arrived;               // [gridDim.y], 0 before and after each launch
    const float* taken_norm;    // BESIDE: [k], the weights of the norm of what experts take
    const float* expert_scale;  // BESIDE: [n_expert]
    int n_tokens, k, n_expert, n_used;
    int score;  // enum Score
    int normalise;
    int n_group, n_group_used;
    float scale, least_sum, eps;
};

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
}

// sum += products of the four columns from `column` on: of ROWS rows w with the CTA's tokens n[TOKENS][k] in shared
// memory.
template <int TOKENS, int ROWS>
__device__ __forceinline__ void add_columns(const float4 (&w)[ROWS], const float* n, int k, int column,
                                            float (&sum)[ROWS][TOKENS]) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const float4 v = *reinterpret_cast<const float4*>(n + t * k + column);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            sum[r][t] = fmaf(w[r].w, v.w, fmaf(w[r].z, v.z, fmaf(w[r].y, v.y, fmaf(w[r].x, v.x, sum[r][t]))));
    }
}

// A warp's ROWS rows of the router, or the gate of the shared expert.
template <int ROWS>
struct RouterRows {
    static constexpr int HELD = ROWS == 1 ? 16 : 0;  // pieces of a row in registers: those of 2048 columns
    const float* row[ROWS];
    float4 held[HELD + 1][ROWS];

    static __device__ __forceinline__ int column(int i) { return threadIdx.x % 32 * 4 + i * 128; }

    __device__ __forceinline__ void load(float4 (&w)[ROWS], int at) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) w[r] = __ldg(reinterpret_cast<const float4*>(row[r] + at));
    }
    __device__ __forceinline__ void begin(int k) {
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (column(i) < k) load(held[i], column(i));
    }
    // Every lane gets the products.
    template <int TOKENS>
    __device__ __forceinline__ void multiply(const float* n, int k, float (&sum)[ROWS][TOKENS]) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) sum[r][t] = 0.0f;
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (column(i) < k) add_columns<TOKENS>(held[i], n, k, column(i), sum);
#pragma unroll 4
        for (int at = column(HELD); at < k; at += 128) {
            float4 w[ROWS];
            load(w, at);
            add_columns<TOKENS>(w, n, k, at, sum);
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) sum[r][t] = warp_sum(sum[r][t]);
    }
};

// Turns logits into scores: a softmax over all experts, or a sigmoid of each.
__device__ __forceinline__ void score_all(const RouteArgs& p, float* score) {
    const int lane = threadIdx.x % 32;
    if (p.score == SIGMOID)
        for (int e = lane; e < p.n_expert; e += 32) score[e] = sigmoid(score[e]);
    if (p.score != SOFTMAX) return;
    float most = LOWEST, total = 0.0f;
    for (int e = lane; e < p.n_expert; e += 32) most = fmaxf(most, score[e]);
    most = warp_max(most);
    for (int e = lane; e < p.n_expert; e += 32) total += score[e] = expf(score[e] - most);
    total = warp_sum(total);
    for (int e = lane; e < p.n_expert; e += 32) score[e] /= total;
}

// Removes the experts of all groups but those whose two best have the largest sums. A lane has one group.
__device__ __forceinline__ void keep_best_groups(const RouteArgs& p, float* choice) {
    const int lane = threadIdx.x % 32, size = p.n_expert / p.n_group;
    const bool valid = lane < p.n_group;
    float best = REMOVED, second = REMOVED;
    for (int i = 0; valid && i < size; ++i) {
        const float v = choice[lane * size + i];
        if (v > best)
            second = best, best = v;
        else if (v > second)
            second = v;
    }
    const float sum = best + second;
    int rank = 0;
    for (int g = 0; g < p.n_group; ++g) {
        const float other = __shfl_sync(0xffffffffu, sum, g);
        rank += other > sum || (other == sum && g < lane);
    }
    for (int i = 0; valid && rank >= p.n_group_used && i < size; ++i) choice[lane * size + i] = REMOVED;
    __syncwarp();
}

// An integer that grows with v; that of NaN is below all others.
__device__ __forceinline__ uint32_t order_of(float v) {
    const uint32_t bits = __float_as_uint(v + 0.0f);  // both zeros are equal
    return v != v ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Warp t turns the logits of token first + t into scores, and into what the choice is made by.
__device__ __forceinline__ void score_token(const RouteArgs& p, int token, float* score, float* choice) {
    const int lane = threadIdx.x % 32;
    for (int e = lane; e < p.n_expert; e += 32)
        score[e] = __ldcg(p.logits + static_cast<size_t>(token) * p.n_expert + e);
    score_all(p, score);
    for (int e = lane; e < p.n_expert; e += 32)
        choice[e] = score[e] + (p.choice_bias ? __ldg(p.choice_bias + e) : 0.0f);
    __syncwarp();
    if (p.n_group > 1) keep_best_groups(p, choice);
    for (int e = lane; e < p.n_expert; e += 32) choice[e] = __uint_as_float(order_of(choice[e]));
}

// chosen[token][rank], for count tokens. A thread counts the experts before one: those with a larger choice, or the same
// and a smaller number.
__device__ __forceinline__ void rank_experts(const RouteArgs& p, const float* choice, int count, int* chosen) {
    for (int i = threadIdx.x; i < count * p.n_expert; i += THREADS) {
        const int t = i / p.n_expert, e = i - t * p.n_expert;
        const float* of_token = choice + t * p.n_expert;
        const uint32_t own = __float_as_uint(of_token[e]);
        int rank = 0;
#pragma unroll 8
        for (int other = 0; other < p.n_expert; ++other) {
            const uint32_t v = __float_as_uint(of_token[other]);
            rank += v > own || (v == own && other < e);
        }
        if (rank < p.n_used) chosen[t * p.n_used + rank] = e;
    }
}

// Stores the experts of a token and their weights.
__device__ __forceinline__ void store_choice(const RouteArgs& p, int token, const float* score, const int* chosen) {
    const int lane = threadIdx.x % 32;
    const bool valid = lane < p.n_used;
    const int id = valid ? chosen[lane] : 0;
    float weight = valid ? score[id] : 0.0f;
    if (SIGMOID_OF_CHOSEN && p.score == CHOSEN) {
        weight = valid ? sigmoid(weight) : 0.0f;
    } else if (p.score == CHOSEN) {
        const float most = warp_max(valid ? weight : LOWEST);
        weight = valid ? expf(weight - most) : 0.0f;
        weight /= warp_sum(weight);
    }
    if (p.normalise) weight /= fmaxf(warp_sum(weight), p.least_sum);
    if (!valid) return;
    p.ids[token * p.n_used + lane] = id;
    if (BESIDE) weight *= __ldg(p.expert_scale + id);
    p.weights[token * p.n_used + lane] = weight * p.scale;
}

// Requests the rows of the experts from e on; past the end the last row again.
template <int ROWS>
__device__ __forceinline__ void find_rows(const RouteArgs& p, RouterRows<ROWS>& rows, int e) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) rows.row[r] = p.weight + static_cast<size_t>(min(e + r, p.n_expert - 1)) * p.k;
    rows.begin(p.k);
}

// Stores the logits of the experts of this CTA, and what the shared expert is multiplied by.
template <int TOKENS, int ROWS>
__device__ __forceinline__ void store_logits(const RouteArgs& p, RouterRows<ROWS>& rows, int e, int first,
                                             const float* n) {
    const int lane = threadIdx.x % 32, stride = gridDim.x * WARPS * ROWS;
    float sum[ROWS][TOKENS];
    for (int next = e; next < p.n_expert; next += stride) {
        if (next > e) find_rows(p, rows, next);
        rows.multiply(n, p.k, sum);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (next + r >= p.n_expert) break;
            const float bias = p.bias ? __ldg(p.bias + next + r) : 0.0f;
#pragma unroll
            for (int t = 0; t < TOKENS; ++t)
                if (lane == t && first + t < p.n_tokens)
                    p.logits[static_cast<size_t>(first + t) * p.n_expert + next + r] = sum[r][t] + bias;
        }
    }
    if (!p.shared_gate || blockIdx.x > 0 || threadIdx.x / 32 != WARPS - 1) return;
    RouterRows<1> gate;
    float product[1][TOKENS];
    gate.row[0] = p.shared_gate;
    gate.begin(p.k);
    gate.multiply(n, p.k, product);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
        if (lane == t && first + t < p.n_tokens) p.strength[first + t] = sigmoid(product[0][t]);
}

// Whether all logits of the CTA's tokens have been stored; only for the last of their CTAs.
__device__ __forceinline__ bool arrives_last(int* arrived) {
    __shared__ bool last;
    if (gridDim.x > 1) __threadfence();  // the logits, before the counter
    __syncthreads();
    if (gridDim.x == 1) return true;
    if (threadIdx.x == 0) {
        last = atomicAdd(arrived, 1) == static_cast<int>(gridDim.x) - 1;
        if (last) *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// Normalises the CTA's tokens into shared memory; the CTAs of the first experts also store them.
template <int TOKENS>
__device__ __forceinline__ void normalise(const RouteArgs& p, RmsNorm& norm, int first, float* n) {
    for (int t = 0; t < TOKENS; ++t) {
        const size_t row = static_cast<size_t>(min(first + t, p.n_tokens - 1)) * p.k;
        norm.load(p.x + row, p.k);
        norm.scale(p.k, p.eps, t & 1);
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i) {
            const int column = RmsNorm::column(i);
            if (column >= p.k) continue;
#pragma unroll
            for (int j = 0; j < 8; ++j) n[t * p.k + column + j] = norm.value(i, j);
            if (blockIdx.x != 0 || first + t >= p.n_tokens) continue;
            uint4* dst = reinterpret_cast<uint4*>(p.normed + row + column);
            if constexpr (BESIDE) {
                RmsNorm taken = norm;
                read_floats(taken.weight[i], p.taken_norm + column);
                *dst = taken.f16x8(i);
            } else {
                *dst = norm.f16x8(i);
            }
        }
    }
}

// Dynamic shared memory: n[TOKENS][k], score[TOKENS][n_expert], choice[TOKENS][n_expert].
template <int TOKENS, int ROWS>
__global__ void __launch_bounds__(THREADS, 1) route(const RouteArgs p) {
    static_assert(TOKENS <= WARPS, "a warp chooses for one token");
    SHARED_DYNAMIC(float, n);
    float* score = n + TOKENS * p.k;
    float* choice = score + TOKENS * p.n_expert;
    const int warp = threadIdx.x / 32, first = blockIdx.y * TOKENS, e = (blockIdx.x * WARPS + warp) * ROWS;
    grid_dependency_launch();
    RouterRows<ROWS> rows;
    find_rows(p, rows, e);
    RmsNorm norm;
    norm.load_weight(p.norm, p.k);
    grid_dependency_wait();
    normalise<TOKENS>(p, norm, first, n);
    __syncthreads();
    store_logits<TOKENS>(p, rows, e, first, n);
    if (!arrives_last(p.arrived + blockIdx.y)) return;
    const int count = min(TOKENS, p.n_tokens - first);
    int* chosen = reinterpret_cast<int*>(n);  // [TOKENS][n_used], where n is no longer needed
    if (warp < count) score_token(p, first + warp, score + warp * p.n_expert, choice + warp * p.n_expert);
    __syncthreads();
    rank_experts(p, choice, count, chosen);
    __syncthreads();
    if (warp < count) store_choice(p, first + warp, score + warp * p.n_expert, chosen + warp * p.n_used);
}
