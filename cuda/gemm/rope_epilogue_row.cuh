// The RoPE epilogue of the decode GEMM: adds the bias to one element of q, k or v, rotates q and k, and stores f16 to
// the rows of q or to the KV pages. The results are bitwise equal to those of rope_kv.cu after a GEMM without the
// epilogue.
//
// One token per sequence: token i belongs to sequence i. Pairs are adjacent elements (norm style). Each thread holds
// one element of one token; the neighbouring thread (lane ^ 1) holds the other element of the pair.
#pragma once
#include "attention/rope.cuh"

// locate() runs before grid_dependency_wait: it computes what depends on the parameters only, and issues all loads of
// data that no kernel of the step writes (positions, pages, bias, angles). prepare() consumes the loaded values while x
// is in flight. Consuming them before the wait would stall the warp on these loads.
struct RopeEpilogueRow {
    int part, e = 0;  // part: QUERY, KEY or VALUE; e: element of the head
    int position, page;
    uint64_t angle;  // rotation per position
    float bias = 0.0f, sine = 0.0f, cosine = 0.0f, magnitude;
    bool rotates = false;
    __half* dst;  // locate(): the address in page 0, slot 0; prepare() adds the page and the slot
    int row;      // f16 elements of a key row; 0 for q, which has no pages
    uint32_t page_halves;

    // Locates row `i` of `part` (q, k or v) of a token.
    __device__ __forceinline__ void locate(const RopeArgs& p, int part_, int token, int i) {
        part = part_;
        position = load_now(p.positions + token), page = load_now(p.pages + token);
        // -0 is the neutral element of addition: x + -0 == x, even for x = -0
        bias = p.bias[part] == nullptr ? -0.0f : load_now(p.bias[part] + i);
        const int head = i / p.head_size;
        e = i - head * p.head_size;
        rotates = part != VALUE && e / 2 < p.n_pairs;
        angle = rotates ? load_now(p.angles + e / 2) : 0;
        magnitude = p.magnitude;
        row = part == QUERY ? 0 : p.row;
        page_halves = p.n_head_kv * row * PAGE_SIZE;
        // rows before the first row of the head
        const int rows = part == QUERY ? token * p.n_head + head : head * PAGE_SIZE;
        dst = (part == QUERY ? p.q : part == KEY ? p.k_pages : p.v_pages) + rows * p.row;
        dst += part == VALUE ? value_offset(0, 0, e) : e;
    }
    // A value that depends on all addresses computed so far: see grid_dependency_wait.
    __device__ __forceinline__ int made() const {
        return made_of(dst) | ((row | page_halves | __float_as_int(magnitude)) & 0x7fffffff);
    }
    __device__ __forceinline__ void prepare() {
        RotationOf<1> rotation;
        rotation.prepare_pair(angle, position, 0);
        sine = rotation.sine[0], cosine = rotation.cosine[0];
        const int slot = position % PAGE_SIZE;
        dst += static_cast<uint64_t>(page_halves) * static_cast<uint32_t>(page);
        dst += part == VALUE ? value_offset(row, slot, e) - value_offset(0, 0, e) : slot * row;
    }
    // Adds the bias to y and rotates the pair (y, y of lane ^ 1). y must have been rounded to f32. All threads of the
    // warp must call it.
    __device__ __forceinline__ float rotate_with_next(float y) const {
        y = __fadd_rn(y, bias);
        const float other = __shfl_xor_sync(0xffffffffu, y, 1);
        const bool second = e & 1;
        const float2 pair = rotated(second ? make_float2(other, y) : make_float2(y, other), cosine, sine, magnitude);
        return !rotates ? y : second ? pair.y : pair.x;
    }
};
