// A token of each row of logits: bias, penalties, top-k, top-p, min-p, XTC, temperature and the draw of
// ggpy/sampling.py, with the same bits. Every rounding is an operation of ggpy/logits.py, so nothing here may be fused or reordered but
// sums of weights, which are whole numbers.
//
// sample_select: a block adjusts a segment of a row, sorts it, and keeps the best. sample_draw: a block finds the best
// of a row among those, in order, and its first warp goes down the rest of the chain.
#include "sampling/ranking.cuh"

constexpr int SEGMENT = 2048;  // logits of a block of sample_select
constexpr int SELECT_THREADS = 256;
constexpr int CAPACITY = 4096;  // keys that sample_draw sorts at a time
constexpr int DRAW_THREADS = 512;

// ggpy/kernels/sample.py ROW.
struct SampleRow {
    uint64_t seed, n_drawn;
    double top_p, frequency, presence, xtc_probability, xtc_threshold;
    float min_p;  // ln of it: how far below the best a logit may be, with its sign
    float temperature, repeat;
    int top_k;            // 0: another chain's row, left alone
    int recent, n_recent;  // in edits: ids that are penalised; ~r is ids[r] of the step before
    int bias, n_bias;      // in edits: pairs of an id and a float
};

// Falling order; n is a power of two and known to all threads. Pairs no further apart than a warp is wide belong to the
// same warp in every step.
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

// The largest b, as a key, that the logits of k or more threads' largest keys reach; 0 where k is more than threads. At
// least k keys of the block reach it, and few others do.
__device__ __forceinline__ uint64_t bound_of(uint64_t largest, int k, int threads) {
    const uint32_t mine = uint32_t(largest >> 32);
    uint32_t bound = 0;
    for (uint32_t bit = 0x80000000u; bit != 0 && k <= threads; bit /= 2) {
        const int reached = __syncthreads_count(mine >= (bound | bit));
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

// best[rows][segments][width]: of each segment the largest keys in falling order, 0 where it has fewer.
// grid (segments, rows)
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
    const float* from = logits + size_t(blockIdx.y) * n_vocab + first;
    for (int i = threadIdx.x; i < SEGMENT; i += SELECT_THREADS) {
        keys[i] = i < n ? ranking_key(__ldcg(from + i), first + i) : 0;
        counts[i] = 0;
    }
    if (threadIdx.x == 0) n_kept = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < row.n_bias; i += SELECT_THREADS) {
        const int* pair = edits + row.bias + 2 * i;
        const int at = pair[0] - first;
        if (at >= 0 && at < n) keys[at] = ranking_key(biased(logit_of(keys[at]), __int_as_float(pair[1])), pair[0]);
    }
    for (int i = threadIdx.x; i < row.n_recent; i += SELECT_THREADS) {
        const int id = edits[row.recent + i], at = (id < 0 ? ids[~id] : id) - first;
        if (at >= 0 && at < n) atomicAdd(counts + at, 1);
    }
    __syncthreads();
    if (row.n_recent > 0) {
        for (int i = threadIdx.x; i < n; i += SELECT_THREADS)
            if (counts[i] > 0) keys[i] = ranking_key(penalized(logit_of(keys[i]), counts[i], row), first + i);
        __syncthreads();
    }
    uint64_t largest = 0;
    for (int i = threadIdx.x; i < n; i += SELECT_THREADS) largest = keys[i] > largest ? keys[i] : largest;
    const uint64_t bound = bound_of(largest, row.top_k, SELECT_THREADS);
    for (int i = threadIdx.x; i < n; i += SELECT_THREADS)
        if (keys[i] >= bound) kept[atomicAdd(&n_kept, 1)] = keys[i];
    __syncthreads();
    const int size = power_of_two(n_kept);
    for (int i = n_kept + threadIdx.x; i < size; i += SELECT_THREADS) kept[i] = 0;
    __syncthreads();
    sort_keys(kept, size, SELECT_THREADS);
    uint64_t* to = best + (size_t(blockIdx.y) * gridDim.x + blockIdx.x) * width;
    for (int i = threadIdx.x; i < width; i += SELECT_THREADS) to[i] = i < size ? kept[i] : 0;
}

