// Packed activations: x[T, K] in f16, in the layout of the B operand of gemm_wgmma.cu and gemm_skinny.cu:
//
//        [K / 64][T rounded up to a multiple of 8][64 columns = 128 bytes]
//
// The 64 columns of consecutive tokens are contiguous in memory, so one bulk copy fills a stage of shared memory in the
// layout that wgmma reads.
//
// The columns of a row are permuted as the codes of a tile are (tile.cuh). Inside 32 columns the order is: step s, then
// element pair (e = 0, 1 or e = 2, 3), then t. The eight 16-byte pieces of a row are therefore (32 columns, s, pair).
// Piece c of token r is stored at index c ^ (r % 8): the 128-byte swizzle. There are two orders, one for each kind of
// tile. Columns past K are 0.
#pragma once
#include "lib/common.cuh"

enum Order {
    PLAIN_ORDER,  // rows [token][k], not packed
    CODES,        // for tiles whose lane t has eight consecutive columns of 32
    F16           // for tiles whose lane t has two times four columns of 32: f16 tiles and groups of 16
};

constexpr int PACKED_STEP = 64;              // columns
constexpr int PACKED_ROW = 2 * PACKED_STEP;  // bytes

__device__ __forceinline__ int packed_tokens(int n_tokens) { return (n_tokens + 7) / 8 * 8; }

// The byte offset of 16-byte piece 0 ... 7 of a token's row in 64-column step `step`.
__device__ __forceinline__ size_t packed_piece(int step, int token, int piece, int n_tokens) {
    return (static_cast<size_t>(step) * packed_tokens(n_tokens) + token) * PACKED_ROW + ((piece ^ (token & 7)) << 4);
}

// The index (0 ... 63) of a column in its permuted row, before the swizzle.
__device__ __forceinline__ int packed_column(int order, int column) {
    const int c = column % 32, e = c % 4;
    const int s = order == CODES ? c / 4 % 2 : c / 16, t = order == CODES ? c / 8 : c / 4 % 4;
    return order == PLAIN_ORDER ? column % 64 : column % 64 / 32 * 32 + s * 16 + e / 2 * 8 + t * 2 + e % 2;
}

// The offset of element (token, column), counted in f16 elements.
__device__ __forceinline__ size_t packed_half(int order, int column, int token, int n_tokens) {
    const int position = packed_column(order, column);
    return packed_piece(column / PACKED_STEP, token, position / 8, n_tokens) / 2 + position % 8;
}

// Permutes 32 columns among four lanes. Before: lane l = lane % 4 holds columns 8 l ... 8 l + 7 in order. After: lane l
// holds the 16-byte piece l.
__device__ __forceinline__ uint4 pack_columns(const uint4& columns, int order) {
    const int l = threadIdx.x % 4;
    const uint32_t word[4] = {columns.x, columns.y, columns.z, columns.w};
    uint32_t out[4];
    if (order == CODES) {  // piece l is word l of each lane
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int other = l ^ r;
            const uint32_t sent = other & 2 ? (other & 1 ? word[3] : word[2]) : (other & 1 ? word[1] : word[0]);
            const uint32_t got = __shfl_xor_sync(0xffffffffu, sent, r);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (i == other) out[i] = got;
        }
    } else {  // piece l is words h and 2 + h of both lanes of a pair, h = l % 2
        const bool odd = l & 1;
        const uint32_t first = __shfl_xor_sync(0xffffffffu, odd ? word[0] : word[1], 1);
        const uint32_t second = __shfl_xor_sync(0xffffffffu, odd ? word[2] : word[3], 1);
        out[0] = odd ? first : word[0], out[1] = odd ? second : word[2];
        out[2] = odd ? word[1] : first, out[3] = odd ? word[3] : second;
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}
