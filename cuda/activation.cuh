// The activations of gated feed-forward layers.
#pragma once
#include "common.cuh"

enum Activation { SILU, GELU_TANH };

__device__ __forceinline__ float activate(int activation, float v) {
    if (activation == SILU) return v / (1.0f + __expf(-v));
    const float inner = 0.7978845608028654f * v * fmaf(0.044715f * v, v, 1.0f);
    return 0.5f * v * (1.0f + tanhf(inner));
}

// act(gate) * up, saturated.
__device__ __forceinline__ __half gated(int activation, float gate, float up) {
    return saturated_half(activate(activation, gate) * up);
}
