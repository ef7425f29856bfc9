// The choice of experts: one warp turns the logits of a token into the numbers of its experts and their weights. route.cu
// chooses for steps of many tokens, expert_gemv.cu for itself.
//
//        p = softmax(l), sigmoid(l), or l (CHOSEN)
//
// The n_used experts with the largest p + choice_bias are chosen, of equal ones the first, in falling order; their
// weights are p, or a softmax over the chosen l, or their sigmoids with SIGMOID_OF_CHOSEN. Experts outside of the best
// n_group_used groups are not looked at. Where only a softmax is between, logits are compared.
#pragma once
#include "lib/activation.cuh"
#include "norm/norm.cuh"

#ifndef SIGMOID_OF_CHOSEN
#define SIGMOID_OF_CHOSEN 0
#endif

enum Score { SOFTMAX, SIGMOID, CHOSEN };

constexpr float LOWEST = -3.402823466e38f;

struct ChoiceArgs {
    float* logits;             // [n_tokens, n_expert]
    const float* choice_bias;  // [n_expert], or null
    int n_expert, n_used;
    int score;  // enum Score
    int normalise;
    int n_group, n_group_used;
    float scale, least_sum;
};

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
}
__device__ __forceinline__ uint32_t warp_largest(uint32_t v) {
#if ARCH >= 800 || EMULATED
    return __reduce_max_sync(0xffffffffu, v);
#else
    for (int offset = 16; offset > 0; offset /= 2) v = max(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
#endif
}
__device__ __forceinline__ uint32_t warp_smallest(uint32_t v) { return ~warp_largest(~v); }

// An integer that grows with v and is not 0; that of NaN is below all others.
__device__ __forceinline__ uint32_t order_of(float v) {
    const uint32_t bits = __float_as_uint(v + 0.0f);  // both zeros are equal
    return v != v ? 1 : (bits >> 31 ? ~bits : bits | 0x80000000u) + 1;
}

// PER_LANE: experts of a lane, which are lane, lane + 32, ...
template <int PER_LANE>
struct ExpertChoice {
    const ChoiceArgs& p;
    int lane;
    float likes[PER_LANE];  // logits, or scores
    int id = 0;             // of the expert that is chosen as number `lane`
    float like = LOWEST;

    // Requests the logits of a token.
    __device__ __forceinline__ ExpertChoice(const ChoiceArgs& args, int token) : p(args), lane(threadIdx.x % 32) {
        const float* logits = p.logits + static_cast<size_t>(token) * p.n_expert;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) likes[i] = valid(i) ? __ldcg(logits + expert(i)) : LOWEST;
    }
    __device__ __forceinline__ int expert(int i) const { return 32 * i + lane; }
    __device__ __forceinline__ bool valid(int i) const { return expert(i) < p.n_expert; }
    __device__ __forceinline__ bool compares_logits() const {
        return p.score == CHOSEN || (p.score == SOFTMAX && p.choice_bias == nullptr && p.n_group == 1);
    }
    // The largest logit, and the sum of all exp(logit - largest).
    __device__ __forceinline__ float2 softmax() const {
        float most = LOWEST, total = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (valid(i)) most = fmaxf(most, likes[i]);
        most = warp_max(most);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (valid(i)) total += expf(likes[i] - most);
        return make_float2(most, warp_sum(total));
    }
    // Turns logits into scores.
    __device__ __forceinline__ void score() {
        const float2 all = p.score == SOFTMAX ? softmax() : make_float2(0.0f, 1.0f);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            likes[i] = p.score == SOFTMAX ? expf(likes[i] - all.x) / all.y : sigmoid(likes[i]);
    }
    // The score of a group is the sum of its two best experts; lane i has that of group i. Removes the experts of all
    // groups but the n_group_used best.
    __device__ __forceinline__ void keep_best_groups(float (&choice)[PER_LANE]) const {
        const int size = p.n_expert / p.n_group;
        float sum = LOWEST;
        for (int group = 0; group < p.n_group; ++group) {
            float best = LOWEST, second = LOWEST;
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i)
                if (valid(i) && expert(i) / size == group)
                    second = fmaxf(second, fminf(best, choice[i])), best = fmaxf(best, choice[i]);
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) {
                const float other = __shfl_xor_sync(0xffffffffu, best, offset);
                second = fmaxf(second, __shfl_xor_sync(0xffffffffu, second, offset));
                second = fmaxf(second, fminf(best, other)), best = fmaxf(best, other);
            }
            if (lane == group) sum = best + second;
        }
        int rank = 0;
        for (int group = 0; group < p.n_group; ++group) {
            const float other = __shfl_sync(0xffffffffu, sum, group);
            rank += other > sum || (other == sum && group < lane);
        }
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (__shfl_sync(0xffffffffu, rank, min(expert(i) / size, 31)) >= p.n_group_used) choice[i] = LOWEST;
    }
    // Chooses the first `count` experts.
    __device__ __forceinline__ void choose(int count) {
        float choice[PER_LANE];
        if (!compares_logits()) score();
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            choice[i] = likes[i] + (p.choice_bias && valid(i) ? __ldg(p.choice_bias + expert(i)) : 0.0f);
        if (p.n_group > 1) keep_best_groups(choice);
        uint32_t order[PER_LANE];  // 0: not there, or chosen
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) order[i] = valid(i) ? order_of(choice[i]) : 0;
#pragma unroll 1
        for (int rank = 0; rank < count; ++rank) {
            uint32_t best = order[0];
            int of_best = lane;
            float its_like = likes[0];
#pragma unroll
            for (int i = 1; i < PER_LANE; ++i)
                if (order[i] > best) best = order[i], of_best = expert(i), its_like = likes[i];
            const uint32_t largest = warp_largest(best);
            const int first = warp_smallest(best == largest ? of_best : ~0u);
            const float chosen = __shfl_sync(0xffffffffu, its_like, first % 32);
            if (lane == rank) id = first, like = chosen;
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i)
                if (expert(i) == first) order[i] = 0;
        }
    }
    // The weight of the expert that is chosen as number `lane`, after choose(n_used).
    __device__ __forceinline__ float weight() const {
        const bool chosen = lane < p.n_used;
        float result = chosen ? like : 0.0f;
        if (SIGMOID_OF_CHOSEN && p.score == CHOSEN) {
            result = chosen ? sigmoid(like) : 0.0f;
        } else if (p.score == CHOSEN) {
            const float most = warp_max(like);
            result = chosen ? expf(like - most) : 0.0f;
            result /= warp_sum(result);
        } else if (compares_logits()) {
            const float2 all = softmax();
            result = chosen ? expf(like - all.x) / all.y : 0.0f;
        }
        if (p.normalise) result /= fmaxf(warp_sum(result), p.least_sum);
        return result * p.scale;
    }
};
