// Pages of keys and values of any type -> pages of halves, as rope.cuh has them, for attention of prompts, which reads
// nothing else (prefill_attention.cuh). Numbers are what paged_attention.cu makes of the same pages, bit by bit.
#include "attention/kv_blocks.cuh"

constexpr int HALVE_WARPS = 4;
static_assert(PAGE_SIZE == 16 * HALVE_WARPS, "a warp turns the keys of 16 positions");

struct ListedPage {
    int page;
    int distance;  // from its last position to the first token that sees it
};

// [PAGE_SIZE][ROW]
template <class Type, int ROW>
__device__ __forceinline__ void halve_keys(const uint8_t* page, __half* to, int warp, int g, int t) {
    constexpr int PIECES = ROW / 32, COUNT = PIECES < 4 ? PIECES : 4;
    static_assert(PIECES % COUNT == 0, "all steps have as many pieces");
    const int position = 16 * warp + 4 * (g / 2) + g % 2;
#pragma unroll
    for (int first = 0; first < PIECES; first += COUNT) {
        typename Type::template Keys<ROW, 2, COUNT> keys;
        keys.load(page, position, first, t);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                __half* key = to + (position + 2 * n) * ROW + (first + i) * 32 + 8 * t;
                *reinterpret_cast<uint4*>(key) = keys.get(n, i, t);
            }
    }
}

// [PAGE_SIZE / 16][ROW][16]
template <class Type, int ROW>
__device__ __forceinline__ void halve_values(const uint8_t* page, __half* to, int warp, int g, int t) {
    constexpr int COUNT = ROW % 128 == 0 ? 8 : 4;  // of 8 elements, at 32 positions: all that a warp has, if it can
    constexpr int TASKS = ROW / (8 * COUNT) * (PAGE_SIZE / 32);
#pragma unroll 1
    for (int task = warp; task < TASKS; task += HALVE_WARPS) {
        const int first = task / 2 * COUNT, position = task % 2 * 32;
        typename Type::template Values<ROW, COUNT> values;
        values.load(page, position, first, g, t);
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            __half* value = to + value_place(ROW, position + 8 * t, (first + n) * 8 + g);
            *reinterpret_cast<uint4*>(value) = values.get(n, g);
        }
    }
}

// Page i of `listed` becomes page i of keys and values, unless it is further back than the window, where there is one.
// grid (listed pages, G, 2: keys and values)
template <int ROW, class K, class V>
__global__ void __launch_bounds__(HALVE_WARPS * 32)
    pages_to_f16(const uint8_t* k_pages, const uint8_t* v_pages, const ListedPage* listed, __half* keys, __half* values,
                int window) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    grid_dependency_launch();
    const ListedPage from = listed[blockIdx.x];  // there before earlier kernels end
    grid_dependency_wait();
    if (window > 0 && from.distance >= window) return;
    constexpr int HALVES = PAGE_SIZE * ROW, BLOCKS = HALVES / 32;
    const size_t head = static_cast<size_t>(from.page) * gridDim.y + blockIdx.y;
    const size_t made = (static_cast<size_t>(blockIdx.x) * gridDim.y + blockIdx.y) * HALVES;
    if (blockIdx.z == 0)
        halve_keys<K, ROW>(k_pages + head * (BLOCKS * K::block_bytes), keys + made, warp, g, t);
    else
        halve_values<V, ROW>(v_pages + head * (BLOCKS * V::block_bytes), values + made, warp, g, t);
}
