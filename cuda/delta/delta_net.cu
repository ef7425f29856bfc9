// A gated delta net between its products, in three kernels: convolution, the recurrence over the tokens of each sequence,
// norm and gate. A step of one token for each sequence has a kernel of its own (delta_decode.cu).
//
// kernel        grid                                      a warp, or (delta_scan) a CTA takes
// delta_conv    ((2 Hk + Hv) / HEADS, T / CONV_TOKENS)    one head of q, k or v of CONV_TOKENS tokens
// delta_scan    (Hv ceil(S / COLUMNS), sequences)         COLUMNS columns of one value head, token after token
// delta_norm    (Hv / HEADS, T)                           one head of one token
//
// delta_scan holds a column in the registers of LANES lanes, which share its rows, and nothing leaves the chip between
// two tokens.
#include "delta/delta.cuh"

constexpr int HEADS = 8;        // of a CTA of delta_conv and delta_norm, a warp each
constexpr int CONV_TOKENS = 4;  // of a warp of delta_conv
constexpr int COLUMNS = 16;     // of a CTA of delta_scan

// Where a token of a step is: the first token and the pages of its sequence.
struct TokenPlace {
    int token, start, stop, read, written;

    __device__ __forceinline__ TokenPlace(const DeltaArgs& p, int token_) : token(token_) {
        const int sequence = p.sequences[token];
        start = p.first[sequence], stop = p.first[sequence + 1];
        read = p.pages[2 * sequence], written = p.pages[2 * sequence + 1];
    }
    // The channel's input `back` tokens before this one, which may be the state's.
    template <int TAPS>
    __device__ __forceinline__ float input(const DeltaArgs& p, int channel, int back) const {
        const int at = token - back;
        if (at >= start) return __ldcg(p.projected + static_cast<size_t>(at) * p.channels() + channel);
        return read == NO_STATE ? 0.0f : __ldcg(p.kept_input<TAPS>(read, TAPS - 1 + at - start, channel));
    }
};

// u[i] of a channel at CONV_TOKENS tokens from `first` on, before q and k are made unit vectors. The last token of a
// sequence also keeps the inputs that the next step's convolution sees.
template <int TAPS>
__device__ __forceinline__ void convolve(const DeltaArgs& p, int first, int channel, float (&u)[CONV_TOKENS]) {
    float weight[TAPS], input[CONV_TOKENS + TAPS - 1];
#pragma unroll
    for (int j = 0; j < TAPS; ++j) weight[j] = __ldg(p.taps_of + static_cast<size_t>(channel) * TAPS + j);
#pragma unroll
    for (int i = 0; i < CONV_TOKENS + TAPS - 1; ++i) {
        const int token = first - (TAPS - 1) + i;
        const float* src = p.projected + static_cast<size_t>(token) * p.channels() + channel;
        input[i] = token >= 0 && token < p.n_tokens ? __ldcg(src) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < CONV_TOKENS; ++i) {
        if (first + i >= p.n_tokens) break;
        const TokenPlace place(p, first + i);
        float window[TAPS];
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            const int back = TAPS - 1 - j;
            window[j] = place.token - back >= place.start ? input[i + j] : place.input<TAPS>(p, channel, back);
        }
        u[i] = convolved(window, weight);
        if (place.token + 1 < place.stop) continue;
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j) *p.kept_input<TAPS>(place.written, j, channel) = window[j + 1];
    }
}

// u of one head of CONV_TOKENS tokens; the warp of a value head also makes its decays.
template <int QUADS, int TAPS>
__global__ void __launch_bounds__(HEADS * 32) delta_conv(const DeltaArgs p) {
    grid_dependency_launch();
    const int head = blockIdx.x * HEADS + threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.y * CONV_TOKENS;
    if (head >= 2 * p.n_k_head + p.n_v_head) return;
    float u[QUADS][CONV_TOKENS] = {};
    grid_dependency_wait();
#pragma unroll
    for (int b = 0; b < QUADS; ++b)
        if (BLOCK * b + lane < p.size) convolve<TAPS>(p, first, head * p.size + BLOCK * b + lane, u[b]);
#pragma unroll
    for (int i = 0; i < CONV_TOKENS; ++i) {
        const int token = first + i;
        if (token >= p.n_tokens) break;
        float scale = 1.0f, squares[QUADS];
        if (head < 2 * p.n_k_head) {
#pragma unroll
            for (int b = 0; b < QUADS; ++b) squares[b] = squares_of_block(u[b][i]);
            scale = unit_scale(sum_of_blocks<QUADS>(squares), head < p.n_k_head, p.size);
        } else if (lane == 0) {
            const int of_values = head - 2 * p.n_k_head;
            p.decay[static_cast<size_t>(token) * p.n_v_head + of_values] = p.decay_of(token, of_values);
        }
        float* dst = p.u + static_cast<size_t>(token) * p.channels() + head * p.size + lane;
#pragma unroll
        for (int b = 0; b < QUADS; ++b)
            if (BLOCK * b + lane < p.size) dst[BLOCK * b] = __fmul_rn(u[b][i], scale);
    }
}

