// The weight pipeline of gemm_decode.cu and gemm_skinny.cu: each warp copies its own chunks into its own STAGES stages
// in shared memory with cp.async, so the pipeline needs no CTA barrier.
#pragma once
#include "layout/tile.cuh"

#ifndef STAGES
#define STAGES 3
#endif

// Starts the copy of a chunk: lines of 512 bytes, then a rest, which lanes beyond its pieces copy again, since a branch
// would take longer.
template <class T>
__device__ __forceinline__ void copy_pieces(CopyTarget dst, const uint8_t* src, int lane, uint64_t policy) {
    constexpr int whole_lines = T::USED / 512, rest = T::USED % 512 / 16;
#pragma unroll
    for (int i = 0; i < whole_lines; ++i)
        cp_async_streaming(dst + i * 512 + lane * 16, src + i * 512 + lane * 16, policy);
    if constexpr (rest > 0) {
        const int offset = whole_lines * 512 + lane % rest * 16;
        cp_async_streaming(dst + offset, src + offset, policy);
    }
}

// Starts the copy of the iterator's chunk as one cp.async group and advances the iterator. Past the last chunk the
// group is empty.
template <class T, class ChunkIterator>
__device__ __forceinline__ void copy_chunk(ChunkIterator& chunks, CopyTarget dst, int lane) {
    if (!chunks.done()) {
        copy_pieces<T>(dst, chunks.tile_row + static_cast<uint32_t>(chunks.chunk * T::BYTES), lane, chunks.p.streaming);
        chunks.next();
    }
    cp_async_commit();
}
