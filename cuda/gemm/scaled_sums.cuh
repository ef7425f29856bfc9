// MMAs of f16 activations with the codes of tiles, for gemm_skinny.cu and expert_rows.cu. Integer codes become f16 exactly
// and without their scale (unpack() in tile.cuh), one AND for two of them, and the f32 sums of a group are multiplied by
// its scale. Formats with scales of scales multiply by the scale of a chunk once a chunk, and each lane converts a
// quarter of the integer scales that its quad needs.
//
// Zero points and minimums meet the sums of the activations of a group, which the CTA computes once. Those of formats
// with scales of scales do so in an MMA.
#pragma once
#include "lib/mma.cuh"
#include "layout/tile.cuh"

__device__ __forceinline__ float sum_of_halves(const uint4& v) {
    const float2 a = half2_to_float2(v.x), b = half2_to_float2(v.y), c = half2_to_float2(v.z), d = half2_to_float2(v.w);
    return ((a.x + a.y) + (b.x + b.y)) + ((c.x + c.y) + (d.x + d.y));
}

// The sums of the activations of groups, in shared memory, eight tokens after eight tokens.
//
//        MIN      the sums: f32 [groups][8]
//        ZEROS    times the zero point, for rows g and g + 8, in the order of an accumulator: f32 [groups][t][4]
//        PAIRED   the B operands of an MMA of eight groups: [groups / 8][lane][2], means as f16, then what these lack
template <class T>
struct ActivationSums {
    static constexpr bool NEEDED = T::SCALED && (T::MIN || T::ZERO != 0), PAIRED = T::HAS_SUB;
    static constexpr bool ZEROS = NEEDED && !PAIRED && T::ZERO != 0;
    static constexpr int FLOATS = ZEROS ? 16 : 8;  // of a group

    // What unpack() returns for the zero point of 32-column group J, row half H.
    template <int J, int H>
    static __device__ __forceinline__ constexpr float zero() {
        return T::ZERO * T::template shift<J, H>() * CODE_UNIT;
    }
    // Stores the sum of a group's activations of token 0 ... 7, times what is multiplied by it.
    static __device__ __forceinline__ void put(float* sums, int token, int group, float sum) {
        if constexpr (PAIRED) {
            const float mean = sum * (1.0f / T::GROUP);
            const __half high = __float2half_rn(mean);
            __half* dst =
                reinterpret_cast<__half*>(sums) + ((group / 8 * 8 + token) * 4 + group % 8 / 2) * 4 + group % 2;
            dst[0] = high, dst[2] = __float2half_rn(mean - __half2float(high));
        } else if constexpr (ZEROS) {
            const bool odd = group * T::GROUP / 32 & 1;
            float* dst = sums + group * FLOATS + token / 2 * 4 + token % 2;
            dst[0] = sum * (odd ? -zero<1, 0>() : -zero<0, 0>());
            dst[2] = sum * (odd ? -zero<1, 1>() : -zero<0, 1>());
        } else {
            sums[group * FLOATS + token] = sum * CODE_UNIT;
        }
    }
    // Where those of a lane begin, if there are TOKENS tokens.
    template <int TOKENS = 8>
    static __device__ __forceinline__ int lane_offset(int lane) {
        return FLOATS / 4 * (PAIRED ? lane % (4 * min(TOKENS, 8)) : lane % min(TOKENS / 2, 4));
    }
};

