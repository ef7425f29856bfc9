// Tiles times the few tokens of a decode step: the arithmetic of gemm_decode.cu. Tiles of integers have scales and are
// multiplied in fixed_point.cuh; here are those without, that stand for halves, times x in halves.
//
// TokenSums<Tile, COLS> is a lane's part of one tile row: load() takes its codes and scales of a chunk out of the ring,
// multiply() adds their products with x (IN_RING: it still reads the chunk), finish() leaves the warp's sums. Nothing here
// knows how chunks and x come into shared memory, or what becomes of the sums.
#pragma once
#include "gemm/fixed_point.cuh"

template <class T, int COLS>
struct HalfSums {
    static constexpr int N = (COLS + 7) / 8, FLOATS = 4 * N;
    static constexpr bool IN_RING = false;
    float acc[N][4];  // rows g, g + 8, columns 2 t, 2 t + 1
    ChunkCodes<T> codes;

    __device__ __forceinline__ float* floats() { return acc[0]; }
    __device__ __forceinline__ void load(const uint8_t* chunk, int lane) { codes.load(chunk, lane); }
    using Lane = LaneOfRoom<T, COLS>;
    __device__ __forceinline__ void multiply(const Lane& at, int column) {
#pragma unroll
        for (int n = 0; n < N; ++n)
            multiply_groups<0>(acc[n], at.room.x_of(at.room.token_of(n * 8 + at.lane / 4), column), at.lane % 4);
    }
    // Groups of 32 columns from J on times eight tokens; `x` is the lane's token's.
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
struct TokenSums : HalfSums<T, COLS> {};
template <class T, int COLS>
struct TokenSums<T, COLS, true> : FixedPointSums<T, COLS> {};

// Where eight columns of a token go where they stay halves: see FixedPlace.
struct HalfPlace {
    uint8_t* x;

    template <class T, int COLS>
    __device__ __forceinline__ HalfPlace(const Room<T, COLS>& room, int token, int column)
        : x(room.x_of(token, column)) {}
    __device__ __forceinline__ void keep() { x = kept_shared(x); }
    __device__ __forceinline__ int made() const { return made_of(x); }
    __device__ __forceinline__ HalfPlace behind(int columns) const {
        HalfPlace place = *this;
        place.x += 2 * columns;
        return place;
    }
};
template <class T, bool SCALED = T::SCALED>
struct XPlaceOf {
    using Type = HalfPlace;
};
template <class T>
struct XPlaceOf<T, true> {
    using Type = FixedPlace<T>;
};
template <class T>
using XPlace = typename XPlaceOf<T>::Type;

// Eight halves go there. Every lane of the warp calls it; those not `valid` write nothing.
template <class T>
__device__ __forceinline__ void put_x(const XPlace<T>& place, bool valid, const uint4& halves) {
    if constexpr (T::SCALED) {
        put_fixed_point(place, valid, halves);
    } else {
        if (valid) *reinterpret_cast<uint4*>(place.x) = halves;
    }
}

// Sums that go on in the next slab of columns.
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
