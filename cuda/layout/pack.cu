// Activations from rows of halves to the order of packed.cuh.
#include "layout/packed.cuh"

// x[n_tokens, k] -> packed [steps]; a thread has eight columns. grid: (8 steps x tokens up to a multiple of 8) / 256
extern "C" __global__ void __launch_bounds__(256)
    pack(const __half* x, uint8_t* out, int n_tokens, int k, int steps, int order) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int pieces = steps * 8, at = blockIdx.x * 256 + threadIdx.x, token = at / pieces, piece = at % pieces;
    uint4 columns = make_uint4(0, 0, 0, 0);
    if (token < n_tokens && piece * 8 < k)
        columns = __ldcg(reinterpret_cast<const uint4*>(x + static_cast<size_t>(token) * k) + piece);
    columns = pack_columns(columns, order);
    if (token < packed_tokens(n_tokens))
        *reinterpret_cast<uint4*>(out + packed_piece(piece / 8, token, piece % 8, n_tokens)) = columns;
}
