"""Writes a model to a GGUF file, tensor by tensor: chooses each format and converts the rows.

Rows are read, put in order, quantised on all cores and written a slab at a time, so that memory
does not depend on the size of a tensor. The file, or all its parts, appear at the end or not at
all. Nothing here prints.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arch.scheme import scale_of, settings_for
from ..formats import Format, by_name
from ..formats.base import F32, U8
from ..formats.rows import stored_as
from ..gguf.writer import Slot, Writer
from ..quantization.mix import Mix, file_type, is_values
from ..quantization.requantize import part_name
from ..quantization.workers import SLAB, Task, Workers, scales_of_rows
from ..util.messages import shown
from .experts import Gathered
from .folder import ConvertError
from .model import ModelConversion, Source

Metadata = dict[str, tuple[str, Any]]


@dataclass(frozen=True)
class TensorChoice:
    """A tensor and the format that it will have."""

    source: Source
    format: Format
    scales: Callable[[], F32] | None = None  # returns [rows]: rows are divided by them first

    @property
    def slot(self) -> Slot:
        return Slot(self.source.name, self.source.shape, stored_as(self.format))


@dataclass(frozen=True)
class TensorPart:
    """One of the files that are written."""

    path: Path
    metadata: Metadata
    choices: Sequence[TensorChoice]


@dataclass(frozen=True)
class ConversionPlan:
    """What will be written, and where."""

    parts: list[TensorPart]

    @property
    def choices(self) -> list[TensorChoice]:
        """All tensors, in the order in which they are written."""
        return [choice for part in self.parts for choice in part.choices]


@dataclass(frozen=True)
class Done:
    """Progress of one tensor."""

    index: int  # in ConversionPlan.choices
    rows: int  # written so far
    error: float | None  # root mean square error of its first slab; None: not measured


def mix_of(model: ModelConversion, name: str, **options: Any) -> Mix:
    """The mix called `name` for a model; options are those of `Mix`."""
    return Mix(
        name,
        architecture=model.architecture,
        n_layer=model.sizes.n_layer,
        n_head=model.sizes.layers[0].n_head,
        n_head_kv=model.sizes.layers[0].n_head_kv,
        tied=model.tied,
        n_expert=max(layer.n_expert for layer in model.sizes.layers),
        n_values=sum(is_values(source.name) for source in model.sources),
        **options,
    )


def plan(
    model: ModelConversion, mix: Mix, path: Path, split_max_size: int = 0, *, keep: bool = False
) -> ConversionPlan:
    """Chooses formats and files; tensors without a format in the mix are F32, as vectors must be.

    split_max_size: the most bytes of tensors in a file; 0: one file. keep: matrices that the
    checkpoint has quantised are not rounded again, unless the user named a type for them.
    ConvertError for a format that needs an importance matrix.
    """
    choices = [choice for source in model.sources for choice in _choices(source, mix, keep)]
    metadata = {**model.metadata, **_of_mix(model, mix, choices, keep)}
    for choice in choices:
        if mix.needs_imatrix(choice.source.name, choice.format):
            raise ConvertError(
                f"tensor {shown(choice.source.name)} in {choice.format.name} needs an importance"
                " matrix, or what comes of it is noise: convert to f16, make a matrix with"
                " `ggpy imatrix`,"
                " and use it with `ggpy quantize --imatrix`"
            )
    groups = _groups(choices, split_max_size)
    if len(groups) == 1:
        return ConversionPlan([TensorPart(path, metadata, choices)])
    parts = []
    for i, group in enumerate(groups):
        split: Metadata = {
            "split.no": ("u16", i),
            "split.count": ("u16", len(groups)),
            "split.tensors.count": ("i32", len(choices)),
        }
        name = part_name(path, i + 1, len(groups))
        parts.append(TensorPart(name, {**(metadata if i == 0 else {}), **split}, group))
    return ConversionPlan(parts)


def _choices(source: Source, mix: Mix, keep: bool) -> list[TensorChoice]:
    """The tensors of the file for a tensor of the model: [scales of rows,] weights."""
    format = mix.choose(source.name, source.shape) or by_name("F32")
    if keep and source.is_quantised and not mix.is_named(source.name):
        return [TensorChoice(kept, kept.format) for kept in source.kept()]
    if not (mix.by_row and format is mix.base and len(source.shape) == 2):
        return [TensorChoice(source, format)]
    scales = RowScales(source, format)
    scale = Source(scale_of(source.name), source.shape[:1], scales)
    return [TensorChoice(scale, by_name("F32")), TensorChoice(source, format, scales)]


class RowScales:
    """The scales of a tensor's rows in a format, computed when they are first asked for."""

    def __init__(self, source: Source, format: Format) -> None:
        self._choice = TensorChoice(source, format)
        self._found: F32 | None = None

    def __call__(self) -> F32:
        if self._found is None:
            self._found = scales_of_rows(tasks(self._choice))
        return self._found


