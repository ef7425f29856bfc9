// CUDA's language and intrinsics for kernels that g++ compiles. cuda/lib/common.cuh includes this file under GGPY_EMULATOR.
//
// build.py rewrites __shared__ declarations into calls of shared(). This file implements the rest of the language with
// macros and functions. f16 math, atomics and tensor cores are in the files beside this one.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "runtime.h"

#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __constant__
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (emulator_current->thread_index)
#define blockIdx (emulator_current->block_index)
#define blockDim (emulator_current->block_dim)
#define gridDim (emulator_current->grid_dim)
constexpr int warpSize = 32;

using emulator::emulator_current;

// The source location of a call, as a default argument.
#define EMULATOR_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace emulator {

inline void* shared(const SharedSlot& slot) { return emulator_shared(&slot); }
inline void* dynamic_shared() { return emulator_dynamic_shared(); }
inline int barrier(int id, int expected, int value, bool wait, Site site) {
    return emulator_barrier(id, expected, value, wait, site);
}
inline void yield(Site site) { emulator_yield(site); }
inline void cluster_arrive(Site site) { emulator_cluster_arrive(site); }
inline void cluster_wait(Site site) { emulator_cluster_wait(site); }
inline void* cluster_shared(void* local, unsigned rank) { return emulator_cluster_shared(local, rank); }
inline void async_commit() { emulator_async_commit(); }
inline void async_wait(unsigned groups) { emulator_async_wait(groups); }

// A rendezvous of the lanes in `mask`, each with a record. The last lane runs complete(records, lanes that met).
template <typename Record, void (*complete)(Record* const*, unsigned)>
void meet(unsigned mask, Record& record, Site site) {
    emulator_meet(
        mask, &record,
        [](void* const* records, unsigned lanes) { complete(reinterpret_cast<Record* const*>(records), lanes); }, site);
}

template <typename T>
struct Shuffle {
    T in, out;
    int source;  // lane
};

template <typename T>
void complete_shuffle(Shuffle<T>* const* records, unsigned lanes) {
    for (int lane = 0; lane < 32; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        int source = records[lane]->source;
        if (!(lanes >> source & 1))
            emulator_fail("shuffle: lane %d reads lane %d, which does not take part", lane, source);
        records[lane]->out = records[source]->in;
    }
}

template <typename T>
T shuffle(unsigned mask, T value, int source, Site site) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "CUDA shuffles at most 8 bytes");
    Shuffle<T> record{value, value, source};
    meet<Shuffle<T>, complete_shuffle<T>>(mask, record, site);
    return record.out;
}

inline int lane() { return emulator_current->lane; }
inline int segment(int width) { return lane() & ~(width - 1); }

template <typename T>
struct Vote {
    T in;
    unsigned out;
};

template <typename T, typename Combine>
unsigned vote(unsigned mask, T value, Site site, Combine) {
    Vote<T> record{value, 0};
    meet<Vote<T>, Combine::template run<T>>(mask, record, site);
    return record.out;
}

struct Ballot {
    template <typename T>
    static void run(Vote<T>* const* records, unsigned lanes) {
        unsigned result = 0;
        for (int i = 0; i < 32; ++i)
            if (lanes >> i & 1) result |= unsigned(records[i]->in != T(0)) << i;
        for (int i = 0; i < 32; ++i)
            if (lanes >> i & 1) records[i]->out = result;
    }
};

struct Match {
    template <typename T>
    static void run(Vote<T>* const* records, unsigned lanes) {
        for (int i = 0; i < 32; ++i) {
            if (!(lanes >> i & 1)) continue;
            unsigned same = 0;
            for (int j = 0; j < 32; ++j)
                if ((lanes >> j & 1) && !memcmp(&records[i]->in, &records[j]->in, sizeof(T))) same |= 1u << j;
            records[i]->out = same;
        }
    }
};

template <typename Operation>
struct Reduce {
    template <typename T>
    static void run(Vote<T>* const* records, unsigned lanes) {
        int first = __builtin_ctz(lanes);
        T result = records[first]->in;
        for (int i = first + 1; i < 32; ++i)
            if (lanes >> i & 1) result = Operation::apply(result, records[i]->in);
        for (int i = 0; i < 32; ++i)
            if (lanes >> i & 1) records[i]->out = unsigned(result);
    }
};

struct Add {
    template <typename T>
    static T apply(T a, T b) {
        return T(unsigned(a) + unsigned(b));
    }
};
struct Min {
    template <typename T>
    static T apply(T a, T b) {
        return std::min(a, b);
    }
};
struct Max {
    template <typename T>
    static T apply(T a, T b) {
        return std::max(a, b);
    }
};
struct And {
    template <typename T>
    static T apply(T a, T b) {
        return a & b;
    }
};
struct Or {
    template <typename T>
    static T apply(T a, T b) {
        return a | b;
    }
};
struct Xor {
    template <typename T>
    static T apply(T a, T b) {
        return a ^ b;
    }
};

