// Bias, head norm and RoPE of q and k for any number of tokens, with the formulas of rope.cuh. Writes rotated q as
// f16 [T, H, row], and k and v to the pages of the KV cache.
//
// kernel           grid                                           a warp takes
// rope_kv          (<= ceil((H + 2 G) / HEAD_WARPS), T)           heads of one token, any size and KV type
// rope_kv_whole    (<= ceil((H + G) / (256 / E)), ceil(T / 8))    several heads of one token at once, f16, no norms
// rope_kv_unusual  (<= ceil((H + 2 G) / HEAD_WARPS), T)           the same as rope_kv, and what UnusualHeads says
// compute_angles   ceil(T n_pairs / threads)                      (a thread has one pair of one token)
//
// rope_kv keeps one head per warp in static shared memory, because block formats need a whole head at once; the other
// kernels use none. Other kernels do this work where they can: for decode, paged_attention.cu or the epilogue of the
// QKV GEMM; for prefill on Hopper, the epilogue of the QKV GEMM (rope_epilogue.cuh), which reads what compute_angles
// writes. rope_kv_whole serves prefill on other GPUs for the heads of most models: all elements rotate, and there is no
// norm. It moves 16 bytes at a time and keeps several loads in flight.
#include "attention/rope.cuh"

constexpr int HEAD_WARPS = 4;

// Head i of a token, counted over q, k and v, as part and index.
struct HeadIndex {
    int part, index;
    __device__ __forceinline__ HeadIndex(const RopeArgs& p, int i) {
        part = i < p.n_head ? QUERY : i < p.n_head + p.n_head_kv ? KEY : VALUE;
        index = i - (part == QUERY ? 0 : part == KEY ? p.n_head : p.n_head + p.n_head_kv);
    }
};

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;
template <class K, class V>
constexpr bool both_f16 = is_same<K, CacheF16> && is_same<V, CacheF16>;

// Values are transposed, so one token's values are 2 bytes in each of many lines; the values of eight tokens are 16
// contiguous bytes.
constexpr int TOGETHER = 8;

// Whether tokens first ... first + 7 of n belong to one sequence and have consecutive positions that begin at a
// multiple of eight.
__device__ __forceinline__ bool are_together(const RopeArgs& p, int first, int n, int lane) {
    const int token = min(first + lane % TOGETHER, n - 1), position = p.positions[token], sequence = p.sequences[token];
    const int start = __shfl_sync(0xffffffffu, position, 0), one = __shfl_sync(0xffffffffu, sequence, 0);
    const bool in_order = position == start + lane % TOGETHER && sequence == one;
    return __all_sync(0xffffffffu, in_order && start % TOGETHER == 0);
}

// The 16 positions that contain `position` within a page's values of a head, at element 0. With value_offset
// instead, ptxas recomputes the offset for each column, and for sm_120 needs more registers than are available.
__device__ __forceinline__ __half* sixteen(__half* values, int row, int position) {
    return values + position % PAGE_SIZE / 16 * 16 * row;
}

// 1 / rms of the values of eight consecutive tokens, with VALUE_NORM; one warp.
struct ValueNorms {
    float inverse[VALUE_NORM ? TOGETHER : 1];

    __device__ __forceinline__ ValueNorms(const RopeArgs& p, int kv_head, int first, int lane) {
#pragma unroll
        for (int t = 0; VALUE_NORM && t < TOGETHER; ++t) {
            Pairs<MAX_HEAD> pairs;
            pairs.load(p, VALUE, kv_head, first + t, lane);
            inverse[t] = pairs.inverse_root(p, p.eps[VALUE]);
        }
    }
    __device__ __forceinline__ float scaled(int t, float v) const { return VALUE_NORM ? v * inverse[t] : v; }
};

// Stores element i of the values of eight consecutive tokens (are_together): 16 contiguous bytes.
__device__ __forceinline__ void store_column(const RopeArgs& p, __half* dst, int kv_head, int first, int position,
                                             int i, const ValueNorms& norms) {
    const int e = p.head_size;
    const float* bias = p.bias[VALUE];
    float value[TOGETHER];
    __align__(16) __half column[TOGETHER];
#pragma unroll
    for (int t = 0; t < TOGETHER; ++t)
        value[t] = i < e ? __ldcg(p.projected[VALUE] + (static_cast<size_t>(first + t) * p.n_head_kv + kv_head) * e + i)
                         : 0.0f;
    const float more = bias != nullptr && i < e ? bias[kv_head * e + i] : 0.0f;
#pragma unroll
    for (int t = 0; t < TOGETHER; ++t) column[t] = saturated_half(norms.scaled(t, value[t] + more));
    *reinterpret_cast<uint4*>(dst + value_offset(p.row, position % 16, i)) = *reinterpret_cast<const uint4*>(column);
}
// The same for all elements of a value head; one warp.
__device__ __forceinline__ void store_values(const RopeArgs& p, int kv_head, int first, int position, int lane) {
    __half* values = reinterpret_cast<__half*>(page_at<CacheF16>(p, p.v_pages, p.pages[first], kv_head, p.row));
    values = sixteen(values, p.row, position);
    const ValueNorms norms(p, kv_head, first, lane);
#pragma unroll 2
    for (int i = lane; i < p.row; i += 32) store_column(p, values, kv_head, first, position, i, norms);
}

