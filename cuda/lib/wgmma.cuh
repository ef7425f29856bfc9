// Hopper (sm_90a): wgmma, bulk copies and tensor copies. One small function per instruction. The emulator executes them
// at once. bulk_copy.cuh has mbarriers and the exchange of registers between warpgroups.
//
// A warpgroup is four consecutive warps, the first of which has an index divisible by four.
#pragma once
#include "lib/bulk_copy.cuh"

// ---- copies ------------------------------------------------------------------------------------------------------

// Copies `bytes` (a multiple of 16, as both addresses) from global to shared memory; the barrier counts them.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, int bytes, uint64_t* barrier) {
#if EMULATED
    EmulatedBarrier::of(barrier).copy(shared, global, bytes);
#else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
#endif
}
// The same copy to all BLOCKS CTAs of the cluster, at the same offset of each CTA's shared memory, counted by the
// barrier at the same offset.
template <int BLOCKS>
__device__ __forceinline__ void bulk_copy_to_all(void* shared, const void* global, int bytes, uint64_t* barrier) {
    if constexpr (BLOCKS == 1)
        bulk_copy(shared, global, bytes, barrier);
    else
#if EMULATED
        for (int i = 0; i < BLOCKS; ++i) {
            void* remote = emulator::cluster_shared(barrier, i);
            bulk_copy(emulator::cluster_shared(shared, i), global, bytes, static_cast<uint64_t*>(remote));
        }
#else
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::
                "r"(shared_address(shared)),
            "l"(global), "r"(bytes), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>((1 << BLOCKS) - 1))
            : "memory");
#endif
}
// A warp arrives at the barrier at this offset in each CTA of the cluster, to say that it has read a stage. The arrival
// has no cluster-scope release, which would order all memory accesses.
template <int BLOCKS>
__device__ __forceinline__ void mbarrier_arrive_at_all(uint64_t* barrier, int lane) {
    if constexpr (BLOCKS == 1) {
        if (lane == 0) mbarrier_arrive(barrier);
    } else if (lane < BLOCKS) {
#if EMULATED
        mbarrier_arrive(static_cast<uint64_t*>(emulator::cluster_shared(barrier, lane)));
#else
        asm volatile(
            "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
            "r"(lane)
            : "memory");
#endif
    }
}

// A tensor map: how an f16 matrix [rows][columns] lies in global memory, and the box that one copy takes. The driver
// makes it (Device.tensor_map); a kernel takes it as a __grid_constant__ parameter.
#if EMULATED
using TensorMap = emulator::TensorMap;
#define __grid_constant__
#else
struct alignas(64) TensorMap {
    uint64_t words[16];
};
#endif
// Copies the box at (row, column) to shared memory, in rows of 128 bytes with wgmma's swizzle; elements outside the
// matrix become 0. The barrier counts the bytes of the whole box.
__device__ __forceinline__ void tensor_copy(void* shared, const TensorMap& map, int row, int column,
                                            uint64_t* barrier) {
#if EMULATED
    EmulatedBarrier::of(barrier).copied(emulator::copy_box(shared, shared, map, row, column));
#else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
            "r"(shared_address(shared)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
        : "memory");
#endif
}
// The same copy to all BLOCKS CTAs of the cluster, as bulk_copy_to_all.
template <int BLOCKS>
__device__ __forceinline__ void tensor_copy_to_all(void* shared, const TensorMap& map, int row, int column,
                                                   uint64_t* barrier) {
#if EMULATED
    for (int i = 0; i < BLOCKS; ++i) {
        auto* remote = static_cast<uint64_t*>(emulator::cluster_shared(barrier, i));
        void* dst = emulator::cluster_shared(shared, i);
        EmulatedBarrier::of(remote).copied(emulator::copy_box(dst, shared, map, row, column));
    }
#else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>((1 << BLOCKS) - 1))
        : "memory");
#endif
}

// Copies `bytes` from shared to global memory. Preceding writes to shared memory must have passed async_fence and a
// barrier.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
#if EMULATED
    memcpy(global, shared, bytes);
#else
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n cp.async.bulk.commit_group;" ::"l"(global),
        "r"(shared_address(shared)), "r"(bytes)
        : "memory");
