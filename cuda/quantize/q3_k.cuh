// The quantiser to Q3_K.
#pragma once
#include "formats/q3_k.cuh"
#include "quantize/encoder.cuh"

template <>
struct Encoder<block_q3_K> {
    static constexpr int group = 16;
    using G = Group<16, 16>;

    // The stored scales of a block: levels from -32 to 31 with the common scale d.
    struct BlockScales {
        float d;
        int levels[16];
    };

    template <bool WEIGHTED>
    static __device__ bool encode(const G& group, block_q3_K& block, uint8_t* codes) {
        float scale;
        int q[16];
        BlockScales scales;
        if constexpr (WEIGHTED) {
            float weights[16];
            group.error_weights(2.0f * group.mean_square(), weights);
            const ScaleFit fit = search_scale(group.x, weights, 4);
#pragma unroll
            for (int j = 0; j < 16; ++j) q[j] = fit.level(group.x[j], 4);
            scale = fit.scale;
            scales = by_search(scale, ordered_sum(weights));
        } else {
            scale = search_scale_by_descent(group.x, q, 4);
            scales = by_extreme(scale);
        }
        const half d = __float2half_rn(scales.d);
        int level = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) level = i == G::lane() ? scales.levels[i] : level;
        if (G::lane() == 0) {
            block.d = d;
            pack_levels(scales.levels, block);
        }
        const float stored = __half2float(d) * float(level);
#pragma unroll
        for (int j = 0; j < 16; ++j)
            codes[j] = group.requantized(j, stored, 0.0f, -4, 3, [&](int j) { return q[j]; }) + 4;
        return is_number(scale) && is_number(d);
    }

    static __device__ __forceinline__ BlockScales by_extreme(float scale) {
        float values[16];
        G::gather(scale, values);
        const float extreme = first_extreme(values), inverse = -32.0f / extreme;
        BlockScales found = {extreme != 0.0f ? 1.0f / inverse : 0.0f};
#pragma unroll
        for (int i = 0; i < 16; ++i)
            found.levels[i] = extreme != 0.0f ? clamp(nearest_int(inverse * values[i]), -32, 31) : -32;
        return found;
    }

    static __device__ __forceinline__ BlockScales by_search(float scale, float total) {
        float values[16], totals[16];
        G::gather(scale, values);
        G::gather(total, totals);
        const ScaleFit fit = search_scale(values, totals, 32);
        BlockScales found = {fit.scale};
#pragma unroll
        for (int i = 0; i < 16; ++i) found.levels[i] = fit.level(values[i], 32);
        return found;
    }

    static __device__ __forceinline__ void pack_levels(const int (&levels)[16], block_q3_K& block) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            block.scales[i] = uint8_t(((levels[i] + 32) & 15) | ((levels[i + 8] + 32) & 15) << 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t byte = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) byte |= uint32_t(levels[i + 4 * k] + 32) >> 4 << 2 * k;
            block.scales[8 + i] = uint8_t(byte);
        }
    }

    static __device__ __forceinline__ void pack(const uint8_t* codes, block_q3_K& block, int lane) {
        for (int b = lane; b < 64; b += 16) block.qs[b] = packed_byte<2>(codes, b / 32 * 128 + b % 32, 32);
        for (int b = lane; b < 32; b += 16) block.hmask[b] = packed_byte<1, 2>(codes, b, 32);
    }
};
