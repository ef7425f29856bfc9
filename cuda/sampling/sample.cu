// Samples one token per row of logits [rows, n_vocab]: bias, penalties, mask, top-k, top-p, min-p, XTC, temperature and
// the draw, with the same bits as ggpy/sampling/. A token that the mask forbids has key 0, and is no candidate. Every rounding is one operation there, so nothing here may be fused or
// reordered, except sums of weights, which are integers.
//
// kernel         grid              a CTA
// sample_select  (segments, rows)  adjusts one segment of 2048 logits, sorts it, writes its `width` largest keys
// sample_draw    (rows)            merges the segments' keys to the top-k; its first warp applies the rest of the chain
//
// Shared memory: sample_select holds the keys of a segment, the keys that pass the bound, and the counts of penalised
// tokens; sample_draw holds up to CAPACITY keys. Both sort in place there, because a sort passes over its keys often.
#include "sampling/ranking.cuh"

constexpr int SEGMENT = 2048;  // logits per CTA of sample_select
constexpr int SELECT_THREADS = 256;
constexpr int CAPACITY = 4096;  // keys that sample_draw sorts at once
constexpr int DRAW_THREADS = 512;

// ROW of ggpy/kernels/sampling/sample.py.
struct SampleRow {
    uint64_t seed, n_drawn;
    double top_p, frequency, presence, xtc_probability, xtc_threshold;
    float min_p;  // ln(min_p) <= 0: how far below the best logit a logit may be
    float temperature, repeat;
    int top_k;             // 0: the row is skipped, its sampler runs elsewhere
    int recent, n_recent;  // range in `edits` of the penalised ids; ~r stands for ids[r] of the previous step
    int bias, n_bias;      // range in `edits` of pairs (id, bias as float)
    int mask;              // where in `edits` the bits of allowed tokens begin, token 0 lowest; -1: all are allowed
};

// Bitonic sort in falling order; n is a power of two and the same for all threads. Pairs at most 32 apart belong to the
// same warp in every step, so __syncwarp suffices for them.
__device__ __forceinline__ void sort_keys(uint64_t* keys, int n, int threads) {
    for (int size = 2; size <= n; size *= 2)
        for (int stride = size / 2; stride > 0; stride /= 2) {
            for (int pair = threadIdx.x; pair < n / 2; pair += threads) {
                const int i = 2 * pair - (pair & (stride - 1)), j = i + stride;
                const uint64_t a = keys[i], b = keys[j];
                if ((a < b) == ((i & size) == 0)) {
                    keys[i] = b;
                    keys[j] = a;
                }
            }
            const int next = stride > 1 ? stride / 2 : size;
            if (max(stride, next) > 32)
                __syncthreads();
            else
                __syncwarp();
        }
    __syncthreads();
}

// The largest bound b, as a key, such that the largest keys of at least k threads have a logit >= b; 0 if k > threads.
// At least k keys of the CTA reach the bound, and few more.
__device__ __forceinline__ uint64_t bound_of(uint64_t largest, int k, int threads) {
    const uint32_t largest_bits = uint32_t(largest >> 32);
    uint32_t bound = 0;
    for (uint32_t bit = 0x80000000u; bit != 0 && k <= threads; bit /= 2) {
        const int reached = __syncthreads_count(largest_bits >= (bound | bit));
        if (reached >= k) bound |= bit;
        if (reached == k) break;
    }
    return uint64_t(bound) << 32;
}

__device__ __forceinline__ int power_of_two(int n) {
    int power = 2;
    while (power < n) power *= 2;
    return power;
}

__device__ __forceinline__ float biased(float logit, float bias) { return __fadd_rn(logit, bias); }

__device__ __forceinline__ float penalized(float logit, int count, const SampleRow& row) {
    const float seen = logit > 0.0f ? __fdiv_rn(logit, row.repeat) : __fmul_rn(logit, row.repeat);
    return __fsub_rn(seen, __double2float_rn(__dadd_rn(__dmul_rn(double(count), row.frequency), row.presence)));
}

