// The quantiser to Q4_1.
#pragma once
#include "formats/q4_1.cuh"
#include "quantize/small.cuh"

template <>
struct Encoder<block_q4_1> : RangeEncoder<block_q4_1, 4> {};
