// Clusters of blocks (sm_90): a barrier over one, and the shared memory of its blocks. A cluster of one block is any block
// on any GPU.
#pragma once
#include "lib/common.cuh"

template <int CLUSTER>
__device__ __forceinline__ int cluster_rank() {
    return blockIdx.x % CLUSTER;
}

// All threads of all blocks arrive, and wait later; what they wrote before is there for those that waited.
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

// Where floats that lie at `own` in this block's shared memory lie in that of another block of the cluster.
struct LocalFloats {
    float* address;

    __device__ __forceinline__ void put(int at, float2 v) const { *reinterpret_cast<float2*>(address + at) = v; }
};
#if EMULATED
template <int CLUSTER>
struct RemoteFloats : LocalFloats {
    RemoteFloats(float* own, int rank) : LocalFloats{static_cast<float*>(emulator::cluster_shared(own, rank))} {}
};
#else
template <int CLUSTER>
struct RemoteFloats {
    uint32_t address;

    __device__ __forceinline__ RemoteFloats(float* own, int rank) {
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
    }
    __device__ __forceinline__ void put(int at, float2 v) const {
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address + 4 * at), "f"(v.x), "f"(v.y)
                     : "memory");
    }
};
#endif
template <>
struct RemoteFloats<1> : LocalFloats {
    __device__ __forceinline__ RemoteFloats(float* own, int) : LocalFloats{own} {}
};