// A lane's sums of a tile row, in UNIT: of rows g and g + 8, times tokens 2 t and 2 t + 1 of each of N times eight.
template <class T, int N>
struct ScaledSums {
    using X = ActivationSums<T>;
    // Scales that are powers of two are multiplied as they are, by as many times the f16 code that unpack() returns.
    static constexpr bool POWERS = T::SCALES == Scales::E8 && T::VALUES::TABLE;
    static constexpr float POWER_UNIT = POWERS ? 0.5f / T::template shift<0, 0>() : 1.0f;
    static constexpr float UNIT = POWER_UNIT * (T::SCALED ? 1.0f / CODE_UNIT : 1.0f);
    int lane;
    typename T::VALUES::Words words;  // constants, unless the kernel keeps them
    float acc[N][4];
    float part[T::HAS_SUB ? N : 1][4];  // HAS_SUB: of a chunk, without its scale
    ChunkScales<T> scales;
    // HAS_SUB: the scales that the lane converts, f16 (row g, row g + 8)
    uint32_t lane_scales[T::HAS_SUB ? T::GROUPS / 4 : 1];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[n][e] = 0.0f;
    }
    // Reads the scales of a chunk. `sums`: the lane's ActivationSums of the chunk; those of the next eight tokens are
    // `pitch` floats further on.
    __device__ __forceinline__ void begin_chunk(const uint8_t* chunk, const float* sums, int pitch) {
        if constexpr (T::HAS_SUB)
            convert_scales(chunk, sums, pitch);
        else if constexpr (T::SCALED)
            scales.load(chunk, lane / 4);
    }
    // Multiplies what was added since begin_chunk by the scale of the chunk.
    __device__ __forceinline__ void end_chunk() {
        if constexpr (T::HAS_SUB) {
            const float2 first = half2_to_float2(scales.dd[0]);
            const float d[2] = {first.x, T::PACKED_SUB ? half2_to_float2(scales.dd[1]).x : first.y};
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[n][e] = fmaf(d[e / 2], part[n][e], acc[n][e]);
        }
    }
    // Adds the products of 32-column group J of the chunk, which is group CODES_J of `codes`, with the n-th eight tokens.
    // b: the B operands of both steps of 16 columns. `sums`: the lane's ActivationSums of these tokens.
    template <int J, int CODES_J, class Codes>
    __device__ __forceinline__ void multiply_columns(const Codes& codes, int n, const uint4& b, const float* sums) {
        uint32_t a[2][4];
        codes.template unpack<CODES_J, 0>(a[0], words);
        codes.template unpack<CODES_J, 1>(a[1], words);
        constexpr int G = J * (32 / T::GROUP);
        if constexpr (!T::SCALED) {
            mma_m16n8k16_f16(acc[n], a[0], {b.x, b.y});
            mma_m16n8k16_f16(acc[n], a[1], {b.z, b.w});
        } else if constexpr (T::GROUP == 32) {
            const float2 sum = sum_of(sums, G);
            float c[4];
            begin(c, sums, G);
            mma_m16n8k16_f16(c, a[0], {b.x, b.y});
            mma_m16n8k16_f16(c, a[1], {b.z, b.w});
            add<G, J>(n, c, sum);
        } else {
            const float2 sum[2] = {sum_of(sums, G), sum_of(sums, G + 1)};
            float c[2][4];
            begin(c[0], sums, G), begin(c[1], sums, G + 1);
            mma_m16n8k16_f16(c[0], a[0], {b.x, b.y});
            mma_m16n8k16_f16(c[1], a[1], {b.z, b.w});
            add<G, J>(n, c[0], sum[0]), add<G + 1, J>(n, c[1], sum[1]);
        }
    }

  private:
    // A lane converts the scales of groups 2 t and 2 t + 1 of each eight. Minimums, or scales, which zero points are
    // multiplied by, meet the means of the groups, and what these lack, in an MMA of eight groups.
    __device__ __forceinline__ void convert_scales(const uint8_t* chunk, const float* sums, int pitch) {
        constexpr int D_WORDS = T::PACKED_SUB ? 2 : 1, EIGHTS = T::GROUPS / 8;
        constexpr float UNIT = -T::GROUP * CODE_UNIT * (T::PACKED_SUB ? 1.0f : T::ZERO * T::SUB_UNIT);
        const int g = lane / 4, t = lane % 4;
        scales.template load_words<D_WORDS>(scales.dd, chunk + g * D_WORDS * 4);
        uint32_t a[EIGHTS][2];
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            const int pair = (g * T::GROUPS + 8 * i) / 2 + t;
            if constexpr (T::PACKED_SUB)
                convert_packed(chunk, pair, lane_scales + 2 * i, a[i]);
            else
                convert_signed(chunk, pair, lane_scales + 2 * i, a[i]);
        }
        float m[2];
        if constexpr (T::PACKED_SUB)
            m[0] = half2_to_float2(scales.dd[0]).y * UNIT, m[1] = half2_to_float2(scales.dd[1]).y * UNIT;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float c[4] = {};
