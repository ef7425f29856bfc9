// Runs CUDA kernels that were compiled for the CPU: a process that obeys commands on its standard input.
//
// Every CUDA thread is a fiber with its own stack; a block's threads run in turns on one OS thread until each waits
// in a collective, and blocks run one after another (or all together in a cooperative launch). What CUDA forbids and
// this can see is an error with the kernel's file and line: divergent barriers, collectives that miss a lane, writes
// past a shared array; with -fsanitize=address,undefined also every access out of bounds and undefined arithmetic.
#include "runtime.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <new>
#include <random>
#include <signal.h>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
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

namespace {

// ---- fibers ----------------------------------------------------------------------------------------------------

constexpr size_t STACK_BYTES = 256 << 10;  // virtual; a sanitizer's report needs the room
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
    Thread thread;  // first: a Thread* is a Fiber*
    Context context;
    char* stack;
    bool yielded;
    std::vector<Copy> copies;  // cp.async not waited for
    unsigned groups;           // committed so far
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

struct SharedArray {
    const SharedSlot* slot;
    char* data;
    char* memory;
    size_t bytes, guard;
};

}  // namespace

struct emulator::Block {
    uint3 index;
    std::vector<Fiber*> fibers;
    std::vector<Warp> warps;
    Barrier barriers[16];
    std::vector<SharedArray> shared;
    int live;
    bool done;
};

extern "C" {
Thread* emulator_current = nullptr;
}

