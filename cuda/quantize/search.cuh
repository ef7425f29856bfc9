// Searches for the scale, or scale and minimum, that lets rounded weights come nearest to the true ones: those of
// ggpy/formats/search.py, and so of ggml-quants.c, one group of weights in one thread's registers.
//
// The bytes of a file depend on every rounding, so each operation and the order of every sum is theirs. That needs
// products and sums that are not contracted (NVRTC's --fmad=false). Knows no block.
#pragma once
#include "lib/common.cuh"

// Groups whose largest magnitude is below get the scale 0 (ggml's GROUP_MAX_EPS).
constexpr float ALL_ZERO = 1e-15f;

// Neither infinite nor NaN.
__device__ __forceinline__ bool is_number(float x) { return fabsf(x) <= 3.40282347e38f; }

// Ties to even, and beyond 2^22, where nobody should be, what ggml's bit trick makes of it.
__device__ __forceinline__ int nearest_int(float x) {
    if (x != x) return 0;  // what the trick makes of x86's NaN
    return (__float_as_int(x + 12582912.0f) & 0x007fffff) - 0x00400000;
}

__device__ __forceinline__ int clamp(int q, int lowest, int highest) { return min(max(q, lowest), highest); }

// numerator / x; 0 where that overflows.
__device__ __forceinline__ float finite_inverse(float numerator, float x) {
    const float inverse = numerator / x;
    return is_number(inverse) ? inverse : 0.0f;
}

template <int N>
__device__ __forceinline__ float ordered_sum(const float (&terms)[N]) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) sum += terms[j];
    return sum;
}

// The first of the largest magnitude; of zeros +0.
template <int N>
__device__ __forceinline__ float first_extreme(const float (&x)[N]) {
    float extreme = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) extreme = fabsf(x[j]) > fabsf(extreme) ? x[j] : extreme;
    return extreme;
}

// ---- x near scale * q, q from -n_max to n_max - 1 ----------------------------------------------------------------

// Of a group, and how its q are found again.
struct ScaleFit {
    float scale, inverse;
    bool empty;  // all zeros: then q is -n_max

    __device__ __forceinline__ int level(float x, int n_max) const {
        return empty ? -n_max : clamp(nearest_int(x * inverse), -n_max, n_max - 1);
    }
};

// Tries 19 scales about the one that makes the extreme weight -n_max (ggml make_qx_quants).
template <int N>
__device__ ScaleFit search_scale(const float (&x)[N], const float (&weights)[N], int n_max) {
    const float extreme = first_extreme(x);
    ScaleFit fit = {0.0f, 0.0f, fabsf(extreme) < ALL_ZERO};
    if (fit.empty) return fit;
    float best = 0.0f;
#pragma unroll 1
    for (int attempt = 0; attempt < 19; ++attempt) {
        const int step = attempt == 0 ? 0 : attempt < 10 ? attempt - 10 : attempt - 9;  // 0, -9 ... -1, 1 ... 9
        const float inverse = finite_inverse(-(float(n_max) + 0.1f * float(step)), extreme);
        float sum_lx = 0.0f, sum_l2 = 0.0f;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float q = float(clamp(nearest_int(x[j] * inverse), -n_max, n_max - 1));
            sum_lx += weights[j] * x[j] * q;
            sum_l2 += weights[j] * q * q;
        }
        const bool better = step == 0 ? sum_l2 != 0.0f : sum_l2 > 0.0f && sum_lx * sum_lx > best * sum_l2;
        if (better) {
            fit.scale = sum_lx / sum_l2;
            best = fit.scale * sum_lx;
        }
        if (better || step == 0) fit.inverse = inverse;
    }
    return fit;
}

// ---- x near scale * q + minimum, q from 0 to N_MAX -----------------------------------------------------------------

// Which of ggml's two searches: make_qkx2_quants by squared or absolute error, or make_qkx3_quants, for an importance
// matrix; they part where a rounding leaves the range.
enum class Errors { SQUARED, ABSOLUTE, WEIGHTED };

template <int N_MAX, Errors ERRORS>
__device__ __forceinline__ int level_of(float product) {
    if (ERRORS == Errors::WEIGHTED) {  // here ggml clamps, then rounds
        product = product > 0.0f ? fminf(product, float(N_MAX)) : 0.0f;
    }
    return clamp(nearest_int(product), 0, N_MAX);
}

// Of a group: minimum <= 0; its q are those of (x - origin) * inverse.
struct LineFit {
    float scale, minimum, inverse, origin;
};

// Rounds with N_MAX + first + i * delta steps over the range, i to `last`, fits scale and minimum to each rounding by
// least squares, and keeps the fit with the least error. A better fit's minimum is where the next roundings start.
template <int N_MAX, Errors ERRORS, int N>
__device__ LineFit search_line(const float (&x)[N], const float (&weights)[N], float first, float delta, int last) {
    float lowest = x[0], highest = x[0], sum_w = weights[0], sum_x = weights[0] * x[0];
#pragma unroll
    for (int j = 1; j < N; ++j) {
        lowest = x[j] < lowest ? x[j] : lowest;
        highest = x[j] > highest ? x[j] : highest;
        sum_w += weights[j];
        sum_x += weights[j] * x[j];
    }
    if (lowest > 0.0f) lowest = 0.0f;
    LineFit fit = {0.0f, lowest, 0.0f, lowest};
    if (highest == lowest) return fit;
    fit.inverse = finite_inverse(float(N_MAX), highest - lowest);
    fit.scale = 1.0f / (float(N_MAX) / (highest - lowest));
    float best = 0.0f;
    const auto add_error = [](float sum, float x, float weight, int q, float scale, float minimum) {
        const float difference = float(q) * scale + minimum - x;
        return sum + (ERRORS == Errors::ABSOLUTE ? fabsf(difference) : difference * difference) * weight;
    };
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const int q = level_of<N_MAX, ERRORS>((x[j] - lowest) * fit.inverse);
        best = add_error(best, x[j], weights[j], q, fit.scale, lowest);
    }
