// The weight pipeline of gemm_decode.cu and gemm_skinny.cu: each warp copies its own chunks into its own STAGES stages
// in shared memory with cp.async, so the pipeline needs no CTA barrier.
#pragma once
#include "layout/tile.cuh"

#ifndef STAGES
#define STAGES 3
#endif

// Starts the copy of the iterator's chunk as one cp.async group and advances the iterator. Past the last chunk the
// group is empty.
template <class T, class ChunkIterator>
__device__ __forceinline__ void copy_chunk(ChunkIterator& chunks, CopyTarget dst, int lane) {
    if (!chunks.done()) {
        constexpr int whole_lines = T::USED / 512, rest = T::USED % 512 / 16;
        const uint8_t* src = chunks.tile_row + static_cast<uint32_t>(chunks.chunk * T::BYTES);
        const uint64_t policy = chunks.p.streaming;
#pragma unroll
        for (int i = 0; i < whole_lines; ++i)
            cp_async_streaming(dst + i * 512 + lane * 16, src + i * 512 + lane * 16, policy);
        if constexpr (rest > 0) {
            const int offset = whole_lines * 512 + lane % rest * 16;  // other lanes copy the same again: no branch
            cp_async_streaming(dst + offset, src + offset, policy);
        }
        chunks.next();
    }
    cp_async_commit();
}
