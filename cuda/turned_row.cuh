// q, k and v of a few tokens on their way from the sums of a product to rows of halves and to pages: bias and rotation, as
// rope_kv.cu does that behind a product, with the same bits. Token i is alone with sequence i. Pairs are neighbours; a
// thread has one element of a token, and the next thread, or the one before, the other of its pair.
#pragma once
#include "rope.cuh"

struct TurnedRow {
    __half* to;
    float bias = 0.0f, sine = 0.0f, cosine = 0.0f;
    bool turns = false, second = false;  // the pair does; the thread's is the second element of it

    // Row `row` of a part of a token. Nothing of it depends on earlier kernels of the step.
    __device__ __forceinline__ void locate(const RopeKv& p, int part, int token, int row) {
        const int head = row / p.head_size, e = row - head * p.head_size;
        const int position = load_now(p.positions + token);
        const int page = load_now(p.page_tables + token * p.table_stride + position / PAGE_SIZE);
        bias = p.bias[part] == nullptr ? -0.0f : load_now(p.bias[part] + row);  // changes nothing, not even -0
        turns = part != VALUE && e / 2 < p.n_pairs;
        second = e & 1;
        RotationOf<1> rotation;
        rotation.prepare_pair(turns ? load_now(p.turns + e / 2) : 0, position, 0);
        sine = rotation.sine[0], cosine = rotation.cosine[0];
        const int slot = position % PAGE_SIZE;
        if (part == QUERY)
            to = p.q + (token * p.n_head + head) * p.row + e;
        else if (part == KEY)
            to = reinterpret_cast<__half*>(page_at<CacheF16>(p, p.k_pages, page, head, p.row)) + slot * p.row + e;
        else
            to = reinterpret_cast<__half*>(page_at<CacheF16>(p, p.v_pages, page, head, p.row)) +
                 value_place(p.row, slot, e);
    }
    // See grid_dependency_wait.
    __device__ __forceinline__ int made() const {
        return made_of(to) | ((__float_as_int(sine) | __float_as_int(cosine) | __float_as_int(bias)) & 0x7fffffff);
    }
    // y, which was rounded to float32, behind that; by all threads of a warp.
    __device__ __forceinline__ float turn(const RopeKv& p, float y) const {
        y = __fadd_rn(y, bias);
        const float other = __shfl_xor_sync(0xffffffffu, y, 1);
        const float2 pair = turned(second ? make_float2(other, y) : make_float2(y, other), cosine, sine, p.magnitude);
        return !turns ? y : second ? pair.y : pair.x;
    }
};
