"""A GGUF file in another type: chooses formats and metadata, and streams tensors to the new file.

Types, order, metadata and bytes are those of llama-quantize; types with a scale for each row are
ggpy's own, and so are the factors of weights (`Factors`). A plan is made, and whatever can be
refused is refused, before anything is written; a file appears under its name when it is complete.
Nothing here prints or knows a command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..arch.scheme import ACTIVATIONS_KEY, I8_KEY, WEIGHT, read_scheme, scale_of, settings_for
from ..backends.host import drop_pages
from ..formats import Format, by_name
from ..formats.base import F32
from ..formats.rows import stored_as
from ..gguf import File, GGUFError, Tensor
from ..gguf.writer import Slot, Writer
from ..util.messages import escaped, shown
from .mix import Mix, in_order, is_values
from .workers import Task, Workers, scales_of_rows, slabs

QUANTIZATION_VERSION = 2  # of ggml's block formats
SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
Typed = dict[str, tuple[str, Any]]  # metadata: key -> type, value


@dataclass(frozen=True)
class Factors:
    """Factors that weights [N, K] are multiplied by before they are quantised, by tensor."""

    columns: Mapping[str, F32] = field(default_factory=dict)  # [K]; a vector [K] is one row
    rows: Mapping[str, F32] = field(default_factory=dict)  # [N]

    def of(self, name: str) -> tuple[F32 | None, F32 | None]:
        """(columns, rows) of a tensor."""
        return self.columns.get(name), self.rows.get(name)


@dataclass(frozen=True)
class Choice:
    """A tensor of the old file, and how it is written."""

    tensor: Tensor
    format: Format
    importance: F32 | None = None  # [columns] or [experts, columns]
    scale: Tensor | None = None  # old scales, [rows] or [1], to be multiplied into the weights
    factors: tuple[F32 | None, F32 | None] = (None, None)  # of columns and rows, see Factors
    new_scale: Callable[[], F32] | None = None  # returns the scales [rows] in the new format
    is_new_scale: bool = False  # the tensor itself is what new_scale returns

    @property
    def is_weighed(self) -> bool:
        """Whether a scale or a factor is multiplied into the weights."""
        return self.scale is not None or any(factor is not None for factor in self.factors)

    @property
    def changes(self) -> bool:
        """Whether the tensor is quantised and not copied."""
        return (
            self.format is not self.tensor.format or self.new_scale is not None or self.is_weighed
        )

    @property
    def slot(self) -> Slot:
        """The tensor as it will be written."""
        return Slot(self.tensor.name, self.tensor.shape, stored_as(self.format))


@dataclass
class RequantizationPlan:
    """A new file, before it is written."""

    choices: list[Choice]  # in the order in which they are written
    metadata: Typed
    notes: list[str] = field(default_factory=list)  # one for each tensor without importance

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are written."""
        return sum(choice.slot.nbytes for choice in self.choices)


def mix_for(file: File, name: str, **options: Any) -> Mix:
    """The mix called `name` for a model; options are those of `Mix`.

    GGUFError if the metadata lacks its dimensions.
    """
    heads = _first(file, "attention.head_count")
    return Mix(
        name,
        architecture=file.architecture,
        n_layer=_first(file, "block_count"),
        n_head=heads,
        n_head_kv=_first(file, "attention.head_count_kv", heads),
        tied="output.weight" not in file.tensors,
        n_expert=_first(file, "expert_count", 0),
        n_values=sum(map(is_values, file.tensors)),
        **options,
    )


def _first(file: File, key: str, default: int | None = None) -> int:
    """An integer setting of the architecture; the first, if each layer has its own."""
    name = f"{file.architecture}.{key}"
    value = file.metadata.get(name, default)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.size:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise GGUFError(f"{file.path}: {escaped(name)} is {shown(value)}: a mix depends on it")
    return int(value)


