// What no kernel on this GPU can beat: how fast it reads its memory, and how fast it multiplies matrices.
//
// Both run long enough to be timed as a whole and do nothing else; their results only prove that the work was done.
#include "lib/mma.cuh"

// Every warp's words, combined by exclusive or, go to result[warp]. n is in units of 16 bytes. Blocks take tiles of
// AT_ONCE * threads units in turn, so that what is under way at a time lies close together in memory. There is no
// atomic: thousands of warps that end together would wait for each other.
template <int AT_ONCE>
__global__ void __launch_bounds__(1024) read_rate(const uint4* data, int64_t n, uint32_t* result) {
    const int64_t tile = static_cast<int64_t>(AT_ONCE) * blockDim.x, whole = n / tile * tile;
    uint32_t sum = 0;
    for (int64_t start = blockIdx.x * tile; start < whole; start += gridDim.x * tile) {
        const uint4* const from = data + start + threadIdx.x;
        uint4 v[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) v[j] = load_streaming(from + j * blockDim.x);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (int64_t i = whole + blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        const uint4 v = load_streaming(data + i);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    for (int lanes = 16; lanes; lanes >>= 1) sum ^= __shfl_xor_sync(0xffffffffu, sum, lanes);
    const int warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) result[blockIdx.x * warps + threadIdx.x / 32] = sum;
}

// Two halves between 1/2 and 2 of either sign: zeros would let the GPU run faster than it ever does with weights.
__device__ __forceinline__ uint32_t random_halves(uint32_t seed) {
    seed = (seed ^ seed >> 16) * 0x7feb352du;
    seed = (seed ^ seed >> 15) * 0x846ca68bu;
    seed ^= seed >> 16;
    return (seed & 0x87ff87ffu) + 0x38003800u;
}

// A block of 256 threads does 2^21 operations in an iteration, whichever instruction does them.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Where wgmma finds a matrix in shared memory: cores of 8 rows x 16 bytes, `next_k` and `next_row` bytes apart.
__device__ __forceinline__ uint64_t matrix_descriptor(const void* matrix, int next_k, int next_row) {
    return uint64_t(shared_address(matrix) >> 4 & 0x3fff) | uint64_t(next_k >> 4) << 16 | uint64_t(next_row >> 4) << 32;
}

// D[64][128] += A[64][16] B[16][128] by a warpgroup: A in registers, B in shared memory, asynchronously.
__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
#define EIGHT(i)                                                                                            \
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

// Every thread's sum of what its accumulators hold goes to result.
extern "C" __global__ void __launch_bounds__(256) matrix_rate(int iterations, float* result) {
    constexpr int TILES = 4, WORDS = 128 * 16 / 2;
    __shared__ __align__(128) uint32_t b[TILES][WORDS];
    for (int i = threadIdx.x; i < TILES * WORDS; i += blockDim.x) b[i / WORDS][i % WORDS] = random_halves(i);
    fence_async();
    __syncthreads();
    float d[64] = {};
    uint32_t a[TILES][4];
    uint64_t tiles[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        tiles[tile] = matrix_descriptor(b[tile], 128, 256);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[tile][i] = random_halves(threadIdx.x * 16 + tile * 4 + i + (1 << 20));
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

// Every thread's sum of what its accumulators hold goes to result.
extern "C" __global__ void __launch_bounds__(256) matrix_rate(int iterations, float* result) {
    constexpr int ROWS = 2, COLUMNS = 8, ROUNDS = 4;  // 64 products of 4096 operations for each of 8 warps
    float d[ROWS][COLUMNS][4] = {};
    uint32_t a[ROWS][4], b[COLUMNS][2];
#pragma unroll
    for (int i = 0; i < 4 * ROWS; ++i) a[i / 4][i % 4] = random_halves(threadIdx.x * 16 + i + (1 << 20));
#pragma unroll
    for (int i = 0; i < 2 * COLUMNS; ++i) b[i / 2][i % 2] = random_halves(threadIdx.x * 16 + i);
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
