"""Uploads the integers of a step: all inputs that change from step to step, in one copy.

The copy goes through rotating page-locked memory, so that steps can be enqueued ahead, to fixed
addresses, so that a captured graph finds the integers. Decode steps alternate between PLACES device
buffers, so that one buffer is filled while the previous step uses the other. Nothing here depends
on weights or activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ....device.base import Buffer
from ....kernels.attention.paged_attention import MAX_SPLIT, POSITIONS_PER_SPLIT, plan_tiles
from ....kernels.attention.pages_to_f16 import plan_f16_pages
from ....kernels.attention.prefill_attention import plan_prefill_tiles
from ....kernels.attention.rope_kv import AttentionMetadata, Heads
from ...interface import PAGE_SIZE, Step
from ..arrays import Memory
from ..plan import StepClass
from .padding import Spare, filled, filled_with_copies, padded, power_of_two
from .splits import plan_decode_tiles

IN_FLIGHT = 4  # steps whose uploads and results may be in flight
PLACES = 2  # device buffers of decode steps, used alternately; all other steps share one
SMALLEST = 1 << 22  # least bytes of a device buffer: growing later would drop all graphs
LEAST_PAGES = 64  # least columns of page tables; the number is a part of the shape
OFTEN = 5000  # after so many decode steps of a shape, PLACES buffers take turns
MAX_KEPT = 256  # step shapes whose addresses are kept
NO_TILES = np.zeros((0, 4), np.int32)
NOTHING = np.zeros(0, np.int32), np.zeros(0, np.int32)

Ints = NDArray[np.int32]


class Kernels(Protocol):
    """The properties of the kernels for one head shape (attention.py) that a step needs."""

    heads: Heads
    decode: Any
    prefill_tokens: int | None  # prefill attention takes sequences with at least so many tokens


@dataclass(frozen=True)
class AttentionTiles:
    """How a step's tokens are divided into attention tiles for one head shape."""

    n_tiles: int
    n_prefill_tiles: int
    n_split: int  # most splits of a token's context
    tiles: Memory
    prefill_tiles: Memory  # tiles of the sequences that prefill attention takes


@dataclass(frozen=True)
class GroupBatch:
    """A step's pages in one group of the KV cache."""

    memory: AttentionMetadata
    prefill_memory: AttentionMetadata  # the same, with page tables into the pages converted to f16
    f16_pages: Memory | None  # pages to convert to f16 for prefill attention
    n_f16_pages: int


@dataclass(frozen=True)
class StepBatch:
    """A step's integers on the device, and the sizes that decide which kernels run."""

    shape: tuple[int, ...]  # steps of equal shape run the same kernels
    place: int  # steps of equal shape and place also use the same addresses
    often: bool  # this shape has come OFTEN times
    n_tokens: int
    n_rows: int
    decode: bool  # each token is the only one of its sequence
    all_rows: bool  # the wanted rows are all tokens, in order
    ids: Memory
    rows: Memory
    tilings: tuple[AttentionTiles, ...]  # one per head shape
    groups: tuple[GroupBatch, ...]
    step_class: StepClass
    unfused_class: StepClass
    sequences: Memory  # [T]
    first: Memory  # [S + 1], the first token of each sequence, if there are recurrent states
    states: tuple[Memory, ...]  # [S, 2] for each recurrent group: states to read and to write
    n_sequences: int


