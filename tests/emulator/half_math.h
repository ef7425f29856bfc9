// The f16 and bfloat16 functions that CUDA's headers define only for the GPU.
#pragma once

namespace emulator {
inline double wide(__half x) { return double(__half2float(x)); }
inline double wide(__nv_bfloat16 x) { return double(__bfloat162float(x)); }
// Computes in double and rounds once.
inline void narrow(__half& to, double x) { to = __double2half(x); }
inline void narrow(__nv_bfloat16& to, double x) { to = __double2bfloat16(x); }
template <typename T>
T rounded(double x) {
    T result;
    narrow(result, x);
    return result;
}
}  // namespace emulator

#define EMULATOR_HALF_FMA(T, T2)                                                                                \
    inline T __hfma(T a, T b, T c) {                                                                            \
        return emulator::rounded<T>(emulator::wide(a) * emulator::wide(b) + emulator::wide(c));                 \
    }                                                                                                           \
    inline T __hfma_relu(T a, T b, T c) {                                                                       \
        return emulator::rounded<T>(std::fmax(emulator::wide(a) * emulator::wide(b) + emulator::wide(c), 0.0)); \
    }                                                                                                           \
    inline T2 __hfma2(T2 a, T2 b, T2 c) { return T2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); }
EMULATOR_HALF_FMA(__half, __half2)
EMULATOR_HALF_FMA(__nv_bfloat16, __nv_bfloat162)

#define EMULATOR_HALF_FUNCTION(name, T, T2, expression) \
    inline T h##name(T value) {                         \
        double x = emulator::wide(value);               \
        return emulator::rounded<T>(expression);        \
    }                                                   \
    inline T2 h2##name(T2 value) { return T2(h##name(value.x), h##name(value.y)); }
#define EMULATOR_HALF_FUNCTIONS(T, T2)                       \
    EMULATOR_HALF_FUNCTION(exp, T, T2, std::exp(x))          \
    EMULATOR_HALF_FUNCTION(exp2, T, T2, std::exp2(x))        \
    EMULATOR_HALF_FUNCTION(log, T, T2, std::log(x))          \
    EMULATOR_HALF_FUNCTION(log2, T, T2, std::log2(x))        \
    EMULATOR_HALF_FUNCTION(sqrt, T, T2, std::sqrt(x))        \
    EMULATOR_HALF_FUNCTION(rsqrt, T, T2, 1.0 / std::sqrt(x)) \
    EMULATOR_HALF_FUNCTION(rcp, T, T2, 1.0 / x)              \
    EMULATOR_HALF_FUNCTION(sin, T, T2, std::sin(x))          \
    EMULATOR_HALF_FUNCTION(cos, T, T2, std::cos(x))          \
    EMULATOR_HALF_FUNCTION(floor, T, T2, std::floor(x))      \
    EMULATOR_HALF_FUNCTION(ceil, T, T2, std::ceil(x))        \
    EMULATOR_HALF_FUNCTION(rint, T, T2, std::nearbyint(x))
EMULATOR_HALF_FUNCTIONS(__half, __half2)
EMULATOR_HALF_FUNCTIONS(__nv_bfloat16, __nv_bfloat162)

inline int __half2int_rn(__half x) { return __float2int_rn(__half2float(x)); }
inline short __half2short_rn(__half x) { return emulator_integer<short>(std::nearbyint(__half2float(x))); }
