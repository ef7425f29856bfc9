// The quantiser to Q4_0.
#pragma once
#include "formats/q4_0.cuh"
#include "quantize/small.cuh"

template <>
struct Encoder<block_q4_0> : ExtremeEncoder<block_q4_0, 4> {};
