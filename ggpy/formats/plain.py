"""The types without blocks: one number each, the float types and the integers. BF16 is stored as
its 16 bits.
"""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, ScaleCodec, register


def dequantize(numbers: Blocks) -> F32:
    """numbers[n] -> weights[n, 1]; I64 and F64 are rounded to f32."""
    return numbers.astype(np.float32)[:, None]


def dequantize_bf16(numbers: Blocks) -> F32:
    """bf16 as uint16[n] -> weights[n, 1]: the upper half of an f32."""
    return (numbers.astype(np.uint32) << 16).view(np.float32)[:, None]


def quantize_f32(weights: F32) -> Blocks:
    """weights[n, 1] -> numbers[n]."""
    return weights[:, 0]


def quantize_f16(weights: F32) -> Blocks:
    """weights[n, 1] -> numbers[n], rounded to nearest, ties to even."""
    return weights[:, 0].astype("<f2")


def quantize_bf16(weights: F32) -> Blocks:
    """weights[n, 1] -> bf16 as uint16[n], rounded to nearest, ties to even
    (ggml_compute_fp32_to_bf16).
    """
    bits = weights[:, 0].view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")


def write_bf16(numbers: Blocks, scales: F32) -> None:
    """A number is its own scale."""
    numbers[:] = quantize_bf16(scales)


F32_ = register(Format("F32", 0, 1, np.dtype("<f4"), dequantize, quantize_f32))
F16 = register(Format("F16", 1, 1, np.dtype("<f2"), dequantize, quantize_f16, tile=(16, 32, "D")))
I8 = register(Format("I8", 24, 1, np.dtype("i1"), dequantize, tile=(8, 32, "NONE")))
I16 = register(Format("I16", 25, 1, np.dtype("<i2"), dequantize))
I32 = register(Format("I32", 26, 1, np.dtype("<i4"), dequantize))
I64 = register(Format("I64", 27, 1, np.dtype("<i8"), dequantize))
F64 = register(Format("F64", 28, 1, np.dtype("<f8"), dequantize))
BF16 = register(
    Format(
        "BF16",
        30,
        1,
        np.dtype("<u2"),
        dequantize_bf16,
        quantize_bf16,
        scale_codec=ScaleCodec(dequantize_bf16, write_bf16),
        tile=(16, 32, "D"),
    )
)