// A warp takes heads of one token with the stride of the grid's warps, so it computes the angles once. For tokens that
// are together, the warps of the first token store the values of all eight. Grid (at most ceil((H + 2 G) / HEAD_WARPS),
// T).
template <class K, class V>  // KV cache types
__global__ void __launch_bounds__(HEAD_WARPS * 32, (both_f16<K, V> ? 8 : 6) / (MAX_HEAD > 256 ? 3 : 1))
    rope_kv(const RopeArgs p) {
    __shared__ float heads[HEAD_WARPS][MAX_HEAD];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.y;
    const int stride = gridDim.x * HEAD_WARPS;
    grid_dependency_launch();
    int i = blockIdx.x * HEAD_WARPS + warp;
    // The step's metadata does not depend on earlier kernels.
    const int position = p.positions[token], first = token / TOGETHER * TOGETHER;
    const bool together = both_f16<K, V> && !SHARED_KV && are_together(p, first, gridDim.y, lane);
    const int end = p.n_head + (SHARED_KV ? 0 : together ? 1 : 2) * p.n_head_kv;
    Rotation rotation;
    rotation.prepare(p, position, lane);
    grid_dependency_wait();
    if (together && token == first)
        for (int kv_head = i; kv_head < p.n_head_kv; kv_head += stride) store_values(p, kv_head, first, position, lane);
    if (i >= end) return;
    float* head = heads[warp];
    const int page = p.pages[token];
    for (; i < end; i += stride) {
        const HeadIndex head_index(p, i);
        __half* q = p.q + (static_cast<size_t>(token) * p.n_head + head_index.index) * p.row;
        if (both_f16<K, V> && head_index.part != VALUE) {
            __half* k = reinterpret_cast<__half*>(page_at<K>(p, p.k_pages, page, head_index.index, p.row)) +
                        static_cast<size_t>(position % PAGE_SIZE) * p.row;
            Pairs<MAX_HEAD> pairs;
            pairs.load(p, head_index.part, head_index.index, token, lane);
            if (const float* norm = p.norm[head_index.part])
                pairs.normalise(p, p.eps[head_index.part], [&](int j) { return pairs.load_weight(p, norm, lane, j); });
            pairs.rotate(p, rotation, lane);
            pairs.store(p, head_index.part == QUERY ? q : k, lane);
            continue;
        }
        prepare_head<K>(p, head_index.part, head_index.index, token, rotation, head, lane);
        if (head_index.part == QUERY)
            for (int e = lane; e < p.row; e += 32) q[e] = saturated_half(head[e]);
        else
            store_head<K, V>(p, head_index.part, head_index.index, page, position, head, lane);
        __syncwarp();
    }
}

// What few models do to their heads.
struct UnusualHeads {
    int norm_last;  // norms of q and k follow RoPE
    int centred;    // they subtract the mean first
    int by_head;    // they have weights of their own for each head, [H, E] and [G, E]
    int length, offset;
    float growth;  // q at position p is multiplied by 1 + growth * ln(1 + (p + offset) / length), of whole numbers
};

template <int ROW>
struct UnusualPairs : Pairs<ROW> {
    using Pairs<ROW>::v;

    __device__ __forceinline__ void subtract_mean(const RopeArgs& p, int lane) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < Pairs<ROW>::COUNT; ++j) sum += v[j].x + v[j].y;
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        const float mean = sum / static_cast<float>(p.head_size);
#pragma unroll
        for (int j = 0; j < Pairs<ROW>::COUNT; ++j)
            if (2 * (lane + 32 * j) < p.head_size) v[j].x -= mean, v[j].y -= mean;
    }
    __device__ __forceinline__ void normalise(const RopeArgs& p, const UnusualHeads& u, int part, int index, int lane) {
        const float* norm = p.norm[part];
        if (norm == nullptr) return;
        if (u.by_head) norm += index * p.head_size;
        if (u.centred) subtract_mean(p, lane);
        Pairs<ROW>::normalise(p, p.eps[part], [&](int j) { return Pairs<ROW>::load_weight(p, norm, lane, j); });
    }
    __device__ __forceinline__ void scale(float by) {
#pragma unroll
        for (int j = 0; j < Pairs<ROW>::COUNT; ++j) v[j].x *= by, v[j].y *= by;
    }
};

