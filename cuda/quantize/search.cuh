// Searches for the scale, or for scale and minimum, with the least rounding error of a group of weights. The searches
// are those of ggpy/formats/search.py and ggml-quants.c. One thread searches one group, in registers.
//
// The bytes of a file depend on every rounding, so each operation and the order of every sum equal those of the two
// sources. This needs separate products and sums (NVRTC's --fmad=false). This file knows no block format.
#pragma once
#include "lib/common.cuh"

// Groups whose largest magnitude is below this limit get the scale 0 (ggml's GROUP_MAX_EPS).
constexpr float ALL_ZERO = 1e-15f;

// Whether x is neither infinite nor NaN.
__device__ __forceinline__ bool is_number(float x) { return fabsf(x) <= LARGEST_FLOAT; }

// Rounds to the nearest integer, ties to even. Beyond 2^22, which no caller should reach, returns the same wrong
// integer as ggml's bit trick.
__device__ __forceinline__ int nearest_int(float x) {
    if (x != x) return 0;  // the bit trick returns 0 for the NaN of x86
    return (__float_as_int(x + 12582912.0f) & 0x007fffff) - 0x00400000;
}

__device__ __forceinline__ int clamp(int q, int lowest, int highest) { return min(max(q, lowest), highest); }

// Returns numerator / x, or 0 if the quotient overflows.
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

// Returns the first element of the largest magnitude; +0 if all are zeros.
template <int N>
__device__ __forceinline__ float first_extreme(const float (&x)[N]) {
    float extreme = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) extreme = fabsf(x[j]) > fabsf(extreme) ? x[j] : extreme;
    return extreme;
}

// ---- x ~ scale * q, q from -n_max to n_max - 1 -------------------------------------------------------------------

// The result for a group: the scale, and `inverse`, from which level() computes q.
struct ScaleFit {
    float scale, inverse;
    bool empty;  // all zeros: then q is -n_max

    __device__ __forceinline__ int level(float x, int n_max) const {
        return empty ? -n_max : clamp(nearest_int(x * inverse), -n_max, n_max - 1);
    }
};

// Tries 19 scales around the scale that gives the extreme weight q = -n_max (ggml make_qx_quants).
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

// ---- x ~ scale * q + minimum, q from 0 to N_MAX --------------------------------------------------------------------

// Which search of ggml to follow. They differ where a rounded value leaves the range.
//
//        SQUARED     make_qkx2_quants with squared errors
//        ABSOLUTE    make_qkx2_quants with absolute errors
//        WEIGHTED    make_qkx3_quants, for an importance matrix
enum class Errors { SQUARED, ABSOLUTE, WEIGHTED };

template <int N_MAX, Errors ERRORS>
__device__ __forceinline__ int level_of(float product) {
    if (ERRORS == Errors::WEIGHTED) {  // make_qkx3_quants clamps before it rounds
        product = product > 0.0f ? fminf(product, float(N_MAX)) : 0.0f;
    }
    return clamp(nearest_int(product), 0, N_MAX);
}

// The result for a group: scale, minimum <= 0, and q = level_of((x - origin) * inverse).
struct LineFit {
    float scale, minimum, inverse, origin;
};

// For i = 0 ... last: rounds x with N_MAX + first + i * delta steps over the range, and fits scale and minimum to the
// rounded values by least squares. Returns the fit with the least error. The minimum of the best fit so far is the
// origin of the next rounding.
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

// ---- coordinate descent --------------------------------------------------------------------------------------------

// Changes one q at a time while sum(w x q)^2 / sum(w q^2) grows, in at most five rounds. Returns the scale sum(w x q) /
// sum(w q^2), or 0 if the divisor is not positive. BYTES: ggml's variant for positive x, where q wraps as a byte and
// both partial sums must be positive.
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

// x ~ scale * q, q from -n_max to n_max - 1, with errors weighted by x^2 (ggml make_q3_quants). Returns the scale.
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

// x ~ scale * q for x >= 0, q from 0 to n_max (ggml make_qp_quants). Tries nine scales around the scale that gives the
// largest x q = n_max, then changes one q at a time. Returns the scale.
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
            const float level = float(step == 0 ? nearest & 255 : min(nearest, n_max));  // ggml stores a byte first
            const float difference = x[j] - scale * level;
            error += weights[j] * difference * difference;
        }
        if (step == 0 || error < best) best = error, inverse = tried;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) q[j] = min(nearest_int(inverse * x[j]), n_max);
    return descend<true>(x, weights, q, 0, n_max);
}
