// What every kernel uses: integer types, dynamic shared memory, and PTX instructions without a C++ equivalent. mma.cuh
// has those of tensor cores, bulk_copy.cuh and wgmma.cuh those of Hopper.
//
// One small function per instruction, each with its meaning in plain C++ for the CPU emulator (GGPY_EMULATOR,
// tests/emulator) and a fallback for architectures without the instruction. Nothing here depends on formats or models.
#pragma once

#ifdef GGPY_EMULATOR
#include "emulator.h"
#define EMULATED 1
#else
#define EMULATED 0
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#endif

// The minimum compute capability of code that follows, 0 on the CPU: `#if ARCH >= 800`.
#ifdef __CUDA_ARCH__
#define ARCH __CUDA_ARCH__
#else
#define ARCH 0
#endif

// Last parameter of functions in which a thread may wait: in the emulator the caller's file and line, for its reports.
#if EMULATED
#define CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define AND_CALLER , CALLER
#define FORWARD_CALLER , file, line
#else
#define CALLER
#define AND_CALLER
#define FORWARD_CALLER
#endif

// `SHARED_DYNAMIC(float, tile);` declares `float* tile`: the CTA's dynamic shared memory, aligned to 128 bytes.
#if EMULATED
#define SHARED_DYNAMIC(type, name) type* name = static_cast<type*>(emulator::dynamic_shared())
#else
#define SHARED_DYNAMIC(type, name)                                   \
    extern __shared__ __align__(128) unsigned char shared_dynamic[]; \
    type* name = reinterpret_cast<type*>(shared_dynamic)
#endif

// The 32-bit shared-memory address that PTX instructions take.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
#if EMULATED
    return uint32_t(reinterpret_cast<uintptr_t>(pointer));
#else
    return uint32_t(__cvta_generic_to_shared(pointer));
#endif
}

// ---- numbers ---------------------------------------------------------------------------------------------------

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LARGEST_FLOAT = 3.40282347e38f;

// Rounds to the nearest f16; values out of range saturate at +-65504, and NaN stays NaN.
__device__ __forceinline__ __half saturated_half(float v) {
    constexpr float limit = 65504.0f;
    v = v > limit ? limit : v;
    return __float2half_rn(v < -limit ? -limit : v);
}

// Two floats as f16x2, saturated; NaN stays NaN.
__device__ __forceinline__ uint32_t saturated_half2(float low, float high) {
#if ARCH >= 800 && !EMULATED
    uint32_t pair;
    asm("{\n"
        ".reg .b32 v;\n"
        "cvt.rn.f16x2.f32 v, %2, %1;\n"
        "min.NaN.f16x2 v, v, %3;\n"
        "max.NaN.f16x2 %0, v, %4;\n"
        "}\n"
        : "=r"(pair)
        : "f"(low), "f"(high), "r"(0x7bff7bffu), "r"(0xfbfffbffu));
    return pair;
#else
    const __half2 pair = __halves2half2(saturated_half(low), saturated_half(high));
    return *reinterpret_cast<const uint32_t*>(&pair);
#endif
}

// Rounds two floats to the nearest bf16, ties to even, `low` in the lower half; NaN stays NaN.
__device__ __forceinline__ uint32_t floats_to_bf16(float low, float high) {
#if ARCH >= 800
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    uint32_t pair = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t bits = __float_as_uint(i ? high : low);
        const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        const uint32_t rounded = is_nan ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
        pair |= rounded << 16 * i;
    }
    return pair;
#endif
}

// 1 / v to about 22 bits, for normal v whose reciprocal is normal.
__device__ __forceinline__ float fast_reciprocal(float v) {
#if EMULATED
    return 1.0f / v;
#else
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
#endif
}

// Rounds two floats to the nearest E4M3 (sign, 4 exponent bits, 3 mantissa bits, no infinity), ties to even, `low` in
// the lower byte. Magnitudes above 448 become 448; NaN stays NaN.
__device__ __forceinline__ uint32_t floats_to_e4m3(float low, float high) {
#if ARCH >= 890
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    uint32_t pair = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t bits = __float_as_uint(i ? high : low), magnitude = bits & 0x7fffffff;
        const uint32_t rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1);  // drops 20 bits of the mantissa
        uint32_t code = min((rounded >> 20) - ((127 - 7) << 3), 0x7eu);
        const float size = __uint_as_float(magnitude);
        if (size < 0.015625f) code = uint32_t(__float2int_rn(size * 512.0f));  // subnormal: units of 2^-9
        if (magnitude > 0x7f800000) code = 0x7f;
        pair |= (code | (bits >> 24 & 0x80)) << 8 * i;
    }
    return pair;
#endif
}

// 2^x with an error of at most two units in the last place; results below 2^-126 become 0.
__device__ __forceinline__ float exp2_approx(float x) {
#if EMULATED
    return x < -126.0f ? 0.0f : exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// ---- bits ------------------------------------------------------------------------------------------------------

// Any function of three bits, bit by bit: lookup is f(0xF0, 0xCC, 0xAA).
template <int lookup>
__device__ __forceinline__ uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t result;
#if EMULATED
    result = 0;
    for (int i = 0; i < 8; ++i)
        if (lookup >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
#else
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(result) : "r"(a), "r"(b), "r"(c), "n"(lookup));
#endif
    return result;
}

