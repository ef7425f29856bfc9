// out[N, K] = f16(W[N, K]): dequantises a tiled matrix (tile.cuh) to f16 rows, for GEMMs that do not read tiles.
// Weights are rounded to the nearest f16 and saturated to the largest finite f16. K is a multiple of 8.
//
// Launch: grid (chunks of a tile row / 4, tile rows of 16), 4 warps per CTA. A warp dequantises one chunk. It loads the
// chunk as the GEMMs do, so a lane holds columns of rows g and g + 8.
#include "layout/tile.cuh"

constexpr int CHUNKS = 4;  // chunks, and warps, per CTA

// Scales two f16 codes that unpack() returned for row half H of group J. Returns two f16 weights.
template <class T, int J, int H>
__device__ __forceinline__ uint32_t two_weights(uint32_t codes, const RowScales& s) {
    const float2 u = half2_to_float2(codes);
    if constexpr (T::SCALED) {
        const float unit = 1.0f / (CODE_UNIT * T::template shift<J, H>());
        return saturated_half2(s.d[H] * (u.x * unit - T::ZERO) + s.m[H], s.d[H] * (u.y * unit - T::ZERO) + s.m[H]);
    } else {
        return codes;
    }
}

// Returns the lane's four f16 weights of step S of group J, for each of its two rows.
template <class T, int J, int S>
__device__ __forceinline__ void four_weights(const ChunkCodes<T>& codes, const ChunkScales<T>& scales,
                                             uint2 (&out)[2]) {
    uint32_t a[4];
    codes.template unpack<J, S>(a);
    if constexpr (T::FLOAT) {
        out[0] = make_uint2(a[0], a[2]), out[1] = make_uint2(a[1], a[3]);
    } else {
        RowScales s = {};
        if constexpr (T::SCALED) s = scales.template get<(32 * J + 16 * S) / T::GROUP>();
        out[0] = make_uint2(two_weights<T, J, 0>(a[0], s), two_weights<T, J, 0>(a[2], s));
        out[1] = make_uint2(two_weights<T, J, 1>(a[1], s), two_weights<T, J, 1>(a[3], s));
    }
}

// Writes groups J, J + 1, ... of a chunk whose first column is `first`. The lane writes rows `row` and row + 8.
template <class T, int J>
__device__ __forceinline__ void write_groups(const ChunkCodes<T>& codes, const ChunkScales<T>& scales, __half* out,
                                             int row, int first, int n_rows, int k) {
    if constexpr (J < T::CHUNK_K / 32) {
        uint2 step[2][2];
        four_weights<T, J, 0>(codes, scales, step[0]);
        four_weights<T, J, 1>(codes, scales, step[1]);
        const int t = threadIdx.x % 4, column = first + 32 * J + tile_column<T>(t, 0, 0);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (row + 8 * h >= n_rows || column >= k) continue;
            const uint2 a = step[0][h], b = step[1][h];
            uint2* dst = reinterpret_cast<uint2*>(out + static_cast<size_t>(row + 8 * h) * k + column);
            if constexpr (T::GROUP != 16 && !T::FLOAT)  // the lane has eight consecutive columns
                *reinterpret_cast<uint4*>(dst) = make_uint4(a.x, a.y, b.x, b.y);
            else if (*dst = a; column + 16 < k)
                dst[4] = b;
        }
        write_groups<T, J + 1>(codes, scales, out, row, first, n_rows, k);
    }
}

template <class T>
__global__ void __launch_bounds__(32 * CHUNKS) dequantize_tile(const uint8_t* tiles, __half* out, int n_rows, int k) {
    const int n_chunk = (k + T::CHUNK_K - 1) / T::CHUNK_K, chunk = blockIdx.x * CHUNKS + threadIdx.x / 32;
    if (chunk >= n_chunk) return;
    const int lane = threadIdx.x % 32, g = lane / 4;
    const uint8_t* src = tiles + (static_cast<size_t>(blockIdx.y) * n_chunk + chunk) * T::BYTES;
    ChunkCodes<T> codes;
    ChunkScales<T> scales;
    codes.load(src, lane);
    if constexpr (T::SCALED) scales.load(src, g);
    write_groups<T, 0>(codes, scales, out, blockIdx.y * TILE_ROWS + g, chunk * T::CHUNK_K, n_rows, k);
}