// best[rows][segments][width] = the largest keys of each segment in falling order, 0 past the last key.
// Grid (segments, rows).
extern "C" __global__ void __launch_bounds__(SELECT_THREADS)
    sample_select(const float* logits, int n_vocab, const SampleRow* rows, const int* edits, const int* ids, int width,
                  uint64_t* best) {
    __shared__ uint64_t keys[SEGMENT], kept[SEGMENT];
    __shared__ int counts[SEGMENT], n_kept;
    grid_dependency_launch();
    grid_dependency_wait();
    const SampleRow row = rows[blockIdx.y];
    if (row.top_k == 0) return;
    const int first = blockIdx.x * SEGMENT, n = min(SEGMENT, n_vocab - first);
    const float* src = logits + size_t(blockIdx.y) * n_vocab + first;
    for (int i = threadIdx.x; i < SEGMENT; i += SELECT_THREADS) {
        keys[i] = i < n ? ranking_key(__ldcg(src + i), first + i) : 0;
        counts[i] = 0;
    }
    if (threadIdx.x == 0) n_kept = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < row.n_bias; i += SELECT_THREADS) {
        const int* pair = edits + row.bias + 2 * i;
        const int index = pair[0] - first;
        if (index >= 0 && index < n)
            keys[index] = ranking_key(biased(logit_of(keys[index]), __int_as_float(pair[1])), pair[0]);
    }
    for (int i = threadIdx.x; i < row.n_recent; i += SELECT_THREADS) {
        const int id = edits[row.recent + i], index = (id < 0 ? ids[~id] : id) - first;
        if (index >= 0 && index < n) atomicAdd(counts + index, 1);
    }
    __syncthreads();
    if (row.n_recent > 0) {
        for (int i = threadIdx.x; i < n; i += SELECT_THREADS)
            if (counts[i] > 0) keys[i] = ranking_key(penalized(logit_of(keys[i]), counts[i], row), first + i);
        __syncthreads();
    }
    if (row.mask >= 0) {
        const int* words = edits + row.mask + first / 32;
        for (int i = threadIdx.x; i < n; i += SELECT_THREADS)
            if (!(uint32_t(words[i / 32]) >> i % 32 & 1)) keys[i] = 0;
    }
    uint64_t largest = 0;
    for (int i = threadIdx.x; i < n; i += SELECT_THREADS) largest = keys[i] > largest ? keys[i] : largest;
    uint64_t bound = bound_of(largest, row.top_k, SELECT_THREADS);
    bound = bound > 0 ? bound : 1;
    for (int i = threadIdx.x; i < n; i += SELECT_THREADS)
        if (keys[i] >= bound) kept[atomicAdd(&n_kept, 1)] = keys[i];
    __syncthreads();
    const int size = power_of_two(n_kept);
    for (int i = n_kept + threadIdx.x; i < size; i += SELECT_THREADS) kept[i] = 0;
    __syncthreads();
    sort_keys(kept, size, SELECT_THREADS);
    uint64_t* dst = best + (size_t(blockIdx.y) * gridDim.x + blockIdx.x) * width;
    for (int i = threadIdx.x; i < width; i += SELECT_THREADS) dst[i] = i < size ? kept[i] : 0;
}

// keys = the k largest of n keys in falling order; zero keys do not count. `count` lies in shared memory.
__device__ __forceinline__ void largest_keys(const uint64_t* src, int n, int k, uint64_t* keys, int* count) {
    if (threadIdx.x == 0) *count = 0;
    uint64_t largest = 0;
    for (int i = threadIdx.x; i < n; i += DRAW_THREADS) largest = src[i] > largest ? src[i] : largest;
    __syncthreads();
    uint64_t bound = bound_of(largest, k, DRAW_THREADS);
    bound = bound > 0 ? bound : 1;
    int have = 0;
    for (int base = 0; base < n; base += DRAW_THREADS) {
        const int i = base + threadIdx.x;
        const uint64_t key = i < n ? src[i] : 0;
        if (key >= bound) keys[atomicAdd(count, 1)] = key;
        have += __syncthreads_count(key >= bound);
        if (base + DRAW_THREADS < n && have <= CAPACITY - DRAW_THREADS) continue;
        const int size = power_of_two(have);
        for (int j = have + threadIdx.x; j < size; j += DRAW_THREADS) keys[j] = 0;
        __syncthreads();
        sort_keys(keys, size, DRAW_THREADS);
        have = min(have, k);
        if (threadIdx.x == 0) *count = have;
        if (have == k) bound = keys[k - 1];
        __syncthreads();
    }
}

// floor(2^40 e^below) for below <= 0.
__device__ __forceinline__ uint64_t weight(float below) {
    constexpr double coefficients[12] = {1.0,
                                         0.6931471805599453,
                                         0.24022650695910072,
                                         0.05550410866482158,
                                         0.009618129107628477,
                                         0.0013333558146428443,
                                         0.0001540353039338161,
                                         1.5252733804059841e-05,
                                         1.321548679014431e-06,
                                         1.01780860092397e-07,
                                         7.054911620801123e-09,
                                         4.4455382718708116e-10};
    const double exponent = fmax(__dmul_rn(double(below), 1.4426950408889634), -64.0), whole = rint(exponent);
    const double part = exponent - whole;
    double power = coefficients[11];
#pragma unroll
    for (int i = 10; i >= 0; --i) power = __dadd_rn(__dmul_rn(power, part), coefficients[i]);
    return uint64_t(ldexp(power, int(whole) + 40));
}

