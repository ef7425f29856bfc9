// RMS norm of rows: before a product of several tokens (half out), and after one that is normalised before it is
// added to the residual (float, in place).
#include "norm.cuh"
#include "packed.cuh"

// out[i] = norm(x[rows ? rows[i] : i]), half; in rows, or packed in `order` (packed.cuh). A block per output row.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const float* x, const int* rows, const float* weight, void* out, int k, float eps, int steps, int order) {
    RmsNorm norm;
    grid_dependency_launch();
    norm.load_weight(weight, k);
    grid_dependency_wait();
    const size_t row = rows != nullptr ? rows[blockIdx.x] : blockIdx.x;
    norm.load(x + row * k, k);
    norm.scale(k, eps);
    uint8_t* bytes = static_cast<uint8_t*>(out);
    if (order == PLAIN_ORDER) {
        uint4* to = reinterpret_cast<uint4*>(bytes + static_cast<size_t>(blockIdx.x) * k * 2);
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i)
            if (norm.column(i) < k) to[norm.column(i) / 8] = norm.halves(i);
        return;
    }
#pragma unroll
    for (int i = 0; i < NORM_PIECES; ++i) {
        const int piece = norm.column(i) / 8;
        uint4 halves = make_uint4(0, 0, 0, 0);
        if (piece * 8 < k) halves = norm.halves(i);
        halves = pack_columns(halves, order);
        if (piece < 8 * steps)
            *reinterpret_cast<uint4*>(bytes + packed_piece(piece / 8, blockIdx.x, piece % 8, gridDim.x)) = halves;
    }
}

// x[i] += norm(y[i]). A block per row.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_rms_norm(float* x, const float* y, const float* weight, int k, float eps) {
    RmsNorm norm;
    grid_dependency_launch();
    norm.load_weight(weight, k);
    grid_dependency_wait();
    const size_t first = static_cast<size_t>(blockIdx.x) * k;
    norm.load(y + first, k);
    norm.scale(k, eps);
#pragma unroll
    for (int i = 0; i < NORM_PIECES; ++i) {
        if (norm.column(i) >= k) continue;
        float old[8];
        float* to = x + first + norm.column(i);
        read_floats(old, to);
#pragma unroll
        for (int j = 0; j < 8; ++j) to[j] = old[j] + norm.value(i, j);
    }
}
