"""A GGUF file in another type: which tensor becomes what, metadata, and the new file, streamed.

Types, order, metadata and bytes are those of llama-quantize. A plan is made, and whatever can be
refused is refused, before anything is written; a file appears under its name when it is whole.
Nothing here prints or knows a command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .formats import Format
from .formats.base import F32
from .gguf import File, GGUFError, Tensor
from .gguf_writer import Slot, Writer
from .mix import Mix, in_order, is_values
from .ops.host import drop_pages
from .workers import Task, Workers, slabs

QUANTIZATION_VERSION = 2  # of ggml's block formats
SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
Typed = dict[str, tuple[str, Any]]  # metadata: key -> type, value


@dataclass(frozen=True)
class Choice:
    """A tensor and what becomes of it."""

    tensor: Tensor
    format: Format
    importance: F32 | None = None  # [columns] or [experts, columns]

    @property
    def changes(self) -> bool:
        """Whether the tensor is quantised rather than copied."""
        return self.format is not self.tensor.format

    @property
    def slot(self) -> Slot:
        """The tensor as it will be written."""
        return Slot(self.tensor.name, self.tensor.shape, self.format)


@dataclass
class Plan:
    """A new file, before it is written."""

    choices: list[Choice]  # in the order in which they are written
    metadata: Typed
    notes: list[str] = field(default_factory=list)  # tensors whose importance is not known

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are written."""
        return sum(choice.slot.nbytes for choice in self.choices)


def mix_for(file: File, name: str, **options: Any) -> Mix:
    """The mix called `name` for a model; options as of `Mix`. GGUFError without its dimensions."""
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
    """A setting of the architecture; of one for each layer, the first."""
    name = f"{file.architecture}.{key}"
    value = file.metadata.get(name, default)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.size:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise GGUFError(f"{file.path}: {name} is {value!r}: a mix depends on it")
    return int(value)


def plan(
    file: File,
    mix: Mix | None,
    importance: Mapping[str, F32] | None = None,
    *,
    allow_requantize: bool = False,
    keep_order: bool = False,
) -> Plan:
    """What becomes of a file's tensors; ValueError for what must not be. No mix: copies.

    importance: of the columns, by tensor. keep_order: as in the file, not by layers.
    """
    order = list(file.tensors) if keep_order else in_order(file.tensors)
    found = Plan([], _metadata(file, mix))
    for name in order:
        tensor = file.tensors[name]
        format = (mix.choose(name, tensor.shape) if mix else None) or tensor.format
        weights = None
        if format is not tensor.format:
            _check_source(tensor, allow_requantize)
            if importance is not None:
                weights = _importance_of(tensor, importance, found.notes)
        if mix and weights is None and mix.needs_imatrix(name, format):
            raise ValueError(
                f"tensor {name!r} in {format.name} needs an importance matrix, or what comes of it "
                "is noise: make one with `ggpy imatrix`, and name it with --imatrix"
            )
        found.choices.append(Choice(tensor, format, weights))
    return found


def _check_source(tensor: Tensor, allow_requantize: bool) -> None:
    """ValueError for a tensor that is no good to start from."""
    source = tensor.format
    if source.block_size > 1 and not allow_requantize:
        raise ValueError(
            f"tensor {tensor.name!r} is in {source.name} already, and quantising it again loses "
            "more: start from F16, BF16 or F32, or give --allow-requantize"
        )
    if source.dtype.kind == "i":
        raise ValueError(f"tensor {tensor.name!r} holds integers, {source.name}: it has no weights")


def _importance_of(tensor: Tensor, importance: Mapping[str, F32], notes: list[str]) -> F32 | None:
    """[columns] or [experts, columns]; None and a note for what the matrix does not have."""
    experts = tensor.shape[0] if len(tensor.shape) == 3 else 1
    weights = importance.get(tensor.name)
    if weights is None:
        notes.append(f"did not find weights for {tensor.name}")
        return None
    if weights.size != experts * tensor.shape[-1]:
        wanted = f"{weights.size} is different from tensor size {experts * tensor.shape[-1]}"
        if tensor.name != "token_embd.weight":
            raise ValueError(
                f"imatrix size {wanted} for {tensor.name}: it was made with another model"
            )
        notes.append(f"imatrix size {wanted} for {tensor.name}")
        return None
    return weights.reshape(experts, -1) if experts > 1 else weights.reshape(-1)


def _metadata(file: File, mix: Mix | None) -> Typed:
    """The file's own without what says how it is split; what is set anew stands at the end."""
    found = {
        key: (file.types[key], value)
        for key, value in file.metadata.items()
        if key not in SPLIT_KEYS
    }
    override(found, "general.quantization_version", "u32", QUANTIZATION_VERSION)
    file_type = mix.file_type if mix else file.metadata.get("general.file_type")
    if file_type is not None:
        override(found, "general.file_type", "u32", file_type)
    return found


def override(metadata: Typed, key: str, kind: str, value: Any) -> None:
    """Set a key, which moves to the end, as in llama.cpp."""
    metadata.pop(key, None)
    metadata[key] = (kind, value)


# Writing


def write(plan: Plan, path: Path, workers: Workers) -> Iterator[tuple[int, int]]:
    """Write the file; yields (index of the choice, bytes of it that are written) as it goes.

    The file is whole when the last was taken. ValueError names a tensor and row with NaN or
    infinity; OSError where there is no room.
    """
    yield from _write(plan.choices, [(path, plan.metadata, plan.choices)], workers)


def write_parts(plan: Plan, path: Path, workers: Workers) -> Iterator[tuple[int, int]]:
    """The same in as many parts as the original, PATH-00001-of-00002.gguf and so on.

    The plan must be in the order of the file.
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
    """Where a part is, by the name of the whole with or without .gguf."""
    stem = path.name.removesuffix(".gguf")
    return path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf")


def _write(
    choices: Sequence[Choice],
    files: Sequence[tuple[Path, Typed, Sequence[Choice]]],
    workers: Workers,
) -> Iterator[tuple[int, int]]:
    """The tensors of all files, which appear together at the end."""
    with ExitStack() as stack:
        out: list[Writer] = []
        for path, metadata, part in files:
            writer = Writer(path, metadata, [choice.slot for choice in part])
            out += [stack.enter_context(writer)] * len(part)
        blocks = workers.run(_tasks(choices))
        for i, choice in enumerate(choices):
            done, nbytes = 0, choice.slot.nbytes
            while done < nbytes:
                piece = next(blocks)
                out[i].write(piece)
                done += piece.nbytes
                yield i, done
            drop_pages(choice.tensor.data)


def _tasks(choices: Iterable[Choice]) -> Iterator[Task]:
    """All tensors, row by row; what is copied is checked for NaN as well."""
    for choice in choices:
        tensor = choice.tensor
        if not choice.changes:
            tensor.check_scales()
        yield from slabs(
            tensor.data,
            tensor.shape[-1],
            tensor.format,
            choice.format,
            choice.importance,
            tensor.name,
        )