class StepUpload:
    """Uploads steps. `moving()` is called before the destination addresses change.

    kernels: one per head shape. kernel_of_group: index into `kernels` for each group with pages;
    recurrent groups follow these. spare: one entry per group, recurrent groups included; see
    padding.py. max_split_tokens: the most sequences whose contexts may be split over CTAs.
    """

    def __init__(
        self,
        device: Any,
        kernels: Sequence[Kernels],
        kernel_of_group: Sequence[int],
        spare: Spare,
        moving: Callable[[], None],
        max_split_tokens: int,
    ) -> None:
        self._spare = spare
        self.device, self._kernels, self._kernel_of_group = device, kernels, kernel_of_group
        of_groups = [kernels[i] for i in kernel_of_group]
        self._converted = [  # groups whose pages become f16 for prefill attention
            g for g, k in enumerate(of_groups) if k.prefill_tokens and not k.heads.is_f16
        ]
        self._max_split_tokens = max_split_tokens
        self.n_steps = 0
        self._moving = moving
        # page-locked memory, and the event after its last copy
        self._staging: list[tuple[Ints, Any]] = []
        self._places: list[Buffer] = []
        # completed when the last step that used the buffer ends
        self._used = [device.event() for _ in range(PLACES + 1)]
        self._place = PLACES  # buffer of the last step
        self._copies = device.new_stream()
        self._batches: dict[tuple, StepBatch] = {}
        self._depths = b""  # of the last decode step that was planned
        self._tiles: list[Ints] = []
        self._splits: list[int] = []
        self.rehearsing = False  # whether all shapes count as frequent
        # shape -> steps so far, at most OFTEN; least recently used first
        self._times: dict[tuple[int, ...], int] = {}

    def upload(
        self, step: Step, pad_to: tuple[int, int] | None = None, argmax: bool = False
    ) -> StepBatch:
        """Upload ids, positions and their pages, sequences, rows, page tables and attention tiles.

        pad_to: the most tokens of a padded step with prompts, and the most sequences of a padded
        decode step; None: no padding. argmax: steps with and without argmax are counted apart.
        """
        n_paged = len(self._kernel_of_group)
        has_prompts = len(step.page_tables[0]) < len(step.ids)
        if self._converted and has_prompts:
            pad_to = None
        step = padded(step, self._spare, *pad_to) if pad_to else step
        sequences = step.sequences
        tables = [_widened(table) for table in step.page_tables[:n_paged]]
        states = list(step.page_tables[n_paged:])
        tiles, prefill, splits = self._plan(step)
        if pad_to and has_prompts:
            tiles = [filled(t) for t in tiles]
            prefill = [filled_with_copies(t, step.positions) for t in prefill]
        decode = len(tables[0]) == len(step.ids)
        if decode:  # row i is token i's, which saves kernels a dependent load
            tables, states = ([table[sequences] for table in x] for x in (tables, states))
            sequences = np.arange(len(step.ids), dtype=np.int32)
        parts = dict(self._parts(step, tables, sequences, tiles, prefill))
        parts |= _parts_of_states(states, sequences)
        sizes = {name: part.size for name, part in parts.items()}
        aligned = (-(-n // 4) * 4 for n in sizes.values())  # rounded up to 16 bytes
        offsets = list(accumulate(aligned, initial=0))
        self._make_room(4 * offsets[-1])
        host, copied = self._staging[self.n_steps % IN_FLIGHT]
        copied.synchronize()
        for part, offset in zip(parts.values(), offsets, strict=False):
            host[offset : offset + part.size] = part.ravel()
        shape = (*sizes.values(), len(tables[0]), *splits)
        often = self._comes_often((*shape, argmax))
        place = self._next_place(often) if decode else PLACES
        self._send(host[: offsets[-1]], place, copied)
        key = shape, place, often
        if key not in self._batches:
            if len(self._batches) >= MAX_KEPT:
                self._batches.clear()
            addresses = (self._places[place].at(4 * offset) for offset in offsets)
            at = dict(zip(parts, addresses, strict=False))
            self._batches[key] = self._batch(*key, at, sizes, tables[0].shape, splits)
        return self._batches[key]

    def _parts(
        self,
        step: Step,
        tables: list[Ints],
        sequences: Ints,
        tiles: list[Ints],
        prefill: list[Ints],
    ) -> Iterator[tuple[str, Ints]]:
        """All arrays to upload, by name; per-group and per-head-shape arrays have an index in their
        name.
        """
        groups = range(len(tables))
        yield "ids", step.ids
        yield "positions", step.positions
        numbers = step.positions // PAGE_SIZE
        yield from ((f"pages {g}", step.page_tables[g][step.sequences, numbers]) for g in groups)
        yield "sequences", sequences
        yield "rows", step.rows
        yield from ((f"tables {g}", tables[g]) for g in groups)
        for i, (some, many) in enumerate(zip(tiles, prefill, strict=True)):
            yield f"tiles {i}", some
            yield f"prefill tiles {i}", many
        for g in self._converted:
            kernels = self._kernels[self._kernel_of_group[g]]
            n_prefill = len(prefill[self._kernel_of_group[g]])
            listed, into = self._f16_pages(step, tables[g], kernels, n_prefill)
            yield f"f16 pages {g}", listed
            yield f"f16 tables {g}", into

    def _send(self, host: Ints, place: int, copied: Any) -> None:
        """Copy the integers to a buffer. If the step before uses the same buffer, the copy follows
        it on its stream. Otherwise another stream copies while that step runs, after earlier steps
        that use this buffer.
        """
        stream = self.device.stream
        if place != self._place:
            self._used[self._place].record()
            stream = self._copies
            stream.wait(self._used[place])
        self.device.upload(self._places[place], host, stream=stream)
        copied.record(stream)
        if place != self._place:
            self.device.stream.wait(copied)
        self._place = place
        self.n_steps += 1

    def _plan(self, step: Step) -> tuple[list[Ints], list[Ints], list[int]]:
        """Attention tiles, prefill tiles and splits to launch, per head shape. Decode steps keep
        theirs, because they change rarely.
        """
        tokens = step.positions, step.sequences
        if len(step.page_tables[0]) < len(step.ids):
            fewest, most = _span_of_lengths(step.sequences)
            tiles, prefill = [NO_TILES] * len(self._kernels), [NO_TILES] * len(self._kernels)
            for i, k in enumerate(self._kernels):
                least, split = k.prefill_tokens, self._max_split_tokens
                if least is None or fewest < least:
                    tiles[i] = plan_tiles(*tokens, k.heads, below=least, max_split_tokens=split)
                if least is not None and most >= least:
                    prefill[i] = plan_prefill_tiles(*tokens, k.heads, least)
            return tiles, prefill, [MAX_SPLIT] * len(tiles)
        depths = (step.positions // POSITIONS_PER_SPLIT).tobytes()
        if depths != self._depths:
            self._depths = depths
            most = self._max_split_tokens
            plans = [plan_decode_tiles(*tokens, k, most) for k in self._kernels]
            self._tiles = [tiles for tiles, _ in plans]
            self._splits = [splits for _, splits in plans]
        return self._tiles, [NO_TILES] * len(self._tiles), self._splits

    def _comes_often(self, shape: tuple[int, ...]) -> bool:
        """Counts a step of this shape. Returns whether it has come OFTEN times, or will according
        to a rehearsal.
        """
        times = self._times.pop(shape, 0) + 1
        if self.rehearsing:
            times = OFTEN
        if len(self._times) >= MAX_KEPT:  # drop the least recently used shape
            del self._times[next(iter(self._times))]
        self._times[shape] = min(times, OFTEN)
        return times >= OFTEN

    def _next_place(self, often: bool) -> int:
        """The buffer of a decode step. A buffer that is free while the step before runs saves a few
        microseconds. Only frequent shapes get one, because each place needs its own graph.
        """
        return (self._place + 1) % PLACES if often and self._place < PLACES else 0

    @staticmethod
    def _f16_pages(step: Step, table: Ints, kernels: Kernels, n_prefill: int) -> tuple[Ints, Ints]:
        """The pages that prefill converts to f16, and page tables into the converted pages."""
        least, heads = kernels.prefill_tokens, kernels.heads
        if not n_prefill or least is None:
            return NOTHING
        return plan_f16_pages(step.positions, step.sequences, table, heads.page_size, least)

    def _make_room(self, nbytes: int) -> None:
        """Make sure that page-locked and device buffers hold nbytes."""
        if self._places and self._places[0].nbytes >= nbytes:
            return
        self._moving()
        size = max(2 * nbytes, SMALLEST)
        self._places = [self.device.alloc(size, "step") for _ in range(PLACES + 1)]
        pinned = [self.device.pinned(size).view(np.int32) for _ in range(IN_FLIGHT)]
        self._staging = [(memory, self.device.event().record()) for memory in pinned]
        self._batches.clear()

    def _batch(
        self,
        shape: tuple[int, ...],
        place: int,
        often: bool,
        at: Mapping[str, Memory],
        sizes: Mapping[str, int],
        tables: tuple[int, ...],
        splits: Sequence[int],
    ) -> StepBatch:
        """The StepBatch of arrays with these sizes and addresses, and page tables [S, P]."""
        n_tokens, n_rows = sizes["ids"], sizes["rows"]
        decode, all_rows = tables[0] == n_tokens, n_rows == n_tokens
        step_class = StepClass(n_tokens, n_rows, decode, all_rows)
        return StepBatch(
            shape=shape,
            place=place,
            often=often,
            n_tokens=n_tokens,
            n_rows=n_rows,
            decode=decode,
            all_rows=all_rows,
            ids=at["ids"],
            rows=at["rows"],
            tilings=tuple(_tiling(i, at, sizes, n) for i, n in enumerate(splits)),
            groups=tuple(
                _group(g, at, sizes, tables[1]) for g in range(len(self._kernel_of_group))
            ),
            step_class=step_class,
            unfused_class=step_class._replace(fused=False),
            sequences=at["sequences"],
            first=at.get("first", at["sequences"]),
            states=tuple(at[name] for name in at if name.startswith("states")),
            n_sequences=tables[0],
        )


def _parts_of_states(states: Sequence[Ints], sequences: Ints) -> dict[str, Ints]:
    """The integers that kernels with recurrent states need."""
    if not states:
        return {}
    numbers = np.arange(len(states[0]) + 1)
    first = np.searchsorted(sequences, numbers).astype(np.int32)
    return {"first": first, **{f"states {i}": pages for i, pages in enumerate(states)}}


def _tiling(
    i: int, at: Mapping[str, Memory], sizes: Mapping[str, int], n_split: int
) -> AttentionTiles:
    some, many = f"tiles {i}", f"prefill tiles {i}"
    return AttentionTiles(sizes[some] // 4, sizes[many] // 4, n_split, at[some], at[many])


def _group(g: int, at: Mapping[str, Memory], sizes: Mapping[str, int], stride: int) -> GroupBatch:
    memory = AttentionMetadata(
        positions=at["positions"],
        pages=at[f"pages {g}"],
        sequences=at["sequences"],
        page_tables=at[f"tables {g}"],
        stride=stride,
    )
    n_f16 = sizes.get(f"f16 pages {g}", 0) // 2
    if not n_f16:
        return GroupBatch(memory, memory, None, 0)
    into_f16 = replace(memory, page_tables=at[f"f16 tables {g}"])
    return GroupBatch(memory, into_f16, at[f"f16 pages {g}"], n_f16)


def _span_of_lengths(sequences: Ints) -> tuple[int, int]:
    """The fewest and the most tokens that a sequence has in a step."""
    lengths = np.bincount(sequences)
    lengths = lengths[lengths > 0]
    return int(lengths.min()), int(lengths.max())


def _widened(tables: Ints) -> Ints:
    """page_tables[S, P] with P rounded up to LEAST_PAGES or a power of two, so that few shapes are
    captured.
    """
    width = tables.shape[1]
    wider = max(LEAST_PAGES, power_of_two(width))
    if wider == width:
        return tables
    wide = np.zeros((len(tables), wider), np.int32)
    wide[:, :width] = tables
    return wide
