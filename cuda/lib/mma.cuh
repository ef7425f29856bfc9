// Tensor-core MMAs (mma.sync) and matrix loads from shared memory (ldmatrix), for sm_75 and later; common.cuh says how
// these functions are written.
//
// D[16][8] += A[16][K] B[K][8]. Lane l holds, with g = l / 4 and t = l % 4, these elements (row, column):
//
// | operand | elements                                                                          |
// | D       | (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)                                |
// | A       | registers (g, k) and (g + 8, k) for the first half of K, then for the second half |
// | B       | registers (k, g) for the first half of K, then for the second half                |
//
// The elements of a register of A or B are k = E t ... E t + E - 1 of its half of K, with E = 2 for 16-bit and E = 4
// for 8-bit types.
#pragma once
#include "lib/common.cuh"

// R: register type of D, "f" or "r". MMA has four registers of A and two of B; MMA_OF_HALF two and one; MMA_8X8 is an 8
// x 8 MMA with one of each.
#define MMA(R, shape_and_types)                                       \
    asm volatile("mma.sync.aligned." shape_and_types                  \
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "    \
                 "{%0, %1, %2, %3};"                                  \
                 : "+" R(d[0]), "+" R(d[1]), "+" R(d[2]), "+" R(d[3]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
#define MMA_OF_HALF(R, shape_and_types)                                                                     \
    asm volatile("mma.sync.aligned." shape_and_types " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
                 : "+" R(d[0]), "+" R(d[1]), "+" R(d[2]), "+" R(d[3])                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(b))
#define MMA_8X8(shape_and_types, first, a, b)                                           \
    asm volatile("mma.sync.aligned." shape_and_types " {%0, %1}, {%2}, {%3}, {%0, %1};" \
                 : "+r"(d[first]), "+r"(d[first + 1])                                   \
                 : "r"(a), "r"(b))

// f16, K = 8.
__device__ __forceinline__ void mma_m16n8k8_f16(float (&d)[4], const uint32_t (&a)[2], uint32_t b AND_CALLER) {
#if EMULATED
    emulator::multiply<emulator::F16, 1>(d, a, &b, {"mma_m16n8k8_f16", file, line});
#else
    MMA_OF_HALF("f", "m16n8k8.row.col.f32.f16.f16.f32");
#endif
}

// f16, K = 16; below sm_80 two MMAs with K = 8.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2] AND_CALLER) {
#if EMULATED
    emulator::multiply<emulator::F16, 2>(d, a, b, {"mma_m16n8k16_f16", file, line});
#elif ARCH >= 800
    MMA("f", "m16n8k16.row.col.f32.f16.f16.f32");
#else
    mma_m16n8k8_f16(d, {a[0], a[1]}, b[0]);
    mma_m16n8k8_f16(d, {a[2], a[3]}, b[1]);
#endif
}

// bf16, K = 16. Below sm_80 there is no bf16 MMA: kernels for these GPUs convert to f16.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2] AND_CALLER) {
#if EMULATED
    emulator::multiply<emulator::Bf16, 2>(d, a, b, {"mma_m16n8k16_bf16", file, line});
#elif ARCH >= 800
    MMA("f", "m16n8k16.row.col.f32.bf16.bf16.f32");
#else
    __trap();
#endif
}

// int8, K = 32; below sm_80 four MMAs of 8 x 8 x 16: register i of A has rows i % 2 and half i / 2 of K.
__device__ __forceinline__ void mma_m16n8k32_s8(int (&d)[4], const uint32_t (&a)[4],
                                                const uint32_t (&b)[2] AND_CALLER) {
#if EMULATED
    emulator::multiply<emulator::S8, 2>(d, a, b, {"mma_m16n8k32_s8", file, line});
#elif ARCH >= 800
    MMA("r", "m16n8k32.row.col.s32.s8.s8.s32");
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) MMA_8X8("m8n8k16.row.col.s32.s8.s8.s32", i % 2 * 2, a[i], b[i / 2]);
#endif
}

// Unsigned bytes times signed bytes, K = 32; below sm_80 four MMAs, as above.
__device__ __forceinline__ void mma_m16n8k32_u8s8(int (&d)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2] AND_CALLER) {
#if EMULATED
    emulator::multiply<emulator::S8, 2, emulator::U8>(d, a, b, {"mma_m16n8k32_u8s8", file, line});
#elif ARCH >= 800
    MMA("r", "m16n8k32.row.col.s32.u8.s8.s32");
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) MMA_8X8("m8n8k16.row.col.s32.u8.s8.s32", i % 2 * 2, a[i], b[i / 2]);
#endif
}

// Unsigned bytes times signed bytes, K = 16.
__device__ __forceinline__ void mma_m16n8k16_u8s8(int (&d)[4], const uint32_t (&a)[2], uint32_t b AND_CALLER) {
#if EMULATED
    emulator::multiply<emulator::S8, 1, emulator::U8>(d, a, &b, {"mma_m16n8k16_u8s8", file, line});
#elif ARCH >= 800
    MMA_OF_HALF("r", "m16n8k16.row.col.s32.u8.s8.s32");
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) MMA_8X8("m8n8k16.row.col.s32.u8.s8.s32", 2 * i, a[i], b);
#endif
}

// E4M3, K = 32; sm_89 and later only.
__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2] AND_CALLER) {
#if EMULATED
    emulator::multiply<emulator::E4m3, 2>(d, a, b, {"mma_m16n8k32_e4m3", file, line});
#elif ARCH >= 890
    MMA("f", "m16n8k32.row.col.f32.e4m3.e4m3.f32");
#else
    __trap();
#endif
}

#undef MMA
#undef MMA_OF_HALF
#undef MMA_8X8

// Loads COUNT (1, 2 or 4) matrices of 8 x 8 16-bit elements from shared memory. Lane l passes the address of row l % 8
// of matrix l / 8, and receives elements (g, 2t), (g, 2t + 1) of each matrix; TRANSPOSED: (2t, g), (2t + 1, g). The row
// is OFFSET bytes after `row`, which takes no instruction.
template <int COUNT, bool TRANSPOSED = false, int OFFSET = 0>
__device__ __forceinline__ void load_matrix(uint32_t (&m)[COUNT], const void* row AND_CALLER) {
    static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4, "ldmatrix loads 1, 2 or 4 matrices");
#if EMULATED
    emulator::load_matrix<COUNT, TRANSPOSED>(m, static_cast<const uint8_t*>(row) + OFFSET, {"load_matrix", file, line});
#else
#define LDMATRIX(shape, registers, ...)                                                 \
    if constexpr (TRANSPOSED)                                                           \
        asm volatile("ldmatrix.sync.aligned.m8n8." shape ".trans.shared.b16 " registers \
                     : __VA_ARGS__                                                      \
                     : "r"(shared_address(row)), "n"(OFFSET)                            \
                     : "memory");                                                       \
    else                                                                                \
        asm volatile("ldmatrix.sync.aligned.m8n8." shape ".shared.b16 " registers       \
                     : __VA_ARGS__                                                      \
                     : "r"(shared_address(row)), "n"(OFFSET)                            \
                     : "memory")
    if constexpr (COUNT == 1) {
        LDMATRIX("x1", "{%0}, [%1 + %2];", "=r"(m[0]));
    } else if constexpr (COUNT == 2) {
        LDMATRIX("x2", "{%0, %1}, [%2 + %3];", "=r"(m[0]), "=r"(m[1]));
    } else {
        LDMATRIX("x4", "{%0, %1, %2, %3}, [%4 + %5];", "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]));
    }
#undef LDMATRIX
#endif
}
