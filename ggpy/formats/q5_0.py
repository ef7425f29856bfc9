"""Q5_0: 32 five-bit numbers and one scale; w = d * (q - 16). The fifth bits are apart, in qh."""

from __future__ import annotations

import numpy as np

from .base import F32, U8, Blocks, Format, register
from .bits import pack, scaled, unpack
from .q4_0 import quantize_by_extreme
from .search import aligned, row_error_weights, search_scale

QK5_0 = 32
block_q5_0 = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", QK5_0 // 2)])


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 32]."""
    q = unpack_quants(blocks).astype(np.int8) - np.int8(16)
    return scaled(blocks["d"].astype(np.float32)[:, None], q)


def unpack_quants(blocks: Blocks) -> U8:
    """blocks[n] -> q[n, 32] in 0..31: byte j of qs has weights j and j + 16, bit j of qh weight j;
    shared with Q5_1.
    """
    high = np.unpackbits(blocks["qh"], axis=1, bitorder="little")
    return unpack(blocks["qs"], 4).reshape(-1, QK5_0) | high << np.uint8(4)


def pack_quants(blocks: Blocks, q: U8) -> None:
    """Stores q[n, 32] in 0..31, in place."""
    blocks["qs"] = pack(q.reshape(-1, 2, QK5_0 // 2) & np.uint8(15), 4)
    blocks["qh"] = np.packbits(q >> np.uint8(4), axis=1, bitorder="little")


def quantize(weights: F32) -> Blocks:
    """weights[n, 32] -> blocks[n]: the extreme one becomes -16 (ggml quantize_row_q5_0_ref)."""
    blocks = np.empty(len(weights), block_q5_0)
    blocks["d"], q = quantize_by_extreme(weights, 16)
    pack_quants(blocks, q)
    return blocks


def quantize_weighted(weights: F32, importance: F32) -> Blocks:
    """weights[n, 32], importance[m, 32] -> blocks[n] (ggml quantize_row_q5_0_impl)."""
    errors = aligned(row_error_weights(weights, importance).T)
    d, q = search_scale(aligned(weights.T), errors, 16)
    blocks = np.empty(len(weights), block_q5_0)
    blocks["d"] = d
    pack_quants(blocks, (q.T + np.float32(16)).astype(np.uint8))
    return blocks


Q5_0 = register(
    Format("Q5_0", 6, QK5_0, block_q5_0, dequantize, quantize, quantize_weighted, tile=(5, 32, "D"))
)