#pragma unroll 1
    for (int i = 0; i <= last; ++i) {
        const float origin = fit.minimum, inverse = (first + delta * float(i) + float(N_MAX)) / (highest - origin);
        float sum_l = 0.0f, sum_l2 = 0.0f, sum_xl = 0.0f, error = 0.0f;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float q = float(level_of<N_MAX, ERRORS>((x[j] - origin) * inverse)), wq = weights[j] * q;
            sum_l += wq;
            sum_xl += wq * x[j];
            sum_l2 += wq * q;
        }
        const float determinant = sum_w * sum_l2 - sum_l * sum_l;
        float scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
        float minimum = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
        if (minimum > 0.0f) scale = sum_xl / sum_l2, minimum = 0.0f;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int q = level_of<N_MAX, ERRORS>((x[j] - origin) * inverse);
            error = add_error(error, x[j], weights[j], q, scale, minimum);
        }
        if (determinant > 0.0f && error < best) {
            best = error;
            fit = {scale, minimum, inverse, origin};
        }
    }
    return fit;
}

// ---- one q at a time -----------------------------------------------------------------------------------------------

// Changes single q while sum(w x q)^2 / sum(w q^2) grows, at most five rounds; returns that quotient's scale, 0 if
// there is none. BYTES: as ggml has it for positive x, q counts as a byte and both partial sums must be positive.
template <bool BYTES, int N>
__device__ float descend(const float (&x)[N], const float (&weights)[N], int (&q)[N], int lowest, int highest) {
    float sum_lx = 0.0f, sum_l2 = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        sum_lx += weights[j] * x[j] * float(q[j]);
        sum_l2 += weights[j] * float(q[j]) * float(q[j]);
        if (BYTES) q[j] &= 255;
    }
#pragma unroll 1
    for (int round = 0; round < 5; ++round) {
        bool changed = false;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float weighted = weights[j] * x[j], old = float(q[j]);
            const float rest_lx = sum_lx - weighted * old, rest_l2 = sum_l2 - weights[j] * old * old;
            int level = min(nearest_int(x[j] * rest_l2 / rest_lx), highest);
            if (!BYTES) level = max(level, lowest);
            const float new_lx = rest_lx + weighted * float(level);
            const float new_l2 = rest_l2 + weights[j] * float(level) * float(level);
            if (rest_lx > 0.0f && level != q[j] && (BYTES ? rest_l2 : new_l2) > 0.0f &&
                new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2) {
                q[j] = BYTES ? level & 255 : level;
                sum_lx = new_lx, sum_l2 = new_l2;
                changed = true;
            }
        }
        if (!changed) break;
    }
    return sum_l2 > 0.0f ? sum_lx / sum_l2 : 0.0f;
}

// x near scale * q, q from -n_max to n_max - 1, errors weighed by x^2 (ggml make_q3_quants); returns the scale.
template <int N>
__device__ float search_scale_by_descent(const float (&x)[N], int (&q)[N], int n_max) {
    const float extreme = first_extreme(x), inverse = finite_inverse(-float(n_max), extreme);
    const bool empty = fabsf(extreme) < ALL_ZERO;
    float weights[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
        weights[j] = x[j] * x[j];
        q[j] = empty ? -n_max : clamp(nearest_int(x[j] * inverse), -n_max, n_max - 1);
    }
    return empty ? 0.0f : descend<false>(x, weights, q, -n_max, n_max - 1);
}

// x >= 0 near scale * q, q from 0 to n_max: tries nine scales about the one that makes the largest x n_max, then
// changes one q at a time (ggml make_qp_quants); returns the scale.
template <int N>
__device__ float search_positive_scale(const float (&x)[N], const float (&weights)[N], int (&q)[N], int n_max) {
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        largest = x[j] > largest ? x[j] : largest;
        q[j] = 0;
    }
    if (largest < ALL_ZERO) return 0.0f;
    float inverse = 0.0f, best = 0.0f;
#pragma unroll 1
    for (int attempt = 0; attempt < 9; ++attempt) {
        const int step = attempt == 0 ? 0 : attempt < 5 ? attempt - 5 : attempt - 4;  // 0, -4 ... -1, 1 ... 4
        const float tried = finite_inverse(0.1f * float(step) + float(n_max), largest), scale = 1.0f / tried;
        float error = 0.0f;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int nearest = nearest_int(tried * x[j]);
            const float level = float(step == 0 ? nearest & 255 : min(nearest, n_max));  // ggml keeps it in a byte
            const float difference = x[j] - scale * level;
            error += weights[j] * difference * difference;
        }
        if (step == 0 || error < best) best = error, inverse = tried;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) q[j] = min(nearest_int(inverse * x[j]), n_max);
    return descend<true>(x, weights, q, 0, n_max);
}
