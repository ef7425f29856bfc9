// Router of a mixture of experts: n = norm(x), and the experts that each token chooses, with their weights. Nothing is
// read back by the host: the kernels that multiply experts read ids[] in device memory.
//
//        l = n weight^T + bias
//
// Launch: grid (CTAs of the experts, ceil(tokens / TOKENS)) of WARPS warps. One SM would read the router's rows too
// slowly for few tokens, so they are spread over CTAs, each of which normalises its TOKENS tokens itself. A warp
// multiplies ROWS experts at a time: a load of n serves ROWS of them, a load of the router TOKENS tokens. The first
// pieces of its rows are requested before grid_dependency_wait. Logits go to global memory; the CTA that arrives last
// at the counter of its tokens chooses (choose.cuh), unless what multiplies experts does (ids is null). The operations
// of a token do not depend on the others, nor on the launch: a lane adds up every 32nd piece of four columns, and the
// lanes' sums are added by butterfly shuffles. Everything is f32; n is also stored as f16, which the experts multiply.
//
// WEIGHTS_AHEAD: while the router runs, memory would be idle: its CTAs bring the beginning of the weights that are
// multiplied next into L2.
//
// BESIDE: experts beside a dense feed-forward, whose router has a norm of its own. Experts take the norm of x with
// other weights, and the weights of the chosen ones are multiplied by expert_scale.
//
// route_late, below, is a second router: for a few tokens, and rows of up to 4096 columns.
#include "lib/bulk_copy.cuh"
#include "moe/choose.cuh"

#ifndef EXPERTS_PER_LANE
#define EXPERTS_PER_LANE 4  // ceil(n_expert / 32)
#endif
#ifndef BESIDE
#define BESIDE 0
#endif
#ifndef WEIGHTS_AHEAD
#define WEIGHTS_AHEAD 0
#endif

struct RouteArgs {
    const float* x;             // [n_tokens, k]
    const float* norm;          // [k]
    const float* weight;        // [n_expert, k]
    const float* bias;          // [n_expert], or null
    const float* shared_gate;   // [k], or null
    __half* normed;             // [n_tokens, k]
    int* ids;                   // [n_tokens, n_used], or null
    float* weights;             // [n_tokens, n_used]
    float* strength;            // [n_tokens], sigmoid(n shared_gate)
    uint32_t* arrived;          // [gridDim.y], 0 before and after each launch
    const float* taken_norm;    // BESIDE: [k], the weights of the norm of what experts take
    const float* expert_scale;  // BESIDE: [n_expert]
    const uint8_t* ahead[2];    // WEIGHTS_AHEAD: matrices whose first ahead_bytes are brought into L2
    int ahead_bytes;            // a multiple of AHEAD_PIECE
    int n_tokens, k;
    float eps;
    ChoiceArgs choice;
};

// sum += products of the four columns from `column` on: of ROWS rows w with the CTA's tokens n[TOKENS][k] in shared
// memory.
template <int TOKENS, int ROWS>
__device__ __forceinline__ void add_columns(const float4 (&w)[ROWS], const float* n, int k, int column,
                                            float (&sum)[ROWS * TOKENS]) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const float4 v = *reinterpret_cast<const float4*>(n + t * k + column);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float& total = sum[r * TOKENS + t];
            total = fmaf(w[r].w, v.w, fmaf(w[r].z, v.z, fmaf(w[r].y, v.y, fmaf(w[r].x, v.x, total))));
        }
    }
}

// Sums N values over the warp with the additions of warp_sum: lane i gets that of value i / (32 / N).
template <int N, int OFFSET = 16>
__device__ __forceinline__ float sum_of_lane(const float (&values)[N]) {
    if constexpr (OFFSET == 0) {
        return values[0];
    } else if constexpr (N == 1) {
        const float sum[1] = {values[0] + __shfl_xor_sync(0xffffffffu, values[0], OFFSET)};
        return sum_of_lane<1, OFFSET / 2>(sum);
    } else {
        const bool upper = threadIdx.x & OFFSET;
        float sums[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const float low = values[i], high = values[i + N / 2];
            sums[i] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, OFFSET);
        }
        return sum_of_lane<N / 2, OFFSET / 2>(sums);
    }
}

// A warp's ROWS rows of the router, or the gate of the shared expert.
template <int ROWS, int TOKENS>
struct RouterRows {
    // pieces of 128 columns of a row in registers; rows have at most 2048 NORM_PIECES columns
    static constexpr int HELD = ROWS == 1 && TOKENS <= 2 && NORM_PIECES > 1 ? 32 : 16 / ROWS;
    // pieces after those of a single row that are brought into L2
    static constexpr int AHEAD = ROWS == 1 && NORM_PIECES * 16 > HELD ? 8 : 0;
    const float* row[ROWS];
    float4 held[HELD][ROWS];

