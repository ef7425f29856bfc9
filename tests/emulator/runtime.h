// The interface between a kernel compiled for the CPU and the program that runs the kernel (host/).
//
// The program owns threads, CTAs and the schedule; the kernel's headers call these functions. A CUDA thread is a fiber.
// All fibers run on one OS thread, so memory operations need no atomics of the host. This file knows no CUDA intrinsic.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector_types.h>

namespace emulator {

// The location in a .cu file where a thread waits.
struct Site {
    const char* what;  // "__syncthreads"
    const char* file;
    int line;
};

struct Block;

// A CUDA thread. The fields that a kernel reads come first.
struct Thread {
    uint3 thread_index, block_index;
    dim3 block_dim, grid_dim;
    unsigned linear;  // threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)
    unsigned warp, lane;
    Block* block;
    int state;  // State in host/fibers.h
    Site site;
    unsigned mask;                             // of the warp collective that the thread waits in
    int barrier_value;                         // result of the last barrier
    unsigned cluster_arrivals, cluster_waits;  // counts at the cluster barrier
};

extern "C" Thread* emulator_current;  // the running thread

// A `__shared__` declaration. Each CTA gets a copy, allocated when a thread first reaches the declaration.
struct SharedSlot {
    size_t bytes, alignment;
    const char *name, *file;
    int line;
};

extern "C" {
void* emulator_shared(const SharedSlot* slot);
void* emulator_dynamic_shared();
[[noreturn]] void emulator_fail(const char* format, ...);
// Waits for every live lane in `mask`, each with a record. The last lane runs complete(records by lane, lanes that
// met).
void emulator_meet(unsigned mask, void* record, void (*complete)(void* const*, unsigned), Site site);
// Waits at barrier `id` until `expected` threads have arrived (0: all live threads). Returns the sum of `value`.
int emulator_barrier(int id, int expected, int value, bool wait, Site site);
unsigned emulator_live_lanes();
// Yields to other threads, in a cooperative launch or a cluster also to other CTAs.
void emulator_yield(Site site);
void emulator_cluster_arrive(Site site);
void emulator_cluster_wait(Site site);
// Maps the address `local` in this CTA's dynamic shared memory to the same offset in CTA `rank` of the cluster.
void* emulator_cluster_shared(void* local, unsigned rank);
void emulator_async_copy(void* to, const void* from, unsigned bytes, unsigned valid);
void emulator_async_commit();
void emulator_async_wait(unsigned groups);
}

// The entry of a kernel. Parameters are passed by address.
struct Entry {
    void (*call)(void* const* parameters);
    unsigned count;
    const unsigned* sizes;  // bytes of each parameter
    const char* kinds;      // i integer, f floating point, p pointer, s structure
};

}  // namespace emulator