#endif
}
// Waits for this thread's bulk stores: until they have read shared memory (READ), or until they are complete.
template <bool READ>
__device__ __forceinline__ void bulk_store_wait() {
#if !EMULATED
    if constexpr (READ)
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    else
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}
// Makes this thread's writes to shared memory visible to bulk copies and to wgmma.
__device__ __forceinline__ void async_fence() {
#if !EMULATED
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// ---- MMAs --------------------------------------------------------------------------------------------------------
// D[64][N] = A[64][16] B[16][N] by a warpgroup, f32 = f16 x f16; ADD: D += A B. Warp w holds rows 16 w ... 16 w + 15 of
// A and D, laid out as in mma_m16n8k16: A in four registers; D of columns 8 i ... 8 i + 7 in d[4 i ... 4 i + 3].
//
// B lies in shared memory as N rows of 64 f16 elements (128 bytes), eight rows in sequence, at an address divisible by
// 1024: 16-byte piece c of row r is at position c ^ (r % 8) of its row (128-byte swizzle). An instruction takes 16 of
// the 64 columns. A may lie in shared memory in the same layout. With LINES_OF_32, B lies as N rows of 16 f16 elements
// (32 bytes) at an address divisible by 256: piece c of two is at position c ^ (r / 4 % 2).

// Upper half of a wgmma descriptor: the stride of eight rows, and the swizzle.
constexpr uint32_t LINES_OF_128 = 0x40000040, LINES_OF_32 = 0xc0000010;

// Lower half of the descriptor of B (or A) at its first column; each further 16 columns add 2. All lanes take the value
// of lane 0, so that the compiler knows that the descriptor and all values derived from it are uniform, as the
// instructions require.
__device__ __forceinline__ uint32_t wgmma_operand(const void* rows) {
    constexpr uint32_t unused = 1 << 16;
    return __shfl_sync(0xffffffffu, unused | (shared_address(rows) & 0x3ffff) >> 4, 0);
}
// Required before the first wgmma, and after writes to registers that the next wgmma reads.
__device__ __forceinline__ void wgmma_fence() {
#if !EMULATED
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// Ends a group of wgmmas.
__device__ __forceinline__ void wgmma_commit() {
#if !EMULATED
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until at most the last PENDING groups are in flight.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
#if !EMULATED
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}

#define D_4 "%0, %1, %2, %3"
#define D_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define D_16 D_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define D_32 D_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define D_48 D_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define D_64                                                                                  \
    D_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
         "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define D_80 D_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define D_96 D_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define D_112 D_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define D_128 D_112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define INOUT_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define INOUT_8(i)                                                                                              \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define INOUT_16(i) INOUT_8(i), INOUT_8(i + 8)
#define INOUT_32(i) INOUT_16(i), INOUT_16(i + 16)
#define INOUT_48(i) INOUT_32(i), INOUT_16(i + 32)
#define INOUT_64(i) INOUT_32(i), INOUT_32(i + 32)
#define INOUT_128(i) INOUT_64(i), INOUT_64(i + 64)
#define WGMMA(n, sums, inputs, last, add, lines, ...)                                                     \
    asm volatile("{\n.reg .b64 b;\nmov.b64 b, {" last ", " lines                                          \
                 "};\n"                                                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" sums "}, " inputs ", b, " add \
                 ", 1, 1, 0;\n}"                                                                          \
                 : __VA_ARGS__                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(ADD), "n"(LINES))

template <int N, bool ADD = true, uint32_t LINES = LINES_OF_128>
__device__ __forceinline__ void wgmma_f16(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b AND_CALLER) {
    static_assert(N == 8 || N == 16 || (N % 32 == 0 && N <= 256), "columns of a product");
#if EMULATED
    emulator::wgmma<N, ADD>(d, a, b, LINES, {"wgmma_f16", file, line});
#else
    if constexpr (N == 8)
        WGMMA(8, D_4, "{%4, %5, %6, %7}", "%8", "%9", "%10", INOUT_4(0));
    else if constexpr (N == 16)
        WGMMA(16, D_8, "{%8, %9, %10, %11}", "%12", "%13", "%14", INOUT_8(0));
    else if constexpr (N == 32)
        WGMMA(32, D_16, "{%16, %17, %18, %19}", "%20", "%21", "%22", INOUT_16(0));
    else if constexpr (N == 64)
        WGMMA(64, D_32, "{%32, %33, %34, %35}", "%36", "%37", "%38", INOUT_32(0));
    else if constexpr (N == 96)
        WGMMA(96, D_48, "{%48, %49, %50, %51}", "%52", "%53", "%54", INOUT_48(0));
    else if constexpr (N == 128)
        WGMMA(128, D_64, "{%64, %65, %66, %67}", "%68", "%69", "%70", INOUT_64(0));
    else if constexpr (N == 160)
        WGMMA(160, D_80, "{%80, %81, %82, %83}", "%84", "%85", "%86", INOUT_64(0), INOUT_16(64));
    else if constexpr (N == 192)
        WGMMA(192, D_96, "{%96, %97, %98, %99}", "%100", "%101", "%102", INOUT_64(0), INOUT_32(64));
    else if constexpr (N == 224)
        WGMMA(224, D_112, "{%112, %113, %114, %115}", "%116", "%117", "%118", INOUT_64(0), INOUT_48(64));
    else
        WGMMA(256, D_128, "{%128, %129, %130, %131}", "%132", "%133", "%134", INOUT_128(0));
#endif
}
#undef WGMMA

// The same for N = 64, with A in shared memory.
template <bool ADD = true>
__device__ __forceinline__ void wgmma_f16(float (&d)[32], uint32_t a, uint32_t b AND_CALLER) {
#if EMULATED
    uint32_t registers[4];
    emulator::wgmma_rows(registers, a);
    emulator::wgmma<64, ADD>(d, registers, b, LINES_OF_128, {"wgmma_f16", file, line});
#else
    asm volatile(
        "{\n.reg .b64 a, b;\nmov.b64 a, {%32, %35};\nmov.b64 b, {%33, %35};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" D_32 "}, a, b, %34, 1, 1, 0, 0;\n}"
        : INOUT_32(0)
        : "r"(a), "r"(b), "n"(ADD), "n"(LINES_OF_128));
#endif
}

// Orders accesses to these registers before or after this point: the compiler does not know of wgmmas in flight.
template <int N>
__device__ __forceinline__ void wgmma_hold(float (&d)[N]) {
#if !EMULATED
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
#endif
}
template <int N>
__device__ __forceinline__ void wgmma_hold(uint32_t (&a)[N][4]) {
#if !EMULATED
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
#endif
}