    static __device__ __forceinline__ int column(int i) { return threadIdx.x % 32 * 4 + i * 128; }

    // __ldcg: the compiler moves loads of constant data to after grid_dependency_wait.
    __device__ __forceinline__ void load(float4 (&w)[ROWS], int at) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) w[r] = __ldcg(reinterpret_cast<const float4*>(row[r] + at));
    }
    __device__ __forceinline__ void begin(int k) {
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (column(i) < k) load(held[i], column(i));
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (column(HELD + i) < k) prefetch_l2(row[0] + column(HELD + i));
    }
    // sum[r * TOKENS + t]: the lane's part of row r times token t.
    __device__ __forceinline__ void multiply(const float* n, int k, float (&sum)[ROWS * TOKENS]) {
#pragma unroll
        for (int i = 0; i < ROWS * TOKENS; ++i) sum[i] = 0.0f;
        if constexpr (ROWS == 1) {
#pragma unroll
            for (int i = 0; i < HELD; ++i)
                if (column(i) < k) add_columns<TOKENS>(held[i], n, k, column(i), sum);
#pragma unroll 8
            for (int at = column(HELD); at < k; at += 128) {
                float4 w[ROWS];
                load(w, at);
                add_columns<TOKENS>(w, n, k, at, sum);
            }
        } else {  // each piece requests the one that takes its registers
#pragma unroll 1
            for (int begin = 0; begin < k; begin += HELD * 128)
#pragma unroll
                for (int i = 0; i < HELD; ++i) {
                    const int at = begin + column(i), next = at + HELD * 128;
                    if (at < k) add_columns<TOKENS>(held[i], n, k, at, sum);
                    if (next < k) load(held[i], next);
                }
        }
    }
};

// Requests the rows of the experts from e on; past the end the last row again.
template <int ROWS, int TOKENS>
__device__ __forceinline__ void find_rows(const RouteArgs& p, RouterRows<ROWS, TOKENS>& rows, int e) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
        rows.row[r] = p.weight + static_cast<size_t>(min(e + r, p.choice.n_expert - 1)) * p.k;
    rows.begin(p.k);
}

// The lane's logit, of those of ROWS experts and TOKENS tokens that sum_of_lane leaves in a warp.
template <int TOKENS, int ROWS>
struct LaneLogit {
    static constexpr int LANES = 32 / (ROWS * TOKENS);  // that have the same one

    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int token() { return lane() / LANES % TOKENS; }
    static __device__ __forceinline__ int row() { return lane() / LANES / TOKENS; }
    static __device__ __forceinline__ bool is_first() { return lane() % LANES == 0; }
    // Its bias, where the first of the experts is e.
    static __device__ __forceinline__ float bias(const RouteArgs& p, int e) {
        return p.bias && e + row() < p.choice.n_expert ? __ldcg(p.bias + e + row()) : 0.0f;
    }
};

// Stores the logits of the experts of this CTA, and what the shared expert is multiplied by. bias: of the logits of the
// first rows.
template <int TOKENS, int ROWS>
__device__ __forceinline__ void store_logits(const RouteArgs& p, RouterRows<ROWS, TOKENS>& rows, float bias, int e,
                                             int first, const float* n) {
    using Logit = LaneLogit<TOKENS, ROWS>;
    const int stride = gridDim.x * WARPS * ROWS, token = first + Logit::token();
    float sum[ROWS * TOKENS];
    for (int next = e; next < p.choice.n_expert; next += stride) {
        if (next > e) find_rows(p, rows, next), bias = Logit::bias(p, next);
        rows.multiply(n, p.k, sum);
        const float logit = sum_of_lane(sum) + bias;
        const int expert = next + Logit::row();
        if (Logit::is_first() && token < p.n_tokens && expert < p.choice.n_expert)
            p.choice.logits[static_cast<size_t>(token) * p.choice.n_expert + expert] = logit;
    }
    if (!p.shared_gate || blockIdx.x > 0 || threadIdx.x / 32 != WARPS - 1) return;
    RouterRows<1, TOKENS> gate;
    float product[TOKENS];
    gate.row[0] = p.shared_gate;
    gate.begin(p.k);
    gate.multiply(n, p.k, product);
    const float strength = sum_of_lane(product);
    using Product = LaneLogit<TOKENS, 1>;
    if (Product::is_first() && first + Product::token() < p.n_tokens)
        p.strength[first + Product::token()] = sigmoid(strength);
}

