// The quantiser of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minimums per block (ggpy/formats/k_scales.py).
#pragma once
#include "formats/k_scales.cuh"
#include "quantize/levels.cuh"

// Packs the levels of scales and minimums into 12 bytes. Like numpy's uint8 arithmetic, a level above 63 spills into
// other bits.
template <typename Block>
__device__ __forceinline__ void pack_scales(const int (&scales)[8], const int (&minimums)[8], Block& block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        block.scales[i] = uint8_t(scales[i] | scales[i + 4] >> 4 << 6);
        block.scales[i + 4] = uint8_t(minimums[i] | minimums[i + 4] >> 4 << 6);
        block.scales[i + 8] = uint8_t((scales[i + 4] & 15) | (minimums[i + 4] & 15) << 4);
    }
}

//        N_MAX    the largest code
//        FIRST    the first step, in tenths, of the search without importance
//        LAST     the index of the last step of that search
template <typename Block, int N_MAX, int FIRST, int LAST>
struct KScalesEncoder {
    static constexpr int group = 32;
    using G = Group<32, 8>;

    template <bool WEIGHTED>
    static __device__ bool encode(const G& group, Block& block, uint8_t* codes) {
        constexpr Errors errors = WEIGHTED ? Errors::WEIGHTED : Errors::SQUARED;
        float weights[32], d, dmin;
        int scales[8], minimums[8];
        LineFit fit;
        if constexpr (WEIGHTED) {
            group.error_weights(2.0f * group.mean_square(), weights);
            fit = search_line<N_MAX, errors>(group.x, weights, -0.9f, 0.05f, 36);
            float totals[8];
            G::gather(ordered_sum(weights), totals);
            d = levels_by_search<G>(fit.scale, totals, 63, scales);
            dmin = levels_by_search<G>(-fit.minimum, totals, 63, minimums);
        } else {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 32; ++j) sum += group.x[j] * group.x[j];
            const float magnitude = sqrtf(sum / 32.0f);
#pragma unroll
            for (int j = 0; j < 32; ++j) weights[j] = magnitude + fabsf(group.x[j]);
            fit = search_line<N_MAX, errors>(group.x, weights, FIRST / 10.0f, 0.1f, LAST);
            d = levels_by_largest<G>(fit.scale, 63, scales);
            dmin = levels_by_largest<G>(-fit.minimum, 63, minimums);
        }
        if (!WEIGHTED || N_MAX == 31) {  // weighted Q4_K does not clamp: a rare negative scale spills into other bits
#pragma unroll
            for (int i = 0; i < 8; ++i) scales[i] = min(scales[i], 63), minimums[i] = min(minimums[i], 63);
        }
        if (G::lane() == 0) {
            block.d = __float2half_rn(d);
            block.dmin = __float2half_rn(dmin);
            pack_scales(scales, minimums, block);
        }
        __syncwarp();
        Codes stored;
        set_scale_and_minimum(block, G::lane(), stored);
        const auto found = [&](int j) { return level_of<N_MAX, errors>((group.x[j] - fit.origin) * fit.inverse); };
#pragma unroll
        for (int j = 0; j < 32; ++j) codes[j] = group.requantized(j, stored.d, stored.m, 0, N_MAX, found);
        return is_number(fit.scale) && is_number(fit.minimum) && is_number(block.d) && is_number(block.dmin);
    }
};
