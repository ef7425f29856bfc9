// CUDA's integer, conversion, load and single-precision intrinsics, implemented from their definitions.
#pragma once

// ---- bits ------------------------------------------------------------------------------------------------------

template <typename To, typename From>
To emulator_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
inline int __float_as_int(float x) { return emulator_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emulator_bits<unsigned>(x); }
inline float __int_as_float(int x) { return emulator_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emulator_bits<float>(x); }
inline long long __double_as_longlong(double x) { return emulator_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emulator_bits<double>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) result |= (x >> i & 1) << (31 - i);
    return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((uint64_t(high) << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = uint64_t(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        unsigned choice = selector >> 4 * i & 15;
        unsigned byte = unsigned(bytes >> 8 * (choice & 7)) & 255;
        if (choice & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * i;
    }
    return result;
}

// ---- integer arithmetic ----------------------------------------------------------------------------------------

inline int __mul24(int a, int b) { return int(unsigned(a << 8 >> 8) * unsigned(b << 8 >> 8)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __mulhi(int a, int b) { return int(int64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __sad(int a, int b, unsigned c) { return c + unsigned(std::abs(int64_t(a) - b)); }

template <typename A, typename B, typename C>
C emulator_dp4a(C a, C b, C c) {
    unsigned sum = unsigned(c);
    for (int i = 0; i < 4; ++i) sum += unsigned(int(A(unsigned(a) >> 8 * i)) * int(B(unsigned(b) >> 8 * i)));
    return C(sum);
}
inline int __dp4a(int a, int b, int c) { return emulator_dp4a<int8_t, int8_t>(a, b, c); }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) { return emulator_dp4a<uint8_t, uint8_t>(a, b, c); }

// SIMD functions on four bytes.
template <typename T, typename Operation>
unsigned emulator_bytes(unsigned a, unsigned b, Operation operation) {
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= (unsigned(operation(int(T(a >> 8 * i)), int(T(b >> 8 * i)))) & 255) << 8 * i;
    return result;
}
inline int emulator_clamp(int x, int low, int high) { return std::min(std::max(x, low), high); }
inline unsigned __vadd4(unsigned a, unsigned b) {
    return emulator_bytes<uint8_t>(a, b, [](int x, int y) { return x + y; });
}
inline unsigned __vsub4(unsigned a, unsigned b) {
    return emulator_bytes<uint8_t>(a, b, [](int x, int y) { return x - y; });
}
inline unsigned __vaddss4(unsigned a, unsigned b) {
    return emulator_bytes<int8_t>(a, b, [](int x, int y) { return emulator_clamp(x + y, -128, 127); });
}
inline unsigned __vsubss4(unsigned a, unsigned b) {
    return emulator_bytes<int8_t>(a, b, [](int x, int y) { return emulator_clamp(x - y, -128, 127); });
}
inline unsigned __vmaxs4(unsigned a, unsigned b) {
    return emulator_bytes<int8_t>(a, b, [](int x, int y) { return std::max(x, y); });
}
inline unsigned __vmins4(unsigned a, unsigned b) {
    return emulator_bytes<int8_t>(a, b, [](int x, int y) { return std::min(x, y); });
}
inline unsigned __vabs4(unsigned a) {
    return emulator_bytes<int8_t>(a, 0, [](int x, int) { return std::abs(x); });
}
inline unsigned __vneg4(unsigned a) {
    return emulator_bytes<int8_t>(a, 0, [](int x, int) { return -x; });
}
inline unsigned __vcmpeq4(unsigned a, unsigned b) {
    return emulator_bytes<uint8_t>(a, b, [](int x, int y) { return x == y ? 255 : 0; });
}
inline unsigned __vcmpne4(unsigned a, unsigned b) {
    return emulator_bytes<uint8_t>(a, b, [](int x, int y) { return x != y ? 255 : 0; });
}
inline unsigned __vcmpgtu4(unsigned a, unsigned b) {
    return emulator_bytes<uint8_t>(a, b, [](int x, int y) { return x > y ? 255 : 0; });
}
inline unsigned __vcmpges4(unsigned a, unsigned b) {
    return emulator_bytes<int8_t>(a, b, [](int x, int y) { return x >= y ? 255 : 0; });
}

// min and max of two numbers of any types, like CUDA's overloads.
template <typename A, typename B>
std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return std::fmin(T(a), T(b));
    else
        return T(a) < T(b) ? T(a) : T(b);
}
template <typename A, typename B>
std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return std::fmax(T(a), T(b));
    else
        return T(a) > T(b) ? T(a) : T(b);
}
using std::abs;
using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

// ---- conversions -----------------------------------------------------------------------------------------------

// Converts a float to an integer like the hardware: saturates, and NaN gives 0.
template <typename T>
T emulator_integer(double rounded) {
    if (std::isnan(rounded)) return 0;
    double low = double(std::numeric_limits<T>::min()), high = double(std::numeric_limits<T>::max());
    if (rounded <= low) return std::numeric_limits<T>::min();
    return rounded >= high ? std::numeric_limits<T>::max() : T(rounded);
}
inline int __float2int_rn(float x) { return emulator_integer<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return emulator_integer<int>(std::trunc(x)); }
inline int __float2int_rd(float x) { return emulator_integer<int>(std::floor(x)); }
inline int __float2int_ru(float x) { return emulator_integer<int>(std::ceil(x)); }
inline unsigned __float2uint_rn(float x) { return emulator_integer<unsigned>(std::nearbyint(x)); }
inline unsigned __float2uint_rz(float x) { return emulator_integer<unsigned>(std::trunc(x)); }
inline unsigned __float2uint_rd(float x) { return emulator_integer<unsigned>(std::floor(x)); }
inline long long __float2ll_rn(float x) { return emulator_integer<long long>(std::nearbyint(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __double2float_rn(double x) { return float(x); }

// ---- loads and stores ------------------------------------------------------------------------------------------

#define EMULATOR_LOAD(name)    \
    template <typename T>      \
    T name(const T* address) { \
        return *address;       \
    }
#define EMULATOR_STORE(name)                             \
    template <typename T>                                \
    void name(T* address, std::common_type_t<T> value) { \
        *address = value;                                \
    }
EMULATOR_LOAD(__ldg)
EMULATOR_LOAD(__ldca)
EMULATOR_LOAD(__ldcg)
EMULATOR_LOAD(__ldcs)
EMULATOR_LOAD(__ldcv)
EMULATOR_LOAD(__ldlu)
EMULATOR_STORE(__stcg)
EMULATOR_STORE(__stcs)
EMULATOR_STORE(__stwb)
EMULATOR_STORE(__stwt)

#define EMULATOR_VECTOR2(T, S) \
    inline T make_##T(S x, S y) { return T{x, y}; }
#define EMULATOR_VECTOR3(T, S) \
    inline T make_##T(S x, S y, S z) { return T{x, y, z}; }
#define EMULATOR_VECTOR4(T, S) \
    inline T make_##T(S x, S y, S z, S w) { return T{x, y, z, w}; }
#if !defined(__VECTOR_FUNCTIONS_H__)
EMULATOR_VECTOR2(int2, int)
EMULATOR_VECTOR2(uint2, unsigned)
EMULATOR_VECTOR2(float2, float)
EMULATOR_VECTOR2(double2, double)
EMULATOR_VECTOR2(short2, short)
EMULATOR_VECTOR2(ushort2, unsigned short)
EMULATOR_VECTOR2(char2, signed char)
EMULATOR_VECTOR2(uchar2, unsigned char)
EMULATOR_VECTOR2(ulonglong2, unsigned long long)
EMULATOR_VECTOR3(int3, int)
EMULATOR_VECTOR3(uint3, unsigned)
EMULATOR_VECTOR3(float3, float)
EMULATOR_VECTOR4(int4, int)
EMULATOR_VECTOR4(uint4, unsigned)
EMULATOR_VECTOR4(float4, float)
EMULATOR_VECTOR4(short4, short)
EMULATOR_VECTOR4(ushort4, unsigned short)
EMULATOR_VECTOR4(char4, signed char)
EMULATOR_VECTOR4(uchar4, unsigned char)
#endif

// ---- single precision ------------------------------------------------------------------------------------------

inline float rsqrtf(float x) { return float(1.0 / std::sqrt(double(x))); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline void __sincosf(float x, float* sine, float* cosine) { sincosf(x, sine, cosine); }
inline float __saturatef(float x) { return std::isnan(x) ? 0.0f : fminf(fmaxf(x, 0.0f), 1.0f); }
// sin(pi x), exact at multiples of 1/2, because the argument is reduced before the multiplication by pi.
inline float sinpif(float x) {
    double turn = std::fmod(double(x), 2.0);
    if (turn == std::floor(turn)) return std::copysign(0.0f, x);
    return float(std::sin(turn * 3.14159265358979323846));
}
inline float cospif(float x) {
    double turn = std::fabs(std::fmod(double(x), 2.0));
    if (turn == 0.5 || turn == 1.5) return 0.0f;
    return float(std::cos(turn * 3.14159265358979323846));
}
inline void sincospif(float x, float* sine, float* cosine) {
    *sine = sinpif(x);
    *cosine = cospif(x);
}
