"""One tensor for each matrix of a checkpoint: weights that are quantised find their scales here.

The parts of a quantised matrix share its name and are told apart by their endings: .qweight of GPTQ
and AWQ, .weight_packed and .weight_scale of compressed-tensors, .weight_scale_inv of 8-bit floats
in blocks. Scales of activations are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..formats import by_name
from ..formats.base import F32
from ..util.messages import shown
from .folder import ConvertError
from .packed import Packed, Parts, awq, compressed, gptq
from .quantization import Quantization
from .scaled import Scaled, Values
from .weights import FLOAT8, FLOATS, Weights

Stored = Weights | Packed | Scaled | Values  # one tensor, however it is stored

WEIGHT = ".weight"
SCALES = INVERSE, SCALE = ("_scale_inv", "_scale")  # follow the name of a matrix of bytes
ZERO = "_zero_point"
# Endings of the other parts of a packed matrix, by the ending of its codes
PACKED = {
    ".qweight": (".qzeros", ".scales", ".g_idx"),
    ".weight_packed": (".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"),
}
# Not used: activations get their scales at run time, and the KV cache has no scale per tensor
IGNORED = (
    *("activation_scale", "input_scale", "input_scale_ub", "input_zero_point", "output_scale"),
    *(".k_scale", ".v_scale", ".q_scale"),
)
KEPT = {"I8": "I8", "F8_E4M3": "F8_E4M3"}  # types whose bytes a file can have


def assemble(found: Mapping[str, Weights], q: Quantization) -> dict[str, Stored]:
    """All tensors by name, with the parts of each quantised matrix joined to one tensor, X.weight.

    ConvertError if parts do not fit together.
    """
    used: set[str] = set()
    tensors: dict[str, Stored] = {}
    for name, weights in found.items():
        if ending := next((e for e in PACKED if name.endswith(e)), ""):
            stem = name.removesuffix(ending)
            used |= {name, *(stem + part for part in PACKED[ending])}
            tensors[stem + WEIGHT] = _packed(stem, ending, found, q)
        elif weights.dtype in FLOAT8 or (weights.dtype == "I8" and name + SCALE in found):
            used |= {name + part for part in (*SCALES, ZERO)}
            tensors[name] = _scaled(weights, Parts(name, found, q))
    rest = {
        name: weights
        for name, weights in found.items()
        if name not in used and name not in tensors and not name.endswith(IGNORED)
    }
    return {**tensors, **rest}


def _packed(stem: str, ending: str, found: Mapping[str, Weights], q: Quantization) -> Packed:
    readers = {"gptq": gptq, "awq": awq, "compressed-tensors": compressed}
    wanted = ("gptq", "awq") if ending == ".qweight" else ("compressed-tensors",)
    if q.method not in wanted:
        raise ConvertError(
            f"{found[stem + ending].shard.path}: tensor {shown(stem + ending)} holds packed codes,"
            f" but quantization_config.quant_method in config.json is {shown(q.method)}, not "
            + " or ".join(wanted)
        )
    return readers[q.method](Parts(stem, found, q))


def _scaled(weights: Weights, parts: Parts) -> Stored:
    """A matrix of 8-bit numbers with its scales.

    `Scaled`, which a file can keep, if a row or the whole matrix has one scale; `Weights` if each
    block has one.
    """
    path, name, shape = weights.shard.path, weights.name, weights.shape
    ending = next((e for e in SCALES if parts.has(e)), "")
    if not ending or len(shape) != 2 or parts.place(ending).dtype not in FLOATS:
        raise ConvertError(f"{path}: tensor {shown(name)}, in {weights.dtype}, has no scales")
    scales = parts.read(ending, FLOATS, parts.place(ending).shape)
    if parts.has(ZERO):
        _check_symmetric(parts)
    n = shape[0]
    if ending == SCALE and scales.size in (1, n) and weights.dtype in KEPT:
        if scales.size == n and scales.shape not in ((n,), (n, 1)):
            raise parts.wrong(ending, f"expected one scale for each of {n} rows")
        by_row: F32 = np.ascontiguousarray(np.broadcast_to(scales.reshape(-1), n), np.float32)
        return Scaled(name, shape, weights.shard, by_name(KEPT[weights.dtype]), by_row)
    return _in_blocks(weights, scales, parts.q.block)


def _check_symmetric(parts: Parts) -> None:
    place = parts.place(ZERO)
    if place.shard.read(place.name).any():
        raise parts.wrong(ZERO, "bytes with zero points cannot be converted")


def _in_blocks(weights: Weights, scales: F32, block: tuple[int, int] | None) -> Weights:
    path, name, shape = weights.shard.path, weights.name, weights.shape
    block = (shape[0], shape[1]) if scales.size == 1 else block
    wanted = tuple(-(-n // b) for n, b in zip(shape, block or (0, 0), strict=True) if b)
    if block is None or scales.size != int(np.prod(wanted)):
        raise ConvertError(
            f"{path}: tensor {shown(name)} has {scales.size} scales, which do not fit to blocks of "
            f"{block} in {shape}: quantization_config.weight_block_size is not theirs"
        )
    if weights.dtype not in FLOAT8:
        raise ConvertError(
            f"{path}: tensor {shown(name)}, in {weights.dtype}, has scales for blocks: only 8-bit"
            " floats can have them"
        )
    return Weights(name, shape, weights.dtype, weights.shard, scales.reshape(wanted), block)
