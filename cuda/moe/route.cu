// Router of a mixture of experts: n = norm(x), and the experts that each token chooses, with their weights. Nothing is
// read back by the host: the kernels that multiply experts read ids[] in device memory.
//
//        l = n weight^T + bias        p = softmax(l), sigmoid(l), or l (SOFTMAX_CHOSEN)
//
// The n_used experts with the largest p + choice_bias are chosen, of equal ones the first, in falling order; their
// weights are p, or a softmax over the chosen l. Experts outside of the best n_group_used groups are not looked at.
//
// Launch: one CTA of WARPS warps per TOKENS tokens. All warps normalise one token after another; then warp w has the
// experts w, w + WARPS, ... for all tokens of the CTA, so that a row of the router is read once for them; then warp t
// chooses for token t. The operations of a token do not depend on the others. Everything is f32; n is also stored as
// f16, which the experts multiply.
#include "norm/norm.cuh"

enum Score { SOFTMAX, SIGMOID, SOFTMAX_CHOSEN };

constexpr float LOWEST = -3.402823466e38f;
constexpr float REMOVED = LOWEST;  // what is never chosen

struct RouteArgs {
    const float* x;            // [n_tokens, k]
    const float* norm;         // [k]
    const float* weight;       // [n_expert, k]
    const float* bias;         // [n_expert], or null
    const float* choice_bias;  // [n_expert], or null
    const float* shared_gate;  // [k], or null
    __half* normed;            // [n_tokens, k]
    int* ids;                  // [n_tokens, n_used]
    float* weights;            // [n_tokens, n_used]
    float* strength;           // [n_tokens], sigmoid(n shared_gate)
    int n_tokens, k, n_expert, n_used;
    int score;  // enum Score
    int normalise;
    int n_group, n_group_used;
    float scale, least_sum, eps;
};

__device__ __forceinline__ float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
}

// Products of a row with the CTA's tokens n[TOKENS][k] in shared memory; every lane gets them.
template <int TOKENS>
__device__ __forceinline__ void products(const float* row, const float* n, int k, float (&sum)[TOKENS]) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) sum[t] = 0.0f;
    for (int column = threadIdx.x % 32 * 4; column < k; column += 128) {
        const float4 w = __ldg(reinterpret_cast<const float4*>(row + column));
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const float4 v = *reinterpret_cast<const float4*>(n + t * k + column);
            sum[t] = fmaf(w.w, v.w, fmaf(w.z, v.z, fmaf(w.y, v.y, fmaf(w.x, v.x, sum[t]))));
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) sum[t] = warp_sum(sum[t]);
}

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

// The expert with the largest choice, of equal ones the first; it is removed. Without a number it is expert 0.
__device__ __forceinline__ int take_best(int n_expert, float* choice) {
    const int lane = threadIdx.x % 32;
    float best = REMOVED;
    int id = n_expert;
    for (int e = lane; e < n_expert; e += 32)
        if (choice[e] > best) best = choice[e], id = e;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, best, offset);
        const int other_id = __shfl_xor_sync(0xffffffffu, id, offset);
        if (other > best || (other == best && other_id < id)) best = other, id = other_id;
    }
    id = id < n_expert ? id : 0;
    if (lane == id % 32) choice[id] = REMOVED;
    __syncwarp();
    return id;
}

// Chooses for one token, whose logits are in score[]; choice[] is for this function.
__device__ __forceinline__ void choose(const RouteArgs& p, int token, float* score, float* choice) {
    const int lane = threadIdx.x % 32;
    score_all(p, score);
    for (int e = lane; e < p.n_expert; e += 32)
        choice[e] = score[e] + (p.choice_bias ? __ldg(p.choice_bias + e) : 0.0f);
    __syncwarp();
    if (p.n_group > 1) keep_best_groups(p, choice);
    int id = 0;
    for (int j = 0; j < p.n_used; ++j) {
        const int best = take_best(p.n_expert, choice);
        if (lane == j) id = best;
    }
    const bool valid = lane < p.n_used;
    float weight = valid ? score[id] : 0.0f;
    if (p.score == SOFTMAX_CHOSEN) {
        const float most = warp_max(valid ? weight : LOWEST);
        weight = valid ? expf(weight - most) : 0.0f;
        weight /= warp_sum(weight);
    }
    if (p.normalise) weight /= fmaxf(warp_sum(weight), p.least_sum);
    if (!valid) return;
    p.ids[token * p.n_used + lane] = id;
    p.weights[token * p.n_used + lane] = weight * p.scale;
}

// Dynamic shared memory: n[TOKENS][k], score[TOKENS][n_expert], choice[TOKENS][n_expert].
template <int TOKENS>
__global__ void __launch_bounds__(THREADS) route(const RouteArgs p) {
    static_assert(TOKENS <= WARPS, "a warp chooses for one token");
    SHARED_DYNAMIC(float, n);
    float* score = n + TOKENS * p.k;
    float* choice = score + TOKENS * p.n_expert;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * TOKENS;
    grid_dependency_launch();
    RmsNorm norm;
    norm.load_weight(p.norm, p.k);
    grid_dependency_wait();
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
            if (first + t < p.n_tokens) *reinterpret_cast<uint4*>(p.normed + row + column) = norm.f16x8(i);
        }
    }
    __syncthreads();
    for (int e = warp; e < p.n_expert; e += WARPS) {
        float sum[TOKENS];
        products<TOKENS>(p.weight + static_cast<size_t>(e) * p.k, n, p.k, sum);
        const float bias = p.bias ? __ldg(p.bias + e) : 0.0f;
#pragma unroll
        for (int t = 0; t < TOKENS; ++t)
            if (lane == t) score[t * p.n_expert + e] = sum[t] + bias;
    }
    if (p.shared_gate && warp == 0) {
        float sum[TOKENS];
        products<TOKENS>(p.shared_gate, n, p.k, sum);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t)
            if (lane == t && first + t < p.n_tokens) p.strength[first + t] = sigmoid(sum[t]);
    }
    __syncthreads();
    if (warp < TOKENS && first + warp < p.n_tokens)
        choose(p, first + warp, score + warp * p.n_expert, choice + warp * p.n_expert);
}
