// q, k and v of a few tokens on their way from the sums of a product to rows of halves and to pages: bias and rotation, as
// rope_kv.cu does that behind a product, with the same bits. Token i is alone with sequence i. Pairs are neighbours; a
// thread has one element of a token, and the next thread, or the one before, the other of its pair.
#pragma once
#include "attention/rope.cuh"

// What parameters say is found before the wait, and what no kernel of the step writes is asked for, all at once; what
// becomes of the latter is found while x is under way. To wait for it before the wait would take longer.
struct TurnedRow {
    int part, e = 0;  // of the head, the element
    int position, page;
    uint64_t turn;  // from one position to the next
    float bias = 0.0f, sine = 0.0f, cosine = 0.0f, magnitude;
    bool turns = false;
    __half* to;  // at first as if page and slot were 0
    int row;     // halves of a key; 0 of q, which is in no page
    uint32_t page_halves;

    // Row `i` of a part of a token.
    __device__ __forceinline__ void locate(const RopeKv& p, int part_, int token, int i) {
        part = part_;
        position = load_now(p.positions + token), page = load_now(p.pages + token);
        bias = p.bias[part] == nullptr ? -0.0f : load_now(p.bias[part] + i);  // changes nothing, not even -0
        const int head = i / p.head_size;
        e = i - head * p.head_size;
        turns = part != VALUE && e / 2 < p.n_pairs;
        turn = turns ? load_now(p.turns + e / 2) : 0;
        magnitude = p.magnitude;
        row = part == QUERY ? 0 : p.row;
        page_halves = p.n_head_kv * row * PAGE_SIZE;
        const int rows = part == QUERY ? token * p.n_head + head : head * PAGE_SIZE;  // before the head's first
        to = (part == QUERY ? p.q : part == KEY ? p.k_pages : p.v_pages) + rows * p.row;
        to += part == VALUE ? value_place(0, 0, e) : e;
    }
    // See grid_dependency_wait.
    __device__ __forceinline__ int made() const {
        return made_of(to) | ((row | page_halves | __float_as_int(magnitude)) & 0x7fffffff);
    }
    __device__ __forceinline__ void prepare() {
        RotationOf<1> rotation;
        rotation.prepare_pair(turn, position, 0);
        sine = rotation.sine[0], cosine = rotation.cosine[0];
        const int slot = position % PAGE_SIZE;
        to += static_cast<uint64_t>(page_halves) * static_cast<uint32_t>(page);
        to += part == VALUE ? value_place(row, slot, e) - value_place(0, 0, e) : slot * row;
    }
    // y, which was rounded to float32, behind that; by all threads of a warp.
    __device__ __forceinline__ float turn_with_next(float y) const {
        y = __fadd_rn(y, bias);
        const float other = __shfl_xor_sync(0xffffffffu, y, 1);
        const bool second = e & 1;
        const float2 pair = turned(second ? make_float2(other, y) : make_float2(y, other), cosine, sine, magnitude);
        return !turns ? y : second ? pair.y : pair.x;
    }
};
