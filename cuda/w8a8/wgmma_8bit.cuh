// wgmma of 8-bit operands by one warpgroup:
//
//        D[64, N] (+)= A[64, 32] B[32, N]        int32 = int8 x int8, or float32 = E4M3 x E4M3
//
// The operands are as in wgmma.cuh, with 32 columns instead of 16. A is in registers, in the layout of an mma of 32
// columns. B is N swizzled rows of 128 bytes in shared memory; an instruction reads 32 bytes of each row.
#pragma once
#include "w8a8/w8a8.cuh"
#include "lib/wgmma.cuh"

#define SUMS_8(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define SUMS_16(c, i) SUMS_8(c, i), SUMS_8(c, i + 8)
#define SUMS_32(c, i) SUMS_16(c, i), SUMS_16(c, i + 16)
#define SUMS_64(c, i) SUMS_32(c, i), SUMS_32(c, i + 32)
#define SUMS_128(c, i) SUMS_64(c, i), SUMS_64(c, i + 64)
#define WGMMA(n, types, sums, inputs, desc, add, lines, end, ...)                                                  \
    asm volatile("{\n.reg .b64 b;\nmov.b64 b, {" desc ", " lines                                                   \
                 "};\n"                                                                                            \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32." types " {" sums "}, " inputs ", b, " add end ";\n}" \
                 : __VA_ARGS__                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(ADD), "n"(LINES_OF_128))
#define WGMMA_OF(c, types, end)                                                                   \
    if constexpr (N == 16)                                                                        \
        WGMMA(16, types, D_8, "{%8, %9, %10, %11}", "%12", "%13", "%14", end, SUMS_8(c, 0));      \
    else if constexpr (N == 32)                                                                   \
        WGMMA(32, types, D_16, "{%16, %17, %18, %19}", "%20", "%21", "%22", end, SUMS_16(c, 0));  \
    else if constexpr (N == 64)                                                                   \
        WGMMA(64, types, D_32, "{%32, %33, %34, %35}", "%36", "%37", "%38", end, SUMS_32(c, 0));  \
    else if constexpr (N == 128)                                                                  \
        WGMMA(128, types, D_64, "{%64, %65, %66, %67}", "%68", "%69", "%70", end, SUMS_64(c, 0)); \
    else                                                                                          \
        WGMMA(256, types, D_128, "{%128, %129, %130, %131}", "%132", "%133", "%134", end, SUMS_128(c, 0))

// D += A B; with ADD = false, D = A B.
template <class VALUES, int N, bool ADD = true>
__device__ __forceinline__ void wgmma_codes(typename Codes8<VALUES>::Sum (&d)[N / 2], const uint32_t (&a)[4],
                                            uint32_t b) {
    static_assert(N == 16 || N == 32 || N == 64 || N == 128 || N == 256, "columns of a product");
    if constexpr (Codes8<VALUES>::EXACT) {
        WGMMA_OF("+r", "s32.s8.s8", "");
    } else {
        WGMMA_OF("+f", "f32.e4m3.e4m3", ", 1, 1");
    }
}
#undef WGMMA
#undef WGMMA_OF

// Keeps the compiler from reading d before this call: the compiler does not know that wgmma writes d asynchronously.
template <int N>
__device__ __forceinline__ void wgmma_hold_codes(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
__device__ __forceinline__ void wgmma_hold_codes(int (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
