// Converts listed pages of the KV cache, of any type, to f16 pages for prefill attention, which reads only f16
// (prefill_attention.cuh):
//
//    keys[i]   = f16(k_pages[listed[i]])      keys   [n][G][PAGE_SIZE][ROW]
//    values[i] = f16(v_pages[listed[i]])      values [n][G][PAGE_SIZE / 16][ROW][16]
//
// The f16 bits equal the operands that paged_attention.cu makes of the same pages. Grid (n listed pages, G, 2: keys and
// values); a CTA has CONVERT_WARPS warps and takes one page of one KV head. A warp converts the keys of 16 positions,
// or 8 COUNT elements of the values at 32 positions. There is no shared memory: a lane stores 16 bytes at a time from
// registers.
#include "attention/kv_blocks.cuh"

constexpr int CONVERT_WARPS = 4;
static_assert(PAGE_SIZE == 16 * CONVERT_WARPS, "a warp turns the keys of 16 positions");

struct ListedPage {
    int page;
    int distance;  // positions from the page's last one to the first token that sees the page
};

// Keys of a page to dst [PAGE_SIZE][ROW].
template <class Type, int ROW>
__device__ __forceinline__ void keys_to_f16(const uint8_t* page, __half* dst, int warp, int g, int t) {
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
                __half* key = dst + (position + 2 * n) * ROW + (first + i) * 32 + 8 * t;
                *reinterpret_cast<uint4*>(key) = keys.get(n, i, t);
            }
    }
}

// Values of a page to dst [PAGE_SIZE / 16][ROW][16].
template <class Type, int ROW>
__device__ __forceinline__ void values_to_f16(const uint8_t* page, __half* dst, int warp, int g, int t) {
    constexpr int COUNT = ROW % 128 == 0 ? 8 : 4;  // groups of 8 elements at 32 positions that a task takes
    constexpr int TASKS = ROW / (8 * COUNT) * (PAGE_SIZE / 32);
#pragma unroll 1
    for (int task = warp; task < TASKS; task += CONVERT_WARPS) {
        const int first = task / 2 * COUNT, position = task % 2 * 32;
        typename Type::template Values<ROW, COUNT> values;
        values.load(page, position, first, g, t);
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            __half* value = dst + value_offset(ROW, position + 8 * t, (first + n) * 8 + g);
            *reinterpret_cast<uint4*>(value) = values.get(n, g);
        }
    }
}

// Page listed[i] of the KV cache becomes page i of `keys` and `values`; pages outside the window are skipped (if
// window is 0, none). Grid (listed pages, G, 2: keys and values).
template <int ROW, class K, class V>
__global__ void __launch_bounds__(CONVERT_WARPS * 32)
    pages_to_f16(const uint8_t* k_pages, const uint8_t* v_pages, const ListedPage* listed, __half* keys, __half* values,
                 int window) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    grid_dependency_launch();
    const ListedPage src = listed[blockIdx.x];  // does not depend on earlier kernels
    grid_dependency_wait();
    if (window > 0 && src.distance >= window) return;
    constexpr int ELEMENTS = PAGE_SIZE * ROW, BLOCKS = ELEMENTS / 32;
    const size_t head = static_cast<size_t>(src.page) * gridDim.y + blockIdx.y;
    const size_t offset = (static_cast<size_t>(blockIdx.x) * gridDim.y + blockIdx.y) * ELEMENTS;
    if (blockIdx.z == 0)
        keys_to_f16<K, ROW>(k_pages + head * (BLOCKS * K::block_bytes), keys + offset, warp, g, t);
    else
        values_to_f16<V, ROW>(v_pages + head * (BLOCKS * V::block_bytes), values + offset, warp, g, t);
}
