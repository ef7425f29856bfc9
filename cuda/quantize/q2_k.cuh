// The quantiser to Q2_K.
#pragma once
#include "formats/q2_k.cuh"
#include "quantize/levels.cuh"

template <>
struct Encoder<block_q2_K> {
    static constexpr int group = 16;
    using G = Group<16, 16>;

    template <bool WEIGHTED>
    static __device__ bool encode(const G& group, block_q2_K& block, uint8_t* codes) {
        constexpr Errors errors = WEIGHTED ? Errors::WEIGHTED : Errors::ABSOLUTE;
        float weights[16], d, dmin;
        int scales[16], minimums[16];
        LineFit fit;
        if constexpr (WEIGHTED) {
            group.error_weights(group.mean_square(), weights);
            fit = search_line<3, errors>(group.x, weights, -0.9f, 0.05f, 36);
            float totals[16];
            G::gather(ordered_sum(weights), totals);
            d = levels_by_search<G>(fit.scale, totals, 15, scales);
            dmin = levels_by_search<G>(-fit.minimum, totals, 15, minimums);
        } else {
#pragma unroll
            for (int j = 0; j < 16; ++j) weights[j] = fabsf(group.x[j]);
            fit = search_line<3, errors>(group.x, weights, -0.5f, 0.1f, 15);
            d = levels_by_largest<G>(fit.scale, 15, scales);
            dmin = levels_by_largest<G>(-fit.minimum, 15, minimums);
        }
        if (G::lane() == 0) {
            block.d = __float2half_rn(d);
            block.dmin = __float2half_rn(dmin);
#pragma unroll
            for (int i = 0; i < 16; ++i) block.scales[i] = uint8_t(scales[i] | minimums[i] << 4);
        }
        __syncwarp();
        const uint32_t packed = block.scales[G::lane()];
        const float scale = __half2float(block.d) * float(packed & 15);
        const float minimum = -(__half2float(block.dmin) * float(packed >> 4));
        const auto found = [&](int j) { return level_of<3, errors>((group.x[j] - fit.origin) * fit.inverse); };
#pragma unroll
        for (int j = 0; j < 16; ++j) codes[j] = group.requantized(j, scale, minimum, 0, 3, found);
        return is_number(fit.scale) && is_number(fit.minimum) && is_number(block.d) && is_number(block.dmin);
    }

    static __device__ __forceinline__ void pack(const uint8_t* codes, block_q2_K& block, int lane) {
        for (int b = lane; b < 64; b += 16) block.qs[b] = packed_byte<2>(codes, b / 32 * 128 + b % 32, 32);
    }
};
