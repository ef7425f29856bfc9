"""The tensors of a file as an architecture declares them: found, taken apart where they are fused,
and checked against the settings.

Whatever is missing, of another shape, or of no use is refused by name. Knows no op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..gguf import File, GGUFError, Tensor
from .config import Dimensions, UnsupportedModel, short
from .scheme import SCALE, scale_of, scale_shapes

if TYPE_CHECKING:
    from .decoder import Architecture

UNUSED = (
    "rotary_emb.inv_freq",
    "attn_rot_embd.weight",
)  # old converters stored what the settings already say


def collect(architecture: Architecture, file: File, sizes: Dimensions) -> dict[str, Tensor]:
    """The tensors by name, fused ones taken apart; GGUFError unless all are as declared."""
    found = dict(file.tensors)
    letters = sizes.letters()
    for at in (f"blk.{i}." for i in range(sizes.n_layer)):
        for name, parts in architecture.fused.items():
            whole = [(part, letters[rows]) for part, rows in parts]
            _split(file, found, at, name, whole)
            _split(file, found, at, scale_of(name), [(scale_of(part), n) for part, n in whole])
    wanted, allowed = architecture.tensors(sizes.n_layer)
    allowed = {**allowed, **scale_shapes({**wanted, **allowed})}
    missing = [name for name in wanted if name not in found]
    if missing:
        raise GGUFError(
            f"{file.path}: {architecture.name} needs tensor {missing[0]!r}{_more(missing)}"
        )
    unknown = [n for n in found if n not in wanted and n not in allowed and not n.endswith(UNUSED)]
    if unknown:
        raise UnsupportedModel(
            f"{file.path}: {architecture.name} has no use for tensor {unknown[0]!r}{_more(unknown)}"
            ": this variant is not supported"
        )
    shapes = {name: s for name, s in {**wanted, **allowed}.items() if name in found}
    for name, shape in shapes.items():
        _check_shape(file, found[name], name, tuple(letters[x] for x in shape.split()))
        if name.endswith(SCALE):
            _check_scale(file, found[name], name)
    return {name: found[name] for name in shapes}


def _split(
    file: File, found: dict[str, Tensor], at: str, name: str, parts: list[tuple[str, int]]
) -> None:
    """Replace a fused tensor by its parts; with only the rows of its own part it is not fused."""
    tensor = found.get(at + name)
    own = dict(parts).get(name)
    if tensor is None or (own is not None and tensor.shape[0] == own):
        return
    total = sum(rows for _, rows in parts)
    if tensor.shape[0] != total:
        raise GGUFError(
            f"{file.path}: tensor {at + name!r} has {tensor.shape[0]} rows, its parts have {total}"
        )
    del found[at + name]
    start = 0
    for part, rows in parts:
        found[at + part] = tensor.rows(start, start + rows)
        start += rows


def _check_shape(file: File, tensor: Tensor, name: str, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise GGUFError(
            f"{file.path}: tensor {name!r} has shape {tensor.shape}, the settings say {expected}"
        )


def _check_scale(file: File, tensor: Tensor, name: str) -> None:
    if tensor.format.name != "F32":
        raise UnsupportedModel(
            f"{file.path}: tensor {name!r} is {tensor.format.name}: scales of rows are F32"
        )


def check_vocabulary(file: File, n_vocab: int) -> None:
    """The tokenizer's list is as long as the embedding table, and its special ids are in it."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != n_vocab:
        raise GGUFError(
            f"{file.path}: {len(tokens)} tokens, but the embedding table has {n_vocab} rows"
        )
    for kind in ("bos", "eos", "eot", "eom", "unknown"):
        key = f"tokenizer.ggml.{kind}_token_id"
        value = file.metadata.get(key, 0)
        if not isinstance(value, int) or not 0 <= value < n_vocab:
            raise GGUFError(f"{file.path}: {key} = {short(value)}: ids go from 0 to {n_vocab - 1}")


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
