"""Launches cuda/sampling/sample.cu, which samples one token per row of logits with the same bits as
ggpy/sampling/.

Defines the memory layout of a row's parameters; the backend decides which samplers have such
parameters.
"""

from __future__ import annotations

import numpy as np

from ...device.base import Device
from ..address import Address
from ..struct_asserts import record_asserts

SEGMENT = 2048  # logits per CTA of sample_select
SELECT_THREADS, DRAW_THREADS = 256, 512
MAX_TOP_K = 1024  # half of SEGMENT, a quarter of the keys that sample_draw sorts at once

# SampleRow of cuda/sampling/sample.cu. min_p is ln(min_p); top_k 0 skips the row. `recent`, `bias`
# and `mask` are the offsets in the edits of the row's ids, of its pairs (id, bias as float32), and
# of its bitmask of allowed tokens; a mask of -1 allows all.
ROW = np.dtype(
    [
        *((name, "<u8") for name in ("seed", "n_drawn")),
        *((name, "<f8") for name in ("top_p", "frequency", "presence")),
        *((name, "<f8") for name in ("xtc_probability", "xtc_threshold")),  # 0: XTC is off
        *((name, "<f4") for name in ("min_p", "temperature", "repeat")),
        *((name, "<i4") for name in ("top_k", "recent", "n_recent", "bias", "n_bias")),
        ("mask", "<i4"),
    ],
    align=True,
)


ASSERTS = record_asserts("SampleRow", ROW)


def segments(n_vocab: int) -> int:
    """Segments of a row; each is sorted by one CTA."""
    return -(-n_vocab // SEGMENT)


def best_bytes(n_rows: int, n_vocab: int, width: int) -> int:
    """Bytes of the keys that sample_select writes for all segments."""
    return 8 * n_rows * segments(n_vocab) * width


class Sample:
    """The kernels sample_select and sample_draw."""

    def __init__(self, device: Device) -> None:
        names = ["sample_select", "sample_draw"]
        self._select, self._draw = device.kernels("sampling/sample.cu", names, extra_source=ASSERTS)

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
        """Enqueues int32 ids[n_rows], sampled from logits[n_rows, n_vocab] with the parameters
        rows[n_rows] of dtype ROW.

        width: the largest top_k of the rows, at most MAX_TOP_K; ValueError otherwise. best:
        workspace of best_bytes bytes. The edits may name an id of the previous step as ~row; the
        kernel reads those ids before it writes ids. results equal ids, but are -1 where the largest
        logit is NaN or infinite, or no token is allowed.
        """
        if not 1 <= width <= min(MAX_TOP_K, n_vocab):
            raise ValueError(f"top_k is {width}: it must be from 1 to {min(MAX_TOP_K, n_vocab)}")
        lists = segments(n_vocab)
        select = (logits, n_vocab, rows, edits, ids, width, best)
        self._select.launch((lists, n_rows), SELECT_THREADS, select, pdl=True)
        draw = (best, lists * width, rows, n_vocab, ids, results)
        self._draw.launch(n_rows, DRAW_THREADS, draw, pdl=True)
