"""Random blocks that are valid: any bits in the quants, scales of a moderate size. For tests and
synthetic benchmarks.

No format is named here: only scales must not be random, and a Format can set its scales.
"""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format


def random_blocks(format: Format, n: int, rng: np.random.Generator, rms: float = 1.0) -> Blocks:
    """blocks[n] whose weights have about the root mean square `rms`; integers are any bits.

    Scales vary by a factor of four and have either sign where the format stores one.
    """
    blocks = np.frombuffer(bytearray(rng.bytes(n * format.nbytes)), format.dtype)
    count = format.scales(np.zeros(1, format.dtype)).shape[1]
    if n == 0 or count == 0:
        return blocks
    scales = _moderate(n, count, rng)
    format.set_scales(blocks, scales)
    weights = format.dequantize(blocks.view(np.uint8))
    format.set_scales(blocks, scales * np.float32(rms / np.sqrt(np.mean(np.square(weights)))))
    return blocks


def _moderate(n: int, count: int, rng: np.random.Generator) -> F32:
    """Random numbers [n, count] of either sign, with magnitudes between 1/2 and 2."""
    magnitude = np.exp2(rng.uniform(-1, 1, (n, count)))
    sign = rng.choice([-1, 1], (n, count))
    scales: F32 = (magnitude * sign).astype(np.float32)
    return scales
