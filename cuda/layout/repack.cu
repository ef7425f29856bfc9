// tiles = repack(blocks[N, K]): rearranges the quant blocks of a GGUF tensor into tiles (tile.cuh). Runs once per
// tensor, when the model is loaded. FORMAT_HEADER declares the block type.
//
// Repacking is exact, except that f16 tiles round and saturate. Codes come from Format::codes8, so every format whose
// codes fit the bits of the tile and whose scales fit its Scales can be repacked. Format::codes8 returns d * scale and
// dmin * min, which are exact in float32; repack divides by d and dmin to recover the small scales. Tiles with a table
// store the index of the value in the table. Tiles without scales store the bytes of the block unchanged.
//
// Launch: grid (chunks of a tile row, tile rows of 16), 128 threads per CTA. A CTA writes one chunk; a thread writes
// the words that one lane of a GEMM reads at once, then scales.
#include FORMAT_HEADER
#include "layout/tile.cuh"

// The code that a tile stores for a value. A value that is not in the table gets code 0.
template <class T>
__device__ __forceinline__ uint32_t code_of(int value) {
    if constexpr (T::VALUES::TABLE) {
        for (int code = 0; code < 1 << T::BITS; ++code)
            if (T::VALUES::value(code) == value) return code;
        return 0;
    } else {
        return value + T::ZERO & 0xff;
    }
}

// The code of (row, column) as the tile stores it. Rows and columns past the end get the code of weight zero.
template <class Block, class T>
__device__ uint32_t tile_code(const Block* row, bool valid, int column, int k) {
    if (!valid || column >= k) return code_of<T>(0);
    if constexpr (!T::SCALED) {
        return reinterpret_cast<const uint8_t*>(row)[column] ^ T::ZERO;
    } else {
        const Codes c = Format<Block>::codes8(row, column / 8);
        const int in = column % 8;
        return code_of<T>(static_cast<int8_t>(c.q[in / 4] >> (8 * (in % 4)) & 0xff));
    }
}

// Writes the words of the main plane and of the extra plane that one lane of a GEMM reads at once.
template <class Block, class T>
__device__ void make_codes(const Block* blocks, uint8_t* chunk, int tile, int first, int n_rows, int k, int piece) {
    using Offset = TileOffset<T>;
    constexpr int EXTRA = T::BITS - T::BASE_BITS;
    const int lane = piece % 32, g = lane / 4, t = lane % 4, j0 = piece / 32 * Offset::GROUPS_AT_ONCE;
    uint32_t main[4] = {0, 0, 0, 0}, extra[2] = {0, 0};
    for (int j = j0; j < j0 + Offset::GROUPS_AT_ONCE; ++j)
        for (int h = 0; h < 2; ++h)
            for (int s = 0; s < 2; ++s)
                for (int e = 0; e < 4; ++e) {
                    const int row = tile * TILE_ROWS + g + 8 * h;
                    const int column = first + j * 32 + tile_column<T>(t, s, e);
                    const Block* src = blocks + static_cast<size_t>(row) * (k / Format<Block>::weights);
                    const uint32_t u = tile_code<Block, T>(src, row < n_rows, column, k);
                    main[Offset::word(h, s)] |= (u & ((1 << T::BASE_BITS) - 1)) << Offset::bit(h, j, e);
                    if (EXTRA) extra[EXTRA == 2 ? j & 1 : 0] |= (u >> T::BASE_BITS) << Offset::extra_bit(h, j, s, e);
                }
    uint32_t* low = reinterpret_cast<uint32_t*>(chunk + T::SCALE_BYTES) + piece * Offset::WORDS;
    for (int i = 0; i < Offset::WORDS; ++i) low[i] = main[i];
    uint32_t* high = reinterpret_cast<uint32_t*>(chunk + T::SCALE_BYTES + T::BASE_BYTES) + piece * EXTRA;
    for (int i = 0; i < EXTRA; ++i) high[i] = extra[i];
}

__device__ __forceinline__ float ratio(float a, float b) { return b == 0.0f ? 0.0f : rintf(a / b); }

// The exponent e of a scale 2^(e - 128). A scale of 0 becomes e = 0, which is close enough because its codes are 0.
__device__ __forceinline__ uint8_t exponent(float power) {
    const uint32_t bits = __float_as_uint(power);
    return bits >> 23 ? (bits >> 23) + 1 : bits == __float_as_uint(power_of_two(1));
}

// d and dmin of a block. Formats that store d differently overload block_d.
template <class Block>
__device__ __forceinline__ float block_d(const Block& block) {
    return __half2float(block.d);
}
template <class Block>
__device__ __forceinline__ float block_dmin(const Block& block) {
    return __half2float(block.dmin);
}

