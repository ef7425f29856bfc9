// RMS norm of rows x [T, k], three uses:
//
//    rms_norm:           out = f16(norm(x))     before a GEMM; rows of f16, or packed (packed.cuh); with BOTH_ORDERS
//                                               packed in CODES order, followed by F16 order
//    add_rms_norm:       x += norm(y)           after a GEMM that a post-norm follows; f32
//    add_rms_norm_next:  the second, then the first with the next norm, in one launch and with the same bits
//
// Decode: grid (T), one CTA per row, in registers. Prefill (*_rows): a grid of the resident CTAs, each of which takes
// every gridDim.x-th row, so it reads the weights once and prefetches the next two rows while it sums one.
//
// Dynamic shared memory of *_rows holds two rows, filled by cp.async. Each thread needs 32 contiguous bytes of a row;
// direct 16-byte loads would fetch every 32-byte sector twice, and L2 bandwidth limits long prefills.
//
// NORM_BIAS: the same kernels add a bias, and subtract the mean first if NORM_CENTRED is 1 (layer_norm.cuh).
#include "norm/deferred_norm.cuh"
#include "norm/layer_norm.cuh"

#ifdef NORM_BIAS
using Norm = BiasedNorm<NORM_CENTRED>;
constexpr int NORM_ARRAYS = 4;  // of NORM_PIECES * 8 registers
#else
using Norm = RmsNorm;
constexpr int NORM_ARRAYS = 3;
#endif

#ifndef BOTH_ORDERS
#define BOTH_ORDERS 0
#endif

// Stores the normalised row as row `index` of `out`, f16: in rows of k, or packed in `order` (packed.cuh) as one of
// n_rows rows.
__device__ __forceinline__ void store_f16(const Norm& norm, uint8_t* out, int index, int n_rows, int k, int steps,
                                          int order) {
    if (order == PLAIN_ORDER) {
        uint4* dst = reinterpret_cast<uint4*>(out + static_cast<size_t>(index) * k * 2);
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i)
            if (norm.column(i) < k) dst[norm.column(i) / 8] = norm.f16x8(i);
        return;
    }
#pragma unroll
    for (int i = 0; i < NORM_PIECES; ++i) {
        const int piece = norm.column(i) / 8;
        uint4 columns = make_uint4(0, 0, 0, 0);
        if (piece * 8 < k) columns = norm.f16x8(i);
        columns = pack_columns(columns, order);
        if (piece < 8 * steps)
            *reinterpret_cast<uint4*>(out + packed_piece(piece / 8, index, piece % 8, n_rows)) = columns;
    }
}
// The same, in `order` or in both orders.
__device__ __forceinline__ void store_row(const Norm& norm, uint8_t* out, int index, int n_rows, int k, int steps,
                                          int order) {
    if constexpr (BOTH_ORDERS) {
        store_f16(norm, out, index, n_rows, k, steps, CODES);
        store_f16(norm, out + packed_piece(steps, 0, 0, n_rows), index, n_rows, k, steps, F16);
    } else {
        store_f16(norm, out, index, n_rows, k, steps, order);
    }
}

// old += norm(x) of piece i, also stored in `dst`.
__device__ __forceinline__ void add_piece(const Norm& norm, int i, float (&old)[8], float* dst) {
#pragma unroll
    for (int j = 0; j < 8; ++j) old[j] = norm.added_to(old[j], i, j);
    reinterpret_cast<float4*>(dst)[0] = make_float4(old[0], old[1], old[2], old[3]);
    reinterpret_cast<float4*>(dst)[1] = make_float4(old[4], old[5], old[6], old[7]);
}

// Two rows in flight from global memory to registers, [2][piece][THREADS * 8 floats] in shared memory. Each warp copies
// its columns, 512 contiguous bytes at a time, so no warp waits for another.
struct RowPipeline {
    float4* memory;
    int k;

    __device__ __forceinline__ float4* of_warp(int slot, int i) const {
        return memory + (slot * NORM_PIECES + i) * 2 * THREADS + threadIdx.x / 32 * 64;
    }
    // Commits one cp.async group; the group is empty if `row` is null. The warp must have taken the slot's previous
    // row.
    __device__ __forceinline__ void prefetch(int slot, const float* row) const {
        const int lane = threadIdx.x % 32;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = RmsNorm::column(i) - 8 * lane + 128 * half + 4 * lane;
                // Swizzle: in every second 128 bytes, neighbours swap, so that eight lanes read from all banks.
                if (row != nullptr && column < k)
                    cp_async<16>(of_warp(slot, i) + 32 * half + (lane ^ (lane / 8 % 2)), row + column);
            }
        cp_async_commit();
    }
    // Waits for the older of the two rows in flight and loads it into registers.
    __device__ __forceinline__ void take(int slot, RmsNorm& norm) const {
        const int lane = threadIdx.x % 32;
        cp_async_wait<1>();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i) {
            if (norm.column(i) >= k) continue;
            const float4* src = of_warp(slot, i) + 2 * lane;
            const float4 low = src[lane / 4 % 2], high = src[lane / 4 % 2 ^ 1];
            norm.x[i][0] = low.x, norm.x[i][1] = low.y, norm.x[i][2] = low.z, norm.x[i][3] = low.w;
            norm.x[i][4] = high.x, norm.x[i][5] = high.y, norm.x[i][6] = high.z, norm.x[i][7] = high.w;
        }
    }
};