// rope_kv for unusual heads.
template <class K, class V>
__global__ void __launch_bounds__(HEAD_WARPS * 32, 5) rope_kv_unusual(const RopeArgs p, const UnusualHeads u) {
    __shared__ float heads[HEAD_WARPS][MAX_HEAD];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.y;
    const int start = blockIdx.x * HEAD_WARPS + warp, stride = gridDim.x * HEAD_WARPS;
    float* head = heads[warp];
    grid_dependency_launch();
    const int position = p.positions[token], page = p.pages[token], first = token / TOGETHER * TOGETHER;
    const bool together = both_f16<K, V> && are_together(p, first, gridDim.y, lane);
    const float growth = 1.0f + u.growth * logf(static_cast<float>(1 + (position + u.offset) / u.length));
    Rotation rotation;
    rotation.prepare(p, position, lane);
    grid_dependency_wait();
    if (together && token == first)
        for (int i = start; i < p.n_head_kv; i += stride) store_values(p, i, first, position, lane);
    for (int i = start; i < p.n_head + (together ? 1 : 2) * p.n_head_kv; i += stride) {
        const HeadIndex of(p, i);
        const int part = of.part, index = of.index;
        UnusualPairs<MAX_HEAD> pairs;
        pairs.load(p, part, index, token, lane);
        if (part != VALUE) {
            if (!u.norm_last) pairs.normalise(p, u, part, index, lane);
            pairs.rotate(p, rotation, lane);
            if (u.norm_last) pairs.normalise(p, u, part, index, lane);
        }
        if (part == QUERY) pairs.scale(growth);
        pairs.each(p, lane, [&](int e, float value) { head[e] = value; });
        __syncwarp();
        if (K::spreads && part != VALUE) {
            spread_head<MAX_HEAD>(head, p.row, lane);
            __syncwarp();
        }
        __half* q = p.q + (static_cast<size_t>(token) * p.n_head + index) * p.row;
        if (part == QUERY)
            for (int e = lane; e < p.row; e += 32) q[e] = saturated_half(head[e]);
        else
            store_head<K, V>(p, part, index, page, position, head, lane);
        __syncwarp();
    }
}

// angles[T][n_pairs] = (cosine, sine) of each pair at the token's position; rows[T] = row of the token's key within the
// layer's K pages of KV head 0. A thread has one pair.
extern "C" __global__ void compute_angles(const RopeArgs p, float2* angles, int* rows, int n_tokens) {
    grid_dependency_launch();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, token = i / p.n_pairs, pair = i % p.n_pairs;
    if (token >= n_tokens) return;
    const int position = p.positions[token];
    RotationOf<1> rotation;
    rotation.prepare_pair(p.angles[pair], position, 0);
    const int page = p.pages[token];
    grid_dependency_wait();
    angles[i] = make_float2(rotation.cosine[0], rotation.sine[0]);
    if (pair == 0) rows[token] = page * p.n_head_kv * PAGE_SIZE + position % PAGE_SIZE;
}

constexpr int LOADS_IN_FLIGHT = 4;  // heads whose loads a lane has in flight

// Eight elements of a head, between the projection and f16: elements 4 l ... 4 l + 3 of its first half and of its
// second half.
struct Quads {
    float4 low, high;

    // Index within the head of the lane's pair j.
    template <int E>
    static __device__ __forceinline__ int pair_of(bool neox, int l, int j) {
        return neox ? 4 * l + j : (j < 2 ? 0 : E / 4 - 2) + 2 * l + j;
    }
    template <int E>
    __device__ __forceinline__ void load(const float* src, int l) {
        low = __ldcg(reinterpret_cast<const float4*>(src) + l);
        high = __ldcg(reinterpret_cast<const float4*>(src + E / 2) + l);
    }
    template <int E>
    __device__ __forceinline__ void add(const float* bias, int l) {
        const float4 a = reinterpret_cast<const float4*>(bias)[l], b = reinterpret_cast<const float4*>(bias + E / 2)[l];
        low.x += a.x, low.y += a.y, low.z += a.z, low.w += a.w;
        high.x += b.x, high.y += b.y, high.z += b.z, high.w += b.w;
    }
    static __device__ __forceinline__ __half2 half_pair(float a, float b) {
        return __halves2half2(saturated_half(a), saturated_half(b));
    }
    static __device__ __forceinline__ void store_four(__half* dst, float a, float b, float c, float d) {
        const __half2 first = half_pair(a, b), second = half_pair(c, d);
        *reinterpret_cast<uint2*>(dst) =
            make_uint2(*reinterpret_cast<const uint32_t*>(&first), *reinterpret_cast<const uint32_t*>(&second));
    }
    template <int E>
    __device__ __forceinline__ void store(const RopeArgs& p, const Rotation& rotation, __half* dst, int l) const {
        const bool neox = p.neox;
        const float2 a = rotation.rotate(p, 0, make_float2(low.x, neox ? high.x : low.y));
        const float2 b = rotation.rotate(p, 1, neox ? make_float2(low.y, high.y) : make_float2(low.z, low.w));
        const float2 c = rotation.rotate(p, 2, neox ? make_float2(low.z, high.z) : make_float2(high.x, high.y));
        const float2 d = rotation.rotate(p, 3, make_float2(neox ? low.w : high.z, high.w));
        store_four(dst + 4 * l, a.x, neox ? b.x : a.y, neox ? c.x : b.x, neox ? d.x : b.y);
        store_four(dst + E / 2 + 4 * l, neox ? a.y : c.x, neox ? b.y : c.y, neox ? c.y : d.x, d.y);
    }
};

