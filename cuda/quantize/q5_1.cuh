// The quantiser to Q5_1.
#pragma once
#include "formats/q5_1.cuh"
#include "quantize/small.cuh"

template <>
struct Encoder<block_q5_1> : RangeEncoder<block_q5_1, 5> {};
