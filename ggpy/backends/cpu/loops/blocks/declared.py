"""The class of declarations of block formats, and the operations that declarations use.

Vectors are those of simd. Nothing here knows a format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import simd

load4, load16, load32, load64 = (simd.load("u8", n) for n in (4, 16, 32, 64))
either, joined, nibbles = simd.bit_or, simd.joined, simd.nibbles
f16 = simd.load_f16
splat8, splat16 = simd.splat_of(8), simd.splat_of(16)


@dataclass(frozen=True)
class Declaration:
    """How the blocks of a format are read.

    codes: for blocks of 32 weights, (p, q) -> u8x64; of 64, p -> u8x64; of 128 or 256, p -> two or
    four u8x64. Codes are at most 127 if the offset is not 128.
    scales: (p, q) -> f32x2, or p -> f32x4, f32x8 or f32x16: a scale for each 32 or 16 weights.
    minimums: likewise, the numbers that are added; None: nothing is added.
    group: weights with one scale.
    """

    codes: Callable[..., Any]
    scales: Callable[..., Any]
    minimums: Callable[..., Any] | None = None
    offset: int = 0
    group: int = 32
