"""Numbers that kernels and their callers share: sizes, places in memory, and ids of kinds.

This module does not import numba: a process whose kernels are on disk does without it.
"""

from __future__ import annotations

import struct

from .processor import tile_shape

# Products

BLOCK_K = 256  # weights of a row that are dequantised at a time: a multiple of every block
PITCH = 4 * (BLOCK_K + 16)  # bytes between rows of a panel: neighbours in different cache sets
LANES = 16  # columns of a vector
ROWS, VECTORS = tile_shape()  # of a tile

# Activations as whole numbers with a scale for each 32: of 8 bits ("q8"), or of 15 ("q16", which is
# 128 * high byte + low byte). A column, with K rounded up to 256, has K bytes (of q16 the high
# ones); K low bytes of q16; K/4 int32, -128 times the sum of 4 neighbours; K/32 scales f32; and
# K/16 sums of 16 neighbours, times the scale, f32.
LARGEST = {"q8": 127, "q16": 127 * 128}


def column_bytes(padded: int) -> int:
    """Bytes of a column."""
    return 3 * padded + padded // 8 + padded // 4


# Many columns as whole numbers. A row of a panel has BLOCK_K codes less their offset as int16, then
# up to 16 scales and 16 minimums f32. 32 numbers of 16 columns, a group, have pairs of neighbours
# as int16 [16][column], a scale [column] f32, and sums times the scale [3][column]: of the first 16
# numbers, of the last 16, and of all.
OF_SCALES, OF_MINIMUMS = 2 * BLOCK_K, 2 * BLOCK_K + 64
WHOLE_PITCH = 2 * BLOCK_K + 3 * 64  # an odd number of cache lines
LARGEST_WORD = 2**15 - 1
OF_COLUMN_SCALES, OF_COLUMN_SUMS, GROUP_BYTES = 1024, 1088, 1280


def f32_bits(number: float) -> int:
    """The bits of a number as f32: how kernels take one."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


# Attention

PAGE = 64
PANEL_ROWS = (PAGE + ROWS - 1) // ROWS * ROWS
MAX_HEAD = 512  # numbers of a head that fit in a row of a panel
HEAD_PITCH = 4 * (MAX_HEAD + 16)  # bytes between rows of a panel

# Ids of types of the KV cache, of activations, and of a router's scores
KINDS = {"f32": 0, "f16": 1, "q8_0": 2}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "swiglu_oai": 2, "sigmoid": 3}
SCORES = {"softmax": 0, "sigmoid": 1, "softmax_chosen": 2, "sigmoid_chosen": 3}

# A job of the pool is a row of int64.
FUNCTION, N_ITEMS, GRAIN, WIDTH, OUT, PRIVATE, ARGUMENTS = range(7)
JOB = 32  # numbers of a job
# WIDTH: bytes of an item's results, which go to OUT; 0: the kernel writes to other places by
# itself, and no chunk is computed twice. PRIVATE: bytes of scratch that the kernel needs.

# Indices of the pool's own int64, in cache lines of 8: DONE, which all threads write, has its own.
CURRENT, N_THREADS, DONE, ACTIVE, STOP, EPOCH, STATES = 8, 9, 16, 24, 25, 32, 64
MAX_CHUNKS = 1024
THREADS, LINE = STATES + MAX_CHUNKS, 8  # each thread has a line of 8 int64:
IN_FLIGHT, MEMORY, TICKET, LAST = range(4)  # whether it may hold a chunk; its memory; the epoch
# (high 32 bits) and the next chunk (low) of its part of the job; the end of that part
CLOSED = 0xFFFFFFFF  # the chunk of a ticket while there is no job
