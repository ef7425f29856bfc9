// Elementwise kernels between the GEMMs of experts, and after the last one.
//
// | kernel     | computes                                                                                  |
// | expert_glu | h = act(gate + b_gate[expert], up + b_up[expert]), f16                                    |
// | combine    | x += sum of weight * (y + b_down[expert]) over a token's experts, in order, + shared part |
//
// WEIGHS_INPUT: the weight of a pair multiplies what its expert takes, as expert_glu does with gate and up, not y.
//
// Pair t * n_used + j is the j-th expert of token t. Row r of gate, up, h and y is pair r, or pair_of[r] of a sorted
// step (sort.cu), in which pair i has the row row_of[i].
#include "moe/expert_act.cuh"

#ifndef WEIGHS_INPUT
#define WEIGHS_INPUT 0
#endif

// One thread per element of a row; grid (columns / blockDim, rows). Biases [n_expert, columns] may be null.
extern "C" __global__ void expert_glu(const float* gate, const float* up, const float* b_gate, const float* b_up,
                                      const int* ids, const int* pair_of, __half* h, int columns, int activation,
                                      const float* weights) {
    grid_dependency_wait();
    grid_dependency_launch();  // after the wait: the next kernel reads ids without waiting (expert_gemv.cu, SUM)
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const int row = blockIdx.y, pair = pair_of ? __ldcg(pair_of + row) : row, expert = __ldcg(ids + pair);
    const float before = WEIGHS_INPUT ? __ldcg(weights + pair) : 1.0f;
    const size_t at = static_cast<size_t>(row) * columns + column;
    const size_t bias = static_cast<size_t>(expert) * columns + column;
    const float g = before * __ldcg(gate + at) + (b_gate ? __ldg(b_gate + bias) : 0.0f);
    const float u = before * __ldcg(up + at) + (b_up ? __ldg(b_up + bias) : 0.0f);
    h[at] = saturated_half(expert_gated(activation, g, u));
}

struct CombineArgs {
    float* x;               // [n_tokens, columns]
    const float* y;         // [n_tokens * n_used, columns]
    const float* bias;      // [n_expert, columns], or null
    const int* ids;         // [n_tokens * n_used]
    const float* weights;   // [n_tokens * n_used]
    const int* row_of;      // [n_tokens * n_used], or null: a pair's row is its number
    const float* shared;    // [n_tokens, columns], or null
    const float* strength;  // [n_tokens], of the shared part, or null
    int columns, n_used;
};

constexpr int AT_ONCE = 8;  // outputs in flight: experts of a token, of most models all of them

// One thread per element; grid (columns / blockDim, tokens).
extern "C" __global__ void combine(const CombineArgs p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int column = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    if (column >= p.columns) return;
    float total = 0.0f;
    const size_t at = static_cast<size_t>(token) * p.columns + column;
    const float old = __ldcg(p.x + at);
    for (int first = 0; first < p.n_used; first += AT_ONCE) {
        int row[AT_ONCE];
        float y[AT_ONCE], weight[AT_ONCE], bias[AT_ONCE] = {};
        const int count = min(AT_ONCE, p.n_used - first), pair = token * p.n_used + first;
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (j < count) row[j] = p.row_of ? __ldcg(p.row_of + pair + j) : pair + j;
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (j < count) {
                y[j] = __ldcg(p.y + static_cast<size_t>(row[j]) * p.columns + column);
                weight[j] = WEIGHS_INPUT ? 1.0f : __ldcg(p.weights + pair + j);
            }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (p.bias && j < count)
                bias[j] = __ldg(p.bias + static_cast<size_t>(__ldcg(p.ids + pair + j)) * p.columns + column);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (j < count) total = fmaf(weight[j], y[j] + bias[j], total);
    }
    if (p.shared) total = fmaf(p.strength ? __ldcg(p.strength + token) : 1.0f, __ldcg(p.shared + at), total);
    p.x[at] = old + total;
}
