"""Architectures by the name in `general.architecture`: one module each, found by the module's name.

A module here that has an ARCHITECTURE is an architecture; adding the file is enough.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from ..backends.interface import Ops
from ..cache_types import USUAL, CacheTypes
from ..gguf import File, Tensor
from ..util.messages import shown
from .architecture import Architecture
from .config import UnsupportedModel
from .decoder import Decoder
from .loader import Progress, build, understood
from .placement import remark_offload

__all__ = [
    "Architecture",
    "Decoder",
    "UnsupportedModel",
    "architectures",
    "check",
    "context_length",
    "find",
    "load",
    "remark_offload",
    "tensors",
]


NO_MODELS = {  # general.type of other files than models
    "adapter": "an adapter (LoRA), which is not supported; the model is another file",
    "mmproj": "what reads images or audio for a model, which is not supported; the model is"
    " another file",
    "imatrix": "an importance matrix, which `ggpy quantize` takes; the model is another file",
}


ELSEWHERE = {  # general.architecture of files that other programs understand
    "clip": NO_MODELS["mmproj"],
    "gptoss": "gpt-oss in the form of Ollama, which no other program reads: fetch a GGUF file of it"
    " from Hugging Face",
}


def architectures() -> dict[str, Architecture]:
    """All architectures by name."""
    modules = [import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]
    found = [m.ARCHITECTURE for m in modules if hasattr(m, "ARCHITECTURE")]
    return {a.name: a for a in found}


def context_length(file: File) -> int:
    """Positions that the model was trained for; 0 when the file does not say."""
    value = file.metadata.get(f"{file.architecture}.context_length", 0)
    return value if isinstance(value, int) and value > 0 else 0


def find(file: File) -> Architecture:
    """The architecture of a file; UnsupportedModel lists those that exist, or says what else than a
    model the file is.
    """
    kind = file.metadata.get("general.type")
    if isinstance(kind, str) and kind in NO_MODELS:
        raise UnsupportedModel(f"{file.path}: general.type = {kind!r}: {NO_MODELS[kind]}")
    known = architectures()
    if file.architecture in ELSEWHERE:
        raise UnsupportedModel(
            f"{file.path}: general.architecture = {file.architecture!r}:"
            f" {ELSEWHERE[file.architecture]}"
        )
    if file.architecture not in known:
        raise UnsupportedModel(
            f"{file.path}: architecture {shown(file.architecture)} is not supported;"
            f" supported are: {', '.join(known)}"
        )
    return known[file.architecture]


def check(file: File) -> None:
    """GGUFError, or UnsupportedModel, for a file that `load` would refuse, whatever the backend.

    Nothing of the weights is read, so that a scale that is not a number is not found.
    """
    tensors(file)


def tensors(file: File) -> dict[str, Tensor]:
    """The tensors that `load` takes, by name: those of encoders of images, of blocks that predict
    further tokens, and what else is not used are left out. Fused ones are split. Errors of `check`.
    """
    collected = understood(find(file), file, context_length(file) or 1).collected
    return {name: tensor for name, (tensor, _) in collected.items()}


def load(
    file: File,
    ops: Ops,
    n_ctx: int,
    progress: Progress | None = None,
    *,
    n_batch: int | None = None,
    n_seq: int = 1,
    n_positions: int | None = None,
    cache_types: CacheTypes = USUAL,
    n_cpu_moe: int = 0,
) -> Decoder:
    """Check the file and hand its weights to the ops; GGUFError or UnsupportedModel.

    For n_seq sequences of n_ctx tokens, which share n_positions of the KV cache where that is
    given, n_batch in a step at most, or as many as are fast there; MemoryError if they do not fit,
    ValueError if the model's heads are too small for blocks of the cache's types. n_cpu_moe: a GPU
    leaves the experts of so many layers, from the first on, in the memory of the host.
    """
    sizes = n_batch, n_seq, cache_types, n_positions, n_cpu_moe
    return build(find(file), file, ops, n_ctx, progress, *sizes)
