// Activations of experts: those of dense feed-forwards, and that of gpt-oss, which clamps gate and up.
#pragma once
#include "lib/activation.cuh"

enum ExpertActivation { EXPERT_SILU, EXPERT_GELU_TANH, SWIGLU_OAI };
constexpr float OAI_ALPHA = 1.702f, OAI_LIMIT = 7.0f;

__device__ __forceinline__ float expert_gated(int activation, float gate, float up) {
    if (activation != SWIGLU_OAI) return activate(activation, gate) * up;
    const float g = fminf(gate, OAI_LIMIT), u = fminf(fmaxf(up, -OAI_LIMIT), OAI_LIMIT);
    return g / (1.0f + expf(-OAI_ALPHA * g)) * (u + 1.0f);
}
