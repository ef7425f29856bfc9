// The schedule of threads: the lanes of a warp run round-robin until each waits, then the next warp runs. CTAs run one
// after the other; the CTAs of a cluster, or of a cooperative launch, run together. Detects deadlocks.
#pragma once
#include "collectives.h"

#include <random>

namespace emulator_host {

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

// Runs the threads of a warp until each waits, yields or ends. Returns whether a thread made progress.
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

// Runs all warps of the CTA once. Returns whether a thread made progress.
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
        run.error =
            text("deadlock in CTA (%u,%u,%u):", block.index.x, block.index.y, block.index.z) + describe_threads(block);
    return progress;
}

void run_together(std::vector<Block>& blocks) {
    constexpr int PATIENCE = 20000;  // maximum number of rounds in which every thread only yields
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
            run.error = text("CTA (%u,%u,%u) waits for something that never comes%s:", block.index.x, block.index.y,
                             block.index.z,
                             run.cooperative ? "" : " (if it waits for another CTA, launch with cooperative=True)");
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
    std::vector<unsigned> order = in_order(count / run.cluster), ranks = in_order(run.cluster);
    unsigned together = run.cooperative ? count : run.cluster;
    std::vector<Block> blocks(together);
    std::vector<Cluster> clusters(together / run.cluster);
    for (unsigned next = 0; next < count && run.error.empty(); next += together) {
        for (Cluster& cluster : clusters) cluster = Cluster{std::vector<Block*>(run.cluster), 0, 0};
        for (unsigned i = 0; i < together; ++i) {
            unsigned rank = ranks[i % run.cluster];
            start_block(blocks[i], order[(next + i) / run.cluster] * run.cluster + rank, size_t(i) * threads);
            blocks[i].cluster = &clusters[i / run.cluster];
            blocks[i].cluster->blocks[rank] = &blocks[i];
        }
        run_together(blocks);
        for (Block& block : blocks) free_shared(block);
    }
    if (!run.error.empty()) forget_stacks();
}

}  // namespace emulator_host