def _of_mix(
    model: ModelConversion, mix: Mix, choices: Sequence[TensorChoice], keep: bool
) -> Metadata:
    """Metadata of types: llama.cpp's number of the file type, if it has one, and the type of the
    activations that 8-bit weights are multiplied with.
    """
    settings = settings_for({choice.format for choice in choices},
                            model.activations if keep else mix.activations)  # fmt: skip
    number = file_type(model.kept_as) if keep and model.kept_as else mix.file_type
    return settings if number is None else {"general.file_type": ("u32", number), **settings}


def _groups(choices: Sequence[TensorChoice], limit: int) -> list[list[TensorChoice]]:
    """Groups of consecutive tensors, each of at most `limit` bytes or one tensor; 0: one group."""
    groups: list[list[TensorChoice]] = [[]]
    total = 0
    for choice in choices:
        if limit and groups[-1] and total + choice.slot.nbytes > limit:
            groups.append([])
            total = 0
        groups[-1].append(choice)
        total += choice.slot.nbytes
    return groups


def write(plan: ConversionPlan, workers: Workers) -> Iterator[Done]:
    """Writes the files and yields progress; they are complete when the iterator is exhausted.

    ValueError names a tensor and row with NaN or infinity; OSError if the disk is full.
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


def _all_tasks(choices: Sequence[TensorChoice], sampled: deque[tuple[int, Task]]) -> Iterator[Task]:
    """The tasks of all tensors; `sampled` gets the first one of each tensor whose values change."""
    for i, choice in enumerate(choices):
        for task in tasks(choice):
            if task.first_row == 0 and (task.source is not task.target or task.scales is not None):
                sampled.append((i, task))
            yield task


def _rmse(task: Task, blocks: U8) -> float:
    """The root mean square error of the blocks that a task's weights became."""
    weights = task.target.dequantize(blocks)
    if task.scales is not None:
        weights *= task.scales[:, None]
    difference = task.source.dequantize(task.data) - weights
    return float(np.sqrt(np.mean(np.square(difference, dtype=np.float64))))


def tasks(choice: TensorChoice) -> Iterator[Task]:
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
        scales = choice.scales and choice.scales()[first : first + len(data)]
        yield Task(data, source.format, choice.format, None, first, source.name, scales)


def _rows(source: Source, start: int, stop: int) -> U8:
    """Rows start:stop in the order of the file and the source's format: bytes[rows, row bytes]."""
    weights = source.weights
    if callable(weights):
        weights = weights()
    if isinstance(weights, np.ndarray):
        return weights.reshape(1, -1).view(np.uint8)
    vector = len(source.shape) == 1
    if vector:  # a single row in the file, but a row for each element in the checkpoint
        start, stop = 0, source.shape[0]
    if source.transform is not None and source.transform.rows is not None:
        data = _gathered(weights, source.transform.rows[start:stop])
    else:
        order = source.order(stop - start) if source.head_size else None
        data = weights.rows(start, stop, order)
    if source.is_computed:
        data = _computed(source, weights.format.dequantize(data)).view(np.uint8)
    return data.reshape(1, -1) if vector else data


def _gathered(weights: Gathered, rows: NDArray[np.intp]) -> U8:
    """Rows in any order; runs of consecutive rows are read at once."""
    borders = np.flatnonzero(np.diff(rows) != 1) + 1
    runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, borders)]
    return np.concatenate([weights.rows(start, stop) for start, stop in runs])


def _computed(source: Source, values: F32) -> F32:
    """The file's values of the checkpoint's values[rows, columns], in the file's order of rows."""
    t = source.transform
    if t is not None and t.function is not None:
        values = t.function(values)
    if t is not None and t.columns is not None:
        values = values[:, t.columns]
    return np.ascontiguousarray(values + np.float32(source.offset))


def _check(source: Source, data: U8, first: int) -> None:
    """ConvertError if rows that are copied hold NaN or infinity."""
    with np.errstate(all="ignore"):
        good = np.isfinite(source.format.dequantize(data)).all(axis=-1)
    if not good.all():
        row = first + int(good.argmin())
        raise ConvertError(f"tensor {shown(source.name)}: row {row} holds NaN or infinity")
