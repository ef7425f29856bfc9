"""Launches cuda/sampling/sample.cu: a token of each row of logits, drawn as ggpy/sampling.py draws it.

Knows how a row's parameters lie in memory; which samplers have such parameters is not its business.
"""

from __future__ import annotations

import numpy as np

from ...device.base import Device
from ..address import Address

SEGMENT = 2048  # logits of a block of threads
SELECT_THREADS, DRAW_THREADS = 256, 512
MAX_TOP_K = 1024  # half of a segment, a quarter of what is sorted at the end

# SampleRow of cuda/sampling/sample.cu. min_p is its logarithm; top_k 0 leaves the row alone. `recent` and
# `bias` are where the row's ids and its pairs (id, bias as float32) begin in the edits.
ROW = np.dtype(
    [
        *((name, "<u8") for name in ("seed", "n_drawn")),
        *((name, "<f8") for name in ("top_p", "frequency", "presence")),
        *((name, "<f8") for name in ("xtc_probability", "xtc_threshold")),  # 0: XTC is off
        *((name, "<f4") for name in ("min_p", "temperature", "repeat")),
        *((name, "<i4") for name in ("top_k", "recent", "n_recent", "bias", "n_bias")),
    ]
)


def segments(n_vocab: int) -> int:
    """Parts of a row that are sorted by themselves."""
    return -(-n_vocab // SEGMENT)


def best_bytes(n_rows: int, n_vocab: int, width: int) -> int:
    """Bytes of what is kept of all segments."""
    return 8 * n_rows * segments(n_vocab) * width


class Sample:
    """The two kernels."""

    def __init__(self, device: Device) -> None:
        names = ["sample_select", "sample_draw"]
        self._select, self._draw = device.kernels("sampling/sample.cu", names)

    def launch(
        self,
        logits: Address,
        n_rows: int,
        n_vocab: int,
        rows: Address,
        edits: Address,
        width: int,
        best: Address,
        ids: Address,
        results: Address,
    ) -> None:
        """Enqueue int32 ids[n_rows] drawn from logits[n_rows, n_vocab] with rows[n_rows] of ROW.

        width: the largest top_k of the rows, at most MAX_TOP_K. best: best_bytes of scratch memory.
        The edits may name ids of the step before, ~row, which are read before ids are written.
        results are the ids, but -1 where the highest logit is NaN or infinite.
        """
        if not 1 <= width <= min(MAX_TOP_K, n_vocab):
            raise ValueError(f"top_k is {width}: from 1 to {min(MAX_TOP_K, n_vocab)} is possible")
        lists = segments(n_vocab)
        select = (logits, n_vocab, rows, edits, ids, width, best)
        self._select.launch((lists, n_rows), SELECT_THREADS, select, pdl=True)
        draw = (best, lists * width, rows, n_vocab, ids, results)
        self._draw.launch(n_rows, DRAW_THREADS, draw, pdl=True)