// Calls done(norm, index) for each normalised row of the CTA; row_of(index) is the address of a row, which depends on
// earlier kernels, so its load follows the wait.
template <class RowOf, class Done>
__device__ __forceinline__ void normalise_rows(const float* weight, int n_rows, int k, float eps, RowOf row_of,
                                               Done done) {
    SHARED_DYNAMIC(float4, memory);
    const RowPipeline pipeline{memory, k};
    const int stride = gridDim.x;
    Norm norm;
    grid_dependency_launch();
    norm.load_weight(weight, k);
    grid_dependency_wait();
    int row = blockIdx.x;
    pipeline.prefetch(0, row_of(row));
    pipeline.prefetch(1, row + stride < n_rows ? row_of(row + stride) : nullptr);
    for (int slot = 0; row < n_rows; row += stride, slot ^= 1) {
        pipeline.take(slot, norm);
        pipeline.prefetch(slot, row + 2 * stride < n_rows ? row_of(row + 2 * stride) : nullptr);
        norm.scale<false>(k, eps, slot);
        done(norm, row);
    }
}

// out[i] = norm(x[rows ? rows[i] : i]). Grid: output rows. `next_prescale`: see DeferredNormArgs, or null.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const float* x, const int* rows, const float* weight, void* out, int k, float eps, int steps, int order,
             float* next_prescale) {
    Norm norm;
    grid_dependency_launch();
    norm.load_weight(weight, k);
    const float* src = x + (rows != nullptr ? 0 : static_cast<size_t>(blockIdx.x) * k);
    grid_dependency_wait(made_of(src));
    if (rows != nullptr) src += static_cast<size_t>(rows[blockIdx.x]) * k;
    norm.load(src, k);
    norm.scale(k, eps);
    store_row(norm, static_cast<uint8_t*>(out), blockIdx.x, gridDim.x, k, steps, order);
    if (next_prescale != nullptr && threadIdx.x == 0) next_prescale[blockIdx.x] = norm.inverse * HEADROOM;
}

// x += norm(y), a row, with the weights of `norm`; then sum.x is the new x.
__device__ __forceinline__ void add_row(Norm& norm, Norm& sum, float* x, const float* y, int k, float eps) {
    norm.load(y, k);
    sum.load(x, k);
    norm.scale(k, eps);
#pragma unroll
    for (int i = 0; i < NORM_PIECES; ++i)
        if (norm.column(i) < k) add_piece(norm, i, sum.x[i], x + norm.column(i));
}

// x[i] += norm(y[i]). Grid: rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_rms_norm(float* x, const float* y, const float* weight, int k, float eps) {
    Norm norm, sum;
    grid_dependency_launch();
    norm.load_weight(weight, k);
    grid_dependency_wait();
    const size_t first = static_cast<size_t>(blockIdx.x) * k;
    add_row(norm, sum, x + first, y + first, k, eps);
}

#ifndef NORM_BIAS
// x[i] += norm(y[i]), then out[i] = norm(x[i]) with the next weight and eps. Grid: rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_rms_norm_next(float* x, const float* y, const float* weight, const float* next_weight, void* out, int k,
                      float eps, float next_eps, int steps, int order) {
    constexpr bool EARLY = NORM_PIECES <= 3;  // registers hold the weights of both norms
    Norm norm, sum;
    grid_dependency_launch();
    norm.load_weight(weight, k);
    if (EARLY) sum.load_weight(next_weight, k);
    grid_dependency_wait();
    const size_t first = static_cast<size_t>(blockIdx.x) * k;
    add_row(norm, sum, x + first, y + first, k, eps);
    if (!EARLY) sum.load_weight(next_weight, k);
    sum.scale(k, next_eps);
    store_row(sum, static_cast<uint8_t*>(out), blockIdx.x, gridDim.x, k, steps, order);
}
#endif

// Resident CTAs per SM, from the 64 K registers of an SM. RmsNorm.resident_ctas in ggpy/kernels/norm/rms_norm.py
// computes the same number for the grid.
constexpr int REGISTERS = 16 + 8 * NORM_ARRAYS * NORM_PIECES;
constexpr int CTAS_PER_SM = REGISTERS * THREADS <= 32768 ? 65536 / (REGISTERS * THREADS) : 1;

// The same for many rows. Grid: any number of CTAs up to the number of rows.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    rms_norm_rows(const float* x, const int* rows, const float* weight, void* out, int n_rows, int k, float eps,
                  int steps, int order) {
    const auto row_of = [&](int i) { return x + static_cast<size_t>(rows != nullptr ? rows[i] : i) * k; };
    normalise_rows(weight, n_rows, k, eps, row_of, [&](const Norm& norm, int i) {
        store_row(norm, static_cast<uint8_t*>(out), i, n_rows, k, steps, order);
    });
}
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    add_rms_norm_rows(float* x, const float* y, const float* weight, int n_rows, int k, float eps) {
    const auto row_of = [&](int i) { return y + static_cast<size_t>(i) * k; };
    normalise_rows(weight, n_rows, k, eps, row_of, [&](const Norm& norm, int index) {
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i) {
            if (norm.column(i) >= k) continue;
            float old[8], *dst = x + static_cast<size_t>(index) * k + norm.column(i);
            read_floats(old, dst);
            add_piece(norm, i, old, dst);
        }
    });
}
