// Packed activations: the operand of gemm_wgmma.cu. They are laid out so that what a block takes is one piece of
// memory, which a bulk copy brings into shared memory as wgmma wants it:
//
//        [64 columns][token, up to a multiple of eight][128 bytes]
//
// Inside 32 columns they stand in the order of the codes of a tile (tile.cuh): step s, then the element pairs e = 0, 1
// of all t, then those of e = 2, 3; so the eight 16-byte pieces of 128 bytes are (32 columns, s, pair). Piece c of token
// r lies at place c ^ (r % 8), the 128-byte swizzle. Two orders, for the two kinds of tiles; columns past k are 0.
#pragma once
#include "lib/common.cuh"

enum Order { PLAIN_ORDER, CODES, HALVES };  // [token][k]; tiles whose t has eight columns in a row; twice four

constexpr int PACKED_STEP = 64;               // columns
constexpr int PACKED_ROW = 2 * PACKED_STEP;   // bytes

__device__ __forceinline__ int packed_tokens(int n_tokens) { return (n_tokens + 7) / 8 * 8; }

// Where the 16-byte piece (0 ... 7) of a token's step lies, in bytes.
__device__ __forceinline__ size_t packed_piece(int step, int token, int piece, int n_tokens) {
    return (static_cast<size_t>(step) * packed_tokens(n_tokens) + token) * PACKED_ROW + ((piece ^ (token & 7)) << 4);
}

// Which of the 64 halves of a token's step a column is, before the swizzle.
__device__ __forceinline__ int packed_column(int order, int column) {
    const int c = column % 32, e = c % 4;
    const int s = order == CODES ? c / 4 % 2 : c / 16, t = order == CODES ? c / 8 : c / 4 % 4;
    return order == PLAIN_ORDER ? column % 64 : column % 64 / 32 * 32 + s * 16 + e / 2 * 8 + t * 2 + e % 2;
}

// Where the half of (token, column) lies, in halves.
__device__ __forceinline__ size_t packed_half(int order, int column, int token, int n_tokens) {
    const int place = packed_column(order, column);
    return packed_piece(column / PACKED_STEP, token, place / 8, n_tokens) / 2 + place % 8;
}

// Four lanes, lane % 4 = l, have columns 8 l ... 8 l + 7 of 32; each receives piece l of their four.
__device__ __forceinline__ uint4 pack_columns(const uint4& columns, int order) {
    const int l = threadIdx.x % 4;
    const uint32_t word[4] = {columns.x, columns.y, columns.z, columns.w};
    uint32_t out[4];
    if (order == CODES) {  // word l of each lane
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int other = l ^ r;
            const uint32_t sent = other & 2 ? (other & 1 ? word[3] : word[2]) : (other & 1 ? word[1] : word[0]);
            const uint32_t got = __shfl_xor_sync(0xffffffffu, sent, r);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (i == other) out[i] = got;
        }
    } else {  // words h and 2 + h of both lanes of a pair, h = l % 2
        const bool odd = l & 1;
        const uint32_t first = __shfl_xor_sync(0xffffffffu, odd ? word[0] : word[1], 1);
        const uint32_t second = __shfl_xor_sync(0xffffffffu, odd ? word[2] : word[3], 1);
        out[0] = odd ? first : word[0], out[1] = odd ? second : word[2];
        out[2] = odd ? word[1] : first, out[3] = odd ? word[3] : second;
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}
