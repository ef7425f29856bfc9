// The quantiser to Q5_0.
#pragma once
#include "formats/q5_0.cuh"
#include "quantize/small.cuh"

template <>
struct Encoder<block_q5_0> : ExtremeEncoder<block_q5_0, 5> {};
