// A gated delta net between its products: convolution, the recurrence over the tokens of each sequence, norm and gate.
//
// kernel        grid                                a CTA takes
// delta_conv    (2 Hk + Hv, T)                      one head of q, k or v of one token
// delta_scan    (Hv ceil(S / COLUMNS), sequences)   COLUMNS columns of the matrix of one value head, token after token
// delta_norm    (Hv, T)                             one head of one token
//
// Hk key heads, Hv value heads of S elements, C = (2 Hk + Hv) S channels. The columns of a head's matrix M[S, S] do not
// depend on each other: an element of v changes one column, and that column makes one element of o. So delta_scan holds
// a column in the registers of LANES lanes, which share its rows, and nothing leaves the chip between two tokens. In
// memory a column is contiguous, and as long as P, which is S rounded up to 32: a warp reads 128 bytes of each of its
// columns at a time.
//
// States are read from one page and written to another (ggpy/backends/states.py), so that CTAs need not wait for each
// other, and a step can be repeated.
#include "lib/common.cuh"

constexpr int LANES = 8, COLUMNS = 16;  // lanes of a column; columns of a CTA of delta_scan
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
    float2* decay;           // [T][Hv]: what M is multiplied with, and sigmoid(beta)
    float* o;                // [T][Hv * S]
    const float* gate;       // [T][Hv * S], before the SiLU
    const float* norm;       // [S]
    __half* out;             // [T][Hv * S]
    float eps;               // of the norm
    int n_k_head, n_v_head, size, taps;
    int tiled;  // the key head of value head h is h % Hk, not h / (Hv / Hk)

    __device__ __forceinline__ int channels() const { return (2 * n_k_head + n_v_head) * size; }
};

__device__ __forceinline__ float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }
__device__ __forceinline__ float silu(float v) { return v / (1.0f + expf(-v)); }

// The sum of v over all threads of the CTA. The CTA has whole warps; `shared` holds a float for each warp.
__device__ __forceinline__ float sum_of_cta(float v, float* shared) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < blockDim.x / 32; ++i) total += shared[i];
    return total;
}

// u of one head of one token, a thread for each element. The last token of a sequence also keeps the inputs that the
// next step's convolution sees, and the CTA of a value head makes its decay.
extern "C" __global__ void delta_conv(const DeltaArgs p) {
    __shared__ float shared[32];
    grid_dependency_launch();
    const int head = blockIdx.x, token = blockIdx.y, i = threadIdx.x;
    const int sequence = p.sequences[token], start = p.first[sequence], stop = p.first[sequence + 1];
    const int read = p.pages[2 * sequence], written = p.pages[2 * sequence + 1];
    const int n_channels = p.channels(), kept = p.taps - 1, channel = head * p.size + i;
    const bool inside = i < p.size;
    // Input `at` of the sequence, counted from the first token of the step.
    const auto input = [&](int at) {
        if (at >= 0) return __ldcg(p.projected + static_cast<size_t>(start + at) * n_channels + channel);
        if (read == NO_STATE) return 0.0f;
        return __ldcg(p.conv_state + (static_cast<size_t>(read) * kept + kept + at) * n_channels + channel);
    };
    grid_dependency_wait();
    float v = 0.0f;
    if (inside) {
        const float* weights = p.taps_of + static_cast<size_t>(channel) * p.taps;
        for (int j = 0; j < p.taps; ++j) v += input(token - start - kept + j) * __ldg(weights + j);
        v = silu(v);
        if (token == stop - 1)
            for (int j = 0; j < kept; ++j)
                p.conv_state[(static_cast<size_t>(written) * kept + j) * n_channels + channel] =
                    input(stop - start - kept + j);
    }
    if (head < 2 * p.n_k_head) {
        const float inverse = rsqrtf(sum_of_cta(v * v, shared) + UNIT_EPS);
        v *= head < p.n_k_head ? inverse * rsqrtf(float(p.size)) : inverse;
    } else if (i == 0) {
        const int h = head - 2 * p.n_k_head;
        const size_t at = static_cast<size_t>(token) * p.n_v_head + h;
        const float x = __ldcg(p.alpha + at) + __ldg(p.dt + h), step = x > 20.0f ? x : log1pf(expf(x));
        p.decay[at] = make_float2(expf(__ldg(p.a + h) * step), sigmoid(__ldcg(p.beta + at)));
    }
    if (inside) p.u[static_cast<size_t>(token) * n_channels + channel] = v;
}

__device__ __forceinline__ float dot(const float4& a, const float4& b) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
}

// What a column meets of one token: the lane's rows of k and q, and its own v.
template <int QUADS>
struct ScanInput {
    float4 k[QUADS], q[QUADS];
    float v;
    float2 decay;

