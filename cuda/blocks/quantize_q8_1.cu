// Quantises activations x[32 n] to n quant blocks block_q8_1:
//
//        d = max|x| / 127        q = x / d, rounded half away from zero        s = d * sum(q)
//
// The bytes equal the numpy quantiser's (ggml quantize_row_q8_1_ref) for finite x. If x has a NaN or an infinity, d is
// NaN or infinite and every product with the block becomes NaN, so errors stay visible.
//
// Launch: one thread per four activations, 256 threads per CTA. Eight lanes share a quant block and reduce its maximum
// and sum by shuffles.
#include "lib/convert.cuh"
#include "formats/q8_1.cuh"

// Returns the largest |x| of the eight lanes that share a quant block. Compares bits: their unsigned order is the order
// of magnitudes, with infinity above all numbers and NaN above infinity.
__device__ __forceinline__ float largest_magnitude(float4 x) {
    uint32_t largest = 0;
    const float values[4] = {x.x, x.y, x.z, x.w};
    for (float value : values) largest = max(largest, __float_as_uint(value) & 0x7fffffffu);
#pragma unroll
    for (int lanes = 4; lanes > 0; lanes /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
    return __uint_as_float(largest);
}

__device__ __forceinline__ float4 load_four(const float* x, int64_t i) { return reinterpret_cast<const float4*>(x)[i]; }
__device__ __forceinline__ float4 load_four(const half* x, int64_t i) {
    const half2* pairs = reinterpret_cast<const half2*>(x) + 2 * i;
    const float2 a = __half22float2(pairs[0]), b = __half22float2(pairs[1]);
    return make_float4(a.x, a.y, b.x, b.y);
}

// T is float or half.
template <typename T>
__global__ void quantize_q8_1(const T* __restrict__ x, block_q8_1* __restrict__ blocks, int64_t n) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const bool valid = i < 8 * n;
    const float4 v = valid ? load_four(x, i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float d = __fdiv_rn(largest_magnitude(v), 127.0f);
    const float reciprocal = __fdiv_rn(1.0f, d), factor = isinf(reciprocal) ? 0.0f : reciprocal;
    int q[4] = {round_half_away(__fmul_rn(v.x, factor)), round_half_away(__fmul_rn(v.y, factor)),
                round_half_away(__fmul_rn(v.z, factor)), round_half_away(__fmul_rn(v.w, factor))};
    int sum = q[0] + q[1] + q[2] + q[3];
#pragma unroll
    for (int lanes = 4; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (!valid) return;
    block_q8_1& block = blocks[i / 8];
    *reinterpret_cast<uint32_t*>(block.qs + i % 8 * 4) = pack4(q[0], q[1], q[2], q[3]);
    if (i % 8 == 0) {
        block.d = __float2half_rn(d);
        block.s = __float2half_rn(__fmul_rn(d, float(sum)));
    }
}
