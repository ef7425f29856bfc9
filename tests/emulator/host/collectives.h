// Warp collectives (a rendezvous per mask), barriers (by counting), shared memory with guards, and the functions of
// runtime.h that kernels call.
#pragma once
#include "fibers.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

namespace emulator_host {

void set_ready(Fiber* fiber) { fiber->thread.state = READY; }

// Completes and removes a rendezvous when every live lane of its mask has arrived.
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

// A phase of the cluster barrier ends when all threads that still run have arrived.
void finish_cluster_phase(Cluster& cluster) {
    unsigned live = 0;
    for (const Block* block : cluster.blocks) live += block->live;
    if (cluster.arrived == 0 || cluster.arrived < live) return;
    cluster.arrived = 0;
    ++cluster.phase;
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
    finish_cluster_phase(*block.cluster);
    if (*reinterpret_cast<volatile uint64_t*>(fiber->stack) != CANARY)
        run.error = "a thread used more than 256 KB of local memory";
}

// Lists the threads that match, as "threads 0-31, 40".
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
        report += "\n  threads " +
                  thread_list(block,
                              [&](const Fiber& fiber) {
                                  const Thread& t = fiber.thread;
                                  return t.state != DONE &&
                                         text("%s at %s:%d", t.site.what, t.site.file, t.site.line) == site;
                              }) +
                  " wait in " + site;
    }
    std::string exited = thread_list(block, [](const Fiber& fiber) { return fiber.thread.state == DONE; });
    return exited.empty() ? report : report + "\n  threads " + exited + " have ended";
}

// ---- shared memory -----------------------------------------------------------------------------------------

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
        return std::all_of(from, from + array.guard,
                           [](char byte) { return static_cast<unsigned char>(byte) == GUARD; });
    };
    if (!run.error.empty() || (whole(array.memory) && whole(array.data + array.bytes))) return;
    long offset = -long(array.guard);
    while (static_cast<unsigned char>(array.data[offset]) == GUARD || (offset >= 0 && offset < long(array.bytes)))
        ++offset;
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

}  // namespace emulator_host

// ---- functions that kernels call -------------------------------------------------------------------------------

extern "C" {

void emulator_fail(const char* format, ...) {
    char message[2048];
    va_list list;
    va_start(list, format);
    vsnprintf(message, sizeof message, format, list);
    va_end(list);
    const Thread& t = *emulator_current;
    run.error = text("CTA (%u,%u,%u) thread (%u,%u,%u): %s", t.block_index.x, t.block_index.y, t.block_index.z,
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
        emulator_fail("%s at %s:%d: lane %u is not in its mask %08x", site.what, site.file, site.line, thread.lane,
                      mask);
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
        emulator_fail("threads of a CTA meet in different barriers: %s at %s:%d and %s at %s:%d", barrier.site.what,
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

void emulator_cluster_arrive(Site site) {
    Thread& thread = *emulator_current;
    Cluster& cluster = *thread.block->cluster;
    if (thread.cluster_arrivals++ != thread.cluster_waits)
        emulator_fail("%s at %s:%d: the thread has not waited since it arrived", site.what, site.file, site.line);
    ++cluster.arrived;
    finish_cluster_phase(cluster);
}

void emulator_cluster_wait(Site site) {
    Thread& thread = *emulator_current;
    if (thread.cluster_waits++ == thread.cluster_arrivals)
        emulator_fail("%s at %s:%d: the thread has not arrived", site.what, site.file, site.line);
    while (thread.block->cluster->phase < thread.cluster_waits) emulator_yield(site);
}

void* emulator_cluster_shared(void* local, unsigned rank) {
    Block& block = *emulator_current->block;
    const SharedArray& array = block.shared[0];
    char* at = static_cast<char*>(local);
    if (at < array.data || at >= array.data + array.bytes || rank >= block.cluster->blocks.size())
        emulator_fail("CTA %u of the cluster has no dynamic shared memory at the offset of %p", rank, local);
    if (block.cluster->blocks[rank]->live == 0) emulator_fail("CTA %u of the cluster has ended", rank);
    return block.cluster->blocks[rank]->shared[0].data + (at - array.data);
}

void emulator_async_copy(void* to, const void* from, unsigned bytes, unsigned valid) {
    Fiber* fiber = fiber_of(emulator_current);
    fiber->copies.push_back({to, bytes, valid, from, fiber->groups});
}

void emulator_async_commit() { ++fiber_of(emulator_current)->groups; }

// Performs the copies of all groups except the last `groups`. This is the latest time that CUDA guarantees.
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
