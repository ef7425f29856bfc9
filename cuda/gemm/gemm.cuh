// What the products of tiles have in common: several matrices side by side, and what happens to a sum at the end.
#pragma once
#include "layout/tile.cuh"

enum Epilogue { STORE, ADD, GLU, QKV };

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

// QKV: how q, k and v, which are the matrices, go to where attention takes them (rope_epilogue.cuh); k's and v's outputs are
// pages of halves.
struct Turning {
    const float2* turns;   // [n_tokens][n_pairs], see find_turns (rope_kv.cu)
    const int* rows;       // [n_tokens], likewise
    const float* bias[3];  // of q, k and v, or null
    int head_size;         // a multiple of 32
    int n_pairs, neox;     // as of RopeKv; an even number of pairs
    int page_size;
    float magnitude;
};

// The segment that has a tile row, which is counted over all segments.
template <class Product>
__device__ __forceinline__ int segment_of(const Product& p, int tile_row) {
    return (tile_row >= p.segment[1].first_tile) + (tile_row >= p.segment[2].first_tile);
}

// A tile row of a block of threads: where it lies and where its outputs go. Past the end it repeats the last one, unwritten.
struct TileRow {
    const uint8_t* chunks;
    int segment, row;
    bool valid;

    // The i-th of COUNT that the block has; GLU: the first half are of gate, the others of up.
    template <int EPILOGUE, int COUNT, class Product>
    static __device__ __forceinline__ TileRow of(const Product& p, int row_block, int i, int chunk_bytes) {
        constexpr bool PAIRS = EPILOGUE == GLU;
        const int wanted = PAIRS ? row_block * (COUNT / 2) + i % (COUNT / 2) : row_block * COUNT + i;
        const int index = min(wanted, p.n_tiles - 1);
        const int s = PAIRS ? i / (COUNT / 2) : segment_of(p, index);
        const int tile = PAIRS ? index : index - p.segment[s].first_tile;
        return {p.segment[s].tiles + static_cast<size_t>(tile) * p.n_chunk * chunk_bytes, s, tile * TILE_ROWS,
                wanted < p.n_tiles};
    }
};

// An output of the matrix, by the scale of its row.
__device__ __forceinline__ float scaled_row(const Segment& segment, int row, float y) {
    return segment.row_scale ? y * __ldg(segment.row_scale + row) : y;
}
