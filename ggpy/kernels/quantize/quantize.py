"""Launches cuda/quantize/quantize.cu: weights of any format to blocks, as the numpy quantisers make them.

A format can be quantised to if cuda/quantize/ has a header with its stem. Knows no tensor.
"""

from __future__ import annotations

from typing import Any

from ...device.base import Device, Kernel
from ...formats import Format
from ...util.paths import cuda_dir
from ..blocks.block_kernel import (
    Address,
    BlockMatrix,
    compile_options,
    expression,
    require,
    stem,
    supported_formats,
)

THREADS = 128
HEADER = "quantize/selected.cuh"
FLAG_BYTES = 4
SUPER_BLOCK = 256  # weights of a block with scales of scales
LEAST_GROUP = 16  # weights that a thread has at least


def has_kernel(format: Format) -> bool:
    """Whether blocks of the format can be made on a GPU."""
    there = format in supported_formats()
    return there and (cuda_dir() / "quantize" / f"{stem(format)}.cuh").is_file()


def names(target: Format, source: Format, weighted: bool) -> list[str]:
    """The C++ names of the kernels for this: to blocks, and the mean squares of rows."""
    arguments = f"{target.struct}, {source.struct}, {'true' if weighted else 'false'}"
    return [f"quantize<{arguments}>", expression("mean_squares", source)]


def options_for(target: Format, source: Format) -> dict[str, Any]:
    """What a device needs to compile them."""
    found = compile_options(target, source)
    found["defines"]["ENCODER_HEADER"] = f'"{HEADER}"'
    found["headers"][HEADER] = f'#include "quantize/{stem(target)}.cuh"\n'
    # Bytes depend on every rounding: a product and a sum are two of them.
    return {**found, "options": ("--fmad=false",)}


class Quantizer:
    """Makes blocks of `target` out of those of `source`, `weighted` by importance or not."""

    def __init__(self, device: Device, target: Format, source: Format, weighted: bool) -> None:
        """ValueError for a target without a kernel, CompileError."""
        if not has_kernel(target):
            raise ValueError(f"{target.name} blocks cannot be made on a GPU")
        self.target, self.source, self.weighted = target, source, weighted
        self._blocks: Kernel
        self._blocks, self._squares = device.kernels(
            "quantize/quantize.cu", names(target, source, weighted), **options_for(target, source)
        )
        # In small blocks the mean square is that of the whole row.
        self.needs_squares = weighted and target.block_size < SUPER_BLOCK

    def launch(
        self,
        weights: BlockMatrix,
        out: Address,
        flag: Address,
        importance: Address | None = None,
        squares: Address | None = None,
        stream: Any = None,
    ) -> None:
        """Enqueue out = weights[rows, columns] as blocks.

        flag, an int, becomes 1 if a weight or a scale is NaN or infinite: then the numpy quantiser
        has to say what that means. importance: float[columns]; squares: room for float[rows].
        ValueError for rows that are no whole blocks, and buffers that are missing or too small.
        """
        rows, columns = weights.rows, weights.columns
        if (self.weighted and importance is None) or (self.needs_squares and squares is None):
            raise ValueError(f"{self.target.name} by importance needs it, and room for squares")
        row_bytes = self.target.row_bytes(columns)
        require(out, rows * row_bytes, f"{self.target.name} blocks [{rows}, {columns}]")
        require(flag, FLAG_BYTES, "flag")
        if self.weighted and importance is not None:
            require(importance, 4 * columns, f"importance [{columns}]")
        if self.needs_squares and squares is not None:
            require(squares, 4 * rows, f"mean squares [{rows}]")
            of_rows = (weights.data, squares, rows, columns)
            self._squares.launch(-(-rows // THREADS), THREADS, of_rows, stream=stream)
        n = rows * columns // self.target.block_size
        lanes = n * (self.target.block_size // LEAST_GROUP)
        arguments = (weights.data, importance, squares, out, flag, columns, n)
        self._blocks.launch(-(-lanes // THREADS), THREADS, arguments, stream=stream)