namespace {
using emulator::Block;

struct Run {
    Entry entry;
    std::vector<void*> parameters;
    dim3 grid, block;
    size_t dynamic_bytes;
    bool cooperative;
    unsigned order;  // 0 forward, 1 backward, else a seed
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
    void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
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

// ---- collectives -----------------------------------------------------------------------------------------------

void set_ready(Fiber* fiber) { fiber->thread.state = READY; }

// Completes the meeting when every live lane of its mask is there; the meeting is gone afterwards.
bool finish_meeting(Block& block, unsigned warp_index, size_t index) {
    Warp& warp = block.warps[warp_index];
    if ((warp.meetings[index].mask & warp.live) != warp.meetings[index].arrived) return false;
    Meeting meeting = warp.meetings[index];
    warp.meetings.erase(warp.meetings.begin() + index);
    if (meeting.complete) meeting.complete(meeting.records, meeting.arrived);
    for (unsigned lane = 0; lane < 32; ++lane)
        if (meeting.arrived >> lane & 1) set_ready(block.fibers[warp_index * 32 + lane]);
    return true;
}

void finish_barrier(Block& block, int id) {
    Barrier& barrier = block.barriers[id];
    int needed = barrier.expected ? barrier.expected : block.live;
    if (barrier.arrived == 0 || barrier.arrived < needed) return;
    int sum = barrier.sum;
    barrier = Barrier();
    for (Fiber* fiber : block.fibers)
        if (fiber->thread.state == IN_BARRIER && int(fiber->thread.mask) == id) {
            fiber->thread.barrier_value = sum;
            set_ready(fiber);
        }
}

void exit_thread(Fiber* fiber) {
    Block& block = *fiber->thread.block;
    Warp& warp = block.warps[fiber->thread.warp];
    fiber->thread.state = DONE;
    fiber->copies.clear();
    warp.live &= ~(1u << fiber->thread.lane);
    --block.live;
    for (size_t i = 0; i < warp.meetings.size();)
        if (!finish_meeting(block, fiber->thread.warp, i)) ++i;
    for (int id = 0; id < 16; ++id)
        if (!block.barriers[id].expected) finish_barrier(block, id);
    if (*reinterpret_cast<volatile uint64_t*>(fiber->stack) != CANARY)
        run.error = "a thread used more than 256 KB of local memory";
}

// "threads 0-31, 40" for those that match.
template <typename Match>
std::string thread_list(const Block& block, Match match) {
    std::string list;
    size_t count = block.fibers.size();
    for (size_t first = 0; first < count; ++first) {
        if (!match(*block.fibers[first])) continue;
        size_t last = first;
        while (last + 1 < count && match(*block.fibers[last + 1])) ++last;
        list += (list.empty() ? "" : ", ") + std::to_string(first);
        if (last > first) list += "-" + std::to_string(last);
        first = last;
    }
    return list;
}

std::string describe_threads(const Block& block) {
    std::map<std::string, int> sites;
    for (const Fiber* fiber : block.fibers) {
        const Thread& thread = fiber->thread;
        if (thread.state != DONE) sites[text("%s at %s:%d", thread.site.what, thread.site.file, thread.site.line)] = 1;
    }
    std::string report;
    for (auto& [site, unused] : sites) {
        (void)unused;
        report += "\n  threads " + thread_list(block, [&](const Fiber& fiber) {
            const Thread& t = fiber.thread;
            return t.state != DONE && text("%s at %s:%d", t.site.what, t.site.file, t.site.line) == site;
        }) + " wait in " + site;
    }
    std::string exited = thread_list(block, [](const Fiber& fiber) { return fiber.thread.state == DONE; });
    return exited.empty() ? report : report + "\n  threads " + exited + " have ended";
}

// ---- shared memory ---------------------------------------------------------------------------------------------

char* add_shared(Block& block, const SharedSlot* slot, size_t bytes, size_t alignment) {
    size_t guard = std::max(alignment, GUARD_BYTES), total = 2 * guard + bytes;
    void* memory = nullptr;
    if (posix_memalign(&memory, guard, total)) throw std::bad_alloc();
    char* data = static_cast<char*>(memory) + guard;
    memset(memory, GUARD, total);
    memset(data, POISON, bytes);
    ASAN_POISON_MEMORY_REGION(memory, guard);
    ASAN_POISON_MEMORY_REGION(data + bytes, guard);
    block.shared.push_back({slot, data, static_cast<char*>(memory), bytes, guard});
    return data;
}

void check_guards(const SharedArray& array) {
    auto whole = [&](const char* from) {
        return std::all_of(from, from + array.guard, [](char byte) { return static_cast<unsigned char>(byte) == GUARD; });
    };
    if (!run.error.empty() || (whole(array.memory) && whole(array.data + array.bytes))) return;
    long offset = -long(array.guard);
    while (static_cast<unsigned char>(array.data[offset]) == GUARD || (offset >= 0 && offset < long(array.bytes))) ++offset;
    const char* name = array.slot ? array.slot->name : "dynamic shared memory";
    run.error = text("wrote byte %ld of %s (%zu bytes)", offset, name, array.bytes);
}

void free_shared(Block& block) {
    for (SharedArray& array : block.shared) {
        ASAN_UNPOISON_MEMORY_REGION(array.memory, 2 * array.guard + array.bytes);
        check_guards(array);
        free(array.memory);
    }
    block.shared.clear();
}

// ---- the schedule ----------------------------------------------------------------------------------------------

std::vector<unsigned> in_order(unsigned count) {
    std::vector<unsigned> order(count);
    for (unsigned i = 0; i < count; ++i) order[i] = run.order == 1 ? count - 1 - i : i;
    if (run.order > 1) std::shuffle(order.begin(), order.end(), std::mt19937(run.order));
    return order;
}

void start_block(Block& block, unsigned index, size_t first_fiber) {
    unsigned threads = run.block.x * run.block.y * run.block.z;
    block = Block();
    block.index = {index % run.grid.x, index / run.grid.x % run.grid.y, index / run.grid.x / run.grid.y};
    block.live = threads;
    block.warps.resize((threads + 31) / 32);
    for (unsigned i = 0; i < threads; ++i) {
        Fiber* fiber = new_fiber(first_fiber + i);
        Thread& thread = fiber->thread;
        thread = Thread();
        thread.thread_index = {i % run.block.x, i / run.block.x % run.block.y, i / run.block.x / run.block.y};
        thread.block_index = block.index;
        thread.block_dim = run.block;
        thread.grid_dim = run.grid;
        thread.linear = i;
        thread.warp = i / 32;
        thread.lane = i % 32;
        thread.block = &block;
        thread.site = {"its start", "", 0};
        fiber->yielded = false;
        fiber->groups = 0;
        fiber->copies.clear();
        *reinterpret_cast<volatile uint64_t*>(fiber->stack) = CANARY;
        start_context(fiber->context, fiber->stack, fiber_main);
        block.warps[i / 32].live |= 1u << i % 32;
        block.fibers.push_back(fiber);
    }
    add_shared(block, nullptr, run.dynamic_bytes, 1024);
}

// Runs a warp's threads until each waits, has yielded or is done. True if one of them got anywhere.
bool run_warp(Block& block, unsigned warp, const std::vector<unsigned>& lanes) {
    bool progress = false, again = true;
    unsigned first = warp * 32, count = std::min<unsigned>(32, block.fibers.size() - first);
    while (again && run.error.empty()) {
        again = false;
        for (unsigned lane : lanes) {
            if (lane >= count) continue;
            Fiber* fiber = block.fibers[first + lane];
            if (fiber->thread.state != READY || fiber->yielded) continue;
            run_fiber(fiber);
            again = true;
            progress |= !fiber->yielded;
            if (!run.error.empty()) break;
        }
    }
    return progress;
}

// Gives every thread of the block its turns. True if one of them got anywhere.
bool run_turn(Block& block, const std::vector<unsigned>& warps, const std::vector<unsigned>& lanes) {
    bool progress = false;
    for (unsigned warp : warps)
        if (run.error.empty()) progress |= run_warp(block, warp, lanes);
    if (!run.error.empty()) return false;
    block.done = block.live == 0;
    bool runnable = false;
    for (Fiber* fiber : block.fibers) {
        runnable |= fiber->thread.state == READY;
        fiber->yielded = false;
    }
    if (!block.done && !runnable)
        run.error = text("deadlock in block (%u,%u,%u):", block.index.x, block.index.y, block.index.z) +
                    describe_threads(block);
    return progress;
}

void run_together(std::vector<Block>& blocks) {
    constexpr int PATIENCE = 20000;  // turns in which every thread only yielded
    auto warps = in_order((run.block.x * run.block.y * run.block.z + 31) / 32), lanes = in_order(32);
    int idle = 0;
    for (size_t left = blocks.size(); left && run.error.empty();) {
        bool progress = false;
        for (Block& block : blocks) {
            if (block.done || !run.error.empty()) continue;
            progress |= run_turn(block, warps, lanes);
            left -= block.done;
        }
        idle = progress ? 0 : idle + 1;
        if (idle < PATIENCE || !run.error.empty()) continue;
        for (Block& block : blocks) {
            if (block.done) continue;
            run.error = text("block (%u,%u,%u) waits for something that never comes%s:", block.index.x, block.index.y,
                             block.index.z,
                             run.cooperative ? "" : " (if it waits for another block, launch with cooperative=True)");
            run.error += describe_threads(block);
            return;
        }
    }
}

void forget_stacks() {
    for (Fiber* fiber : fiber_pool) ASAN_UNPOISON_MEMORY_REGION(fiber->stack, STACK_BYTES);
}

void launch() {
    unsigned count = run.grid.x * run.grid.y * run.grid.z, threads = run.block.x * run.block.y * run.block.z;
    std::vector<unsigned> order = in_order(count);
    unsigned together = run.cooperative ? count : 1;
    std::vector<Block> blocks(together);
    for (unsigned next = 0; next < count && run.error.empty(); next += together) {
        for (unsigned i = 0; i < together; ++i) start_block(blocks[i], order[next + i], size_t(i) * threads);
        run_together(blocks);
        for (Block& block : blocks) free_shared(block);
    }
    if (!run.error.empty()) forget_stacks();
}

}  // namespace

// ---- what kernels call -----------------------------------------------------------------------------------------

extern "C" {

void emulator_fail(const char* format, ...) {
    char message[2048];
    va_list list;
    va_start(list, format);
    vsnprintf(message, sizeof message, format, list);
    va_end(list);
    const Thread& t = *emulator_current;
    run.error = text("block (%u,%u,%u) thread (%u,%u,%u): %s", t.block_index.x, t.block_index.y, t.block_index.z,
                     t.thread_index.x, t.thread_index.y, t.thread_index.z, message);
    to_scheduler(true);
    abort();
}

void* emulator_shared(const SharedSlot* slot) {
    Block& block = *emulator_current->block;
    size_t total = slot->bytes;
    for (const SharedArray& array : block.shared) {
        if (array.slot == slot) return array.data;
        if (array.slot) total += array.bytes;
    }
    if (total > MAX_STATIC_SHARED || total + run.dynamic_bytes > MAX_SHARED)
        emulator_fail("%s at %s:%d: %zu bytes of __shared__ and %zu dynamic exceed 48 KB or 227 KB", slot->name,
                      slot->file, slot->line, total, run.dynamic_bytes);
    return add_shared(block, slot, slot->bytes, slot->alignment);
}

void* emulator_dynamic_shared() { return emulator_current->block->shared[0].data; }

void emulator_meet(unsigned mask, void* record, void (*complete)(void* const*, unsigned), Site site) {
    Thread& thread = *emulator_current;
    Block& block = *thread.block;
    Warp& warp = block.warps[thread.warp];
    thread.site = site;
    thread.mask = mask;
    if (!(mask >> thread.lane & 1))
        emulator_fail("%s at %s:%d: lane %u is not in its mask %08x", site.what, site.file, site.line, thread.lane, mask);
    size_t index = 0;
    while (index < warp.meetings.size() && warp.meetings[index].mask != mask) ++index;
    if (index == warp.meetings.size()) warp.meetings.push_back({mask, 0, site, complete, {}});
    Meeting& meeting = warp.meetings[index];
    if (meeting.complete != complete)
        emulator_fail("lanes of a warp meet in different collectives: %s at %s:%d and %s at %s:%d", meeting.site.what,
                      meeting.site.file, meeting.site.line, site.what, site.file, site.line);
    meeting.arrived |= 1u << thread.lane;
    meeting.records[thread.lane] = record;
    thread.state = IN_WARP;
    if (!finish_meeting(block, thread.warp, index) || thread.state != READY) to_scheduler(false);
}

int emulator_barrier(int id, int expected, int value, bool wait, Site site) {
    Thread& thread = *emulator_current;
    Block& block = *thread.block;
    thread.site = site;
    if (id < 0 || id > 15 || expected % 32)
        emulator_fail("%s at %s:%d: barrier %d for %d threads; ids are 0-15, threads a multiple of 32", site.what,
                      site.file, site.line, id, expected);
    Barrier& barrier = block.barriers[id];
    if (barrier.arrived == 0) {
        barrier.expected = expected;
        barrier.site = site;
    }
    bool same_place = !strcmp(barrier.site.file, site.file) && barrier.site.line == site.line;
    if (barrier.expected != expected || (!expected && !same_place))
        emulator_fail("threads of a block meet in different barriers: %s at %s:%d and %s at %s:%d", barrier.site.what,
                      barrier.site.file, barrier.site.line, site.what, site.file, site.line);
    ++barrier.arrived;
    barrier.sum += value;
    if (!wait) {
        finish_barrier(block, id);
        return 0;
    }
    thread.state = IN_BARRIER;
    thread.mask = id;
    finish_barrier(block, id);
    if (thread.state != READY) to_scheduler(false);
    return thread.barrier_value;
}

unsigned emulator_live_lanes() { return emulator_current->block->warps[emulator_current->warp].live; }

void emulator_yield(Site site) {
    emulator_current->site = site;
    fiber_of(emulator_current)->yielded = true;
    to_scheduler(false);
}

void emulator_async_copy(void* to, const void* from, unsigned bytes, unsigned valid) {
    Fiber* fiber = fiber_of(emulator_current);
    fiber->copies.push_back({to, bytes, valid, from, fiber->groups});
}

void emulator_async_commit() { ++fiber_of(emulator_current)->groups; }

// Performs the copies of all but the last `groups` groups, as late as a kernel may rely on.
void emulator_async_wait(unsigned groups) {
    Fiber* fiber = fiber_of(emulator_current);
    size_t done = 0;
    for (const Copy& copy : fiber->copies) {
        if (copy.group + groups >= fiber->groups) break;
        memset(copy.to, 0, copy.bytes);
        memcpy(copy.to, copy.from, copy.valid);
        ++done;
    }
    fiber->copies.erase(fiber->copies.begin(), fiber->copies.begin() + done);
}
}

// ---- commands --------------------------------------------------------------------------------------------------

namespace {

struct Request {
    uint64_t command, a, b, payload;  // bytes that follow
};

int input = 0, output = 1;
std::string kernel_name;

void read_all(void* data, size_t bytes) {
    for (char* to = static_cast<char*>(data); bytes;) {
        ssize_t got = read(input, to, bytes);
        if (got <= 0) _exit(0);
        to += got;
        bytes -= got;
    }
}

__attribute__((no_sanitize("address"))) void write_all(const void* data, size_t bytes) {
    for (const char* from = static_cast<const char*>(data); bytes;) {
        ssize_t put = write(output, from, bytes);
        if (put <= 0) _exit(0);
        from += put;
        bytes -= put;
    }
}

void answer(bool failed, const void* data, size_t bytes) {
    uint64_t head[2] = {failed, bytes};
    write_all(head, sizeof head);
    write_all(data, bytes);
}

// Says where a kernel was when a signal ended it.
void on_signal(int signal) {
    char line[512];
    const Thread* t = emulator_current;
    const char* what = signal == SIGALRM ? "does not end (no time left)" : strsignal(signal);
    int size = snprintf(line, sizeof line, "kernel %s: %s", kernel_name.c_str(), what);
    if (t)
        size += snprintf(line + size, sizeof line - size, " in block (%u,%u,%u) thread (%u,%u,%u), last seen in %s at %s:%d\n",
                         t->block_index.x, t->block_index.y, t->block_index.z, t->thread_index.x, t->thread_index.y,
                         t->thread_index.z, t->site.what, t->site.file, t->site.line);
    if (write(2, line, size) < 0) _exit(2);
    _exit(2);
}

void catch_signals() {
    static char stack[64 << 10];
    stack_t alternative = {};
    alternative.ss_sp = stack;
    alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, nullptr);
    struct sigaction action = {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_ONSTACK;
    sigaction(SIGALRM, &action, nullptr);
    if (WITH_ASAN) return;  // the sanitizer reports the others better
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigaction(signal, &action, nullptr);
}

// Device memory: exactly sized, so that the sanitizer sees its end; followed by guard bytes without it.
constexpr size_t DEVICE_GUARD = WITH_ASAN ? 0 : 256;
std::map<char*, size_t> allocations;

void allocate(size_t bytes) {
    void* data = nullptr;
    size_t size = bytes + DEVICE_GUARD;
    if (posix_memalign(&data, 256, size ? size : 1)) return answer(true, "out of memory", 13);
    memset(data, POISON, bytes);
    memset(static_cast<char*>(data) + bytes, GUARD, DEVICE_GUARD);
    allocations[static_cast<char*>(data)] = bytes;
    answer(false, &data, sizeof data);
}

void check_device_guards() {
    for (auto& [data, bytes] : allocations)
        for (size_t i = 0; i < DEVICE_GUARD; ++i)
            if (static_cast<unsigned char>(data[bytes + i]) != GUARD && run.error.empty())
                run.error = text("wrote byte %zu of a buffer of %zu bytes", bytes + i, bytes);
}

void load(std::string path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        std::string reason = dlerror();
        return answer(true, reason.data(), reason.size());
    }
    answer(false, &library, sizeof library);
}

void find(void* library, std::string name) {
    const Entry* entry = static_cast<const Entry*>(dlsym(library, name.c_str()));
    if (!entry) return answer(true, name.data(), name.size());
    std::vector<uint64_t> reply = {reinterpret_cast<uint64_t>(entry), entry->count};
    for (unsigned i = 0; i < entry->count; ++i) reply.insert(reply.end(), {entry->sizes[i], uint64_t(entry->kinds[i])});
    answer(false, reply.data(), reply.size() * 8);
}

// Payload: grid[3], block[3], dynamic bytes, cooperative, order, seconds, bytes of the name, name, then each
// parameter at a multiple of 16 bytes.
void start(const Entry* entry, std::vector<char>& payload) {
    uint64_t head[11];
    memcpy(head, payload.data(), sizeof head);
    run = Run();
    run.entry = *entry;
    run.grid = dim3(head[0], head[1], head[2]);
    run.block = dim3(head[3], head[4], head[5]);
    run.dynamic_bytes = head[6];
    run.cooperative = head[7];
    run.order = head[8];
    kernel_name.assign(payload.data() + sizeof head, head[10]);
    size_t offset = (sizeof head + head[10] + 15) / 16 * 16;
    for (unsigned i = 0; i < entry->count; ++i) {
        run.parameters.push_back(payload.data() + offset);
        offset += (entry->sizes[i] + 15) / 16 * 16;
    }
    alarm(head[9]);
    launch();
    alarm(0);
    if (run.error.empty()) check_device_guards();
    answer(!run.error.empty(), run.error.data(), run.error.size());
}

void obey(const Request& request, std::vector<char>& payload) {
    char* address = reinterpret_cast<char*>(request.a);
    std::string name(payload.data(), payload.size());
    switch (request.command) {
        case 'A': return allocate(request.a);
        case 'F':
            allocations.erase(address);
            free(address);
            return answer(false, nullptr, 0);
        case 'W':
            memcpy(address, payload.data(), payload.size());
            return answer(false, nullptr, 0);
        case 'R': return answer(false, address, request.b);
        case 'S':
            memset(address, request.b >> 56, request.b & ((uint64_t(1) << 56) - 1));
            return answer(false, nullptr, 0);
        case 'L': return load(name);
        case 'N': return find(address, name);
        case 'K': return start(reinterpret_cast<const Entry*>(address), payload);
        default: return answer(true, "unknown command", 15);
    }
}

}  // namespace

int main() {
    input = dup(0);
    output = dup(1);
    dup2(2, 1);  // a kernel's printf
    catch_signals();
    for (;;) {
        Request request;
        read_all(&request, sizeof request);
        std::vector<char> payload(request.payload);
        if (request.payload) read_all(payload.data(), request.payload);
        obey(request, payload);
        fflush(stdout);
    }
}
