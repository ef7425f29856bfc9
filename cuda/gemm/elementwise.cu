// Elementwise epilogues as kernels of their own, for GEMMs on quant blocks (cuda/blocks), which have no fused epilogue.
// One thread per element, or per four where memory is the limit.
#include "layout/packed.cuh"
#include "lib/activation.cuh"

// f16 h[n] = act(gate[n]) * up[n].
extern "C" __global__ void glu(const float* gate, const float* up, __half* h, int64_t n, int activation) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) h[i] = gated(activation, __ldcg(gate + i), __ldcg(up + i));
}

// f16 h[T, K] = act(INPUT_RANGE * gate[T, K]) * input[T, K]: a layer's input (INPUT_RANGE: activation.cuh). h has rows of
// K, or is packed in `order` (packed.cuh). Grid (K / blockDim, T).
extern "C" __global__ void gate_input(const float* gate, const float* input, __half* h, int k, int activation,
                                      int order) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int column = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    if (column >= k) return;
    const size_t i = static_cast<size_t>(token) * k + column;
    const size_t at = order == PLAIN_ORDER ? i : packed_half(order, column, token, gridDim.y);
    h[at] = gated(activation, INPUT_RANGE * __ldcg(gate + i), __ldcg(input + i));
}

// x[n] *= factor, in place.
extern "C" __global__ void scale(float* x, int64_t n, float factor) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) x[i] = __ldcg(x + i) * factor;
}

__device__ __forceinline__ float soft_capped(float x, float cap) { return cap * tanhf(x / cap); }

// x[n] = cap * tanh(x / cap), in place. Grid: n / 4 / blockDim.
extern "C" __global__ void soft_cap(float* x, int64_t n, float cap) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (first + 4 <= n) {
        float4* at = reinterpret_cast<float4*>(x + first);
        const float4 v = __ldcg(at);
        *at = make_float4(soft_capped(v.x, cap), soft_capped(v.y, cap), soft_capped(v.z, cap), soft_capped(v.w, cap));
        return;
    }
    for (int64_t i = first; i < n; ++i) x[i] = soft_capped(__ldcg(x + i), cap);
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
