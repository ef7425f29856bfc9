// What the kernels of a gated delta net share: their parameters, the convolution of a channel, sums over a head, and one
// token through a column of a matrix.
//
// Hk key heads, Hv value heads of S elements, C = (2 Hk + Hv) S channels. The columns of a head's matrix M[S, S] do not
// depend on each other: an element of v changes one column, and that column makes one element of o. In memory a column is
// contiguous, and as long as P, which is S rounded up to 32; rows past S are zero.
//
// A step is computed by delta_decode alone, or by delta_conv, delta_scan (or delta_chunks and delta_scan) and delta_norm.
// delta_decode has the bits of delta_conv, delta_scan and delta_norm: a head's elements are added up in blocks of 32,
// which meet by shuffles, and then the blocks in order; what is not one instruction by nature is rounded by name.
//
// States are read from one page and written to another (ggpy/backends/states.py), so that CTAs need not wait for each
// other, and a step can be repeated.
#pragma once
#include "lib/activation.cuh"
#include "norm/norm.cuh"
#include "layout/packed.cuh"

constexpr int BLOCK = 32;  // elements of a head that are added up by one warp
constexpr int LANES = 8;   // of a column of a matrix
constexpr int CHUNK = 64;  // tokens (delta_chunks.cu)
constexpr int NO_STATE = -1;
constexpr float UNIT_EPS = 1e-6f;  // added to the square of the length of q and k

struct DeltaArgs {
    const int* sequences;    // [T]
    const int* first;        // [sequences + 1], the first token of each, and the number of all
    const int* pages;        // [sequences][2]: the page that is read, or NO_STATE, and the page that is written
    float* conv_state;       // [pages][taps - 1][C], of one layer
    float* matrices;         // [pages][Hv][S columns][P], of one layer
    const float* projected;  // [T][C]: q, k and v before the convolution
    const float* beta;       // [T][Hv], before the sigmoid
    const float* alpha;      // [T][Hv]
    const float* taps_of;    // [C][taps], the oldest token's first
    const float* a;          // [Hv]
    const float* dt;         // [Hv]
    float* u;                // [T][C]: q and k of length 1, q over sqrt(S), and v
    float2* decay;           // [T][Hv]: the logarithm of what M is multiplied with, and sigmoid(beta)
    float* solved;           // [T][Hv][2 CHUNK] (delta_chunks.cu), in the memory of `projected`
    float* o;                // [T][Hv * S]
    const float* gate;       // [T][Hv * S], before the SiLU
    const float* norm;       // [S]
    __half* out;             // [T][Hv * S], in rows or packed (packed.cuh)
    float eps;               // of the norm
    int n_k_head, n_v_head, size;
    int n_tokens, n_sequences;
    int tiled;    // the key head of value head h is h % Hk, not h / (Hv / Hk)
    int order;    // of out
    int chunked;  // whole chunks of each sequence are delta_chunk_scan's

    __device__ __forceinline__ int channels() const { return (2 * n_k_head + n_v_head) * size; }
    __device__ __forceinline__ int key_head(int head) const {
        return tiled ? head % n_k_head : head / (n_v_head / n_k_head);
    }
    // Whether no other value head before this one has its key head.
    __device__ __forceinline__ bool is_first_of_key(int head) const {
        return tiled ? head < n_k_head : head % (n_v_head / n_k_head) == 0;
    }
    // (log decay, sigmoid(beta)) of a token and value head.
    __device__ __forceinline__ float2 decay_of(int token, int head) const {
        const size_t at = static_cast<size_t>(token) * n_v_head + head;
        return decay_of_inputs(head, __ldcg(alpha + at), __ldcg(beta + at));
    }
    // The same, from the token's elements of alpha and beta.
    __device__ __forceinline__ float2 decay_of_inputs(int head, float of_alpha, float of_beta) const {
        const float x = __fadd_rn(of_alpha, __ldg(dt + head)), step = x > 20.0f ? x : log1pf(expf(x));
        return make_float2(__fmul_rn(__ldg(a + head), step), sigmoid(of_beta));
    }
    // Input j (0 ... TAPS - 2) of a state's convolution.
    template <int TAPS>
    __device__ __forceinline__ float* kept_input(int page, int j, int channel) const {
        return conv_state + (static_cast<size_t>(page) * (TAPS - 1) + j) * channels() + channel;
    }
    // Stores an element of out, of value head `head`.
    __device__ __forceinline__ void store(int token, int head, int element, float v) const {
        const int column = head * size + element;
        size_t at = static_cast<size_t>(token) * n_v_head * size + column;
        if (order != PLAIN_ORDER) at = packed_half(order, column, token, n_tokens);
        out[at] = saturated_half(v);
    }
};

