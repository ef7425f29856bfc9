// Activations: of gated feed-forward layers, and the sigmoid of gates.
#pragma once
#include "lib/common.cuh"

enum Activation { SILU, GELU_TANH };

// The gate of a layer's input multiplies x as it is, which may exceed the range of f16: x is divided by this number
// before, and the gate multiplied by it.
constexpr float INPUT_RANGE = 64.0f;

// Of GELU (tanh); the first is 2 sqrt(2 / pi).
constexpr float GELU_SLOPE = 1.5957691216057308f, GELU_CUBIC = 0.044715f;

__device__ __forceinline__ float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }

// v * sigmoid(w), with w = v for SiLU; for GELU (tanh), (1 + tanh(w / 2)) / 2 is the sigmoid of w. Few instructions,
// because epilogues unroll it.
__device__ __forceinline__ float activate(int activation, float v) {
    const float w = activation == SILU ? v : GELU_SLOPE * v * fmaf(GELU_CUBIC * v, v, 1.0f);
    return __fdividef(v, 1.0f + __expf(-w));
}

// act(gate) * up as f16, saturated.
__device__ __forceinline__ __half gated(int activation, float gate, float up) {
    return saturated_half(activate(activation, gate) * up);
}
