// The mainloop arithmetic of the decode GEMM (gemm_decode.cu): one 16-row tile row times up to COLS tokens.
//
// | tiles                 | x in shared memory | accumulators                     |
// | integers with scales  | 16-bit fixed point | FixedPointSums (fixed_point.cuh) |
// | f16 values, no scales | f16                | F16Sums (below)                  |
//
// DecodeSums<Tile, COLS> holds one lane's accumulators of one tile row. load() reads the lane's codes and scales of one
// chunk from a pipeline stage; multiply() adds their products with x; finish() stores the warp's partial sums
// [16][COLS]. With IN_STAGE, multiply() still reads the stage, so the stage may be refilled only after it. The caller
// moves chunks and x into shared memory and reduces the partial sums over the warps.
#pragma once
#include "gemm/fixed_point.cuh"

template <class T, int COLS>
struct F16Sums {
    static constexpr int N = (COLS + 7) / 8, FLOATS = 4 * N;
    static constexpr bool IN_STAGE = false;
    float acc[N][4];  // rows g and g + 8, tokens 2 t and 2 t + 1 of each n
    ChunkCodes<T> codes;

    __device__ __forceinline__ float* floats() { return acc[0]; }
    __device__ __forceinline__ void load(const uint8_t* chunk, int lane) { codes.load(chunk, lane); }
    using Lane = LaneStorage<T, COLS>;
    __device__ __forceinline__ void multiply(const Lane& lane_storage, int column) {
#pragma unroll
        for (int n = 0; n < N; ++n)
            multiply_groups<0>(
                acc[n], lane_storage.storage.x_of(lane_storage.storage.token_of(n * 8 + lane_storage.lane / 4), column),
                lane_storage.lane % 4);
    }
    // Multiplies the groups of 32 columns J, J + 1, ... of the chunk by eight tokens. `x` points at the token of this
    // lane.
    template <int J>
    __device__ __forceinline__ void multiply_groups(float (&sums)[4], const uint8_t* x, int t) {
        if constexpr (J * 32 < T::CHUNK_K) {
            uint32_t a0[4], a1[4];
            codes.template unpack<J, 0>(a0);
            codes.template unpack<J, 1>(a1);
            uint4 b;
            if constexpr (T::GROUP == 16 || T::FLOAT) {
                const uint2 low = *reinterpret_cast<const uint2*>(x + J * 64 + 8 * t);
                const uint2 high = *reinterpret_cast<const uint2*>(x + J * 64 + 32 + 8 * t);
                b = make_uint4(low.x, low.y, high.x, high.y);
            } else {
                b = *reinterpret_cast<const uint4*>(x + J * 64 + 16 * t);
            }
            mma_m16n8k16_f16(sums, a0, {b.x, b.y});
            mma_m16n8k16_f16(sums, a1, {b.z, b.w});
            multiply_groups<J + 1>(sums, x, t);
        }
    }
    __device__ __forceinline__ void finish(float* part, int lane) const {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int column = n * 8 + lane % 4 * 2 + e % 2;
                if (column < COLS) part[(lane / 4 + e / 2 * 8) * COLS + column] = acc[n][e];
            }
    }
};

template <class T, int COLS, bool SCALED = T::SCALED>
struct DecodeSums : F16Sums<T, COLS> {};
template <class T, int COLS>
struct DecodeSums<T, COLS, true> : FixedPointSums<T, COLS> {};

// Destination of eight columns of x in shared memory as f16. FixedPointDst is the counterpart for fixed point.
struct F16Dst {
    uint8_t* x;

    template <class T, int COLS>
    __device__ __forceinline__ F16Dst(const DecodeSharedStorage<T, COLS>& storage, int token, int column)
        : x(storage.x_of(token, column)) {}
    __device__ __forceinline__ void keep() { x = kept_shared(x); }
    __device__ __forceinline__ int made() const { return made_of(x); }
    __device__ __forceinline__ F16Dst offset_by(int columns) const {
        F16Dst dst = *this;
        dst.x += 2 * columns;
        return dst;
    }
};
template <class T, bool SCALED = T::SCALED>
struct XDstOf {
    using Type = F16Dst;
};
template <class T>
struct XDstOf<T, true> {
    using Type = FixedPointDst<T>;
};
template <class T>
using XDst = typename XDstOf<T>::Type;

// Stores eight f16 columns of x at `dst`. Every lane of the warp must call it, because the fixed-point conversion
// shuffles; lanes with `valid` = false store nothing.
template <class T>
__device__ __forceinline__ void put_x(const XDst<T>& dst, bool valid, const uint4& f16x8) {
    if constexpr (T::SCALED) {
        put_fixed_point(dst, valid, f16x8);
    } else {
        if (valid) *reinterpret_cast<uint4*>(dst.x) = f16x8;
    }
}

// When x does not fit in shared memory, accumulators are saved (carry_sums) at the end of a slab of columns and
// restored (start_sums) at the next slab.
template <class Sums>
__device__ __forceinline__ void start_sums(Sums& sums, const float* carried, bool first, int lane) {
#pragma unroll
    for (int i = 0; i < Sums::FLOATS; ++i) sums.floats()[i] = first ? 0.0f : carried[i * 32 + lane];
}
template <class Sums>
__device__ __forceinline__ void carry_sums(Sums& sums, float* carried, int lane) {
#pragma unroll
    for (int i = 0; i < Sums::FLOATS; ++i) carried[i * 32 + lane] = sums.floats()[i];
}
