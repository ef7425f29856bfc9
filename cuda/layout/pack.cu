// out = pack(x[T, K]): permutes f16 activations from rows to the packed layout of packed.cuh. K is a multiple of 8.
//
// Launch: grid 8 * steps * (T rounded up to a multiple of 8) / 256, 256 threads per CTA; a step is 64 columns. A thread
// loads eight columns of one token; four lanes exchange 32 columns by shuffles, and each stores one 16-byte piece.
#include "layout/packed.cuh"

extern "C" __global__ void __launch_bounds__(256)
    pack(const __half* x, uint8_t* out, int n_tokens, int k, int steps, int order) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int pieces = steps * 8, index = blockIdx.x * 256 + threadIdx.x, token = index / pieces,
              piece = index % pieces;
    uint4 columns = make_uint4(0, 0, 0, 0);
    if (token < n_tokens && piece * 8 < k)
        columns = __ldcg(reinterpret_cast<const uint4*>(x + static_cast<size_t>(token) * k) + piece);
    columns = pack_columns(columns, order);
    if (token < packed_tokens(n_tokens))
        *reinterpret_cast<uint4*>(out + packed_piece(piece / 8, token, piece % 8, n_tokens)) = columns;
}