// Whether all logits of the CTA's tokens have been stored; only for the last of their CTAs.
__device__ __forceinline__ bool arrives_last(uint32_t* arrived) {
    __shared__ bool last;
    __syncthreads();
    if (gridDim.x == 1) return true;
    if (threadIdx.x == 0) {  // orders the logits of all threads, with the barriers
        last = add_acquire_release(arrived, 1) == gridDim.x - 1;
        if (last) *arrived = 0;
    }
    __syncthreads();
    return last;
}

// Stores the normalised row of token first + t in shared memory, n[k], and as f16 at element `row` of p.normed, if no
// other CTA does.
__device__ __forceinline__ void store_row(const RouteArgs& p, const RmsNorm& norm, float* n, int first, int t,
                                          size_t row) {
#pragma unroll
    for (int i = 0; i < NORM_PIECES; ++i) {
        const int column = RmsNorm::column(i);
        if (column >= p.k) continue;
        float4* pieces = reinterpret_cast<float4*>(n + column);
#pragma unroll
        for (int j = 0; j < 8; j += 4)
            pieces[j / 4] =
                make_float4(norm.value(i, j), norm.value(i, j + 1), norm.value(i, j + 2), norm.value(i, j + 3));
        if (blockIdx.x != min(static_cast<unsigned>(t), gridDim.x - 1) || first + t >= p.n_tokens) continue;
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

// Normalises the CTA's tokens into shared memory. Each of them is also stored by one of the CTAs that have it.
template <int TOKENS>
__device__ __forceinline__ void normalise(const RouteArgs& p, const RmsNorm& weights, int first, float* n) {
    constexpr int MOST = NORM_PIECES < 8 ? 8 / NORM_PIECES : 1, AT_ONCE = TOKENS < MOST ? TOKENS : MOST;
#pragma unroll
    for (int begin = 0; begin < TOKENS; begin += AT_ONCE) {
        RmsNorm norm[AT_ONCE];
        size_t row[AT_ONCE];
        float sums[AT_ONCE];
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) {
            row[t] = static_cast<size_t>(min(first + begin + t, p.n_tokens - 1)) * p.k;
            norm[t].copy_weight(weights);
            norm[t].load(p.x + row[t], p.k);
        }
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) sums[t] = norm[t].squares(p.k);
        cta_sums(sums, begin / AT_ONCE & 1);
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) {
            norm[t].scale_by(sums[t], p.k, p.eps);
            store_row(p, norm[t], n + (begin + t) * p.k, first, begin + t, row[t]);
        }
    }
}

constexpr int AHEAD_PIECE = 8192;  // bytes that a thread requests at once

__device__ __forceinline__ void prefetch_ahead(const RouteArgs& p) {
    const int lane = threadIdx.x % 32, cta = blockIdx.y * gridDim.x + blockIdx.x;
    if (threadIdx.x >= 32) return;
    for (int at = (cta * 32 + lane) * AHEAD_PIECE; at < p.ahead_bytes; at += gridDim.x * gridDim.y * 32 * AHEAD_PIECE)
        for (const uint8_t* weights : p.ahead) bulk_prefetch_l2(weights + at, AHEAD_PIECE);
}

// Dynamic shared memory: n[TOKENS][k].
template <int TOKENS, int ROWS>
__global__ void __launch_bounds__(THREADS, 1) route(const RouteArgs p) {
    static_assert(TOKENS <= WARPS, "a warp chooses for one token");
    SHARED_DYNAMIC(float, n);
    const int warp = threadIdx.x / 32, first = blockIdx.y * TOKENS, e = (blockIdx.x * WARPS + warp) * ROWS;
    grid_dependency_launch();
    RouterRows<ROWS, TOKENS> rows;
    find_rows(p, rows, e);
    const float bias = LaneLogit<TOKENS, ROWS>::bias(p, e);
    RmsNorm norm;
    norm.load_weight(p.norm, p.k);
    if (WEIGHTS_AHEAD) prefetch_ahead(p);
    grid_dependency_wait();
    normalise<TOKENS>(p, norm, first, n);
    __syncthreads();
    store_logits(p, rows, bias, e, first, n);
    if (p.ids == nullptr || !arrives_last(p.arrived + blockIdx.y)) return;
    const int token = first + warp;
    if (warp >= TOKENS || token >= p.n_tokens) return;
    ExpertChoice<EXPERTS_PER_LANE> choice(p.choice, token);
    choice.choose(p.choice.n_used);
    float weight = choice.weight();
    if (BESIDE) weight *= __ldg(p.expert_scale + choice.id);
    if (choice.lane >= p.choice.n_used) return;
    p.ids[token * p.choice.n_used + choice.lane] = choice.id;
    p.weights[token * p.choice.n_used + choice.lane] = weight;
}