def plan(
    file: File,
    mix: Mix | None,
    importance: Mapping[str, F32] | None = None,
    *,
    allow_requantize: bool = False,
    keep_order: bool = False,
    factors: Factors | None = None,
) -> RequantizationPlan:
    """Chooses the format of each tensor, and the metadata; mix=None copies the tensors.

    importance: of the columns, [X * K], by tensor. allow_requantize: also from quant blocks.
    keep_order: tensors stay in the order of the file; else they are sorted by layer and name.
    ValueError for a tensor that cannot or must not be quantised.
    """
    scheme = read_scheme(file.metadata, file.path)
    tensors = {name: scheme.typed(x) for name, x in file.tensors.items()}
    scales = {name: tensors[scale_of(name)] for name in tensors if _has_scale(name, tensors)}
    order = list(tensors) if keep_order else in_order(tensors)
    found = RequantizationPlan([], _metadata(file, mix))
    beside = {scale.name for scale in scales.values()}  # written just before their tensors
    for name in (name for name in order if name not in beside):
        tensor = tensors[name]
        format = (mix.choose(name, tensor.shape) if mix else None) or tensor.format
        weights = None
        by_row = mix is not None and mix.by_row and format is mix.base and len(tensor.shape) == 2
        by_row = by_row and not (format is tensor.format and name in scales)
        factor = factors.of(name) if factors else (None, None)
        if format is not tensor.format or by_row or any(f is not None for f in factor):
            _check_source(tensor, allow_requantize, name in scales)
            if importance is not None and not by_row:
                weights = _importance_of(tensor, importance, found.notes)
        if mix and weights is None and mix.needs_imatrix(name, format):
            raise ValueError(
                f"tensor {name!r} in {format.name} needs an importance matrix, or what comes of it "
                "is noise: make one with `ggpy imatrix`, and name it with --imatrix"
            )
        choice = Choice(tensor, format, weights, scales.get(name), factor)
        found.choices += _with_scales(choice, by_row)
    formats = {choice.format for choice in found.choices}
    activations = mix.activations if mix and mix.by_row else scheme.activations
    for key, (kind, value) in settings_for(formats, activations).items():
        override(found.metadata, key, kind, value)
    return found


