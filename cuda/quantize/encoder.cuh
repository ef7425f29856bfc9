// What quantising to a block format is to the kernel: Encoder<block_q4_K> and its like, one specialisation per file of
// this folder, each the same arithmetic as `quantize` and `quantize_weighted` of ggpy/formats/<stem>.py.
//
// A lane has a group of a block's weights, its neighbours the others. A specialisation has
//   static constexpr int group;    weights of a lane, 16 or more
//   template <bool WEIGHTED> static bool encode(const Group& group, Block& block, uint8_t* codes);
//       sets scales of the block and the group's codes; false where numpy should decide (see quantize.cu)
//   static void pack(const uint8_t* codes, Block& block, int lane);    a lane's share of the block's codes, packed
#pragma once
#include "formats/format.cuh"
#include "quantize/search.cuh"

template <typename Block>
struct Encoder;

// N weights of one block, whose LANES groups are in neighbouring lanes.
template <int N, int LANES>
struct Group {
    static constexpr int lanes = LANES;

    float x[N];
    const float* importance;  // of these columns
    float row_mean_square;    // if the block has fewer than 256 weights

    static __device__ __forceinline__ int lane() { return threadIdx.x % LANES; }
    static __device__ __forceinline__ float from(float value, int lane) { return __shfl_sync(~0u, value, lane, LANES); }
    static __device__ __forceinline__ int from(int value, int lane) { return __shfl_sync(~0u, value, lane, LANES); }

    // The value of each lane.
    template <typename T>
    static __device__ __forceinline__ void gather(T value, T (&values)[LANES]) {
#pragma unroll
        for (int i = 0; i < LANES; ++i) values[i] = from(value, i);
    }

    // The mean of the squares of the block's weights, added in order.
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

    // importance * sqrt(variance + x^2)
    __device__ __forceinline__ void error_weights(float variance, float (&weights)[N]) const {
#pragma unroll
        for (int j = 0; j < N; ++j) weights[j] = importance[j] * sqrtf(variance + x[j] * x[j]);
    }

    // q of (x - minimum) / scale for what a block stores; a group whose scale became 0 keeps what was found.
    template <typename Found>
    __device__ __forceinline__ int requantized(int j, float scale, float minimum, int lowest, int highest,
                                               Found found) const {
        return scale == 0.0f ? found(j) : clamp(nearest_int((x[j] - minimum) / scale), lowest, highest);
    }
};

__device__ __forceinline__ bool is_number(half x) { return is_number(__half2float(x)); }

// BITS bits of four or two codes in a byte: codes first, first + stride, ..., the first lowest.
template <int BITS, int SHIFT = 0>
__device__ __forceinline__ uint8_t packed_byte(const uint8_t* codes, int first, int stride) {
    uint32_t byte = 0;
#pragma unroll
    for (int k = 0; k < 8 / BITS; ++k) byte |= (codes[first + k * stride] >> SHIFT & ((1 << BITS) - 1)) << BITS * k;
    return byte;
}
