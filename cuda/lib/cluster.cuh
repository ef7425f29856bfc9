// Clusters of CTAs (sm_90): the cluster barrier and distributed shared memory. CLUSTER = 1 is any CTA on any GPU.
#pragma once
#include "lib/common.cuh"

template <int CLUSTER>
__device__ __forceinline__ int cluster_rank() {
    return blockIdx.x % CLUSTER;
}

// The cluster barrier in two parts: all threads of all CTAs arrive, and wait later. What a thread wrote before it
// arrived is visible to all threads that have waited. CLUSTER = 1: only the wait is a barrier.
template <int CLUSTER>
__device__ __forceinline__ void cluster_arrive(CALLER) {
    if constexpr (CLUSTER > 1)
#if EMULATED
        emulator::cluster_arrive({"cluster_arrive", file, line});
#else
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
template <int CLUSTER>
__device__ __forceinline__ void cluster_wait(CALLER) {
    if constexpr (CLUSTER > 1)
#if EMULATED
        emulator::cluster_wait({"cluster_wait", file, line});
#else
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    else
        __syncthreads();
}

// Pointer to floats at `local` in the shared memory of CTA `rank` of the cluster.
struct LocalFloats {
    float* address;

    __device__ __forceinline__ void put(int offset, float2 v) const {
        *reinterpret_cast<float2*>(address + offset) = v;
    }
};
#if EMULATED
template <int CLUSTER>
struct RemoteFloats : LocalFloats {
    RemoteFloats(float* local, int rank) : LocalFloats{static_cast<float*>(emulator::cluster_shared(local, rank))} {}
};
#else
template <int CLUSTER>
struct RemoteFloats {
    uint32_t address;

    __device__ __forceinline__ RemoteFloats(float* local, int rank) {
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(local)), "r"(rank));
    }
    __device__ __forceinline__ void put(int offset, float2 v) const {
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address + 4 * offset), "f"(v.x), "f"(v.y)
                     : "memory");
    }
};
#endif
template <>
struct RemoteFloats<1> : LocalFloats {
    __device__ __forceinline__ RemoteFloats(float* local, int) : LocalFloats{local} {}
};
