"""The integers of a step on their way to a GPU: all that changes from step to step, in one copy.

They pass through pinned memory that rotates, so that steps can be handed over ahead, and arrive at
an address that stays, so that a recorded graph finds them. Knows nothing of weights or activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..device.base import Buffer
from ..kernels.attend import plan_tiles
from ..kernels.rope_kv import Batch as BatchMemory
from ..kernels.rope_kv import Heads
from .cuda_arrays import Memory
from .interface import Step

IN_FLIGHT = 4  # steps whose uploads and results may be under way
SMALLEST = 1 << 16  # bytes of the buffer, at least


@dataclass(frozen=True)
class Batch:
    """A step's integers on the device, and the sizes that decide which kernels run."""

    n_tokens: int
    n_rows: int
    n_tiles: int
    alone: bool  # each token is the only one of its sequence
    split: bool  # some token is, so that its context may be split
    all_rows: bool  # the wanted rows are all tokens, in order
    ids: Memory
    rows: Memory
    tiles: Memory
    memory: BatchMemory


class StepUpload:
    """Uploads steps; `moving()` is called before the address that they go to changes."""

    def __init__(self, device: Any, heads: Heads, moving: Callable[[], None]) -> None:
        self.device, self.heads = device, heads
        self.n_steps = 0
        self._moving = moving
        self._staging: list[tuple[NDArray[np.int32], Any]] = []
        self._buffer: Buffer | None = None

    def upload(self, step: Step) -> Batch:
        """Ids, positions, sequences, rows, page tables and attention's tiles."""
        n_tokens, n_rows = len(step.ids), len(step.rows)
        tables = _padded(step.page_tables)
        tiles = plan_tiles(step.positions, step.sequences, self.heads)
        parts = [step.ids, step.positions, step.sequences, step.rows, tables, tiles]
        ids, positions, sequences, rows, tables_at, tiles_at = self._send(parts)
        alone = len(step.page_tables) == n_tokens
        return Batch(
            n_tokens=n_tokens,
            n_rows=n_rows,
            n_tiles=len(tiles),
            alone=alone,
            split=alone or bool((tiles[:, 2] > 1).any()),
            all_rows=n_rows == n_tokens,
            ids=ids,
            rows=rows,
            tiles=tiles_at,
            memory=BatchMemory(positions, sequences, tables_at, tables.shape[1]),
        )

    def _send(self, parts: list[NDArray[np.int32]]) -> list[Memory]:
        """Copies the parts, each to a multiple of 16 bytes; where they are."""
        offsets = np.cumsum([0, *[-(-part.size // 4) * 16 for part in parts]]).tolist()
        host, device = self._room(offsets[-1])
        for part, offset in zip(parts, offsets, strict=False):
            host[offset // 4 : offset // 4 + part.size] = part.ravel()
        self.device.upload(device, host[: offsets[-1] // 4])
        self._staging[self.n_steps % IN_FLIGHT] = host, self.device.event().record()
        self.n_steps += 1
        return [device.at(offset) for offset in offsets[:-1]]

    def _room(self, nbytes: int) -> tuple[NDArray[np.int32], Buffer]:
        """Pinned integers that no copy reads any more, and where they go."""
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self._moving()
            size = max(2 * nbytes, SMALLEST)
            self._buffer = self.device.alloc(size, "step")
            pinned = [self.device.pinned(size).view(np.int32) for _ in range(IN_FLIGHT)]
            self._staging = [(memory, None) for memory in pinned]
        host, event = self._staging[self.n_steps % IN_FLIGHT]
        if event is not None:
            event.synchronize()
        return host, self._buffer


def _padded(tables: NDArray[np.int32]) -> NDArray[np.int32]:
    """page_tables[S, P] with P rounded up to a power of two, so that few shapes are recorded."""
    width = tables.shape[1]
    padded = np.zeros((len(tables), 1 << (width - 1).bit_length()), np.int32)
    padded[:, :width] = tables
    return padded
