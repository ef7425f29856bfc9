// What the products of tiles have in common: several matrices side by side, and what happens to a sum at the end.
#pragma once
#include "common.cuh"

enum Epilogue { STORE, ADD, GLU };

// One matrix of a product.
struct Segment {
    const uint8_t* tiles;
    void* out;               // float or half [n_tokens, n_rows]; GLU: only the first segment's
    const float* row_scale;  // [n_rows], or null: none
    int n_rows;
    int first_tile;  // counted over all segments; of one that is none, beyond all
};

// What every product is of; a kernel's own parameters come behind it.
struct Matrices {
    Segment segment[3];
    uint64_t streaming;  // how weights are kept in the second-level cache: cp_async_streaming
    int n_tiles;  // tile rows of all segments together; GLU: of each
    int n_tokens;
    int k;
    int n_chunk;     // of a tile row
    int activation;  // GLU
};

// The segment that has a tile row, which is counted over all segments.
template <class Product>
__device__ __forceinline__ int segment_of(const Product& p, int tile_row) {
    return (tile_row >= p.segment[1].first_tile) + (tile_row >= p.segment[2].first_tile);
}

// An output of the matrix, by the scale of its row.
__device__ __forceinline__ float scaled_row(const Segment& segment, int row, float y) {
    return segment.row_scale ? y * __ldg(segment.row_scale + row) : y;
}