    __device__ __forceinline__ void load(const DeltaArgs& p, int token, int head, int key_head, int column, int lane) {
        const float* row = p.u + static_cast<size_t>(token) * p.channels();
        const float* query = row + key_head * p.size;
        const float* key = query + p.n_k_head * p.size;
#pragma unroll
        for (int j = 0; j < QUADS; ++j) {
            const int at = 4 * (lane + LANES * j);
            const bool inside = at < p.size;
            const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            k[j] = inside ? __ldcg(reinterpret_cast<const float4*>(key + at)) : zero;
            q[j] = inside ? __ldcg(reinterpret_cast<const float4*>(query + at)) : zero;
        }
        v = column < p.size ? __ldcg(row + (2 * p.n_k_head + head) * p.size + column) : 0.0f;
        decay = __ldcg(p.decay + static_cast<size_t>(token) * p.n_v_head + head);
    }
};

// The recurrence of COLUMNS columns of one head over the tokens of one sequence. With M decayed, o = M^T q + (k q) d,
// where d = beta (v - M^T k), so that one round of shuffles adds up all three products. QUADS is P / 32.
template <int QUADS>
__global__ void __launch_bounds__(COLUMNS* LANES) delta_scan(const DeltaArgs p) {
    grid_dependency_launch();
    const int n_blocks = (p.size + COLUMNS - 1) / COLUMNS, head = blockIdx.x / n_blocks, sequence = blockIdx.y;
    const int column = blockIdx.x % n_blocks * COLUMNS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int key_head = p.tiled ? head % p.n_k_head : head / (p.n_v_head / p.n_k_head);
    const int start = p.first[sequence], stop = p.first[sequence + 1];
    const int read = p.pages[2 * sequence], written = p.pages[2 * sequence + 1];
    const bool inside = column < p.size;
    const auto quads_of = [&](int page) {
        const size_t at = (static_cast<size_t>(page) * p.n_v_head + head) * p.size + column;
        return reinterpret_cast<float4*>(p.matrices + at * 32 * QUADS) + lane;
    };
    if (start == stop) return;
    grid_dependency_wait();
    float4 m[QUADS];
#pragma unroll
    for (int j = 0; j < QUADS; ++j)
        m[j] = inside && read != NO_STATE ? __ldcg(quads_of(read) + LANES * j) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    ScanInput<QUADS> x, next;
    x.load(p, start, head, key_head, column, lane);
    for (int token = start; token < stop; ++token) {
        if (token + 1 < stop) next.load(p, token + 1, head, key_head, column, lane);
        float mk = 0.0f, mq = 0.0f, kq = 0.0f;
#pragma unroll
        for (int j = 0; j < QUADS; ++j) {
            m[j].x *= x.decay.x, m[j].y *= x.decay.x, m[j].z *= x.decay.x, m[j].w *= x.decay.x;
            mk += dot(m[j], x.k[j]), mq += dot(m[j], x.q[j]), kq += dot(x.k[j], x.q[j]);
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) {
            mk += __shfl_xor_sync(0xffffffffu, mk, step);
            mq += __shfl_xor_sync(0xffffffffu, mq, step);
            kq += __shfl_xor_sync(0xffffffffu, kq, step);
        }
        const float d = x.decay.y * (x.v - mk);
#pragma unroll
        for (int j = 0; j < QUADS; ++j) {
            m[j].x = fmaf(x.k[j].x, d, m[j].x), m[j].y = fmaf(x.k[j].y, d, m[j].y);
            m[j].z = fmaf(x.k[j].z, d, m[j].z), m[j].w = fmaf(x.k[j].w, d, m[j].w);
        }
        if (inside && lane == 0)
            p.o[(static_cast<size_t>(token) * p.n_v_head + head) * p.size + column] = fmaf(kq, d, mq);
        x = next;
    }
#pragma unroll
    for (int j = 0; j < QUADS; ++j)
        if (inside) quads_of(written)[LANES * j] = m[j];
}

// out = norm(o) * silu(gate), f16; a thread for each element of a head.
extern "C" __global__ void delta_norm(const DeltaArgs p) {
    __shared__ float shared[32];
    grid_dependency_launch();
    const int i = threadIdx.x;
    const size_t at = (static_cast<size_t>(blockIdx.y) * p.n_v_head + blockIdx.x) * p.size + i;
    const bool inside = i < p.size;
    grid_dependency_wait();
    const float v = inside ? __ldcg(p.o + at) : 0.0f;
    const float inverse = rsqrtf(sum_of_cta(v * v, shared) / p.size + p.eps);
    if (inside) p.out[at] = saturated_half(v * inverse * __ldg(p.norm + i) * silu(__ldcg(p.gate + at)));
}
