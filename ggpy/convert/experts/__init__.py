"""The matrices of all experts as one tensor of three axes, however a checkpoint stores them.

Most released checkpoints have a tensor for each expert, *.experts.3.gate_proj.weight. Others have
one for all experts, *.experts.gate_up_proj [X, 2 N, K], with the rows of gate before those of up.
Llama 4, gpt-oss and Qwen3-VL exchange the last two axes. gpt-oss interleaves the rows of gate and
up, and may store MXFP4 as two tensors, codes and scales. All become *.experts.gate_proj.weight,
.up_proj.weight and .down_proj.weight; where the GGUF files of an architecture have gate and up in
one tensor, *.experts.gate_up_proj.weight stays whole. Granite has other names for the two tensors.

Letters: X experts, N rows of a matrix, K columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ...formats.mxfp4 import QK_MXFP4
from ...util.messages import shown
from ..assemble import Stored
from ..folder import ConvertError
from ..packed import Packed
from ..weights import Weights
from .tensors import Cut, Microscaled, PackedStack, SingleRow, Stacked

APART = re.compile(r"(.*\.experts)\.(\d{1,5})\.(.*)")
TOGETHER = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(\.weight|_bias|_blocks|)")
SINGLE_ROWS = (".shared_expert_gate.weight", ".moe_statics.e_score_correction_bias")
USUAL_NAMES = {  # endings of Granite's names -> the usual endings
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj.weight",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj.weight",
}
SCALES = "_scales"  # beside _blocks
GATE, UP, GATE_UP = (f".ffn_{x}_exps.weight" for x in ("gate", "up", "gate_up"))  # of files
ALL = slice(None)

Gathered = Stored | Stacked | Cut | SingleRow | Microscaled
Found = dict[str, Gathered]


def gathered(
    tensors: Mapping[str, Stored], transposed: bool, interleaved: bool, together: bool = False
) -> Found:
    """The tensors by name; the same matrix of all experts is one tensor [X, N, K].

    transposed: the checkpoint exchanges the last two axes. interleaved: its rows of gate and up
    take turns. together: gate and up stay in one tensor. ConvertError if an expert is missing.
    """
    found: Found = {}
    apart: dict[str, dict[int, Stored]] = {}
    for stored, weights in tensors.items():
        name = _usual_name(stored)
        if match := APART.fullmatch(name):
            apart.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = weights
        elif (match := TOGETHER.fullmatch(name)) and isinstance(weights, Weights):
            whole = together and match[2] == "gate_up_proj"
            found |= _taken_apart(match, weights, tensors, transposed, interleaved, whole)
        elif name.endswith(SINGLE_ROWS) and isinstance(weights, Weights) and weights.shape[0] == 1:
            found[name] = SingleRow(weights)
        elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + "_blocks" in tensors):
            found[name] = weights
    return {**found, **{name: _stacked(name, parts) for name, parts in apart.items()}}


def _usual_name(name: str) -> str:
    for granite, usual in USUAL_NAMES.items():
        name = name.removesuffix(granite) + usual if name.endswith(granite) else name
    return name


def _taken_apart(
    match: re.Match[str],
    weights: Weights,
    tensors: Mapping[str, Stored],
    transposed: bool,
    interleaved: bool,
    whole: bool,
) -> Found:
    """gate_proj, up_proj or down_proj out of one tensor of all experts, or gate_up_proj if `whole`.

    ConvertError for an unexpected number of axes, or an odd number of rows of gate and up.
    """
    stem, kind, ending = match[1], match[2], match[3]
    scales = None
    if ending == "_blocks":
        scales = _scales_of(weights, tensors.get(f"{stem}.{kind}{SCALES}"))
    n_axes, ours = (2, ".bias") if ending == "_bias" else (3 if scales is None else 4, ".weight")
    transposed = transposed and n_axes == 3 and not _in_usual_order(stem, ending, tensors)
    m = weights.shape[-1 if transposed else 1] if len(weights.shape) == n_axes else 1
    if len(weights.shape) != n_axes or (kind == "gate_up_proj" and m % 2):
        raise ConvertError(
            f"{weights.shard.path}: tensor {shown(weights.name)} has the shape {weights.shape}, "
            f"expected {n_axes} axes, experts first, and as many rows of gate as of up"
        )
    found: Found = {}
    parts = {kind: ALL} if whole else _parts(kind, m, interleaved)
    for part, rows in parts.items():
        cut = Cut(weights.name, weights, rows, transposed)
        part_of = cut if scales is None else Microscaled(weights.name, weights, scales, rows)
        found[f"{stem}.{part}{ours}"] = part_of
    return found


def _in_usual_order(stem: str, ending: str, tensors: Mapping[str, Stored]) -> bool:
    """Whether gate_up_proj [X, 2 N, K] and down_proj [X, K, N] fit together as they are, and not
    with their last two axes exchanged: transformers 5 saves them in this order, even where the
    released checkpoint has the other one.
    """
    pair = [tensors.get(f"{stem}.{kind}{ending}") for kind in ("gate_up_proj", "down_proj")]
    if any(x is None or len(x.shape) != 3 for x in pair):
        return False
    (_, m, k), (_, rows, n) = (x.shape for x in pair if x is not None)
    return (m, k) == (2 * n, rows) and (m, k) != (n, 2 * rows)


def with_gate_up(
    shapes: Mapping[str, tuple[int, ...]], names: Iterable[str]
) -> dict[str, tuple[int, ...]]:
    """`shapes`, with gate and up merged to one tensor in the layers where `names` has it so."""
    found = dict(shapes)
    for stem in (name.removesuffix(GATE_UP) for name in names if name.endswith(GATE_UP)):
        if stem + GATE in found and stem + UP in found:
            n_expert, n_gate, k = found.pop(stem + GATE)
            found[stem + GATE_UP] = (n_expert, n_gate + found.pop(stem + UP)[1], k)
    return found


def _parts(kind: str, m: int, interleaved: bool) -> dict[str, slice]:
    """The rows of each matrix in a tensor of m rows."""
    if kind == "down_proj":
        return {kind: ALL}
    if interleaved:
        return {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    return {"gate_proj": slice(0, m // 2), "up_proj": slice(m // 2, None)}


def _scales_of(codes: Weights, scales: Stored | None) -> Weights:
    """`scales` of MXFP4 codes, after a check; ConvertError unless both are U8 and shapes match."""
    good = isinstance(scales, Weights) and {codes.dtype, scales.dtype} == {"U8"}
    if not good or (*scales.shape, QK_MXFP4 // 2) != codes.shape:  # type: ignore[union-attr]
        raise ConvertError(
            f"{codes.shard.path}: tensor {shown(codes.name)}, {codes.dtype} {codes.shape}, has no"
            " scales that fit it"
        )
    assert isinstance(scales, Weights)
    return scales


def _stacked(name: str, parts: Mapping[int, Stored]) -> Stacked:
    """One tensor [X, N, K] of the experts' tensors [N, K]; ConvertError if an expert is missing or
    shapes differ.
    """
    first = next(iter(parts.values()))
    missing = next((i for i in range(len(parts)) if i not in parts), None)
    if missing is not None:
        raise ConvertError(
            f"{first.shard.path}: there is no {shown(name)} of expert {missing}, but of"
            f" {len(parts)} others: the checkpoint is not whole"
        )
    shapes = {part.shape for part in parts.values()}
    if len(shapes) > 1 or len(first.shape) != 2:
        raise ConvertError(
            f"{first.shard.path}: {shown(name)} has the shapes {sorted(shapes)}: one of two axes is"
            " expected"
        )
    ordered = tuple(parts[i] for i in range(len(parts)))
    packed = tuple(part for part in ordered if isinstance(part, Packed))
    alike = len({part.format for part in packed}) == 1
    return PackedStack(name, packed) if packed == ordered and alike else Stacked(name, ordered)