#pragma unroll
            for (int i = 0; i < EIGHTS; ++i) {
                const uint2 b = *reinterpret_cast<const uint2*>(sums + n * pitch + i * 8 * X::FLOATS);
                mma_m16n8k16_f16(c, {a[i][0], a[i][1], a[i][0], a[i][1]}, {b.x, b.y});
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if constexpr (T::PACKED_SUB)
                    acc[n][e] = fmaf(m[e / 2], c[e], acc[n][e]), part[n][e] = 0.0f;
                else
                    part[n][e] = UNIT * c[e];
            }
        }
    }
    // d: the scales of an even and an odd group as f16. a: their minimums, of row g, of row g + 8.
    __device__ __forceinline__ void convert_packed(const uint8_t* chunk, int pair, uint32_t* d, uint32_t* a) const {
        const uint8_t* sub = chunk + TILE_ROWS * 4;
        const uint32_t fours = reinterpret_cast<const uint32_t*>(sub)[pair];
        uint32_t even = fours & 0x0f0f0f0fu, odd = fours >> 4 & 0x0f0f0f0fu;
        if constexpr (T::TWOS) {
            const uint32_t twos = reinterpret_cast<const uint32_t*>(sub + T::SUB_BYTES)[pair / 2] >> 4 * (pair & 1);
            even |= twos << 4 & 0x30303030u, odd |= twos << 2 & 0x30303030u;
        }
        d[0] = in_units<0>(biased_bytes<0>(even), 1024.0f), d[1] = in_units<1>(biased_bytes<0>(odd), 1024.0f);
        const uint32_t minimums = __byte_perm(even, odd, 0x7362);
        a[0] = as_bits(bytes_to_half2<0>(minimums, 0.0f)), a[1] = as_bits(bytes_to_half2<1>(minimums, 0.0f));
    }
    // d: the scales of an even and an odd group as f16. a: the same ones in units of 1, of row g, of row g + 8.
    __device__ __forceinline__ void convert_signed(const uint8_t* chunk, int pair, uint32_t* d, uint32_t* a) const {
        const uint32_t bytes = reinterpret_cast<const uint32_t*>(chunk + TILE_ROWS * 2)[pair] ^ 0x80808080u;
        d[0] = in_units<0>(biased_bytes<0>(bytes), 1152.0f), d[1] = in_units<1>(biased_bytes<1>(bytes), 1152.0f);
        const uint32_t by_row = __byte_perm(bytes, 0, 0x3120);
        a[0] = as_bits(bytes_to_half2<0>(by_row, 128.0f)), a[1] = as_bits(bytes_to_half2<1>(by_row, 128.0f));
    }
    // Subtracts `bias` from the scales of an even or ODD group, and divides them by the factor by which unpack() returns
    // codes too large. Both are exact.
    template <int ODD>
    __device__ __forceinline__ uint32_t in_units(half2 biased, float bias) const {
        const half2 even = unit_of<0>(1.0f), odd = unit_of<1>(1.0f);
        const half2 even_bias = unit_of<0>(-bias), odd_bias = unit_of<1>(-bias);
        const bool is_odd = T::GROUP == 32 ? ODD : lane & 1;  // of the 32 columns
        return as_bits(__hfma2(biased, is_odd ? odd : even, is_odd ? odd_bias : even_bias));
    }
    template <int J>
    static __device__ __forceinline__ half2 unit_of(float x) {
        constexpr float low = T::SUB_UNIT / T::template shift<J, 0>(), high = T::SUB_UNIT / T::template shift<J, 1>();
        return __floats2half2_rn(low * x, high * x);
    }
    // MIN: the sums of a group, of the lane's two tokens.
    static __device__ __forceinline__ float2 sum_of(const float* sums, int group) {
        if constexpr (!X::NEEDED || X::PAIRED || X::ZEROS) return make_float2(0.0f, 0.0f);
        return *reinterpret_cast<const float2*>(sums + group * X::FLOATS);
    }
    // What the products of a group are added to: 0, or its zero points.
    static __device__ __forceinline__ void begin(float (&c)[4], const float* sums, int group) {
        float4 first = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if constexpr (X::ZEROS) first = *reinterpret_cast<const float4*>(sums + group * X::FLOATS);
        c[0] = first.x, c[1] = first.y, c[2] = first.z, c[3] = first.w;
    }
    // Adds the products of group G of the chunk, which lies in 32-column group J.
    template <int G, int J>
    __device__ __forceinline__ void add(int n, const float (&c)[4], const float2& sum) {
        const RowScales s = scale<G, J>();
        float (&dst)[4] = T::HAS_SUB ? part[n] : acc[n];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            dst[e] = fmaf(s.d[e / 2], c[e], dst[e]);
            if (T::MIN && !T::HAS_SUB) dst[e] = fmaf(s.m[e / 2], e % 2 ? sum.y : sum.x, dst[e]);
        }
    }
    // The scales of unpacked codes, and minimums; HAS_SUB: in units of the scale of the chunk.
    template <int G, int J>
    __device__ __forceinline__ RowScales scale() const {
        if constexpr (T::HAS_SUB) {
            const float2 d = half2_to_float2(__shfl_sync(0xffffffffu, lane_scales[G / 8 * 2 + G % 2], G % 8 / 2, 4));
            return {{d.x, d.y}, {0.0f, 0.0f}};
        } else if constexpr (POWERS) {
            constexpr int from_bit = 16 * (G & 1);
            const uint32_t word = scales.sc[G / 2];
            return {{power_bits<from_bit>(word), power_bits<from_bit + 8>(word)}, {0.0f, 0.0f}};
        } else {
            RowScales r = scales.template get<G>();
            r.d[0] *= 1.0f / T::template shift<J, 0>(), r.d[1] *= 1.0f / T::template shift<J, 1>();
            return r;
        }
    }
};
