// Two kernels that measure the ceilings of a GPU: the memory bandwidth of reads (read_rate) and the f16 throughput of
// the tensor cores (matrix_rate). No other kernel on the GPU can be faster.
//
//        read_rate      result[warp] = XOR of the words that the warp reads; all words of data[n] are read once
//        matrix_rate    result[thread] = sum of its accumulators after `iterations` rounds of f16 mma with f32 sums
//
// The results only prove that the work was done. The caller chooses sizes that run long enough to be timed as a whole.
#include "lib/mma.cuh"

// Launch: any grid and any CTA of whole warps. n counts units of 16 bytes. CTAs take tiles of LOADS_IN_FLIGHT * threads
// units round-robin, so loads in flight at the same time are close together in memory. Each warp stores a result of its
// own instead of using an atomic, because thousands of warps that end together would wait for each other.
template <int LOADS_IN_FLIGHT>
__global__ void __launch_bounds__(1024) read_rate(const uint4* data, int64_t n, uint32_t* result) {
    const int64_t tile = static_cast<int64_t>(LOADS_IN_FLIGHT) * blockDim.x, whole = n / tile * tile;
    uint32_t sum = 0;
    for (int64_t start = blockIdx.x * tile; start < whole; start += gridDim.x * tile) {
        const uint4* const src = data + start + threadIdx.x;
        uint4 v[LOADS_IN_FLIGHT];
#pragma unroll
        for (int j = 0; j < LOADS_IN_FLIGHT; ++j) v[j] = load_streaming(src + j * blockDim.x);
#pragma unroll
        for (int j = 0; j < LOADS_IN_FLIGHT; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (int64_t i = whole + blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        const uint4 v = load_streaming(data + i);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    for (int lanes = 16; lanes; lanes >>= 1) sum ^= __shfl_xor_sync(0xffffffffu, sum, lanes);
    const int warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) result[blockIdx.x * warps + threadIdx.x / 32] = sum;
}

// Returns two random f16 values with magnitudes from 1/2 to 2. Zeros would use less power, so the GPU would run faster
// than with real weights.
__device__ __forceinline__ uint32_t random_f16(uint32_t seed) {
    seed = (seed ^ seed >> 16) * 0x7feb352du;
    seed = (seed ^ seed >> 15) * 0x846ca68bu;
    seed ^= seed >> 16;
    return (seed & 0x87ff87ffu) + 0x38003800u;
}

// A CTA of 256 threads computes 2^21 floating-point operations per iteration, in both versions of matrix_rate.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Returns the wgmma descriptor of a matrix in shared memory, made of core matrices of 8 rows x 16 bytes that are
// `next_k` and `next_row` bytes apart.
__device__ __forceinline__ uint64_t matrix_descriptor(const void* matrix, int next_k, int next_row) {
    return uint64_t(shared_address(matrix) >> 4 & 0x3fff) | uint64_t(next_k >> 4) << 16 | uint64_t(next_row >> 4) << 32;
}

// D[64, 128] += A[64, 16] B[16, 128] by a warpgroup, asynchronously. A is in registers, B in shared memory.
__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
#define EIGHT(i)                                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
        : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#undef EIGHT
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Launch: any grid, 256 threads per CTA.
extern "C" __global__ void __launch_bounds__(256) matrix_rate(int iterations, float* result) {
    constexpr int TILES = 4, WORDS = 128 * 16 / 2;
    __shared__ __align__(128) uint32_t b[TILES][WORDS];
    for (int i = threadIdx.x; i < TILES * WORDS; i += blockDim.x) b[i / WORDS][i % WORDS] = random_f16(i);
    fence_async();
    __syncthreads();
    float d[64] = {};
    uint32_t a[TILES][4];
    uint64_t tiles[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        tiles[tile] = matrix_descriptor(b[tile], 128, 256);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[tile][i] = random_f16(threadIdx.x * 16 + tile * 4 + i + (1 << 20));
    }
    for (int n = 0; n < iterations; ++n) {
        wgmma_fence();
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) wgmma_m64n128k16(d, a[tile], tiles[tile]);
        wgmma_commit();
        wgmma_wait();
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 64; ++i) sum += d[i];
    result[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

#else

// Launch: any grid, 256 threads per CTA.
extern "C" __global__ void __launch_bounds__(256) matrix_rate(int iterations, float* result) {
    constexpr int ROWS = 2, COLUMNS = 8, ROUNDS = 4;  // 64 mma of 4096 operations for each of 8 warps
    float d[ROWS][COLUMNS][4] = {};
    uint32_t a[ROWS][4], b[COLUMNS][2];
#pragma unroll
    for (int i = 0; i < 4 * ROWS; ++i) a[i / 4][i % 4] = random_f16(threadIdx.x * 16 + i + (1 << 20));
#pragma unroll
    for (int i = 0; i < 2 * COLUMNS; ++i) b[i / 2][i % 2] = random_f16(threadIdx.x * 16 + i);
    for (int n = 0; n < iterations; ++n)
#pragma unroll
        for (int i = 0; i < ROUNDS * ROWS * COLUMNS; ++i)
            mma_m16n8k16_f16(d[i / COLUMNS % ROWS][i % COLUMNS], a[i / COLUMNS % ROWS], b[i % COLUMNS]);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4 * ROWS * COLUMNS; ++i) sum += d[i / 4 / COLUMNS][i / 4 % COLUMNS][i % 4];
    result[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

#endif
