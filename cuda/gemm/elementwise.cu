// Elementwise epilogues as kernels of their own, for GEMMs on quant blocks (cuda/blocks), which have no fused epilogue.
// One thread per element.
#include "lib/activation.cuh"
#include "lib/common.cuh"

// f16 h[n] = act(gate[n]) * up[n].
extern "C" __global__ void glu(const float* gate, const float* up, __half* h, int64_t n, int activation) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) h[i] = gated(activation, __ldcg(gate + i), __ldcg(up + i));
}

// f16 h[n] = act(INPUT_RANGE * gate[n]) * input[n]: a layer's input (INPUT_RANGE: activation.cuh).
extern "C" __global__ void gate_input(const float* gate, const float* input, __half* h, int64_t n, int activation) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) h[i] = gated(activation, INPUT_RANGE * __ldcg(gate + i), __ldcg(input + i));
}

// x[n] *= factor, in place.
extern "C" __global__ void scale(float* x, int64_t n, float factor) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) x[i] = __ldcg(x + i) * factor;
}

// x[n] = cap * tanh(x / cap), in place.
extern "C" __global__ void soft_cap(float* x, int64_t n, float cap) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) x[i] = cap * tanhf(__ldcg(x + i) / cap);
}

// x[rows, columns] += bias[columns]; grid (columns / blockDim, rows).
extern "C" __global__ void add_bias(float* x, const float* bias, int columns) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float* at = x + static_cast<size_t>(blockIdx.y) * columns + column;
    *at = __ldcg(at) + __ldg(bias + column);
}

// f16 o[n] *= sigmoid(gate[n]), in place.
extern "C" __global__ void sigmoid_gate(__half* o, const float* gate, int64_t n) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) o[i] = saturated_half(__half2float(__ldcg(o + i)) / (1.0f + expf(-__ldcg(gate + i))));
}
