"""The integers of a step on their way to a GPU: all that changes from step to step, in one copy.

They pass through pinned memory that rotates, so that steps can be handed over ahead, and arrive at
an address that stays, so that a recorded graph finds them. Steps of single tokens go to two such
places in turns, so that one arrives while the step before is at work on the other. Knows nothing of
weights or activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...device.base import Buffer
from ...kernels.attention.paged_attention import MAX_SPLIT, POSITIONS_PER_SPLIT, plan_tiles
from ...kernels.attention.pages_to_f16 import plan_halves
from ...kernels.attention.prefill_attention import plan_prompts
from ...kernels.attention.rope_kv import Batch as BatchMemory
from ...kernels.attention.rope_kv import Heads
from ..interface import Step
from .arrays import Memory

IN_FLIGHT = 4  # steps whose uploads and results may be under way
PLACES = 2  # of steps of single tokens, in turns; all others have one
SMALLEST = 1 << 16  # bytes of the buffer, at least
MAX_KEPT = 256  # shapes of steps whose addresses are kept
NO_TILES = np.zeros((0, 4), np.int32)
NOTHING = np.zeros(0, np.int32), np.zeros(0, np.int32)


@dataclass(frozen=True)
class Batch:
    """A step's integers on the device, and the sizes that decide which kernels run."""

    shape: tuple[int, ...]  # steps that have the same run the same kernels
    place: int  # and with the same, too, on the same addresses
    n_tokens: int
    n_rows: int
    n_tiles: int
    n_prompt_tiles: int
    n_halved: int
    alone: bool  # each token is the only one of its sequence
    n_split: int  # parts of a token's context, at most
    all_rows: bool  # the wanted rows are all tokens, in order
    ids: Memory
    rows: Memory
    tiles: Memory
    prompt_tiles: Memory  # of the sequences that prefill_attention takes
    halved: Memory  # pages that become halves for them (kernels/pages_to_f16.py)
    memory: BatchMemory
    prompt_memory: BatchMemory  # the same, with page tables into these


