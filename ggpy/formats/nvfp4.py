"""NVFP4: 64 numbers of the 4-bit float E2M1; each 16 have an unsigned 8-bit float UE4M3 as scale.

As ggml does, the E2M1 values are kept doubled, as integers, and the scale halved. The f32 scale of
the whole tensor that such checkpoints have is a tensor of its own, not part of a block.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .base import F32, U8, Blocks, Format, ScaleCodec, register
from .bits import largest_magnitude, pack, scaled, unpack
from .mxfp4 import E2M1_DOUBLED, nearest_e2m1

QK_NVFP4 = 64
QK_NVFP4_SUB = 16  # weights per scale
block_nvfp4 = np.dtype([("d", "u1", QK_NVFP4 // QK_NVFP4_SUB), ("qs", "u1", QK_NVFP4 // 2)])


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 64]; byte 8 * g + j has weights 16 * g + j + (0, 8)."""
    codes = unpack(blocks["qs"].reshape(-1, 4, 8), 4)
    return scaled(half_scale_table()[blocks["d"]], E2M1_DOUBLED[codes])


@cache
def half_scale_table() -> F32:
    """Half of what each UE4M3 code stands for, [256]: exponent bias 7, no infinity, 127 (NaN) and
    bit 7 read as ggml does.
    """
    code = np.arange(256, dtype=np.int32)
    exponent, mantissa = code >> 3 & 15, (code & 7).astype(np.float32)
    subnormal = np.ldexp(mantissa, -9)
    normal = np.ldexp(1 + mantissa / np.float32(8), exponent - 7)
    table = np.where(exponent == 0, subnormal, normal) * np.float32(0.5)
    table[127] = 0
    return table


def quantize(weights: F32) -> Blocks:
    """weights[n, 64] -> blocks[n]: each 16th's largest magnitude becomes 6, the largest E2M1.

    As in ggml quantize_row_nvfp4_ref.
    """
    groups = weights.reshape(-1, QK_NVFP4_SUB)
    blocks = np.empty(len(weights), block_nvfp4)
    blocks["d"] = encode_scales(largest_magnitude(groups) / np.float32(6)).reshape(-1, 4)
    codes = nearest_e2m1(groups, read_scales(blocks).reshape(-1, 1))
    blocks["qs"] = pack(codes.reshape(-1, 4, 2, 8), 4).reshape(-1, QK_NVFP4 // 2)
    return blocks


def encode_scales(scales: F32) -> U8:
    """UE4M3 codes of scales (not halved), as ggml_fp32_to_ue4m3 finds them.

    A mantissa is rounded half up; from 248 on everything becomes 448, the largest.
    """
    bits = np.ascontiguousarray(scales).view(np.int32)
    normal = (bits + (1 << 19) >> 20) - ((127 - 7) << 3)
    normal = np.where(normal >= 15 << 3, 126, normal)
    subnormal = np.minimum(scales * np.float32(512) + np.float32(0.5), 7).astype(np.int32)
    is_subnormal = bits >> 23 <= 127 - 7
    return np.where(scales > 0, np.where(is_subnormal, subnormal, normal), 0).astype(np.uint8)


def read_scales(blocks: Blocks) -> F32:
    """blocks[n] -> scales[n, 4] of the doubled values. Every code is a number to ggml."""
    scales: F32 = half_scale_table()[blocks["d"]]
    return scales


def write_scales(blocks: Blocks, scales: F32) -> None:
    """The nearest UE4M3."""
    blocks["d"] = encode_scales(2 * np.abs(scales))


NVFP4 = register(
    Format(
        "NVFP4",
        40,
        QK_NVFP4,
        block_nvfp4,
        dequantize,
        quantize,
        scale_codec=ScaleCodec(read_scales, write_scales),
        tile=(4, 16, "D"),  # half a bit more for each weight: the scales become f16
        tile_values="E2M1",
    )
)
