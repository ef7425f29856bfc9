// Norms of a row that RmsNorm does not compute, with its interface:
//
//    y[k] = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias
//
// CENTRED: whether the mean is subtracted. The biases lie after the weights, [2][k].
#pragma once
#include "norm/norm.cuh"

template <bool CENTRED>
struct BiasedNorm : RmsNorm {
    float bias[NORM_PIECES][8];

    __device__ __forceinline__ void load_weight(const float* src, int k) {
        RmsNorm::load_weight(src, k);
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i)
            if (column(i) < k) read_floats(bias[i], src + k + column(i));
    }
    // The order of summation is that of squares.
    __device__ __forceinline__ void subtract_mean(int k) {
        float sum[1] = {0.0f};
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i)
            if (column(i) < k)
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[0] += x[i][j];
        cta_sums(sum);
        const float mean = sum[0] / static_cast<float>(k);
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i)
            if (column(i) < k)
#pragma unroll
                for (int j = 0; j < 8; ++j) x[i][j] -= mean;
    }
    template <bool AGAIN = true>
    __device__ __forceinline__ void scale(int k, float eps, int parity = 0) {
        if constexpr (CENTRED) subtract_mean(k);
        RmsNorm::scale(k, eps, parity);
    }
    __device__ __forceinline__ float value(int i, int j) const {
        return fmaf(x[i][j] * inverse, weight[i][j], bias[i][j]);
    }
    __device__ __forceinline__ float added_to(float old, int i, int j) const { return __fadd_rn(old, value(i, j)); }
    __device__ __forceinline__ uint4 f16x8(int i) const {
        return make_uint4(saturated_half2(value(i, 0), value(i, 1)), saturated_half2(value(i, 2), value(i, 3)),
                          saturated_half2(value(i, 4), value(i, 5)), saturated_half2(value(i, 6), value(i, 7)));
    }
};
