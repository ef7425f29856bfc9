"""Collects the tensors of a file that an architecture declares: splits fused tensors, and checks
shapes against the settings.

A tensor that is missing, has another shape, or has no use is refused by name. This module knows no
ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..gguf import File, GGUFError, Tensor
from ..gguf.names import layer_of
from .architecture import CLASSIFIER, DENSE, Architecture, Declared
from .config import AGAIN, Dimensions, UnsupportedModel
from .join import join_experts
from .layers.attention import FUSED_QKV
from .scheme import SCALE, scale_of, scales_of, spread_scales

UNUSED = (
    "rotary_emb.inv_freq",
    "attn_rot_embd.weight",
)  # stored by old converters; the settings say the same
OF_IMAGES = ("v.", "a.", "mm.")  # encoders of images and sounds, which some files contain


def of_texts(file: File) -> dict[str, Tensor]:
    """The tensors of a file without encoders of images and sounds."""
    return {name: x for name, x in file.tensors.items() if not name.startswith(OF_IMAGES)}


def collect(
    architecture: Architecture, file: File, tensors: Mapping[str, Tensor], sizes: Dimensions
) -> dict[str, tuple[Tensor, Declared]]:
    """The tensors by name, with fused ones split; GGUFError if one is not as declared."""
    wanted, allowed = architecture.tensors(sizes)
    on_host = {**CLASSIFIER, **DENSE}
    allowed |= scales_of(wanted | {n: x for n, x in allowed.items() if n not in on_host})
    unread = architecture.unread(sizes)
    found = dict(tensors)
    spread_scales(found)
    for name in unread:
        found.pop(name, None)
        found.pop(scale_of(name), None)
    for i in range(sizes.n_layer):
        join_experts(found, i, wanted)
        _split_experts(found, f"blk.{i}.", wanted)
        _split_fused(architecture, file, sizes, i, found, {**wanted, **allowed})
    after = range(sizes.n_layer, sizes.n_layer + sizes.n_nextn)
    found = {name: x for name, x in found.items() if layer_of(name) not in after}
    missing = _missing(architecture, sizes, wanted, found)
    if missing:
        raise GGUFError(
            f"{file.path}: {architecture.name} needs tensor {missing[0]!r}{_more(missing)}: {AGAIN}"
        )
    unknown = [n for n in found if n not in wanted and n not in allowed and not n.endswith(UNUSED)]
    if unknown:
        raise UnsupportedModel(
            f"{file.path}: {architecture.name} has no use for tensor {unknown[0]!r}{_more(unknown)}"
            ": this variant is not supported"
        )
    for name in unread.keys() & file.tensors.keys():
        _shaped(file, file.tensors[name], name, unread[name].shape)
    collected = {}
    for name, declared in {**wanted, **allowed}.items():
        if name in found:
            tensor = _shaped(file, found[name], name, declared.shape)
            if name.endswith(SCALE):
                _check_scale(file, tensor, name)
            collected[name] = tensor, declared
    return collected


def _missing(
    architecture: Architecture, sizes: Dimensions, wanted: Mapping[str, Declared], found: Mapping
) -> list[str]:
    """The missing tensors, by their names in files: parts of a fused tensor have its name."""
    stored = {name: name for name in wanted}
    for i in range(sizes.n_layer):
        for name, parts in architecture.parts_of(sizes, i).items():
            whole = {f"blk.{i}.{part}": f"blk.{i}.{name}" for part in parts}
            stored |= {} if whole.keys() & found.keys() else whole
    return list(dict.fromkeys(stored[name] for name in wanted if name not in found))


def _split_fused(
    architecture: Architecture,
    file: File,
    sizes: Dimensions,
    layer: int,
    found: dict[str, Tensor],
    declared: Mapping[str, Declared],
) -> None:
    """Replace the fused tensors of a layer by their parts."""
    at, fused = f"blk.{layer}.", architecture.parts_of(sizes, layer)
    for name, parts in {**FUSED_QKV, **fused}.items():
        whole = name not in fused and at + name in declared
        if whole or not all(at + part in declared for part in parts):
            continue
        # q may have parts itself
        inner = {part: fused.get(part, (part,)) if name in FUSED_QKV else (part,) for part in parts}
        rows = {at + x: sum(declared[at + y].shape[0] for y in ys) for x, ys in inner.items()}
        scales = {scale_of(x): n for x, n in rows.items()}
        letter, _ = architecture.turns.get(name, ("", ()))
        n_heads = sizes.letters(layer)[letter] if letter else 1
        _split(file, found, at + name, rows, n_heads)
        _split(file, found, scale_of(at + name), scales, n_heads)


def _split(
    file: File, found: dict[str, Tensor], name: str, parts: dict[str, int], n_heads: int = 1
) -> None:
    """Replace a fused tensor by its parts. A tensor with the rows of one part is not fused.

    parts: name -> rows. n_heads: 1, or the heads by which the parts are interleaved.
    """
    tensor = found.get(name)
    if tensor is None or tensor.shape[0] == parts.get(name):
        return
    total = sum(parts.values())
    if tensor.shape[0] != total:
        raise GGUFError(
            f"{file.path}: tensor {name!r} has {tensor.shape[0]} rows, its parts have {total}"
        )
    del found[name]
    start = 0
    for part, rows in parts.items():
        found[part] = _turns(tensor, n_heads, start, rows)
        start += rows


def _split_experts(found: dict[str, Tensor], at: str, wanted: Mapping[str, Declared]) -> None:
    """Split one tensor [X, 2F, D] of gate and up of all experts; the parts are views."""
    gate, up = (f"{at}ffn_{name}_exps.weight" for name in ("gate", "up"))
    fused = f"{at}ffn_gate_up_exps.weight"
    tensor, scale = found.get(fused), found.get(scale_of(fused))
    if tensor is None or gate in found or gate not in wanted:
        return
    n_expert, n_rows, k = wanted[gate].shape
    if tensor.shape != (n_expert, 2 * n_rows, k):
        return
    del found[fused]
    if scale is not None:
        found |= dict.fromkeys((scale_of(gate), scale_of(up)), found.pop(scale.name))
    for name, rows in ((gate, slice(n_rows)), (up, slice(n_rows, 2 * n_rows))):
        shape, data = (n_expert, n_rows, k), tensor.data[:, rows]
        offset = (
            tensor.offset + rows.start * tensor.data.strides[1] if rows.start else tensor.offset
        )
        found[name] = replace(tensor, shape=shape, data=data, offset=offset)


def _turns(tensor: Tensor, n_heads: int, start: int, n_rows: int) -> Tensor:
    """The part of a fused tensor that has n_rows rows after `start` rows of other parts. With
    n_heads > 1, each head of the tensor contains its share of all parts.
    """
    if n_heads == 1:
        return tensor.rows(start, start + n_rows)
    turns = tensor.data.reshape(n_heads, tensor.shape[0] // n_heads, -1)
    data = turns[:, start // n_heads : (start + n_rows) // n_heads]
    shape = (n_rows, *tensor.shape[1:])
    rest = (-1,) if len(shape) == 1 else (n_rows, -1)
    return replace(tensor, shape=shape, data=np.ascontiguousarray(data).reshape(rest))


def _shaped(file: File, tensor: Tensor, name: str, expected: tuple[int, ...]) -> Tensor:
    """The tensor in the expected shape. A file may have more or fewer leading axes of length 1;
    GGUFError for any other shape.
    """
    if _without_ones(tensor.shape) != _without_ones(expected):
        raise GGUFError(
            f"{file.path}: tensor {name!r} has shape {tensor.shape}, the settings say {expected}"
        )
    if tensor.shape == expected:
        return tensor
    return replace(tensor, shape=expected, data=tensor.data.reshape(*expected[:-1], -1))


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without leading axes of length 1."""
    first = next((i for i, n in enumerate(shape[:-1]) if n != 1), len(shape) - 1)
    return shape[first:]


def _check_scale(file: File, tensor: Tensor, name: str) -> None:
    if tensor.format.name != "F32":
        raise UnsupportedModel(
            f"{file.path}: tensor {name!r} is {tensor.format.name}: scales are F32"
        )


def check_vocabulary(file: File, n_vocab: int) -> None:
    """GGUFError if the tokenizer's list is not as long as the embedding table."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != n_vocab:
        raise GGUFError(
            f"{file.path}: {len(tokens)} tokens, but the embedding table has {n_vocab} rows:"
            f" {AGAIN}"
        )


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