// weights[i] = weight((logit_i - best logit) / temperature) for keys[n], by one warp; returns their total. Each lane
// later reads only the weights that it wrote.
__device__ __forceinline__ uint64_t weigh(const uint64_t* keys, int n, float temperature, uint64_t* weights) {
    const float highest = logit_of(keys[0]);
    uint64_t total = 0;
    for (int i = threadIdx.x; i < n; i += 32) {
        weights[i] = weight(__fdiv_rn(__fsub_rn(logit_of(keys[i]), highest), temperature));
        total += weights[i];
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
    return total;
}

// The first index i < n at which the prefix sum of weights is >= `mass` (`beyond`: > mass), by one warp; n - 1 if there
// is none.
__device__ __forceinline__ int crossing(const uint64_t* weights, int n, double mass, bool beyond) {
    const int lane = threadIdx.x;
    uint64_t before = 0;
    for (int base = 0; base < n; base += 32) {
        uint64_t sum = base + lane < n ? weights[base + lane] : 0;  // the same lane wrote weights[base + lane]
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const uint64_t other = __shfl_up_sync(~0u, sum, offset);
            if (lane >= offset) sum += other;
        }
        sum += before;
        const bool reached = beyond ? double(sum) > mass : double(sum) >= mass;
        const unsigned lanes = __ballot_sync(~0u, reached && base + lane < n);
        if (lanes) return base + __ffs(lanes) - 1;
        before = __shfl_sync(~0u, sum, 31);
    }
    return n - 1;
}

// The number of indices below n that satisfy a condition, by one warp.
template <typename Condition>
__device__ __forceinline__ int count_if(int n, Condition condition) {
    int count = 0;
    for (int base = 0; base < n; base += 32) {
        const int i = base + threadIdx.x;
        count += __popc(__ballot_sync(~0u, i < n && condition(i)));
    }
    return count;
}

// SplitMix64: a uniform number in [0, 1) from (seed, counter).
__device__ __forceinline__ double uniform(uint64_t seed, uint64_t counter) {
    uint64_t z = seed + (counter + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    return double(z >> 40) * 0x1p-24;
}

// Draws a token: returns its index in keys[n], which are in falling order; by one warp.
__device__ __forceinline__ int draw(const uint64_t* keys, int n, const SampleRow& row, uint64_t* weights) {
    if (row.temperature <= 0.0f && row.xtc_probability == 0.0) return 0;
    if (row.top_p < 1.0) {
        const uint64_t total = weigh(keys, n, 1.0f, weights);
        n = crossing(weights, n, __dmul_rn(row.top_p, double(total)), false) + 1;
    }
    const float lowest = __fadd_rn(logit_of(keys[0]), row.min_p);
    n = count_if(n, [&](int i) { return logit_of(keys[i]) >= lowest; });
    int first = 0;
    if (uniform(row.seed, 2 * row.n_drawn + 1) < row.xtc_probability) {
        const double least = __dmul_rn(row.xtc_threshold, double(weigh(keys, n, 1.0f, weights)));
        first = max(1, count_if(n, [&](int i) { return double(weights[i]) >= least; })) - 1;
    }
    if (row.temperature <= 0.0f) return first;
    const uint64_t total = weigh(keys + first, n - first, fmaxf(row.temperature, 1e-30f), weights);
    const double mass = __dmul_rn(uniform(row.seed, 2 * row.n_drawn), double(total));
    return first + crossing(weights, n - first, mass, true);
}

// best[rows][n_best]: the keys that sample_select wrote. Grid (rows).
extern "C" __global__ void __launch_bounds__(DRAW_THREADS)
    sample_draw(const uint64_t* best, int n_best, const SampleRow* rows, int n_vocab, int* ids, int* results) {
    __shared__ uint64_t keys[CAPACITY];
    __shared__ int count;
    grid_dependency_launch();
    grid_dependency_wait();
    const SampleRow row = rows[blockIdx.x];
    if (row.top_k == 0) return;
    largest_keys(best + size_t(blockIdx.x) * n_best, n_best, min(row.top_k, n_vocab), keys, &count);
    if (threadIdx.x >= 32) return;
    const int n = count;  // fewer than top_k where few tokens are allowed
    const int chosen = n > 0 && isfinite(logit_of(keys[0])) ? draw(keys, n, row, keys + CAPACITY / 2) : 0;
    if (threadIdx.x == 0) store_token(ids, results, blockIdx.x, keys[0], n > 0 ? index_of(keys[chosen]) : 0);
}
