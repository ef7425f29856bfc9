"""Pads steps with prompts, so that steps of many sizes have few shapes and graphs are found for
them.

A server's steps mix decode tokens with prompts of every length. Without padding hardly two of them
have one shape, and each is launched kernel by kernel, which takes the CPU longer than the GPU
computes. The tokens that pad a step are one sequence of its own, whose keys and values go to a
page that no sequence has; nobody reads their output. Nothing here knows devices or kernels.

Letters: T tokens, S sequences, R rows, as in interface.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...interface import Step

LEAST = 8  # tokens and sequences are multiples of it, and above 128 of more

Ints = NDArray[np.int32]


def rounded(n: int) -> int:
    """n, at least 1, rounded up to a multiple of LEAST, or of the sixteenth of a power of two that
    is not less: by an eighth at most.
    """
    unit = max(LEAST, power_of_two(n) // 16)
    return -(-n // unit) * unit


def padded(step: Step, spare: Sequence[int], most: int) -> Step:
    """The step with T, S and R rounded up, T to `most` at most; the step itself if it is a decode
    step, or all its tokens are rows, or it is too small.

    spare: of each group of the cache, the page of the tokens that pad it.
    """
    n, n_seq, n_rows = len(step.ids), len(step.page_tables[0]), len(step.rows)
    if n_seq == n or n_rows == n:
        return step
    n_to = max(n, min(rounded(n), most))
    more = n_to - n
    # One at least for the tokens that pad it; and fewer than tokens, as of rows: else it would be a
    # step of another kind.
    n_seq_to = min(rounded(n_seq) + LEAST, n_to - 1)
    if n_seq_to < n_seq + bool(more):
        return step
    zeros = np.zeros(more, np.int32)
    return replace(
        step,
        ids=np.concatenate([step.ids, zeros]),
        positions=np.concatenate([step.positions, zeros]),
        sequences=np.concatenate([step.sequences, zeros + n_seq]),
        page_tables=tuple(
            _with_page(table, n_seq_to, page)
            for table, page in zip(step.page_tables, spare, strict=True)
        ),
        rows=_repeated(step.rows, min(_few(n_rows), n_to - 1)) if n_rows else step.rows,
    )


def filled(tiles: Ints, positions: Ints) -> Ints:
    """Attention tiles[n, 4] (plan_tiles) with copies of a cheap one, to a rounded number: that of
    the lowest position among those that are not split, which write the same values twice. Without
    such a tile, the tiles as they are.
    """
    whole = tiles[tiles[:, 2] == 1]
    if not len(whole):
        return tiles
    cheapest = whole[np.argmin(positions[whole[:, 0]])]
    missing = rounded(len(tiles)) - len(tiles)
    return np.concatenate([tiles, np.broadcast_to(cheapest, (missing, 4))])


def _few(n: int) -> int:
    """n rounded up, in smaller steps where the head's kernels are for few rows."""
    return rounded(n) if n > LEAST else power_of_two(n)


def power_of_two(n: int) -> int:
    """n rounded up to a power of two."""
    return 1 << (n - 1).bit_length()


def _with_page(table: Ints, n_rows: int, page: int) -> Ints:
    """table[S, P] with n_rows rows, of which the first new one begins with `page`."""
    out = np.zeros((n_rows, table.shape[1]), np.int32)
    out[: len(table)] = table
    if len(table) < n_rows:
        out[len(table), 0] = page
    return out


def _repeated(rows: Ints, n: int) -> Ints:
    """rows[R] with the last one repeated, n in all."""
    return np.concatenate([rows, np.full(n - len(rows), rows[-1], np.int32)])