// What a column meets of one token: the lane's rows of k and q, and its own v.
template <int QUADS>
struct ScanInput {
    float4 k[QUADS], q[QUADS];
    float v;
    float2 decay;

    __device__ __forceinline__ void load(const DeltaArgs& p, int token, int head, int column, int lane) {
        const float* row = p.u + static_cast<size_t>(token) * p.channels();
        const float* query = row + p.key_head(head) * p.size;
        const float* key = query + p.n_k_head * p.size;
#pragma unroll
        for (int j = 0; j < QUADS; ++j) {
            const int at = 4 * (lane + LANES * j);
            const bool inside = at < p.size;
            k[j] = inside ? __ldcg(reinterpret_cast<const float4*>(key + at)) : zero4();
            q[j] = inside ? __ldcg(reinterpret_cast<const float4*>(query + at)) : zero4();
        }
        v = column < p.size ? __ldcg(row + (2 * p.n_k_head + head) * p.size + column) : 0.0f;
        decay = __ldcg(p.decay + static_cast<size_t>(token) * p.n_v_head + head);
    }
};

// The recurrence of COLUMNS columns of one head over the tokens of one sequence. AHEAD: the inputs of so many tokens are
// requested ahead.
template <int QUADS, int AHEAD>
__global__ void __launch_bounds__(COLUMNS* LANES) delta_scan(const DeltaArgs p) {
    grid_dependency_launch();
    const int n_blocks = (p.size + COLUMNS - 1) / COLUMNS, head = blockIdx.x / n_blocks, sequence = blockIdx.y;
    const int column = blockIdx.x % n_blocks * COLUMNS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int first = p.first[sequence], stop = p.first[sequence + 1];
    const int start = p.chunked ? stop - (stop - first) % CHUNK : first;  // the first token after the last whole chunk
    const int written = p.pages[2 * sequence + 1], read = start > first ? written : p.pages[2 * sequence];
    const bool inside = column < p.size;
    grid_dependency_wait();  // all CTAs wait, for the next kernel takes the end of this one for that of those before
    if (start == stop) return;
    Column<QUADS> m;
    m.load(Column<QUADS>::of(p, read, head, column, lane), inside && read != NO_STATE);
    ScanInput<QUADS> inputs[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
        if (start + i < stop) inputs[i].load(p, start + i, head, column, lane);
    for (int first_token = start; first_token < stop; first_token += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int token = first_token + i;
            if (token >= stop) break;
            ScanInput<QUADS>& x = inputs[i];
            const auto k = [&](int j) -> const float4& { return x.k[j]; };
            const auto q = [&](int j) -> const float4& { return x.q[j]; };
            const float o = m.step(k, q, x.v, expf(x.decay.x), x.decay.y);
            if (inside && lane == 0) p.o[(static_cast<size_t>(token) * p.n_v_head + head) * p.size + column] = o;
            if (token + AHEAD < stop) x.load(p, token + AHEAD, head, column, lane);
        }
    }
    if (inside) m.store(Column<QUADS>::of(p, written, head, column, lane));
}

// out = norm(o) * silu(gate), f16.
template <int QUADS>
__global__ void __launch_bounds__(HEADS * 32) delta_norm(const DeltaArgs p) {
    grid_dependency_launch();
    const int head = blockIdx.x * HEADS + threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.y;
    if (head >= p.n_v_head) return;
    const size_t at = (static_cast<size_t>(token) * p.n_v_head + head) * p.size;
    float v[QUADS], gate[QUADS], squares[QUADS];
    grid_dependency_wait();
#pragma unroll
    for (int b = 0; b < QUADS; ++b) {
        const int i = BLOCK * b + lane;
        v[b] = i < p.size ? __ldcg(p.o + at + i) : 0.0f;
        gate[b] = i < p.size ? __ldcg(p.gate + at + i) : 0.0f;
    }
#pragma unroll
    for (int b = 0; b < QUADS; ++b) squares[b] = squares_of_block(v[b]);
    const float sum = sum_of_blocks<QUADS>(squares);
#pragma unroll
    for (int b = 0; b < QUADS; ++b) {
        const int i = BLOCK * b + lane;
        if (i < p.size) p.store(token, head, i, gated_norm(v[b], sum, __ldg(p.norm + i), gate[b], p.size, p.eps));
    }
}