// The k largest of n keys to `keys`, in falling order; zeros do not count. `count` is shared.
__device__ __forceinline__ void largest_keys(const uint64_t* from, int n, int k, uint64_t* keys, int* count) {
    if (threadIdx.x == 0) *count = 0;
    uint64_t largest = 0;
    for (int i = threadIdx.x; i < n; i += DRAW_THREADS) largest = from[i] > largest ? from[i] : largest;
    __syncthreads();
    uint64_t bound = bound_of(largest, k, DRAW_THREADS);
    bound = bound > 0 ? bound : 1;
    int have = 0;
    for (int base = 0; base < n; base += DRAW_THREADS) {
        const int i = base + threadIdx.x;
        const uint64_t key = i < n ? from[i] : 0;
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
    constexpr double coefficients[12] = {
        1.0, 0.6931471805599453, 0.24022650695910072, 0.05550410866482158, 0.009618129107628477, 0.0013333558146428443,
        0.0001540353039338161, 1.5252733804059841e-05, 1.321548679014431e-06, 1.01780860092397e-07,
        7.054911620801123e-09, 4.4455382718708116e-10};
    const double turns = fmax(__dmul_rn(double(below), 1.4426950408889634), -64.0), whole = rint(turns);
    const double part = turns - whole;
    double power = coefficients[11];
#pragma unroll
    for (int i = 10; i >= 0; --i) power = __dadd_rn(__dmul_rn(power, part), coefficients[i]);
    return uint64_t(ldexp(power, int(whole) + 40));
}

// Weights of (l - the best l) / temperature of keys[n], by one warp, each lane's own; their total.
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

// The first i of n at which the sum of weights is `mass`, or `beyond` it, by one warp; n - 1 if there is none.
__device__ __forceinline__ int crossing(const uint64_t* weights, int n, double mass, bool beyond) {
    const int lane = threadIdx.x;
    uint64_t before = 0;
    for (int base = 0; base < n; base += 32) {
        uint64_t sum = base + lane < n ? weights[base + lane] : 0;  // this lane wrote it
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

// How many of n satisfy a condition, by one warp.
template <typename Condition>
__device__ __forceinline__ int count_if(int n, Condition condition) {
    int count = 0;
    for (int base = 0; base < n; base += 32) {
        const int i = base + threadIdx.x;
        count += __popc(__ballot_sync(~0u, i < n && condition(i)));
    }
    return count;
}

// SplitMix64: the number in [0, 1) of (seed, counter).
__device__ __forceinline__ double uniform(uint64_t seed, uint64_t counter) {
    uint64_t z = seed + (counter + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    return double(z >> 40) * 0x1p-24;
}

// The index in keys[n], which are in falling order, of the token that is drawn; by one warp.
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

// best[rows][n_best]: what sample_select kept of all segments. grid (rows)
extern "C" __global__ void __launch_bounds__(DRAW_THREADS)
    sample_draw(const uint64_t* best, int n_best, const SampleRow* rows, int n_vocab, int* ids, int* results) {
    __shared__ uint64_t keys[CAPACITY];
    __shared__ int count;
    grid_dependency_launch();
    grid_dependency_wait();
    const SampleRow row = rows[blockIdx.x];
    if (row.top_k == 0) return;
    const int k = min(row.top_k, n_vocab);
    largest_keys(best + size_t(blockIdx.x) * n_best, n_best, k, keys, &count);
    if (threadIdx.x >= 32) return;
    const int chosen = isfinite(logit_of(keys[0])) ? draw(keys, k, row, keys + CAPACITY / 2) : 0;
    if (threadIdx.x == 0) store_token(ids, results, blockIdx.x, keys[0], index_of(keys[chosen]));
}
