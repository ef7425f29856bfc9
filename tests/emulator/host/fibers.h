// CUDA threads as fibers on one OS thread, each with a stack and a saved context; and the state of a launch that the
// other headers of the program share.
#pragma once
#include "runtime.h"

#include <cstdarg>
#include <cstdio>
#include <new>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define WITH_ASAN 1
#else
#define WITH_ASAN 0
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif

using emulator::Entry;
using emulator::SharedSlot;
using emulator::Site;
using emulator::Thread;

// Not an anonymous namespace, because emulator::Block contains these types. No kernel can collide with the name.
namespace emulator_host {

constexpr size_t STACK_BYTES = 256 << 10;  // virtual memory; a sanitizer's report needs this much
constexpr uint64_t CANARY = 0x5ca1ab1edeadbea7;

#if defined(__x86_64__)
struct Context {
    void* stack_pointer;
};
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
    .text
    .globl emulator_switch
    .type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
void switch_context(Context& from, Context& to) { emulator_switch(&from.stack_pointer, to.stack_pointer); }
void start_context(Context& context, char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES - 64);
    *--top = nullptr;  // the entry never returns
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    context.stack_pointer = top;
}
#else
using Context = ucontext_t;
void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }
void start_context(Context& context, char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
#endif

enum State { READY, IN_WARP, IN_BARRIER, DONE };

struct Copy {
    void* to;
    unsigned bytes, valid;
    const void* from;
    unsigned group;
};

struct Fiber {
    Thread thread;  // the first member, so that a Thread* is a Fiber*
    Context context;
    char* stack;
    bool yielded;
    std::vector<Copy> copies;  // pending cp.async copies
    unsigned groups;           // committed groups
};

struct Meeting {
    unsigned mask, arrived;
    Site site;
    void (*complete)(void* const*, unsigned);
    void* records[32];
};

struct Warp {
    unsigned live;
    std::vector<Meeting> meetings;
};

struct Barrier {
    int arrived, waiting, expected, sum;
    Site site;
};

struct Cluster {
    std::vector<emulator::Block*> blocks;
    unsigned arrived, phase;  // barrier: threads that arrived in this phase, number of finished phases
};

struct SharedArray {
    const SharedSlot* slot;
    char* data;
    char* memory;
    size_t bytes, guard;
};

}  // namespace emulator_host

using namespace emulator_host;

struct emulator::Block {
    uint3 index;
    std::vector<Fiber*> fibers;
    std::vector<Warp> warps;
    Barrier barriers[16];
    std::vector<SharedArray> shared;
    Cluster* cluster;
    int live;
    bool done;
};

extern "C" {
Thread* emulator_current = nullptr;
}

namespace emulator_host {
using emulator::Block;

struct Run {
    Entry entry;
    std::vector<void*> parameters;
    dim3 grid, block;
    size_t dynamic_bytes;
    bool cooperative;
    unsigned cluster;  // CTAs per cluster
    unsigned order;    // 0 forward, 1 backward, else a seed
    std::string error;
};

Run run;
Context scheduler;
std::vector<Fiber*> fiber_pool;
#if WITH_ASAN
const void* scheduler_stack = nullptr;
size_t scheduler_stack_bytes = 0;
#endif
constexpr unsigned char POISON = 0xff;  // NaN in every float format
constexpr unsigned char GUARD = 0xa5;
constexpr size_t GUARD_BYTES = 128;
constexpr size_t MAX_SHARED = 227 << 10, MAX_STATIC_SHARED = 48 << 10;

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char* format, ...) {
    char line[2048];
    va_list list;
    va_start(list, format);
    vsnprintf(line, sizeof line, format, list);
    va_end(list);
    return line;
}

Fiber* fiber_of(Thread* thread) { return reinterpret_cast<Fiber*>(thread); }

Fiber* new_fiber(size_t index) {
    if (index < fiber_pool.size()) return fiber_pool[index];
    void* stack =
        mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) throw std::bad_alloc();
    Fiber* fiber = new Fiber();
    fiber->stack = static_cast<char*>(stack);
    fiber_pool.push_back(fiber);
    return fiber;
}

__attribute__((no_sanitize("address"))) void to_scheduler(bool finished) {
    Fiber* fiber = fiber_of(emulator_current);
#if WITH_ASAN
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(finished ? nullptr : &fake, scheduler_stack, scheduler_stack_bytes);
    switch_context(fiber->context, scheduler);
    __sanitizer_finish_switch_fiber(fake, &scheduler_stack, &scheduler_stack_bytes);
#else
    (void)finished;
    switch_context(fiber->context, scheduler);
#endif
}

__attribute__((no_sanitize("address"))) void run_fiber(Fiber* fiber) {
    emulator_current = &fiber->thread;
#if WITH_ASAN
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fiber->stack, STACK_BYTES);
    switch_context(scheduler, fiber->context);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
    switch_context(scheduler, fiber->context);
#endif
    emulator_current = nullptr;
}

void exit_thread(Fiber* fiber);

__attribute__((no_sanitize("address"))) void fiber_main() {
#if WITH_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
    run.entry.call(run.parameters.data());
    exit_thread(fiber_of(emulator_current));
    to_scheduler(true);
    __builtin_trap();
}

}  // namespace emulator_host
