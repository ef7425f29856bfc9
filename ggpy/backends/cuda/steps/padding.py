"""Pads steps, so that steps of many sizes have few shapes and graphs are found for them.

A server's steps mix decode tokens with prompts of every length. Without padding hardly two of them
have one shape, and each is launched kernel by kernel, which takes the CPU longer than the GPU
computes. Of decode steps for many sequences each size would have graphs, which take the host's
memory. The tokens that pad a step are at position 0 of sequences of their own, whose keys and
values go to a page, and whose recurrent states go to a state, that no other sequence has. They
begin without a state, and nobody reads their output. Nothing here knows devices or kernels.

Letters: T tokens, S sequences, R rows, as in interface.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...interface import Step

LEAST = 8  # tokens and sequences are multiples of it, and above 128 of more
EXACT = 16  # decode steps of at most so many sequences are not padded
FEW = 16  # tokens that pad a step with prompts have a sequence for so many, while there are some

Ints = NDArray[np.int32]
# Of each group of the cache, how the page table of a sequence that pads a step begins: with a page,
# or with NO_STATE and a state.
Spare = Sequence[tuple[int, ...]]


def rounded(n: int) -> int:
    """n, at least 1, rounded up to a multiple of LEAST, or of the sixteenth of a power of two that
    is not less: by an eighth at most.
    """
    unit = max(LEAST, power_of_two(n) // 16)
    return -(-n // unit) * unit


def coarse(n: int) -> int:
    """n, at least 1, rounded up to a power of two, or above LEAST to a multiple of LEAST or of a
    quarter of it: for what costs little where nothing is.
    """
    power = power_of_two(n)
    unit = max(LEAST, power // 4)
    return power if n <= LEAST else -(-n // unit) * unit


def padded(step: Step, spare: Spare, most: int, most_sequences: int) -> Step:
    """The step with T, S and R rounded up: in a step with prompts T to `most` at most, in a decode
    step all three to `most_sequences`. The step itself if all tokens of its prompts are rows, or
    it is small, or a single prompt of such a T.
    """
    n, n_seq, n_rows = len(step.ids), len(step.page_tables[0]), len(step.rows)
    if n_rows == n_seq == n > EXACT:
        return _padded_decode(step, spare, min(rounded(n), most_sequences))
    n_to = max(n, min(rounded(n), most))
    more = n_to - n
    if n_seq == n or n_rows == n or (n_seq == 1 and not more):
        return step
    # Sequences, with those of the tokens that pad the step, go with the number of rows, unless many
    # prompts go on after the step. They are fewer than tokens, as rows are: else it would be a
    # step of another kind. With few rows they are few, because kernels may choose by the tokens of
    # a sequence on average (delta_net.py).
    needed = n_seq + bool(more)
    n_seq_to = coarse(max(n_rows, 1))
    n_seq_to += min(n_seq_to, LEAST)
    if n_seq_to < needed:
        n_seq_to = coarse(n_seq) + LEAST
    n_seq_to = min(n_seq_to, n_to - 1)
    if n_seq_to < needed:
        return step
    rows = step.rows
    if n_rows:
        n_rows_to = min(coarse(n_rows), rounded(max(n_rows, most_sequences)), n_to - 1)
        rows = np.concatenate([rows, np.full(n_rows_to - n_rows, rows[-1], np.int32)])
    zeros = np.zeros(more, np.int32)
    parts = min(-(-more // FEW), n_seq_to - n_seq)
    numbers = np.arange(more, dtype=np.int32) * parts // max(more, 1)
    return replace(
        step,
        ids=np.concatenate([step.ids, zeros]),
        positions=np.concatenate([step.positions, zeros]),
        sequences=np.concatenate([step.sequences, n_seq + numbers]),
        page_tables=_with_spare(step, spare, n_seq_to),
        rows=rows,
    )


def _padded_decode(step: Step, spare: Spare, n_to: int) -> Step:
    """The decode step with n_to tokens, each the only one of its sequence, and a row."""
    n = len(step.ids)
    if n_to <= n:
        return step
    zeros, more = np.zeros(n_to - n, np.int32), np.arange(n, n_to, dtype=np.int32)
    return replace(
        step,
        ids=np.concatenate([step.ids, zeros]),
        positions=np.concatenate([step.positions, zeros]),
        sequences=np.concatenate([step.sequences, more]),
        page_tables=_with_spare(step, spare, n_to),
        rows=np.concatenate([step.rows, more]),
    )


def filled(tiles: Ints) -> Ints:
    """Attention tiles[n, 4] (plan_tiles) with tiles that have no split, whose CTAs end at once, to
    a rounded number; none if there are none.
    """
    if not len(tiles):
        return tiles
    n = len(tiles)
    return np.concatenate([tiles, np.zeros((coarse(max(n, LEAST)) - n, 4), np.int32)])


def filled_with_copies(tiles: Ints, positions: Ints) -> Ints:
    """Tiles[n, 4] of prefill attention with copies of a cheap one, to a rounded number: that of the
    lowest position, which writes the same values twice; none if there are none.
    """
    if not len(tiles):
        return tiles
    cheapest = tiles[np.argmin(positions[tiles[:, 0]])]
    missing = rounded(len(tiles)) - len(tiles)
    return np.concatenate([tiles, np.broadcast_to(cheapest, (missing, 4))])


def power_of_two(n: int) -> int:
    """n rounded up to a power of two."""
    return 1 << (n - 1).bit_length()


def _with_spare(step: Step, spare: Spare, n_rows: int) -> tuple[Ints, ...]:
    """The page tables[S, P] with n_rows rows, of which the new ones begin with what is spare."""
    tables = []
    for table, first in zip(step.page_tables, spare, strict=True):
        out = np.zeros((n_rows, table.shape[1]), np.int32)
        out[: len(table)] = table
        out[len(table) :, : len(first)] = first
        tables.append(out)
    return tuple(tables)