// Writes the scales of one (row, group). PACKED_SUB tiles: of four groups, which share words of fours and twos.
template <class Block, class T>
__device__ void make_scales(const Block* blocks, uint8_t* chunk, int tile, int first, int n_rows, int k, int index) {
    using Offset = TileOffset<T>;
    const int row_in_tile = index % TILE_ROWS, g = row_in_tile % 8, h = row_in_tile / 8;
    const int group = index / TILE_ROWS * (T::PACKED_SUB ? 4 : 1), row = tile * TILE_ROWS + row_in_tile;
    const Block* src = blocks + static_cast<size_t>(row) * (k / Format<Block>::weights);
    const auto codes_of = [&](int i) {
        const int column = first + (group + i) * T::GROUP;
        return row < n_rows && column < k ? Format<Block>::codes8(src, column / 8) : Codes{{0, 0}, 0.0f, 0.0f};
    };
    const int column = first + group * T::GROUP;
    const bool valid = row < n_rows && column < k;
    const Codes c = codes_of(0);
    __half* d = reinterpret_cast<__half*>(chunk + Offset::scale(g, group, h));
    if constexpr (T::SCALES == Scales::E8) {
        chunk[Offset::scale(g, group, h)] = exponent(c.d);
    } else if constexpr (T::SCALES == Scales::D || T::SCALES == Scales::DM) {
        d[0] = __float2half(c.d);
        if constexpr (T::MIN) d[1] = __float2half(c.m);
    } else {
        const float big = valid ? block_d(src[column / Format<Block>::weights]) : 0.0f;
        if (group == 0) d[0] = __float2half(big);
        if constexpr (T::SIGNED_SUB) {
            chunk[Offset::sub_scale(g, group, h)] =
                static_cast<uint8_t>(static_cast<int>(ratio(c.d, big * T::SUB_UNIT)));
        } else {
            const float low = valid ? block_dmin(src[column / Format<Block>::weights]) : 0.0f;
            if (group == 0) d[1] = __float2half(low);
            uint32_t fours[2] = {}, mins[2] = {}, twos = 0, min_twos = 0;
            for (int i = 0; i < 4; ++i) {
                const Codes of = codes_of(i);
                const uint32_t scale = static_cast<int>(ratio(of.d, big)), min = static_cast<int>(ratio(-of.m, low));
                fours[i / 2] |= (scale & 15) << i % 2 * 4, mins[i / 2] |= (min & 15) << i % 2 * 4;
                twos |= scale >> 4 << 2 * i, min_twos |= min >> 4 << 2 * i;
            }
            for (int i = 0; i < 2; ++i) {
                uint8_t* dst = chunk + Offset::sub_scale(g, group + 2 * i, h);
                dst[0] = fours[i], dst[2] = mins[i];
            }
            if constexpr (T::TWOS) {
                uint8_t* dst = chunk + Offset::sub_twos(g, group, h);
                dst[0] = twos, dst[2] = min_twos;
            }
        }
    }
}

// Writes 16 bytes of an f16 tile: a lane's A operand of one mma, which covers 16 rows x 16 columns.
template <class Block, class T>
__device__ void make_f16(const Block* blocks, uint8_t* chunk, int tile, int first, int n_rows, int k, int piece) {
    const int lane = piece % 32, g = lane / 4, t = lane % 4, step = piece / 32;
    uint32_t words[4];
    for (int i = 0; i < 4; ++i) {
        const int row = tile * TILE_ROWS + g + 8 * (i & 1), column = first + step * 16 + 4 * t + 2 * (i >> 1);
        float pair[2] = {0.0f, 0.0f};
        if (row < n_rows)
            for (int e = 0; e < 2; ++e)
                if (column + e < k) {
                    float w[8];
                    Format<Block>::weights8(blocks + static_cast<size_t>(row) * k, (column + e) / 8, w);
                    pair[e] = w[(column + e) % 8];
                }
        words[i] = saturated_half2(pair[0], pair[1]);
    }
    reinterpret_cast<uint4*>(chunk)[piece] = make_uint4(words[0], words[1], words[2], words[3]);
}

template <class Block, class T>
__global__ void repack(const Block* blocks, uint8_t* tiles, int n_rows, int k) {
    const int first = blockIdx.x * T::CHUNK_K, tile = blockIdx.y;
    uint8_t* chunk = tiles + (static_cast<size_t>(tile) * gridDim.x + blockIdx.x) * T::BYTES;
    if constexpr (T::FLOAT) {
        for (int piece = threadIdx.x; piece < T::BASE_BYTES / 16; piece += blockDim.x)
            make_f16<Block, T>(blocks, chunk, tile, first, n_rows, k, piece);
    } else {
        for (int piece = threadIdx.x; piece < T::BASE_BYTES / (4 * TileOffset<T>::WORDS); piece += blockDim.x)
            make_codes<Block, T>(blocks, chunk, tile, first, n_rows, k, piece);
        if constexpr (T::SCALED)
            for (int index = threadIdx.x; index < TILE_ROWS * T::GROUPS / (T::PACKED_SUB ? 4 : 1); index += blockDim.x)
                make_scales<Block, T>(blocks, chunk, tile, first, n_rows, k, index);
    }
    for (int i = T::USED + threadIdx.x; i < T::BYTES; i += blockDim.x) chunk[i] = 0;
}
