// Joins the experts of each token with a dense feed-forward d beside them:
//
//    out = norm(d) + norm(sum of weight * y over the token's experts, in order)
//
// A CTA has one token; rows of y are those of combine.cu.
#include "norm/norm.cuh"

struct JoinArgs {
    const float* dense;         // [n_tokens, k]
    const float* y;             // [n_tokens * n_used, k]
    const float* weights;       // [n_tokens * n_used]
    const int* row_of;          // [n_tokens * n_used], or null: a pair's row is its number
    const float* dense_norm;    // [k]
    const float* experts_norm;  // [k]
    float* out;                 // [n_tokens, k]
    int k, n_used;
    float dense_eps, experts_eps;
};

constexpr int AT_ONCE = 4;  // experts whose columns a thread has in flight

// Columns of the weighted sum of a token's experts. All experts of a token are few: a loop over groups of them keeps
// several loads in flight.
__device__ __forceinline__ void add_experts(const JoinArgs& p, int token, RmsNorm& sum) {
    for (int first = 0; first < p.n_used; first += AT_ONCE) {
        const int count = min(AT_ONCE, p.n_used - first), pair = token * p.n_used + first;
        const float* row[AT_ONCE];
        float weight[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int at = pair + min(j, count - 1);
            row[j] = p.y + static_cast<size_t>(p.row_of ? __ldcg(p.row_of + at) : at) * p.k;
            weight[j] = j < count ? __ldcg(p.weights + at) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i) {
            const int column = RmsNorm::column(i);
            if (column >= p.k) continue;
            float y[AT_ONCE][8];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) read_floats(y[j], row[j] + column);
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)
                if (j < count)
#pragma unroll
                    for (int c = 0; c < 8; ++c) sum.x[i][c] = fmaf(weight[j], y[j][c], sum.x[i][c]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) join(const JoinArgs p) {
    const int token = blockIdx.x;
    RmsNorm dense, experts;
    grid_dependency_launch();
    dense.load_weight(p.dense_norm, p.k);
    experts.load_weight(p.experts_norm, p.k);
    grid_dependency_wait();
    dense.load(p.dense + static_cast<size_t>(token) * p.k, p.k);
#pragma unroll
    for (int i = 0; i < NORM_PIECES; ++i)
#pragma unroll
        for (int c = 0; c < 8; ++c) experts.x[i][c] = 0.0f;
    add_experts(p, token, experts);
    float sums[2] = {dense.squares(p.k), experts.squares(p.k)};
    cta_sums<false>(sums);
    dense.scale_by(sums[0], p.k, p.dense_eps);
    experts.scale_by(sums[1], p.k, p.experts_eps);
#pragma unroll
    for (int i = 0; i < NORM_PIECES; ++i) {
        const int column = RmsNorm::column(i);
        if (column >= p.k) continue;
        float4* dst = reinterpret_cast<float4*>(p.out + static_cast<size_t>(token) * p.k + column);
        float v[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) v[c] = experts.added_to(dense.value(i, c), i, c);
        dst[0] = make_float4(v[0], v[1], v[2], v[3]), dst[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
}