// Kernel entries: the addresses, sizes and kinds of the parameters, so that wrong arguments are reported.
template <auto Function>
struct EntryOf;
template <typename... P, void (*Function)(P...)>
struct EntryOf<Function> {
    static constexpr unsigned sizes[sizeof...(P) + 1] = {unsigned(sizeof(P))..., 0};
    template <typename T>
    static constexpr char kind() {
        return std::is_pointer_v<T> ? 'p' : std::is_floating_point_v<T> ? 'f' : std::is_class_v<T> ? 's' : 'i';
    }
    static constexpr char kinds[sizeof...(P) + 1] = {kind<P>()..., 0};
    template <size_t... I>
    static void apply(void* const* parameters, std::index_sequence<I...>) {
        Function(*static_cast<std::remove_reference_t<P>*>(parameters[I])...);
    }
    static void call(void* const* parameters) { apply(parameters, std::index_sequence_for<P...>()); }
    static constexpr Entry entry = {call, sizeof...(P), sizes, kinds};
};

}  // namespace emulator

// ---- CTA barriers ----------------------------------------------------------------------------------------------

inline void __syncthreads(EMULATOR_PLACE) { emulator::barrier(0, 0, 0, true, {"__syncthreads", file, line}); }
inline int __syncthreads_count(int predicate, EMULATOR_PLACE) {
    return emulator::barrier(0, 0, predicate != 0, true, {"__syncthreads_count", file, line});
}
inline int __syncthreads_or(int predicate, EMULATOR_PLACE) {
    return emulator::barrier(0, 0, predicate != 0, true, {"__syncthreads_or", file, line}) != 0;
}
inline int __syncthreads_and(int predicate, EMULATOR_PLACE) {
    return emulator::barrier(0, 0, predicate == 0, true, {"__syncthreads_and", file, line}) == 0;
}

// ---- warp collectives ------------------------------------------------------------------------------------------

inline void __syncwarp(unsigned mask = ~0u, EMULATOR_PLACE) {
    emulator::emulator_meet(mask, nullptr, nullptr, {"__syncwarp", file, line});
}
inline unsigned __activemask() { return emulator::emulator_live_lanes(); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_PLACE) {
    source = emulator::segment(width) + (source & (width - 1));
    return emulator::shuffle(mask, value, source, {"__shfl_sync", file, line});
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, EMULATOR_PLACE) {
    int source = emulator::lane() ^ lanes;
    if (source >= emulator::segment(width) + width) source = emulator::lane();
    return emulator::shuffle(mask, value, source, {"__shfl_xor_sync", file, line});
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32, EMULATOR_PLACE) {
    int source = emulator::lane() + int(lanes);
    if (source >= emulator::segment(width) + width) source = emulator::lane();
    return emulator::shuffle(mask, value, source, {"__shfl_down_sync", file, line});
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32, EMULATOR_PLACE) {
    int source = emulator::lane() - int(lanes);
    if (source < emulator::segment(width)) source = emulator::lane();
    return emulator::shuffle(mask, value, source, {"__shfl_up_sync", file, line});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_PLACE) {
    return emulator::vote(mask, predicate, {"__ballot_sync", file, line}, emulator::Ballot());
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_PLACE) {
    return emulator::vote(mask, predicate, {"__any_sync", file, line}, emulator::Ballot()) != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMULATOR_PLACE) {
    return emulator::vote(mask, int(!predicate), {"__all_sync", file, line}, emulator::Ballot()) == 0;
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value, EMULATOR_PLACE) {
    return emulator::vote(mask, value, {"__match_any_sync", file, line}, emulator::Match());
}

#define EMULATOR_REDUCE(name, operation, T)                                                                  \
    inline T name(unsigned mask, T value, EMULATOR_PLACE) {                                                  \
        return T(emulator::vote(mask, value, {#name, file, line}, emulator::Reduce<emulator::operation>())); \
    }
EMULATOR_REDUCE(__reduce_add_sync, Add, unsigned)
EMULATOR_REDUCE(__reduce_add_sync, Add, int)
EMULATOR_REDUCE(__reduce_min_sync, Min, unsigned)
EMULATOR_REDUCE(__reduce_min_sync, Min, int)
EMULATOR_REDUCE(__reduce_max_sync, Max, unsigned)
EMULATOR_REDUCE(__reduce_max_sync, Max, int)
EMULATOR_REDUCE(__reduce_and_sync, And, unsigned)
EMULATOR_REDUCE(__reduce_or_sync, Or, unsigned)
EMULATOR_REDUCE(__reduce_xor_sync, Xor, unsigned)

// ---- order, time -----------------------------------------------------------------------------------------------

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned, EMULATOR_PLACE) { emulator::yield({"__nanosleep", file, line}); }
inline long long clock64() {
    static long long ticks = 0;
    return ticks += 16;
}
inline long long clock() { return clock64(); }
inline void __trap(EMULATOR_PLACE) { emulator::emulator_fail("__trap at %s:%d", file, line); }

#include "atomics.h"
#include "intrinsics.h"
#include "half_math.h"
#include "tensor.h"
