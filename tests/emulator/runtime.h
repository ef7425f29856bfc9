// What a kernel compiled for the CPU and the program that runs it (host/) know of each other.
//
// The program owns threads, blocks and the schedule; the kernel's side is header code that calls these functions.
// One CUDA thread is a fiber, all on one OS thread, so memory operations need no atomics of the host. Nothing here
// knows CUDA's intrinsics.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector_types.h>

namespace emulator {

// Where in a .cu file a thread waits.
struct Site {
    const char* what;  // "__syncthreads"
    const char* file;
    int line;
};

struct Block;

// One CUDA thread. The fields a kernel reads come first.
struct Thread {
    uint3 thread_index, block_index;
    dim3 block_dim, grid_dim;
    unsigned linear;  // threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)
    unsigned warp, lane;
    Block* block;
    int state;  // State in host/fibers.h
    Site site;
    unsigned mask;      // of the warp collective it waits in
    int barrier_value;  // result of the last barrier
    unsigned cluster_arrivals, cluster_waits;  // at the cluster's barrier so far
};

extern "C" Thread* emulator_current;  // the running thread

// A `__shared__` declaration. Each block gets its own copy, made when a thread first reaches the declaration.
struct SharedSlot {
    size_t bytes, alignment;
    const char *name, *file;
    int line;
};

extern "C" {
void* emulator_shared(const SharedSlot* slot);
void* emulator_dynamic_shared();
[[noreturn]] void emulator_fail(const char* format, ...);
// Waits for every live lane in `mask`, each with its record; the last runs complete(records by lane, lanes that met).
void emulator_meet(unsigned mask, void* record, void (*complete)(void* const*, unsigned), Site site);
// Waits on barrier `id` until `expected` threads have come (0: all live threads). Returns the sum of `value`.
int emulator_barrier(int id, int expected, int value, bool wait, Site site);
unsigned emulator_live_lanes();
// Lets other threads (in a cooperative launch or a cluster also other blocks) run before this one goes on.
void emulator_yield(Site site);
void emulator_cluster_arrive(Site site);
void emulator_cluster_wait(Site site);
// Where what lies at `own` in this block's dynamic shared memory lies in that of block `rank` of the cluster.
void* emulator_cluster_shared(void* own, unsigned rank);
void emulator_async_copy(void* to, const void* from, unsigned bytes, unsigned valid);
void emulator_async_commit();
void emulator_async_wait(unsigned groups);
}

// A kernel's entry: its parameters are given by address.
struct Entry {
    void (*call)(void* const* parameters);
    unsigned count;
    const unsigned* sizes;  // bytes of each parameter
    const char* kinds;      // i integer, f floating point, p pointer, s structure
};

}  // namespace emulator
