// Quantises the scales (or the minimums) of all groups of a block to integer levels with one common scale.
#pragma once
#include "quantize/encoder.cuh"

// Chooses the common scale so that the largest value gets level `most`. Returns the common scale; 0, with all levels 0,
// if no value is positive.
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

// Searches for the common scale with the least error. The weight of a group's error is the sum of its error weights.
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
