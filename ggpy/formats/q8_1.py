"""Q8_1: 32 signed bytes, one scale and s = d * sum(q); w = d * q. What activations are quantised
to.

A dot product with weights of the form d * q + m needs the sum of the activations: s gives it
without another pass.
"""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, register
from .bits import scaled
from .q8_0 import quantize_int8

QK8_1 = 32
block_q8_1 = np.dtype([("d", "<f2"), ("s", "<f2"), ("qs", "i1", QK8_1)])


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 32]; s is not needed."""
    return scaled(blocks["d"].astype(np.float32)[:, None], blocks["qs"])


def quantize(weights: F32) -> Blocks:
    """weights[n, 32] -> blocks[n] (ggml quantize_row_q8_1_ref): s is of the scale before it was
    rounded to f16.
    """
    blocks = np.empty(len(weights), block_q8_1)
    d, qs = quantize_int8(weights)
    blocks["d"], blocks["qs"] = d, qs
    blocks["s"] = d * qs.sum(axis=1, dtype=np.int32).astype(np.float32)
    return blocks


def derive_sum(blocks: Blocks) -> None:
    """Sets s of blocks whose other fields are set."""
    blocks["s"] = blocks["d"].astype(np.float32) * blocks["qs"].sum(axis=1, dtype=np.int32)


Q8_1 = register(
    Format("Q8_1", 9, QK8_1, block_q8_1, dequantize, quantize, derive_fields=derive_sum)
)
