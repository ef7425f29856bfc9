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

// A thread has COLUMNS neighbouring columns: many small CTAs would not be resident at once.
constexpr int COLUMNS = 4;

__device__ __forceinline__ float4 columns_of(const float* matrix, int row, int columns, int column) {
    return __ldcg(reinterpret_cast<const float4*>(matrix + static_cast<size_t>(row) * columns + column));
}
__device__ __forceinline__ float4 columns_or_zero(const float* matrix, int row, int columns, int column) {
    return matrix ? columns_of(matrix, row, columns, column) : float4{};
}
__device__ __forceinline__ float4 scaled_sum(float scale, const float4& v, const float4& to) {
    return make_float4(fmaf(scale, v.x, to.x), fmaf(scale, v.y, to.y), fmaf(scale, v.z, to.z), fmaf(scale, v.w, to.w));
}

__device__ __forceinline__ float4 sum_of(const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Grid (columns / (COLUMNS * blockDim), rows). Biases [n_expert, columns] may be null.
extern "C" __global__ void expert_glu(const float* gate, const float* up, const float* b_gate, const float* b_up,
                                      const int* ids, const int* pair_of, __half* h, int columns, int activation,
                                      const float* weights) {
    grid_dependency_wait();
    grid_dependency_launch();  // after the wait: the next kernel reads ids without waiting (expert_gemv.cu, SUM)
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * COLUMNS;
    if (column >= columns) return;
    const int row = blockIdx.y;
    const float4 gates = columns_of(gate, row, columns, column), ups = columns_of(up, row, columns, column);
    const int pair = pair_of ? __ldcg(pair_of + row) : row, expert = __ldcg(ids + pair);
    const float before = WEIGHS_INPUT ? __ldcg(weights + pair) : 1.0f;
    const float4 g = scaled_sum(before, gates, columns_or_zero(b_gate, expert, columns, column));
    const float4 u = scaled_sum(before, ups, columns_or_zero(b_up, expert, columns, column));
    const ExpertGated gated(activation);
    *reinterpret_cast<uint2*>(h + static_cast<size_t>(row) * columns + column) = make_uint2(
        saturated_half2(gated(g.x, u.x), gated(g.y, u.y)), saturated_half2(gated(g.z, u.z), gated(g.w, u.w)));
}

struct CombineArgs {
    float* x;               // [n_tokens, columns]
    const float* y;         // [n_tokens * n_used, columns]
    const float* bias;      // BIASES: [n_expert, columns]
    const int* ids;         // BIASES: [n_tokens * n_used]
    const float* weights;   // [n_tokens * n_used]
    const int* row_of;      // [n_tokens * n_used], or null: a pair's row is its number
    const float* shared;    // [n_tokens, columns], or null
    const float* strength;  // [n_tokens], of the shared part, or null
    int n_tokens, columns, n_used;
};

constexpr int AT_ONCE = 8;  // outputs in flight: experts of a token, of most models all of them
// ggpy/kernels/moe/combine.py has the same numbers.
constexpr int COMBINE_THREADS = 64;
template <bool BIASES>
constexpr int RESIDENT_CTAS = BIASES ? 6 : 16;  // of an SM

// A lane holds one pair of a token: pair number `lane`, if that is less than n_used.
template <bool BIASES>
struct LanePair {
    int row = 0, expert = 0;
    float weight = 0.0f;

    __device__ __forceinline__ void load(const CombineArgs& p, int token) {
        const int lane = threadIdx.x % 32, pair = token * p.n_used + lane;
        if (token >= p.n_tokens || lane >= p.n_used) return;
        row = p.row_of ? __ldcg(p.row_of + pair) : pair;
        weight = WEIGHS_INPUT ? 1.0f : __ldcg(p.weights + pair);
        if (BIASES) expert = __ldcg(p.ids + pair);
    }
};

// Grid (columns / (COLUMNS * blockDim), rows): a CTA takes every gridDim.y-th token, and asks for the pairs of the next one
// while it adds up the outputs of this one. n_used is at most 32.
template <bool BIASES>
__global__ void __launch_bounds__(COMBINE_THREADS, RESIDENT_CTAS<BIASES>) combine(const CombineArgs p) {
    grid_dependency_launch();
    const int own = (blockIdx.x * blockDim.x + threadIdx.x) * COLUMNS, column = min(own, p.columns - COLUMNS);
    LanePair<BIASES> next;
    grid_dependency_wait();
    next.load(p, blockIdx.y);
    for (int token = blockIdx.y; token < p.n_tokens; token += gridDim.y) {
        const LanePair<BIASES> pairs = next;
        next.load(p, token + gridDim.y);
        float4 total = {};
        const float4 old = columns_of(p.x, token, p.columns, column);
        for (int first = 0; first < p.n_used; first += AT_ONCE) {
            float4 y[AT_ONCE], bias[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const int row = __shfl_sync(0xffffffffu, pairs.row, first + j);
                if (first + j < p.n_used) y[j] = columns_of(p.y, row, p.columns, column);
            }
            if (BIASES)
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) {
                    const int expert = __shfl_sync(0xffffffffu, pairs.expert, first + j);
                    if (first + j < p.n_used) bias[j] = columns_of(p.bias, expert, p.columns, column);
                }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const float weight = __shfl_sync(0xffffffffu, pairs.weight, first + j);
                if (first + j < p.n_used) total = scaled_sum(weight, BIASES ? sum_of(y[j], bias[j]) : y[j], total);
            }
        }
        if (p.shared) {
            const float strength = p.strength ? __ldcg(p.strength + token) : 1.0f;
            total = scaled_sum(strength, columns_of(p.shared, token, p.columns, column), total);
        }
        if (own < p.columns)
            *reinterpret_cast<float4*>(p.x + static_cast<size_t>(token) * p.columns + column) = sum_of(old, total);
    }
}
