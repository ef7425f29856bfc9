"""Pads steps, so that steps of many sizes have few shapes and can replay graphs.

A server's steps mix decode tokens with prompts of every length. Without padding, hardly two steps
have the same shape, and each is launched kernel by kernel, which takes the CPU longer than the GPU
needs to compute. Decode steps of many sequences would need graphs for every size, which take host
memory.

The tokens that pad a step are at position 0 of their own sequences. Keys and values of these
sequences go to a spare page, and recurrent states to a spare state, which no other sequence has.
They begin without a state, and nobody reads their output. Nothing here knows devices or kernels.

Letters: T tokens, S sequences, R rows, as in interface.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...interface import Step

LEAST = 8  # numbers of tokens and sequences are multiples of it; above 128, of larger numbers
EXACT = 16  # decode steps of at most so many sequences are not padded
FEW = 16  # padding tokens per padding sequence, in a step with prompts, while sequences are left

Ints = NDArray[np.int32]
# For each group of the cache, the beginning of the page table of a padding sequence: a page, or
# NO_STATE and a state.
Spare = Sequence[tuple[int, ...]]


def rounded(n: int) -> int:
    """n, at least 1, rounded up to a multiple of LEAST, or of a sixteenth of the next power of two
    if that is larger. Above 64, n grows by at most an eighth.
    """
    unit = max(LEAST, power_of_two(n) // 16)
    return -(-n // unit) * unit


def coarse(n: int) -> int:
    """n, at least 1, rounded up coarsely: to a power of two up to LEAST, and above it to a multiple
    of a quarter of the next power of two, or of LEAST. For padding that costs little.
    """
    power = power_of_two(n)
    unit = max(LEAST, power // 4)
    return power if n <= LEAST else -(-n // unit) * unit


def padded(step: Step, spare: Spare, most: int, most_sequences: int) -> Step:
    """The step with T, S and R rounded up. T is at most `most` in a step with prompts; all three
    are at most `most_sequences` in a decode step. Some steps are returned as they are: small ones,
    those with prompts whose tokens are all rows, and a single prompt whose T needs no rounding.
    """
    n, n_seq, n_rows = len(step.ids), len(step.page_tables[0]), len(step.rows)
    if n_rows == n_seq == n > EXACT:
        return _padded_decode(step, spare, min(rounded(n), most_sequences))
    n_to = max(n, min(rounded(n), most))
    more = n_to - n
    if n_seq == n or n_rows == n or (n_seq == 1 and not more):
        return step
    # The number of sequences, with those that pad the step, follows from the number of rows, unless
    # many prompts go on after the step. There must be fewer sequences than tokens, and fewer rows,
    # because otherwise the step would be of another kind. With few rows there are few sequences,
    # because kernels may be chosen by the average tokens per sequence (delta_net.py).
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
    """The decode step with n_to tokens; each is the only token of its sequence, and a row."""
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
    """Attention tiles[n, 4] (plan_tiles), padded to a rounded number by tiles without a split,
    whose CTAs end at once. No tiles stay no tiles.
    """
    if not len(tiles):
        return tiles
    n = len(tiles)
    return np.concatenate([tiles, np.zeros((coarse(max(n, LEAST)) - n, 4), np.int32)])


def filled_with_copies(tiles: Ints, positions: Ints) -> Ints:
    """Tiles[n, 4] of prefill attention, padded to a rounded number by copies of the tile with the
    lowest position, which is cheap and writes the same values again. No tiles stay no tiles.
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
    """The page tables[S, P] with n_rows rows; the new rows begin with the spare page or state."""
    tables = []
    for table, first in zip(step.page_tables, spare, strict=True):
        out = np.zeros((n_rows, table.shape[1]), np.int32)
        out[: len(table)] = table
        out[len(table) :, : len(first)] = first
        tables.append(out)
    return tuple(tables)
