// How the weights of a product for few tokens come: each warp copies its own chunks into its own ring in shared memory,
// with no barrier between warps.
#pragma once
#include "layout/tile.cuh"

#ifndef STAGES
#define STAGES 3
#endif

// Starts the copy of the current chunk (one group, empty past the end) and goes on.
template <class T, class Walk>
__device__ __forceinline__ void copy_chunk(Walk& walk, CopyTarget to, int lane) {
    if (!walk.done()) {
        constexpr int whole_lines = T::USED / 512, rest = T::USED % 512 / 16;
        const uint8_t* from = walk.tile_row + static_cast<uint32_t>(walk.chunk * T::BYTES);
        const uint64_t policy = walk.p.streaming;
#pragma unroll
        for (int i = 0; i < whole_lines; ++i)
            cp_async_streaming(to + i * 512 + lane * 16, from + i * 512 + lane * 16, policy);
        const int at = whole_lines * 512 + lane * 16;
        if constexpr (rest > 0) cp_async_streaming(to + at, from + at, policy, lane < rest);
        walk.next();
    }
    cp_async_commit();
}
