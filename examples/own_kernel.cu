// out[row][i] = exp(x[row][i] - m) / sum_j exp(x[row][j] - m), m the row's maximum: softmax of each row.
//
// One CTA a row, THREADS threads. A thread takes every THREADS-th column; warps reduce by shuffles, and
// their results meet in shared memory.

// `op` over the values of all threads of the CTA, the same in every thread; `none` is its neutral element.
template <int THREADS, class Op>
__device__ float reduce(float v, float none, Op op) {
    __shared__ float of_warp[THREADS / 32];
    for (int offset = 16; offset > 0; offset /= 2) v = op(v, __shfl_xor_sync(0xffffffffu, v, offset));
    __syncthreads();  // the last reduction may still be read
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    float all = none;
    for (int warp = 0; warp < THREADS / 32; ++warp) all = op(all, of_warp[warp]);
    return all;
}

struct Max {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};

template <int THREADS>
__global__ void __launch_bounds__(THREADS) softmax_rows(const float* x, float* out, int n_columns) {
    const float* row = x + static_cast<long long>(blockIdx.x) * n_columns;
    float* out_row = out + static_cast<long long>(blockIdx.x) * n_columns;

    float largest = -3.4e38f;
    for (int i = threadIdx.x; i < n_columns; i += THREADS) largest = fmaxf(largest, row[i]);
    largest = reduce<THREADS>(largest, -3.4e38f, Max{});

    float sum = 0.0f;
    for (int i = threadIdx.x; i < n_columns; i += THREADS) sum += expf(row[i] - largest);
    sum = reduce<THREADS>(sum, 0.0f, Sum{});

    for (int i = threadIdx.x; i < n_columns; i += THREADS) out_row[i] = expf(row[i] - largest) / sum;
}
