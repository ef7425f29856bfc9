// Bulk copies by the copy engine (sm_90) and the mbarriers in shared memory that count their bytes.
//
// A phase of an mbarrier ends when `count` threads have arrived and all announced bytes have been copied. Waiting for
// parity 0 waits for the end of the first phase (then the third, ...); waiting for parity 1 of a fresh barrier returns
// at once.
#pragma once
#include "lib/common.cuh"

#if EMULATED
// The emulator's state in the eight bytes of an mbarrier.
struct EmulatedBarrier {
    uint16_t parity : 1, count : 15;
    uint16_t missing;  // arrivals missing in this phase
    int32_t bytes;     // bytes announced and not yet copied; negative: copied and not yet announced

    static EmulatedBarrier& of(uint64_t* barrier) { return *reinterpret_cast<EmulatedBarrier*>(barrier); }
    void settle() {
        if (missing == 0 && bytes == 0) parity ^= 1, missing = count;
    }
    void copy(void* shared, const void* global, int size) {
        memcpy(shared, global, size);
        copied(size);
    }
    void copied(int size) { bytes -= size, settle(); }
};
#endif

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int count) {
#if EMULATED
    EmulatedBarrier::of(barrier) = {0, uint16_t(count), uint16_t(count), 0};
#else
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
#endif
}
// Makes the initialised barriers visible to other threads and to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
#if !EMULATED
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
#if EMULATED
    EmulatedBarrier& b = EmulatedBarrier::of(barrier);
    --b.missing, b.settle();
#else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}
// Arrives, and announces bytes that bulk copies will bring.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, int bytes) {
#if EMULATED
    EmulatedBarrier& b = EmulatedBarrier::of(barrier);
    b.bytes += bytes, --b.missing, b.settle();
#else
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity AND_CALLER) {
#if EMULATED
    while (EmulatedBarrier::of(barrier).parity == parity) emulator::yield({"mbarrier_wait", file, line});
#else
    asm volatile(
        "{\n"
        ".reg .pred there;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n"
        "@!there bra again;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
#endif
}

// Position in a pipeline of COUNT stages: the stage, and the parity with which its barriers are waited for.
template <int COUNT>
struct PipelineState {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == COUNT) stage = 0, parity ^= 1;
    }
};

// Copies `bytes` (a multiple of 16, as both addresses) from global to shared memory; the barrier counts them. For data
// read once; `policy`: see cp_async_streaming.
__device__ __forceinline__ void bulk_copy_streaming(void* shared, const void* global, int bytes, uint64_t* barrier,
                                                    uint64_t policy) {
#if EMULATED
    EmulatedBarrier::of(barrier).copy(shared, global, bytes);
#elif ARCH >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
#endif
}

// Brings `bytes` (a multiple of 16, as the address) of global memory into L2, on sm_90.
__device__ __forceinline__ void bulk_prefetch_l2(const void* global, int bytes) {
#if !EMULATED && ARCH >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}

// Changes the number of registers per thread of a warpgroup; all four warps must call it.
template <int COUNT>
__device__ __forceinline__ void take_registers() {
#if ARCH >= 900
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT>
__device__ __forceinline__ void give_registers() {
#if ARCH >= 900
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