def _has_scale(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a matrix has a scale for each row, or one for all of it.

    Experts are left alone: in Gemma 4 a tensor of this name is no scale of their weights.
    """
    scale, shape = tensors.get(scale_of(name)), tensors[name].shape
    is_matrix = name.endswith(WEIGHT) and len(shape) == 2
    return is_matrix and scale is not None and scale.shape in (shape[:1], (1,))


def _with_scales(choice: Choice, by_row: bool) -> list[Choice]:
    """[the choice of the scales of its rows, new or old,] `choice`; ValueError."""
    if by_row:
        made = NewScale(choice)
        name, n_rows = scale_of(choice.tensor.name), choice.tensor.shape[0]
        data, path = np.zeros(4 * n_rows, np.uint8), choice.tensor.path
        empty = Tensor(name, (n_rows,), by_name("F32"), data, path)
        scale = Choice(empty, by_name("F32"), new_scale=made, is_new_scale=True)
        return [scale, replace(choice, new_scale=made)]
    if choice.scale is not None and choice.format is choice.tensor.format:
        if any(factor is not None for factor in choice.factors):
            name = choice.tensor.name
            raise ValueError(f"tensor {name!r} has a scale for each row already: start from F16")
        return [Choice(choice.scale, choice.scale.format), replace(choice, scale=None)]
    return [choice]


class NewScale:
    """The scales of a tensor's rows in its new format, computed when they are first asked for."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._found: F32 | None = None

    def __call__(self) -> F32:
        if self._found is None:
            self._found = scales_of_rows(_weights(self._choice))
        return self._found


def _check_source(tensor: Tensor, allow_requantize: bool, has_scale: bool) -> None:
    """ValueError for a tensor without weights, or one that is quantised unless this is allowed."""
    source = tensor.format
    if (source.block_size > 1 or has_scale) and not allow_requantize:
        raise ValueError(
            f"tensor {tensor.name!r} is in {source.name} already, and quantising it again loses "
            "more: start from F16, BF16 or F32, or give --allow-requantize"
        )
    if source.dtype.kind == "i" and not has_scale:
        raise ValueError(f"tensor {tensor.name!r} holds integers, {source.name}: it has no weights")


def _importance_of(tensor: Tensor, importance: Mapping[str, F32], notes: list[str]) -> F32 | None:
    """[columns] or [experts, columns]; None and a note if `importance` lacks the tensor.

    ValueError if it has another size, except for the embedding table.
    """
    experts = tensor.shape[0] if len(tensor.shape) == 3 else 1
    weights = importance.get(tensor.name)
    if weights is None:
        notes.append(f"did not find weights for {escaped(tensor.name)}")
        return None
    if weights.size != experts * tensor.shape[-1]:
        wanted = f"{weights.size} is different from tensor size {experts * tensor.shape[-1]}"
        if tensor.name != "token_embd.weight":
            raise ValueError(
                f"imatrix size {wanted} for {escaped(tensor.name)}: it was made with another model"
            )
        notes.append(f"imatrix size {wanted} for {escaped(tensor.name)}")
        return None
    return weights.reshape(experts, -1) if experts > 1 else weights.reshape(-1)


def _metadata(file: File, mix: Mix | None) -> Typed:
    """The file's own metadata without the keys of a split file; changed keys come last."""
    found = {
        key: (file.types[key], value)
        for key, value in file.metadata.items()
        if key not in (*SPLIT_KEYS, I8_KEY, ACTIVATIONS_KEY)
    }
    override(found, "general.quantization_version", "u32", QUANTIZATION_VERSION)
    file_type = mix.file_type if mix else file.metadata.get("general.file_type")
    if file_type is None:
        found.pop("general.file_type", None)
    else:
        override(found, "general.file_type", "u32", file_type)
    return found


def override(metadata: Typed, key: str, kind: str, value: Any) -> None:
    """Sets a key, which moves to the end, as in llama.cpp."""
    metadata.pop(key, None)
    metadata[key] = (kind, value)


# Writing


def write(plan: RequantizationPlan, path: Path, workers: Workers) -> Iterator[tuple[int, int]]:
    """Writes the file and yields (index of a choice, bytes of it that are written).

    The file is complete when the iterator is exhausted. ValueError names a tensor and row with NaN
    or infinity; OSError if the disk is full.
    """
    yield from _write(plan.choices, [(path, plan.metadata, plan.choices)], workers)


def write_parts(
    plan: RequantizationPlan, path: Path, workers: Workers
) -> Iterator[tuple[int, int]]:
    """Like `write`, in as many parts as the original: PATH-00001-of-00002.gguf and so on.

    The plan must be in the order of the file (keep_order).
    """
    by_part: dict[str, list[Choice]] = {}
    for choice in plan.choices:
        by_part.setdefault(choice.tensor.path, []).append(choice)
    n = len(by_part)
    if n == 1:
        yield from write(plan, part_name(path, 1, 1), workers)
        return
    files = []
    for i, choices in enumerate(by_part.values()):
        metadata: Typed = dict(plan.metadata) if i == 0 else {}
        override(metadata, "split.no", "u16", i)
        override(metadata, "split.count", "u16", n)
        override(metadata, "split.tensors.count", "i32", len(plan.choices))
        files.append((part_name(path, i + 1, n), metadata, choices))
    yield from _write(plan.choices, files, workers)


def part_name(path: Path, number: int, count: int) -> Path:
    """The path of part `number` (from 1) of `count`. path: of the whole, with or without .gguf."""
    stem = path.name.removesuffix(".gguf")
    return path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf")


def _write(
    choices: Sequence[Choice],
    files: Sequence[tuple[Path, Typed, Sequence[Choice]]],
    workers: Workers,
) -> Iterator[tuple[int, int]]:
    """Writes all tensors in order; the files get their names together at the end."""
    with ExitStack() as stack:
        out: list[Writer] = []
        for path, metadata, part in files:
            writer = Writer(path, metadata, [choice.slot for choice in part])
            out += [stack.enter_context(writer)] * len(part)
        blocks = workers.run(_tasks(choices, workers.search_slab))
        for i, choice in enumerate(choices):
            done, nbytes = 0, choice.slot.nbytes
            while done < nbytes:
                piece = next(blocks)
                out[i].write(piece)
                done += piece.nbytes
                yield i, done
            drop_pages(choice.tensor.data)


def _tasks(choices: Iterable[Choice], search_slab: int) -> Iterator[Task]:
    """The tasks of all tensors in order; copied tensors are checked for NaN as well."""
    for choice in choices:
        tensor = choice.tensor
        if not choice.changes:
            tensor.check_scales()
        if choice.is_new_scale and choice.new_scale is not None:
            data = choice.new_scale().view(np.uint8)
            yield Task(data, tensor.format, tensor.format, tensor=tensor.name)
        else:
            yield from _weights(choice, choice.new_scale and choice.new_scale(), search_slab)


def _weights(
    choice: Choice, new_scale: F32 | None = None, search_slab: int | None = None
) -> Iterator[Task]:
    """The tasks of a tensor; its scale and its factors, if any, are multiplied into the weights."""
    tensor, float32 = choice.tensor, by_name("F32")
    parts = slabs(
        tensor.data,
        tensor.shape[-1],
        tensor.format,
        choice.format,
        choice.importance,
        tensor.name,
        new_scale,
        search_slab=search_slab,
    )
    scale = None
    if choice.scale is not None:
        scale = np.broadcast_to(choice.scale.dequantize(), tensor.shape[:1])
    columns, rows = choice.factors
    for task in parts:
        if not choice.is_weighed:
            yield task
            continue
        weights = task.source.dequantize(task.data)
        part = slice(task.first_row, task.first_row + len(weights))
        for factor in (scale, rows):
            if factor is not None:
                weights *= factor[part, None]
        if columns is not None:
            weights *= columns
        yield task._replace(data=weights.view(np.uint8), source=float32)