class StepUpload:
    """Uploads steps; `moving()` is called before the addresses that they go to change.

    prompts_from: tokens of a sequence in a step from which on prefill_attention takes them, or None.
    places: see Attend.places. most_split: sequences whose attention has room to be split.
    """

    def __init__(
        self,
        device: Any,
        heads: Heads,
        moving: Callable[[], None],
        prompts_from: int | None,
        places: Callable[[int], int | None],
        most_split: int,
    ) -> None:
        self.device, self.heads, self.prompts_from = device, heads, prompts_from
        self._split_places, self._most_split = places, most_split
        self.n_steps = 0
        self._moving = moving
        self._staging: list[tuple[NDArray[np.int32], Any]] = []  # and when it was copied
        self._places: list[Buffer] = []
        self._used = [device.event() for _ in range(PLACES + 1)]  # reached behind a step there
        self._place = PLACES  # of the last step
        self._copies = device.new_stream()
        self._batches: dict[tuple, Batch] = {}
        self._depths = b""  # of the step of single tokens that was planned last
        self._tiles = NO_TILES

    def upload(self, step: Step) -> Batch:
        """Ids, positions and their pages, sequences, rows, page tables and attention's tiles."""
        tables, sequences = _padded(step.page_tables), step.sequences
        tiles, prompts = self._plan(step)
        alone = len(tables) == len(step.ids)
        if alone:  # row i is token i's: a kernel has a load less to wait for
            tables, sequences = tables[sequences], np.arange(len(tables), dtype=np.int32)
        halved, halved_tables = self._halved(step, tables, len(prompts))
        parts = {
            "ids": step.ids,
            "positions": step.positions,
            "pages": step.pages,
            "sequences": sequences,
            "rows": step.rows,
            "tables": tables,
            "tiles": tiles,
            "prompt_tiles": prompts,
            "halved": halved,
            "halved_tables": halved_tables,
        }
        sizes = {name: part.size for name, part in parts.items()}
        padded = (-(-n // 4) * 4 for n in sizes.values())  # to 16 bytes
        offsets = list(accumulate(padded, initial=0))
        self._make_room(4 * offsets[-1])
        host, copied = self._staging[self.n_steps % IN_FLIGHT]
        copied.synchronize()
        for part, offset in zip(parts.values(), offsets, strict=False):
            host[offset : offset + part.size] = part.ravel()
        place = self.n_steps % PLACES if alone else PLACES
        self._send(host[: offsets[-1]], place, copied)
        n_split = _parts(int(tiles[:, 2].max())) if alone else MAX_SPLIT
        shape = (*sizes.values(), len(tables), n_split)
        key = shape, place
        if key not in self._batches:
            if len(self._batches) >= MAX_KEPT:
                self._batches.clear()
            addresses = (self._places[place].at(4 * offset) for offset in offsets)
            at = dict(zip(parts, addresses, strict=False))
            self._batches[key] = _batch(*key, at, sizes, tables.shape, n_split)
        return self._batches[key]

    def _send(self, host: NDArray[np.int32], place: int, copied: Any) -> None:
        """Beside what the GPU is at work on, unless that uses the place."""
        self._used[self._place].record()
        self._copies.wait(self._used[place])
        self.device.upload(self._places[place], host, stream=self._copies)
        self.device.stream.wait(copied.record(self._copies))
        self._place = place
        self.n_steps += 1

    def _plan(self, step: Step) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Attention's tiles, and those of prompts; of single tokens they stay the same for many
        steps.
        """
        least = self.prompts_from
        if len(step.page_tables) < len(step.ids):
            tokens = step.positions, step.sequences, self.heads
            prompts = NO_TILES if least is None else plan_prompts(*tokens, least)
            return plan_tiles(*tokens, below=least, most_split=self._most_split), prompts
        depths = (step.positions // POSITIONS_PER_SPLIT).tobytes()
        if depths != self._depths:
            self._depths = depths
            tokens = step.positions, step.sequences, self.heads
            places = self._split_places(len(step.ids))
            self._tiles = plan_tiles(*tokens, places=places, most_split=self._most_split)
        return self._tiles, NO_TILES

    def _halved(
        self, step: Step, tables: NDArray[np.int32], n_prompts: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Which pages become halves for the tiles of prompts, and page tables into these."""
        if not n_prompts or self.prompts_from is None or self.heads.has_halves:
            return NOTHING
        tokens = step.positions, step.sequences
        return plan_halves(*tokens, tables, self.heads.page_size, self.prompts_from)

    def _make_room(self, nbytes: int) -> None:
        """Pinned memory and places that are large enough."""
        if self._places and self._places[0].nbytes >= nbytes:
            return
        self._moving()
        size = max(2 * nbytes, SMALLEST)
        self._places = [self.device.alloc(size, "step") for _ in range(PLACES + 1)]
        pinned = [self.device.pinned(size).view(np.int32) for _ in range(IN_FLIGHT)]
        self._staging = [(memory, self.device.event().record()) for memory in pinned]
        self._batches.clear()


def _batch(
    shape: tuple[int, ...],
    place: int,
    at: Mapping[str, Memory],
    sizes: Mapping[str, int],
    tables: tuple[int, ...],
    n_split: int,
) -> Batch:
    """What upload returns, for parts of these sizes at these places and tables[S, P]."""
    n_tokens, n_rows = sizes["ids"], sizes["rows"]
    memory = BatchMemory(
        positions=at["positions"],
        pages=at["pages"],
        sequences=at["sequences"],
        page_tables=at["tables"],
        stride=tables[1],
    )
    in_halves = replace(memory, page_tables=at["halved_tables"]) if sizes["halved"] else memory
    return Batch(
        shape=shape,
        place=place,
        n_tokens=n_tokens,
        n_rows=n_rows,
        n_tiles=sizes["tiles"] // 4,
        n_prompt_tiles=sizes["prompt_tiles"] // 4,
        n_halved=sizes["halved"] // 2,
        alone=tables[0] == n_tokens,
        n_split=n_split,
        all_rows=n_rows == n_tokens,
        ids=at["ids"],
        rows=at["rows"],
        tiles=at["tiles"],
        prompt_tiles=at["prompt_tiles"],
        halved=at["halved"],
        memory=memory,
        prompt_memory=in_halves,
    )


def _padded(tables: NDArray[np.int32]) -> NDArray[np.int32]:
    """page_tables[S, P] with P rounded up to a power of two, so that few shapes are recorded."""
    width = tables.shape[1]
    if _power_of_two(width) == width:
        return tables
    padded = np.zeros((len(tables), _power_of_two(width)), np.int32)
    padded[:, :width] = tables
    return padded


def _parts(n: int) -> int:
    """Parts to launch where contexts have n: few numbers, so that few shapes are recorded. As many
    as there may be are launched only for so many, since Attend.strips asks for that.
    """
    return n if n == MAX_SPLIT else min(_power_of_two(n), MAX_SPLIT - 1)


def _power_of_two(n: int) -> int:
    """n, rounded up to one."""
    return 1 << (n - 1).bit_length()