// Returns v. The compiler does not move its computation to after the next grid_dependency_wait.
__device__ __forceinline__ float done_here(float v) {
#if !EMULATED
    asm volatile("" : "+f"(v));
#endif
    return v;
}

// The router of steps of a few tokens, in which the kernels that multiply experts choose them: it stores logits and n.
// A warp multiplies the row of an expert, or the shared expert's gate, by a token. Rows have at most 128 PIECES columns.
//
// The warps multiply their rows by the weights of the norm before grid_dependency_wait, and their sums by 1 / rms last.
// So a CTA needs one barrier: after x is in shared memory, float x[128 PIECES]. The bits of logits differ from route's.
//
// Launch: grid (ceil(rows / WARPS), tokens).
template <int PIECES>
__global__ void __launch_bounds__(THREADS, 1) route_late(const RouteArgs p) {
    constexpr int OWN = (PIECES + WARPS - 1) / WARPS;  // pieces of four columns that a thread loads
    SHARED_DYNAMIC(float4, shared);
    const int e = blockIdx.x * WARPS + threadIdx.x / 32, token = blockIdx.y, lane = threadIdx.x % 32;
    const bool is_gate = e == p.choice.n_expert && p.shared_gate, is_expert = e < p.choice.n_expert;
    const auto load = [&](const float* row, int piece) {
        return __ldcg(reinterpret_cast<const float4*>(row) + min(piece, p.k / 4 - 1));
    };
    grid_dependency_launch();
    const float* row = is_gate ? p.shared_gate : p.weight + static_cast<size_t>(is_expert ? e : 0) * p.k;
    float4 w[PIECES], norm[OWN];
#pragma unroll
    for (int i = 0; i < PIECES; ++i) w[i] = load(row, lane + 32 * i);
#pragma unroll
    for (int i = 0; i < OWN; ++i) norm[i] = load(p.norm, threadIdx.x + THREADS * i);
    const float bias = p.bias && is_expert ? __ldcg(p.bias + e) : 0.0f;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const float4 v = load(p.norm, lane + 32 * i);
        w[i] = make_float4(done_here(w[i].x * v.x), done_here(w[i].y * v.y), done_here(w[i].z * v.z),
                           done_here(w[i].w * v.w));
    }
    grid_dependency_wait();
    float4 own[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) own[i] = load(p.x + static_cast<size_t>(token) * p.k, threadIdx.x + THREADS * i);
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        if (threadIdx.x + THREADS * i < 32 * PIECES) {
            const bool inside = (threadIdx.x + THREADS * i) * 4 < p.k;
            shared[threadIdx.x + THREADS * i] = inside ? own[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    __syncthreads();
    float products[4] = {}, squares[4] = {};
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const float4 v = shared[lane + 32 * i];
        products[0] = fmaf(w[i].x, v.x, products[0]), products[1] = fmaf(w[i].y, v.y, products[1]);
        products[2] = fmaf(w[i].z, v.z, products[2]), products[3] = fmaf(w[i].w, v.w, products[3]);
        squares[0] = fmaf(v.x, v.x, squares[0]), squares[1] = fmaf(v.y, v.y, squares[1]);
        squares[2] = fmaf(v.z, v.z, squares[2]), squares[3] = fmaf(v.w, v.w, squares[3]);
    }
    const float product = warp_sum((products[0] + products[1]) + (products[2] + products[3]));
    const float square = warp_sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    const float inverse = RmsNorm::inverse_of(square, p.k, p.eps), logit = product * inverse;
    if (lane == 0 && is_expert) p.choice.logits[static_cast<size_t>(token) * p.choice.n_expert + e] = logit + bias;
    if (lane == 0 && is_gate) p.strength[token] = sigmoid(logit);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int piece = threadIdx.x + THREADS * i;
        if (i % gridDim.x != blockIdx.x || piece * 4 >= p.k) continue;
        reinterpret_cast<uint2*>(p.normed + static_cast<size_t>(token) * p.k)[piece] =
            make_uint2(saturated_half2(own[i].x * inverse * norm[i].x, own[i].y * inverse * norm[i].y),
                       saturated_half2(own[i].z * inverse * norm[i].z, own[i].w * inverse * norm[i].w));
    }
}
