"""The description of an architecture's checkpoints: the module of each architecture has one
`HuggingFace`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import LayerSizes
from .names import GLOBAL, LAYER
from .settings import CheckpointSettings

Metadata = dict[str, tuple[str, Any]]  # key below "<architecture>." -> type as in File.types, value


@dataclass(frozen=True, eq=False)
class Transform:
    """How a tensor of a file is made from a tensor of a checkpoint."""

    rows: NDArray[np.intp] | None = None  # of the checkpoint, in the file's order
    n_rows: int | None = None  # of the checkpoint's tensor, if not all of them are the file's
    columns: NDArray[np.intp] | None = None
    function: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None  # of each number


@dataclass(frozen=True)
class HuggingFace:
    """Checkpoints of one architecture: their classes, settings, and names of tensors."""

    # Of config.json's "architectures", each with transformers' values of the settings that a
    # config.json may leave out
    classes: Mapping[str, Mapping[str, Any]]
    settings: Callable[[CheckpointSettings], Metadata]
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    outside: Mapping[str, str] = field(default_factory=lambda: GLOBAL)
    # Tensors that are made of settings: rope's factors
    tensors: Callable[[CheckpointSettings], dict[str, NDArray[np.float32]]] = lambda s: {}
    permuted: tuple[str, ...] = ()
    norm_offset: float = 0.0  # what files have more than checkpoints, but not in ssm_norm
    transforms: Callable[[LayerSizes], Mapping[str, Transform]] = lambda sizes: {}  # by stem
    # tie_word_embeddings, where config.json does not say; None: as there is an output matrix
    tied: bool | None = False
    inserted: str = ""  # what names of the text model have in them beside other models
    others: tuple[str, ...] = ()  # how the names of those begin
    # Tensors of all experts are transposed; rows of gate and up take turns there
    transposed: bool = False
    interleaved: bool = False
    together: bool = False  # files have gate and up of all experts in one tensor
    characters: bool = False  # its tokens are merged of characters, not of bytes or pieces
    nextn: tuple[str, ...] = ()  # settings with the number of blocks after the layers: left out
    beside: tuple[str, ...] = ()  # settings of those that the text model's file has to have
