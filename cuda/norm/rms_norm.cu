// RMS norm of rows: before a product of several tokens (half out), and after one that is normalised before it is
// added to the residual (float, in place). Few rows have a block each. Of many, a block takes one after the other: the
// weights are read once, and the next rows are on their way while one is summed.
//
// Those come through shared memory because 32 bytes of a row are one thread's: loads of 16 bytes would fetch each
// sector of 32 twice, and the second-level cache, which gives a row to its block, limits long prompts.
#include "norm/deferred_norm.cuh"
#include "norm/norm.cuh"

// The normalised row is row `index` of `out`, half; in rows, or packed in `order` (packed.cuh) as one of n_rows.
__device__ __forceinline__ void store_halves(const RmsNorm& norm, uint8_t* out, int index, int n_rows, int k, int steps,
                                             int order) {
    if (order == PLAIN_ORDER) {
        uint4* to = reinterpret_cast<uint4*>(out + static_cast<size_t>(index) * k * 2);
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
            *reinterpret_cast<uint4*>(out + packed_piece(piece / 8, index, piece % 8, n_rows)) = halves;
    }
}

__device__ __forceinline__ void add_row(const RmsNorm& norm, float* x, int k) {
#pragma unroll
    for (int i = 0; i < NORM_PIECES; ++i) {
        if (norm.column(i) >= k) continue;
        float old[8];
        float4* to = reinterpret_cast<float4*>(x + norm.column(i));
        read_floats(old, x + norm.column(i));
#pragma unroll
        for (int j = 0; j < 8; j += 4)
            to[j / 4] = make_float4(norm.added_to(old[j], i, j), norm.added_to(old[j + 1], i, j + 1),
                                    norm.added_to(old[j + 2], i, j + 2), norm.added_to(old[j + 3], i, j + 3));
    }
}

// Two rows on their way to registers, [2][piece][THREADS * 8 floats]. Each warp copies its own columns, 512 bytes in a
// row at a time, and waits for no other one.
struct ComingRows {
    float4* memory;
    int k;

    __device__ __forceinline__ float4* of_warp(int slot, int i) const {
        return memory + (slot * NORM_PIECES + i) * 2 * THREADS + threadIdx.x / 32 * 64;
    }
    // A group of copies, an empty one where there is no such row. What the slot had has been taken.
    __device__ __forceinline__ void ask(int slot, const float* row) const {
        const int lane = threadIdx.x % 32;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = RmsNorm::column(i) - 8 * lane + 128 * half + 4 * lane;
                // Of every other 128 bytes, neighbours change places: eight lanes take from all banks.
                if (row != nullptr && column < k)
                    cp_async<16>(of_warp(slot, i) + 32 * half + (lane ^ (lane / 8 % 2)), row + column);
            }
        cp_async_commit();
    }
    // The older of the two rows that were asked for.
    __device__ __forceinline__ void take(int slot, RmsNorm& norm) const {
        const int lane = threadIdx.x % 32;
        cp_async_wait<1>();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < NORM_PIECES; ++i) {
            if (norm.column(i) >= k) continue;
            const float4* from = of_warp(slot, i) + 2 * lane;
            const float4 low = from[lane / 4 % 2], high = from[lane / 4 % 2 ^ 1];
            norm.x[i][0] = low.x, norm.x[i][1] = low.y, norm.x[i][2] = low.z, norm.x[i][3] = low.w;
            norm.x[i][4] = high.x, norm.x[i][5] = high.y, norm.x[i][6] = high.z, norm.x[i][7] = high.w;
        }
    }
};

// done(norm, index) for each row of a block, normalised; row_of(index): where it lies. Loads wait for earlier kernels.
template <class RowOf, class Done>
__device__ __forceinline__ void normalise_rows(const float* weight, int n_rows, int k, float eps, RowOf row_of,
                                               Done done) {
    SHARED_DYNAMIC(float4, memory);
    const ComingRows coming{memory, k};
    const int stride = gridDim.x;
    RmsNorm norm;
    grid_dependency_launch();
    norm.load_weight(weight, k);
    grid_dependency_wait();
    int row = blockIdx.x;
    coming.ask(0, row_of(row));
    coming.ask(1, row + stride < n_rows ? row_of(row + stride) : nullptr);
    for (int slot = 0; row < n_rows; row += stride, slot ^= 1) {
        coming.take(slot, norm);
        coming.ask(slot, row + 2 * stride < n_rows ? row_of(row + 2 * stride) : nullptr);
        norm.scale<false>(k, eps, slot);
        done(norm, row);
    }
}

// out[i] = norm(x[rows ? rows[i] : i]). A block per output row. `after`: see Handed, or null.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const float* x, const int* rows, const float* weight, void* out, int k, float eps, int steps, int order,
             float* after) {
    RmsNorm norm;
    grid_dependency_launch();
    norm.load_weight(weight, k);
    const float* from = x + (rows != nullptr ? 0 : static_cast<size_t>(blockIdx.x) * k);
    grid_dependency_wait(made_of(from));
    if (rows != nullptr) from += static_cast<size_t>(rows[blockIdx.x]) * k;
    norm.load(from, k);
    norm.scale(k, eps);
    store_halves(norm, static_cast<uint8_t*>(out), blockIdx.x, gridDim.x, k, steps, order);
    if (after != nullptr && threadIdx.x == 0) after[blockIdx.x] = norm.inverse * HEADROOM;
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
    add_row(norm, x + first, k);
}

// As many blocks of a multiprocessor as there are registers for: 64 K. RmsNorm.at_once (Python) launches so many.
constexpr int REGISTERS = 16 + 24 * NORM_PIECES;
constexpr int AT_ONCE = REGISTERS * THREADS <= 32768 ? 65536 / (REGISTERS * THREADS) : 1;

// The same of many rows: any number of blocks, but not more than rows.
extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
    rms_norm_rows(const float* x, const int* rows, const float* weight, void* out, int n_rows, int k, float eps,
                  int steps, int order) {
    const auto row_of = [&](int i) { return x + static_cast<size_t>(rows != nullptr ? rows[i] : i) * k; };
    normalise_rows(weight, n_rows, k, eps, row_of, [&](const RmsNorm& norm, int i) {
        store_halves(norm, static_cast<uint8_t*>(out), i, n_rows, k, steps, order);
    });
}
extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
    add_rms_norm_rows(float* x, const float* y, const float* weight, int n_rows, int k, float eps) {
    const auto row_of = [&](int i) { return y + static_cast<size_t>(i) * k; };
    normalise_rows(weight, n_rows, k, eps, row_of,
                   [&](const RmsNorm& norm, int i) { add_row(norm, x + static_cast<size_t>(i) * k, k); });
}
