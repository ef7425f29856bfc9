"""How the matrices of a file are multiplied, if their blocks alone do not say it.

| tensor | shape | meaning |
|---|---|---|
| X.scale, F32 | [N] | a scale for each row of X.weight |
| X.scale, F32 | [1] | a scale for the whole matrix |
| X.scale, F32 | [X] | a scale for each expert |
| X.input_scale | | not used; others round activations to 4 bits by it (NVFP4) |

Two settings are for the whole file: "ggpy.i8" says what bytes of type I8 are ("int8" or "e4m3"),
and "ggpy.activations" what such matrices are multiplied with ("f16", or 8-bit numbers of the same
kind, rounded for each token). This module knows no architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ..backends.interface import ActivationType, Role
from ..formats import Format, by_name
from ..gguf import GGUFError, Tensor
from ..util.messages import escaped
from .architecture import Declarations, Declared
from .config import UnsupportedModel, short

WEIGHT, SCALE, INPUT_SCALE = ".weight", ".scale", ".input_scale"
PREFIX = "ggpy."
I8_KEY, ACTIVATIONS_KEY = "ggpy.i8", "ggpy.activations"
I8_FORMATS = {"int8": "I8", "e4m3": "F8_E4M3"}
ACTIVATIONS = ("f16", *I8_FORMATS)


@dataclass(frozen=True)
class Given:
    """What a backend is handed for one weight: the arguments of Ops.weight."""

    tensor: Tensor
    role: Role
    scale: Tensor | None = None
    activations: ActivationType = "f16"


@dataclass(frozen=True)
class Scheme:
    """The settings of a file: the format of its I8 matrices, and what these are multiplied with."""

    format: Format
    activations: ActivationType

    def typed(self, tensor: Tensor) -> Tensor:
        """The tensor in the format that its bytes have."""
        return replace(tensor, format=self.format) if _has_bytes(tensor) else tensor

    def given(self, tensor: Tensor, role: Role, scale: Tensor | None) -> Given:
        """A weight as it is handed over."""
        activations = self.activations if _has_bytes(tensor) else "f16"
        return Given(self.typed(tensor), role, scale, activations)


def _has_bytes(tensor: Tensor) -> bool:
    return len(tensor.shape) == 2 and tensor.format is by_name("I8")


def read_scheme(metadata: Mapping[str, Any], path: object) -> Scheme:
    """The settings under "ggpy."; UnsupportedModel names a key or a value that is not known."""
    for key in metadata:
        if key.startswith(PREFIX) and key not in (I8_KEY, ACTIVATIONS_KEY):
            raise UnsupportedModel(
                f"{path}: not supported: {escaped(key)} = {short(metadata[key])}"
            )
    kind = _one_of(metadata, I8_KEY, tuple(I8_FORMATS), path)
    activations = _one_of(metadata, ACTIVATIONS_KEY, ACTIVATIONS, path)
    if activations not in ("f16", kind):
        raise UnsupportedModel(
            f"{path}: {ACTIVATIONS_KEY} = {short(activations)} is not supported with {I8_KEY} ="
            f" {short(kind)}: both have to be of one kind"
        )
    return Scheme(by_name(I8_FORMATS[kind]), cast(ActivationType, activations))


def settings_for(formats: Iterable[Format], activations: str) -> dict[str, tuple[str, Any]]:
    """The settings of a file with matrices in these formats, typed; ValueError if they cannot be in
    one file.
    """
    kinds = {kind for kind, name in I8_FORMATS.items() if name in {f.name for f in formats}}
    if len(kinds) > 1:
        raise ValueError(
            "a file cannot hold both bytes that are whole numbers and bytes that are floats: "
            "give a --type"
        )
    if not kinds:
        return {}
    kind = kinds.pop()
    if activations not in ("f16", kind):
        raise ValueError(f"{kind} weights cannot be multiplied with {activations} activations")
    found = {} if kind == "int8" else {I8_KEY: ("str", kind)}
    return found if activations == "f16" else {**found, ACTIVATIONS_KEY: ("str", activations)}


def _one_of(metadata: Mapping[str, Any], key: str, known: tuple[str, ...], path: object) -> str:
    """The text under a key, which is the first of `known` where there is none."""
    value = metadata.get(key, known[0])
    if not isinstance(value, str) or value not in known:
        raise UnsupportedModel(
            f"{path}: {key} = {short(value)} is not supported (only {' or '.join(known)} is)"
        )
    return value


def scale_of(name: str) -> str:
    """blk.0.attn_q.scale for blk.0.attn_q.weight."""
    return name.removesuffix(WEIGHT) + SCALE


def scales_of(declarations: Declarations) -> Declarations:
    """The scales of rows that the matrices among these tensors may have, and those of experts."""
    return {
        scale_of(name): Declared(axes.split()[0], shape[:1])
        for name, (axes, shape) in declarations.items()
        if name.endswith(WEIGHT) and len(shape) > 1
    }


def spread_scales(tensors: dict[str, Tensor]) -> None:
    """Give each row of a matrix the scale of the matrix, and drop the scales of activations;
    GGUFError for one of another shape.
    """
    for name, scale in list(tensors.items()):
        matrix = tensors.get(name[: name.rfind(".")] + WEIGHT)
        if matrix is None or len(matrix.shape) < 2:
            continue
        n, shape = matrix.shape[0], scale.shape
        if name.endswith(INPUT_SCALE):
            if shape != (1,) and (len(matrix.shape) == 2 or shape != (n,)):
                raise GGUFError(
                    f"{scale.path}: tensor {name!r} has shape {shape}, {matrix.name!r} needs (1,)"
                )
            del tensors[name]
        elif name.endswith(SCALE) and shape == (1,) and len(matrix.shape) == 2:
            tensors[name] = replace(scale, shape=(n,), data=np.tile(scale.data, n))