// silu of the convolution of a channel, from its inputs and weights, the oldest first.
template <int TAPS>
__device__ __forceinline__ float convolved(const float (&input)[TAPS], const float (&weight)[TAPS]) {
    float v = 0.0f;
#pragma unroll
    for (int j = 0; j < TAPS; ++j) v = fmaf(input[j], weight[j], v);
    return activate(SILU, v);
}

// The sum of squares of a block, in each lane of its warp.
__device__ __forceinline__ float squares_of_block(float v) { return warp_sum(__fmul_rn(v, v)); }
// Adds up the sums of a head's blocks, `stride` apart.
template <int QUADS>
__device__ __forceinline__ float sum_of_blocks(const float* sums, int stride = 1) {
    float total = 0.0f;
#pragma unroll
    for (int b = 0; b < QUADS; ++b) total = __fadd_rn(total, sums[b * stride]);
    return total;
}
// What a head of q or k is multiplied with.
__device__ __forceinline__ float unit_scale(float squares, bool is_query, int size) {
    const float inverse = rsqrtf(__fadd_rn(squares, UNIT_EPS));
    return is_query ? __fmul_rn(inverse, rsqrtf(static_cast<float>(size))) : inverse;
}
// norm(o) * silu(gate) of an element.
__device__ __forceinline__ float gated_norm(float o, float squares, float weight, float gate, int size, float eps) {
    const float inverse = rsqrtf(fmaf(squares, fast_reciprocal(static_cast<float>(size)), eps));
    return __fmul_rn(__fmul_rn(__fmul_rn(o, inverse), weight), activate(SILU, gate));
}

__device__ __forceinline__ float4 zero4() { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); }
__device__ __forceinline__ float4 scaled(const float4& v, float scale) {
    return make_float4(__fmul_rn(v.x, scale), __fmul_rn(v.y, scale), __fmul_rn(v.z, scale), __fmul_rn(v.w, scale));
}
__device__ __forceinline__ float dot(const float4& a, const float4& b) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
}

// A lane's rows of a column of M: rows 4 (lane + LANES j) ... + 3. QUADS is P / 32.
template <int QUADS>
struct Column {
    float4 m[QUADS];

    static __device__ __forceinline__ float4* of(const DeltaArgs& p, int page, int head, int column, int lane) {
        const size_t at = (static_cast<size_t>(page) * p.n_v_head + head) * p.size + column;
        return reinterpret_cast<float4*>(p.matrices + at * BLOCK * QUADS) + lane;
    }
    __device__ __forceinline__ void load(const float4* src, bool inside) {
#pragma unroll
        for (int j = 0; j < QUADS; ++j) m[j] = inside ? load_of_line(src + LANES * j) : zero4();
    }
    __device__ __forceinline__ void store(float4* dst) const {
#pragma unroll
        for (int j = 0; j < QUADS; ++j) dst[LANES * j] = m[j];
    }
    // One token: M = decay M, d = beta (v - M^T k), M = M + k d; returns M^T q, which is (decay M)^T q + (k q) d, so
    // that one round of shuffles adds up all three products. k(j) and q(j): the lane's rows of k and q.
    template <class K, class Q>
    __device__ __forceinline__ float step(const K& k, const Q& q, float v, float decay, float beta) {
        float mk = 0.0f, mq = 0.0f, kq = 0.0f;
#pragma unroll
        for (int j = 0; j < QUADS; ++j) {
            const float4 of_k = k(j), of_q = q(j);
            m[j] = scaled(m[j], decay);
            mk += dot(m[j], of_k), mq += dot(m[j], of_q), kq += dot(of_k, of_q);
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) {
            mk += __shfl_xor_sync(0xffffffffu, mk, step);
            mq += __shfl_xor_sync(0xffffffffu, mq, step);
            kq += __shfl_xor_sync(0xffffffffu, kq, step);
        }
        const float d = __fmul_rn(beta, __fsub_rn(v, mk));
#pragma unroll
        for (int j = 0; j < QUADS; ++j) {
            const float4 of_k = k(j);
            m[j].x = fmaf(of_k.x, d, m[j].x), m[j].y = fmaf(of_k.y, d, m[j].y);
            m[j].z = fmaf(of_k.z, d, m[j].z), m[j].w = fmaf(of_k.w, d, m[j].w);
        }
        return fmaf(kq, d, mq);
    }
};