// Heads of E elements without norms, all elements rotated, and f16 pages. A warp takes 32 / (E / 8) heads of one token
// at once, and a part of the values of the CTA's eight tokens. Grid (at most ceil((H + G) / (256 / E)), ceil(T / 8)).
template <int E>
__global__ void __launch_bounds__(TOGETHER * 32, 3) rope_kv_whole(const RopeArgs p, int n_tokens) {
    constexpr int LANES = E / 8, HEADS = 32 / LANES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, l = lane % LANES;
    const int first = blockIdx.y * TOGETHER, token = min(first + warp, n_tokens - 1), stride = gridDim.x * HEADS;
    const bool valid = first + warp < n_tokens;
    grid_dependency_launch();
    const int position = p.positions[token];
    const bool together = are_together(p, first, n_tokens, lane);
    Rotation rotation;
#pragma unroll
    for (int j = 0; j < 4; ++j) rotation.prepare_pair(p.angles[Quads::pair_of<E>(p.neox, l, j)], position, j);
    grid_dependency_wait();
    const int page = p.pages[token] * p.n_head_kv;
    const int end = valid ? p.n_head + p.n_head_kv : 0;
    const float* q = p.projected[QUERY] + static_cast<size_t>(token) * p.n_head * E;
    const float* k = p.projected[KEY] + static_cast<size_t>(token) * p.n_head_kv * E;
    for (int i = blockIdx.x * HEADS + lane / LANES; i < end; i += LOADS_IN_FLIGHT * stride) {
        Quads quads[LOADS_IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < LOADS_IN_FLIGHT; ++u) {
            const int head = i + u * stride;
            if (head < end) quads[u].load<E>(head < p.n_head ? q + head * E : k + (head - p.n_head) * E, l);
        }
#pragma unroll
        for (int u = 0; u < LOADS_IN_FLIGHT; ++u) {
            const int head = i + u * stride, kv_head = head - p.n_head;
            if (head >= end) break;
            const int part = kv_head < 0 ? QUERY : KEY;
            if (p.bias[part] != nullptr) quads[u].add<E>(p.bias[part] + (kv_head < 0 ? head : kv_head) * E, l);
            __half* dst = p.q + (static_cast<size_t>(token) * p.n_head + head) * E;
            if (kv_head >= 0)
                dst = p.k_pages + (static_cast<size_t>(page + kv_head) * PAGE_SIZE + position % PAGE_SIZE) * E;
            quads[u].store<E>(p, rotation, dst, l);
        }
    }
    if (together) {
        const int start = position - warp;
        const ValueNorms norms(p, 0, first, lane);  // heads with norms do not come here
        for (int i = blockIdx.x * TOGETHER + warp; i < p.n_head_kv * (E / 32); i += gridDim.x * TOGETHER) {
            const int kv_head = i / (E / 32);
            __half* dst = sixteen(p.v_pages + static_cast<size_t>(page + kv_head) * E * PAGE_SIZE, E, start);
            store_column(p, dst, kv_head, first, start, i % (E / 32) * 32 + lane, norms);
        }
    } else if (valid) {
        const float* bias = p.bias[VALUE];
        for (int i = blockIdx.x * 32 + lane; i < p.n_head_kv * E; i += gridDim.x * 32) {
            const float value = __ldcg(p.projected[VALUE] + static_cast<size_t>(token) * p.n_head_kv * E + i);
            __half* dst = p.v_pages + static_cast<size_t>(page + i / E) * E * PAGE_SIZE;
            dst[value_offset(E, position % PAGE_SIZE, i % E)] =
                saturated_half(value + (bias != nullptr ? bias[i] : 0.0f));
        }
    }
}
