// The quantiser to Q6_K.
#pragma once
#include "formats/q6_k.cuh"
#include "quantize/encoder.cuh"

template <>
struct Encoder<block_q6_K> {
    static constexpr int group = 16;
    using G = Group<16, 16>;

    template <bool WEIGHTED>
    static __device__ bool encode(const G& group, block_q6_K& block, uint8_t* codes) {
        float weights[16], scales[16];
#pragma unroll
        for (int j = 0; j < 16; ++j) weights[j] = WEIGHTED ? group.importance[j] : group.x[j] * group.x[j];
        const ScaleFit fit = search_scale(group.x, weights, 32);
        G::gather(fit.scale, scales);
        const float extreme = first_extreme(scales), inverse = -128.0f / extreme;
        const bool empty = fabsf(extreme) < ALL_ZERO;
        const half d = __float2half_rn(empty ? 0.0f : 1.0f / inverse);
        const int level = empty ? 0 : min(nearest_int(inverse * fit.scale), 127);
        block.scales[G::lane()] = int8_t(level);
        if (G::lane() == 0) block.d = d;
        const float scale = __half2float(d) * float(int8_t(level));
        const auto found = [&](int j) { return fit.level(group.x[j], 32); };
#pragma unroll
        for (int j = 0; j < 16; ++j) codes[j] = empty ? 0 : group.requantized(j, scale, 0.0f, -32, 31, found) + 32;
        return is_number(fit.scale) && is_number(d);
    }

    static __device__ __forceinline__ void pack(const uint8_t* codes, block_q6_K& block, int lane) {
        for (int b = lane; b < 128; b += 16) block.ql[b] = packed_byte<4>(codes, b / 64 * 128 + b % 64, 64);
        for (int b = lane; b < 64; b += 16) block.qh[b] = packed_byte<2, 4>(codes, b / 32 * 128 + b % 32, 32);
    }
};
