// What all GEMMs on tiled weights share: the kernel parameters for up to four matrices (segments) that multiply the
// same x, and the mapping from a CTA to its tile rows.
#pragma once
#include "layout/tile.cuh"

enum Epilogue { STORE, ADD, GLU, QKV, INPUT };

// One weight matrix of a GEMM.
struct Segment {
    const uint8_t* tiles;
    void* out;               // f32 or f16 [n_tokens, n_rows]; GLU: only segment 0's is used
    const float* row_scale;  // [n_rows], or of experts [n_expert], or null: no scale
    int n_rows;
    int first_tile;  // index of the segment's first tile row, counted over all segments; INT_MAX for an unused segment
};

// Parameters of every GEMM. Each kernel derives a structure that appends its own parameters.
struct GemmArgs {
    Segment segment[4];
    uint64_t streaming;  // L2 cache policy of weight loads: see cp_async_streaming
    int n_tiles;         // tile rows of all segments together; GLU: of gate, which has as many as up
    int n_tokens;
    int k;
    int n_chunk;     // chunks of a tile row
    int activation;  // GLU: enum Activation
};

// The RoPE epilogue (QKV; rope_epilogue.cuh): the segments are q, k and v. Outputs of q are f16 rows; outputs of k and
// v are pages of the f16 KV cache.
struct RopeEpilogueArgs {
    const float2* angles;  // [n_tokens][n_pairs]: see compute_angles (rope_kv.cu)
    const int* rows;       // [n_tokens], the row of each token in the KV pages: from compute_angles too
    const float* bias[3];  // of q, k and v, or null
    int head_size;         // a multiple of 32
    int n_pairs, neox;     // as in RopeArgs; n_pairs is even
    int page_size;
    float magnitude;
};

// Index of the segment that holds `tile_row`, which is counted over all segments.
template <class Args>
__device__ __forceinline__ int segment_of(const Args& p, int tile_row) {
    return (tile_row >= p.segment[1].first_tile) + (tile_row >= p.segment[2].first_tile) +
           (tile_row >= p.segment[3].first_tile);
}

// One tile row of a CTA: where its chunks are and which output rows it makes. A CTA past the last tile row gets the
// last one again with valid = false: it multiplies, but stores nothing.
struct TileRow {
    const uint8_t* chunks;
    int segment, row;
    bool valid;

    // Tile row i of the COUNT tile rows of CTA row `row_block`. GLU: i < COUNT / 2 are tile rows of gate, the others
    // the same tile rows of up.
    template <int EPILOGUE, int COUNT, class Args>
    static __device__ __forceinline__ TileRow of(const Args& p, int row_block, int i, int chunk_bytes) {
        constexpr bool PAIRS = EPILOGUE == GLU;
        const int wanted = PAIRS ? row_block * (COUNT / 2) + i % (COUNT / 2) : row_block * COUNT + i;
        const int index = min(wanted, p.n_tiles - 1);
        const int s = PAIRS ? i / (COUNT / 2) : segment_of(p, index);
        const int tile = PAIRS ? index : index - p.segment[s].first_tile;
        return {p.segment[s].tiles + static_cast<size_t>(tile) * p.n_chunk * chunk_bytes, s, tile * TILE_ROWS,
                wanted < p.n_tiles};
    }
};

// Applies the scale of an output row, if the matrix has row scales.
__device__ __forceinline__ float scaled_row(const Segment& segment, int row, float y) {
    return segment.row_scale ? y * __ldg(segment.row_scale + row) : y;
}
// Applies the scale of an expert, which all of its rows have, if the experts have scales.
__device__ __forceinline__ float scaled_expert(const Segment& segment, int expert, float y) {
    return scaled_row(segment, expert, y);
}
