"""A model to a GGUF file, tensor by tensor: which format each gets, and the rows on their way.

Rows are read, put in order, quantised on all cores and written a slab at a time, so that memory
does not depend on the size of a tensor. The file, or all parts of it, appear at the end or not at
all. Nothing here prints.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..formats import Format, by_name
from ..formats.base import U8
from ..gguf_writer import Slot, Writer
from ..mix import Mix, is_values
from ..requantize import part_name
from ..workers import SLAB, Task, Workers
from .folder import ConvertError
from .model import Model, Source

Metadata = dict[str, tuple[str, Any]]


@dataclass(frozen=True)
class Choice:
    """A tensor and the format that it will have."""

    source: Source
    format: Format

    @property
    def slot(self) -> Slot:
        return Slot(self.source.name, self.source.shape, self.format)


@dataclass(frozen=True)
class Part:
    """One of the files that are written."""

    path: Path
    metadata: Metadata
    choices: Sequence[Choice]


@dataclass(frozen=True)
class Plan:
    """What will be written, and where."""

    parts: list[Part]

    @property
    def choices(self) -> list[Choice]:
        """All tensors, in the order in which they are written."""
        return [choice for part in self.parts for choice in part.choices]


@dataclass(frozen=True)
class Done:
    """A tensor of which something more was written."""

    index: int  # in Plan.choices
    rows: int
    error: float | None  # of the weights whose error was measured: their root mean square error


def mix_of(model: Model, name: str, **options: Any) -> Mix:
    """The mix called `name` for a model; options as of `Mix`."""
    return Mix(
        name,
        architecture=model.architecture,
        n_layer=model.sizes.n_layer,
        n_head=model.sizes.n_head,
        n_head_kv=model.sizes.n_head_kv,
        tied=model.tied,
        n_values=sum(is_values(source.name) for source in model.sources),
        **options,
    )


def plan(model: Model, mix: Mix, path: Path, split_max_size: int = 0) -> Plan:
    """Formats and files; what the mix leaves alone is F32, as vectors have to be.

    split_max_size: bytes of the tensors in a file, about; 0: one file.
    """
    choices = [
        Choice(source, mix.choose(source.name, source.shape) or by_name("F32"))
        for source in model.sources
    ]
    metadata = {**model.metadata, "general.file_type": ("u32", mix.file_type)}
    for choice in choices:
        if mix.needs_imatrix(choice.source.name, choice.format):
            raise ConvertError(
                f"tensor {choice.source.name!r} in {choice.format.name} needs an importance matrix,"
                " or what comes of it is noise: convert to f16, make a matrix with `ggpy imatrix`,"
                " and use it with `ggpy quantize --imatrix`"
            )
    groups = _groups(choices, split_max_size)
    if len(groups) == 1:
        return Plan([Part(path, metadata, choices)])
    parts = []
    for i, group in enumerate(groups):
        split: Metadata = {
            "split.no": ("u16", i),
            "split.count": ("u16", len(groups)),
            "split.tensors.count": ("i32", len(choices)),
        }
        name = part_name(path, i + 1, len(groups))
        parts.append(Part(name, {**(metadata if i == 0 else {}), **split}, group))
    return Plan(parts)


def _groups(choices: Sequence[Choice], limit: int) -> list[list[Choice]]:
    """Tensors in order, as many together as fit into `limit` bytes, but one at least."""
    groups: list[list[Choice]] = [[]]
    total = 0
    for choice in choices:
        if limit and groups[-1] and total + choice.slot.nbytes > limit:
            groups.append([])
            total = 0
        groups[-1].append(choice)
        total += choice.slot.nbytes
    return groups


def write(plan: Plan, workers: Workers) -> Iterator[Done]:
    """Write the files; yields what is done as it goes, and they are whole when the last was taken.

    ValueError names a tensor and row with NaN or infinity; OSError where there is no room.
    """
    choices = plan.choices
    sampled: deque[tuple[int, Task]] = deque()  # tasks whose error will be measured
    with ExitStack() as stack:
        out: list[Writer] = []
        for part in plan.parts:
            writer = Writer(part.path, part.metadata, [choice.slot for choice in part.choices])
            out += [stack.enter_context(writer)] * len(part.choices)
        blocks = workers.run(_all_tasks(choices, sampled))
        for i, choice in enumerate(choices):
            rows, row_bytes = 0, choice.format.row_bytes(choice.source.shape[-1])
            while rows < prod(choice.source.shape[:-1]):
                piece = next(blocks)
                out[i].write(piece)
                error = None
                if sampled and sampled[0][0] == i and rows == sampled[0][1].first_row:
                    error = _rmse(sampled.popleft()[1], piece)
                rows += piece.size // row_bytes
                yield Done(i, rows, error)


def _all_tasks(choices: Sequence[Choice], sampled: deque[tuple[int, Task]]) -> Iterator[Task]:
    """The tasks of all tensors; the first of each that changes is kept, to measure its error."""
    for i, choice in enumerate(choices):
        for task in tasks(choice):
            if task.first_row == 0 and task.source is not task.target:
                sampled.append((i, task))
            yield task


def _rmse(task: Task, blocks: U8) -> float:
    """How far the weights of a task are from what became of them."""
    difference = task.source.dequantize(task.data) - task.target.dequantize(blocks)
    return float(np.sqrt(np.mean(np.square(difference, dtype=np.float64))))


def tasks(choice: Choice) -> Iterator[Task]:
    """The rows of a tensor, ready to be quantised; ConvertError names one with NaN or infinity."""
    source = choice.source
    columns = source.shape[-1]
    n_rows = prod(source.shape[:-1])
    unit = source.head_size or 1
    step = max(1, SLAB // columns // unit) * unit
    for first in range(0, n_rows, step):
        data = _rows(source, first, min(first + step, n_rows))
        if choice.format is source.format:
            _check(source, data, first)
        yield Task(data, source.format, choice.format, None, first, source.name)


def _rows(source: Source, start: int, stop: int) -> U8:
    """Rows start:stop of what the file will have, bytes[rows, bytes of a row]."""
    weights = source.weights
    if isinstance(weights, np.ndarray):
        return weights.reshape(1, -1).view(np.uint8)
    vector = len(source.shape) == 1
    if vector:  # one row to a file, but as many to the checkpoint as it has weights
        start, stop = 0, source.shape[0]
    order = _interleaved(stop - start, source.head_size) if source.head_size else None
    data = weights.rows(start, stop, order)
    if source.offset:
        data = (weights.format.dequantize(data) + np.float32(source.offset)).view(np.uint8)
    return data.reshape(1, -1) if vector else data


def _interleaved(n_rows: int, head_size: int) -> np.ndarray:
    """Row numbers that put the halves of each head in turn: 0, E/2, 1, E/2 + 1, ..."""
    rows = np.arange(n_rows).reshape(-1, 2, head_size // 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _check(source: Source, data: U8, first: int) -> None:
    """ConvertError if rows that are copied hold what is no number."""
    with np.errstate(all="ignore"):
        good = np.isfinite(source.format.dequantize(data)).all(axis=-1)
    if not good.all():
        row = first + int(good.argmin())
        raise ConvertError(f"tensor {source.name!r}: row {row} holds NaN or infinity")
