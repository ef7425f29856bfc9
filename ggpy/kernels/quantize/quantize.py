"""Launches cuda/quantize/quantize.cu: weights of any format to the bytes of the numpy quantisers.

A target format is supported if cuda/quantize/ has a header with its stem. This module knows no
tensor names.
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
SUPER_BLOCK = 256  # weights of a quant block whose scales are quantised too
LEAST_GROUP = 16  # minimum number of weights per thread


def has_kernel(format: Format) -> bool:
    """Whether a GPU can quantise to the format."""
    has_blocks = format in supported_formats()
    return has_blocks and (cuda_dir() / "quantize" / f"{stem(format)}.cuh").is_file()


def names(target: Format, source: Format, weighted: bool) -> list[str]:
    """The C++ names of the two kernels: quantize and mean_squares."""
    arguments = f"{target.struct}, {source.struct}, {'true' if weighted else 'false'}"
    return [f"quantize<{arguments}>", expression("mean_squares", source)]


def options_for(target: Format, source: Format) -> dict[str, Any]:
    """The options that compile the kernels."""
    found = compile_options(target, source)
    found["defines"]["ENCODER_HEADER"] = f'"{HEADER}"'
    found["headers"][HEADER] = f'#include "quantize/{stem(target)}.cuh"\n'
    # The bytes depend on every rounding: a product and a sum must round twice.
    return {**found, "options": ("--fmad=false",)}


class Quantizer:
    """Quantises from `source` to `target`; `weighted`: with errors weighted by importance."""

    def __init__(self, device: Device, target: Format, source: Format, weighted: bool) -> None:
        """Raises ValueError for a target without a kernel, CompileError if NVRTC fails."""
        if not has_kernel(target):
            raise ValueError(f"a GPU cannot quantise to {target.name}: there is no kernel")
        self.target, self.source, self.weighted = target, source, weighted
        self._blocks: Kernel
        self._blocks, self._squares = device.kernels(
            "quantize/quantize.cu", names(target, source, weighted), **options_for(target, source)
        )
        # Small quant blocks use the mean square of the whole row.
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
        """Enqueue out = quantize(weights[rows, columns]).

        Sets `flag`, an int32, to 1 if a weight or a scale is NaN or infinite; the caller then uses
        the numpy quantiser. importance: float [columns]. squares: scratch of float [rows]. Raises
        ValueError if a row is not a whole number of blocks or a buffer is missing or too small.
        """
        rows, columns = weights.rows, weights.columns
        if (self.weighted and importance is None) or (self.needs_squares and squares is None):
            raise ValueError(
                f"{self.target.name} with importance needs `importance`, and scratch for `squares`"
            )
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
