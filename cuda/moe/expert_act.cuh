// Activations of experts: those of dense feed-forwards, and that of gpt-oss, which clamps gate and up.
#pragma once
#include "lib/activation.cuh"

enum ExpertActivation { EXPERT_SILU, EXPERT_GELU_TANH, SWIGLU_OAI };
constexpr float OAI_ALPHA = 1.702f, OAI_LIMIT = 7.0f;

// act(gate) * up, for all activations by one formula, so that a thread computes several outputs at once, which branches
// would prevent:
//
//     g / (1 + 2^-(g * (slope + cubic * g^2))) * (u + shift),  where g <= limit and -limit <= u <= limit
struct ExpertGated {
    float slope, cubic, limit, shift;

    __device__ __forceinline__ explicit ExpertGated(int activation) {
        const bool is_gelu = activation == EXPERT_GELU_TANH, is_oai = activation == SWIGLU_OAI;
        slope = LOG2E * (is_gelu ? GELU_SLOPE : is_oai ? OAI_ALPHA : 1.0f);
        cubic = is_gelu ? LOG2E * GELU_SLOPE * GELU_CUBIC : 0.0f;
        limit = is_oai ? OAI_LIMIT : LARGEST_FLOAT;
        shift = is_oai ? 1.0f : 0.0f;
    }
    __device__ __forceinline__ float operator()(float gate, float up) const {
        const float g = gate > limit ? limit : gate;  // as np.minimum, which keeps NaN
        const float below = up > limit ? limit : up, u = below < -limit ? -limit : below;
        const float exponent = g * fmaf(cubic * g, g, slope);
        return g * fast_reciprocal(1.0f + exp2_approx(-exponent)) * (u + shift);
    }
};