// a * b as a multiplication that the compiler does not replace: selecting words by a factor of 0 or 1 leaves the logic
// units free.
__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
#if EMULATED
    return a * b;
#else
    uint32_t result;
    asm("mul.lo.u32 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
#endif
}

// Maximum of unsigned 16-bit integers, two at a time.
__device__ __forceinline__ uint32_t max_u16x2(uint32_t a, uint32_t b) {
#if ARCH >= 900
    uint32_t result;
    asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
#else
    return max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16;
#endif
}

// ---- order between kernels and CTAs ----------------------------------------------------------------------------

// Programmatic dependent launch (PDL). Before grid_dependency_wait a kernel must not read or write what an earlier
// kernel writes or reads; grid_dependency_launch lets the CTAs of the next kernel start.
__device__ __forceinline__ void grid_dependency_wait() {
#if ARCH >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// A non-negative integer that depends on the whole address.
__device__ __forceinline__ int made_of(const void* address) {
    const auto bits = reinterpret_cast<uint64_t>(address);
    return static_cast<int>(bits >> 32) | static_cast<int>(static_cast<uint32_t>(bits) >> 1);
}
// Waits after `made` (a non-negative value; for several values, their OR) has been computed. The compiler moves
// computations whose results are needed after the wait to after the wait, where each of them delays the kernel; the
// dependence on `made` keeps them before it.
__device__ __forceinline__ void grid_dependency_wait(int made) {
#if ARCH >= 900
    asm volatile("{\n.reg .pred p;\nsetp.ge.s32 p, %0, 0;\n@p griddepcontrol.wait;\n}" ::"r"(made) : "memory");
#endif
}
__device__ __forceinline__ void grid_dependency_launch() {
#if ARCH >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Barrier `id` (1 to 15; 0 is __syncthreads) of `threads` threads, a multiple of 32.
__device__ __forceinline__ void named_barrier_sync(int id, int threads AND_CALLER) {
#if EMULATED
    emulator::barrier(id, threads, 0, true, {"named_barrier_sync", file, line});
#else
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}
// Arrives at barrier `id` without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads AND_CALLER) {
#if EMULATED
    emulator::barrier(id, threads, 0, false, {"named_barrier_arrive", file, line});
#else
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

template <class Word>
struct FourOf;
template <>
struct FourOf<float> {
    using Type = float4;
};
template <>
struct FourOf<int> {
    using Type = int4;
};
template <class Word>
using Four = typename FourOf<Word>::Type;

// 16 bytes that other CTAs may read or write at the same time: each of the four words is either old or new.
#if EMULATED
template <class Words>
__device__ __forceinline__ Words load_relaxed(const Words* address) {
    return *address;
}
template <class Words>
__device__ __forceinline__ void store_relaxed(Words* address, const Words& v) {
    *address = v;
}
#else
#define RELAXED(FOUR, REGISTER)                                                                            \
    __device__ __forceinline__ FOUR load_relaxed(const FOUR* address) {                                    \
        FOUR v;                                                                                            \
        asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"                                \
                     : "=" REGISTER(v.x), "=" REGISTER(v.y), "=" REGISTER(v.z), "=" REGISTER(v.w)          \
                     : "l"(address)                                                                        \
                     : "memory");                                                                          \
        return v;                                                                                          \
    }                                                                                                      \
    __device__ __forceinline__ void store_relaxed(FOUR* address, const FOUR& v) {                          \
        asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), REGISTER(v.x), \
                     REGISTER(v.y), REGISTER(v.z), REGISTER(v.w)                                           \
                     : "memory");                                                                          \
    }
RELAXED(float4, "f")
RELAXED(int4, "r")
#undef RELAXED
#endif
// Returns the old value; orders both ways.
__device__ __forceinline__ uint32_t add_acquire_release(uint32_t* address, uint32_t value) {
    uint32_t old;
#if EMULATED
    old = *address;
    *address = old + value;
#else
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
#endif
    return old;
}

// Every loop that waits for another CTA must call this in its body.
__device__ __forceinline__ void spin_wait(CALLER) {
#if EMULATED
    emulator::yield({"spin_wait", file, line});
#else
    __nanosleep(20);
#endif
}

// Nanoseconds of a clock that all SMs share.
__device__ __forceinline__ uint64_t global_timer() {
#if EMULATED
    return uint64_t(clock64());
#else
    uint64_t time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
#endif
}

// ---- global memory ---------------------------------------------------------------------------------------------

// T name(const T*): one volatile load of 4, 8 or 16 bytes with the given cache operator. The compiler does not move it;
// it would move an ordinary load to its first use, after other waits.
#if EMULATED
#define GLOBAL_LOAD(name, way)                        \
    template <class T>                                \
    __device__ __forceinline__ T name(const T* src) { \
        return *src;                                  \
    }
#else
#define GLOBAL_LOAD(name, way)                                                                                    \
    template <class T>                                                                                            \
    __device__ __forceinline__ T name(const T* src) {                                                             \
        static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "one load");                           \
        uint32_t words[4];                                                                                        \
        if constexpr (sizeof(T) == 4)                                                                             \
            asm volatile("ld.global." way ".u32 %0, [%1];" : "=r"(words[0]) : "l"(src));                          \
        else if constexpr (sizeof(T) == 8)                                                                        \
            asm volatile("ld.global." way ".v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(src)); \
        else                                                                                                      \
            asm volatile("ld.global." way ".v4.u32 {%0, %1, %2, %3}, [%4];"                                       \
                         : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])                         \
                         : "l"(src));                                                                             \
        T v;                                                                                                      \
        memcpy(&v, words, sizeof v);                                                                              \
        return v;                                                                                                 \
    }
#endif
// For data that no kernel of the step writes.
GLOBAL_LOAD(load_now, "nc")
// For data read once (weights): does not allocate in L1.
GLOBAL_LOAD(load_streaming, "nc.L1::no_allocate")
// For parts of a 128-byte line that other warps read too: fetches the whole line into L2.
GLOBAL_LOAD(load_of_line, "cg.L2::128B")
#undef GLOBAL_LOAD

// Prefetches the cache line at `address` into L2; the address need not be valid.
__device__ __forceinline__ void prefetch_l2(const void* address) {
#if !EMULATED
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// ---- asynchronous copies into shared memory ----------------------------------------------------------------------

// Copies BYTES (4, 8 or 16) from global to shared memory, complete after cp_async_wait (and a barrier, for other
// threads). Only `valid` bytes are read; the rest becomes zero. Below sm_80 it is an ordinary copy.
template <int BYTES>
__device__ __forceinline__ void cp_async(void* shared, const void* global, int valid = BYTES AND_CALLER) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async moves 4, 8 or 16 bytes");
#if EMULATED
    emulator::async_copy(shared, global, BYTES, valid, {"cp_async", file, line});
#elif ARCH >= 800
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                     "r"(valid)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global),
                     "n"(BYTES), "r"(valid)
                     : "memory");
#else
    if (BYTES == 16 && valid == 16) {
        *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
        return;
    }
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i)
        static_cast<uint32_t*>(shared)[i] = 4 * i < valid ? static_cast<const uint32_t*>(global)[i] : 0u;
#endif
}
// Destination of a thread's copies in shared memory. With a cache policy and a partly uniform address, ptxas of CUDA
// 13.0 emits an instruction that faults; the result of a shuffle is never treated as uniform.
#if ARCH >= 900 && !EMULATED
using CopyTarget = uint32_t;
__device__ __forceinline__ CopyTarget copy_target(uint8_t* shared) {
    return __shfl_sync(0xffffffffu, shared_address(shared), threadIdx.x % 32);
}
#else
using CopyTarget = uint8_t*;
__device__ __forceinline__ CopyTarget copy_target(uint8_t* shared) { return shared; }
#endif

// Returns v, kept in a register. The compiler otherwise recomputes values of special registers, above all shared-memory
// addresses, at every use, which takes long; it cannot recompute the result of a shuffle. All lanes of the warp must
// call it.
template <class T>
__device__ __forceinline__ T kept(T v) {
    static_assert(sizeof(T) == 4, "one register");
#if EMULATED
    return v;
#else
    return __shfl_sync(0xffffffffu, v, threadIdx.x % 32);
#endif
}
template <class T>
__device__ __forceinline__ T* kept_shared(T* pointer) {
#if EMULATED
    return pointer;
#else
    return static_cast<T*>(__cvta_shared_to_generic(kept(shared_address(pointer))));
#endif
}

// Copies 16 bytes of data read once (weights), on lanes with `valid`, without a branch. `policy`: the L2 policy, as
// createpolicy returns it (sm_90); as a kernel parameter it takes no registers.
__device__ __forceinline__ void cp_async_streaming(CopyTarget dst, const void* global, uint64_t policy,
                                                   bool valid = true AND_CALLER) {
#if ARCH >= 900 && !EMULATED
    asm volatile(
        "{\n"
        ".reg .pred there;\n"
        "setp.ne.u32 there, %2, 0;\n"
        "@there cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %3;\n"
        "}\n" ::"r"(dst),
        "l"(global), "r"(static_cast<uint32_t>(valid)), "l"(policy)
        : "memory");
#elif ARCH >= 800 && !EMULATED
    asm volatile(
        "{\n"
        ".reg .pred there;\n"
        "setp.ne.u32 there, %2, 0;\n"
        "@there cp.async.cg.shared.global [%0], [%1], 16;\n"
        "}\n" ::"r"(shared_address(dst)),
        "l"(global), "r"(static_cast<uint32_t>(valid))
        : "memory");
#else
    if (valid) cp_async<16>(dst, global, 16 FORWARD_CALLER);
#endif
}
// Ends a group of copies.
__device__ __forceinline__ void cp_async_commit() {
#if EMULATED
    emulator::async_commit();
#elif ARCH >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most the last `pending` groups are in flight.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
#if EMULATED
    emulator::async_wait(pending);
#elif ARCH >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}
