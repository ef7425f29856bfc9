// The interface of a quantiser to quantize.cu: Encoder<block_q4_K> and so on, one specialisation per file of this
// folder. Each computes the same arithmetic as `quantize` and `quantize_weighted` of ggpy/formats/<stem>.py.
//
// A lane holds one group of weights; neighbouring lanes hold the other groups of the block. A specialisation has
//   static constexpr int group;    weights per lane, 16 or more
//   template <bool WEIGHTED> static bool encode(const Group& group, Block& block, uint8_t* codes);
//       writes the scales of the block and the codes of the group; false: numpy must decide (see quantize.cu)
//   static void pack(const uint8_t* codes, Block& block, int lane);
//       packs the lane's part of the codes into the block
#pragma once
#include "formats/format.cuh"
#include "quantize/search.cuh"

template <typename Block>
struct Encoder;

// One group of N weights of a block. The LANES groups of the block are in neighbouring lanes.
template <int N, int LANES>
struct Group {
    static constexpr int lanes = LANES;

    float x[N];
    const float* importance;  // [N], of the group's columns
    float row_mean_square;    // only for blocks of fewer than 256 weights

    static __device__ __forceinline__ int lane() { return threadIdx.x % LANES; }
    static __device__ __forceinline__ float from(float value, int lane) { return __shfl_sync(~0u, value, lane, LANES); }
    static __device__ __forceinline__ int from(int value, int lane) { return __shfl_sync(~0u, value, lane, LANES); }

    // Returns the values of all lanes of the block.
    template <typename T>
    static __device__ __forceinline__ void gather(T value, T (&values)[LANES]) {
#pragma unroll
        for (int i = 0; i < LANES; ++i) values[i] = from(value, i);
    }

    // Returns the mean square of the block's weights, summed in order.
    __device__ __forceinline__ float mean_square() const {
        float sum = 0.0f;
#pragma unroll 1
        for (int i = 0; i < LANES; ++i)
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const float other = from(x[j], i);
                sum += other * other;
            }
        return sum / float(N * LANES);
    }

    // The weight of each error: importance * sqrt(variance + x^2).
    __device__ __forceinline__ void error_weights(float variance, float (&weights)[N]) const {
#pragma unroll
        for (int j = 0; j < N; ++j) weights[j] = importance[j] * sqrtf(variance + x[j] * x[j]);
    }

    // Returns the code of x[j] for the scale and minimum that the block stores (rounded). If the stored scale is 0,
    // keeps the code found(j) of the search.
    template <typename Found>
    __device__ __forceinline__ int requantized(int j, float scale, float minimum, int lowest, int highest,
                                               Found found) const {
        return scale == 0.0f ? found(j) : clamp(nearest_int((x[j] - minimum) / scale), lowest, highest);
    }
};

__device__ __forceinline__ bool is_number(half x) { return is_number(__half2float(x)); }

// Packs BITS bits, from bit SHIFT, of 8 / BITS codes into a byte: codes first, first + stride, ..., the first one in
// the lowest bits.
template <int BITS, int SHIFT = 0>
__device__ __forceinline__ uint8_t packed_byte(const uint8_t* codes, int first, int stride) {
    uint32_t byte = 0;
#pragma unroll
    for (int k = 0; k < 8 / BITS; ++k) byte |= (codes[first + k * stride] >> SHIFT & ((1 << BITS) - 1)) << BITS * k;
    return byte;
}
