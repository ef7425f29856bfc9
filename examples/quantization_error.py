"""Quantise a matrix to every type that has a quantiser; print and draw the errors.

    python examples/quantization_error.py [PLOT.png]

The matrix has normal numbers and a few columns with large ones, as weights of language models have.
Needs matplotlib for the plot: pip install 'ggpy[plot]'.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import ggpy
from ggpy.formats import Format, all_formats

ROWS, COLUMNS = 64, 1024  # columns: a multiple of 256, the block of K-quants
OUTLIERS, FACTOR = 8, 6.0  # so many columns are so much larger


class Result(NamedTuple):
    """One type: bits of a weight with scales, and the relative root mean square error."""

    name: str
    bits: float
    error: float


def weights() -> NDArray[np.float32]:
    """w[ROWS, COLUMNS], the same each time."""
    rng = np.random.default_rng(1)
    w = rng.normal(0, 0.02, (ROWS, COLUMNS)).astype(np.float32)
    w[:, rng.choice(COLUMNS, OUTLIERS, replace=False)] *= FACTOR
    return w


def measure(format: Format, w: NDArray[np.float32]) -> Result:
    """The error of a round trip through the format: rms(w' - w) / rms(w)."""
    blocks = ggpy.quantize(w, format.name)  # uint8 [ROWS, bytes]
    again = ggpy.dequantize(blocks, format.name)  # float32 [ROWS, COLUMNS]
    error = float(np.sqrt(np.mean((again - w) ** 2) / np.mean(w**2)))
    return Result(format.name, 8 * blocks.nbytes / w.size, error)


def draw(results: list[Result], path: str) -> None:
    """Write a picture: error over bits, a point for each type."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("a plot needs matplotlib: pip install '.[plot]'") from None

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6))
    axes.scatter([r.bits for r in results], [r.error for r in results])
    for i, r in enumerate(results):  # names of neighbours stand above and below their points
        place = (4, 4 if i % 2 else -10)
        axes.annotate(r.name, (r.bits, r.error), place, textcoords="offset points", fontsize=8)
    axes.set(xlabel="bits of a weight", ylabel="relative rms error", yscale="log")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Print the table, the smallest error first; draw it if a file is named."""
    w = weights()
    formats = [f for f in all_formats() if f.quantize_blocks and f.block_size > 1]
    results = sorted((measure(format, w) for format in formats), key=lambda r: r.error)
    print(f"{'type':8} {'bits':>6} {'error':>8}")
    for r in results:
        print(f"{r.name:8} {r.bits:6.2f} {r.error:8.2%}")
    if len(sys.argv) > 1:
        draw(results, sys.argv[1])
        print(f"\n{sys.argv[1]} is written")


if __name__ == "__main__":
    main()
