// The scales, or minimums, of all groups of a block as levels with one scale of their own.
#pragma once
#include "quantize/encoder.cuh"

// So that the largest level is `most`; returns what a level stands for. 0 and levels of 0 if no value is positive.
template <typename G>
__device__ __forceinline__ float levels_by_largest(float value, int most, int (&levels)[G::lanes]) {
    float values[G::lanes], largest = 0.0f;
    G::gather(value, values);
#pragma unroll
    for (int i = 0; i < G::lanes; ++i) largest = values[i] > largest ? values[i] : largest;
    const float inverse = largest > 0.0f ? float(most) / largest : 0.0f;
#pragma unroll
    for (int i = 0; i < G::lanes; ++i) levels[i] = uint8_t(nearest_int(inverse * values[i]));
    return largest / float(most);
}

// The same by a search, weighed by what the lanes' errors weigh together.
template <typename G>
__device__ __forceinline__ float levels_by_search(float value, const float (&totals)[G::lanes], int most,
                                                  int (&levels)[G::lanes]) {
    float values[G::lanes];
    G::gather(value, values);
    const float scale = search_positive_scale(values, totals, levels, most);
#pragma unroll
    for (int i = 0; i < G::lanes; ++i) levels[i] = uint8_t(levels[i]);
    return scale;
}
