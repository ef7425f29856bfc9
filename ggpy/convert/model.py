"""A checkpoint as a GGUF model: which tensor of it becomes which of the file, and all metadata.

The architecture's own file says what it needs (`arch.hugging_face`); here it is found, checked and
put in order. Whatever can be refused is refused here, before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arch import Architecture, architectures
from ..arch.config import Config, Dimensions, read_dimensions, refuse_variants
from ..arch.decoder import ACTIVATION_NAMES, OUTPUT, Context, declared
from ..arch.hugging_face import GLOBAL, HuggingFace, Settings
from ..formats import Format, by_name
from ..mix import in_order
from ..requantize import QUANTIZATION_VERSION
from .checkpoint import Checkpoint, Weights
from .folder import ConvertError, Folder
from .general import general_metadata
from .special import special_metadata
from .verify import verify
from .vocabulary import read_tokens

UNUSED = ("rotary_emb.inv_freq",)  # ends of names: what the settings already say
LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
Metadata = dict[str, tuple[str, Any]]


@dataclass(frozen=True)
class Source:
    """A tensor of the file, and how it is made of the checkpoint's."""

    name: str
    shape: tuple[int, ...]
    weights: Weights | NDArray[np.float32]  # the latter are made of settings
    head_size: int = 0  # rows of heads whose halves are to be interleaved; 0: they stay
    offset: float = 0.0  # to be added

    @property
    def format(self) -> Format:
        """The format that its rows come in."""
        plain = isinstance(self.weights, np.ndarray) or self.offset
        return by_name("F32") if plain else self.weights.format  # type: ignore[union-attr]


@dataclass
class Model:
    """All that a file will hold, but for the choice of formats."""

    architecture: str
    sizes: Dimensions
    tied: bool
    sources: list[Source]  # in the order in which they are written
    metadata: Metadata
    warnings: list[str] = field(default_factory=list)

    @property
    def stored(self) -> str:
        """The type that most weights are stored in: BF16, or F16 for all else."""
        kinds: dict[str, int] = {}
        for source in self.sources:
            kinds[source.format.name] = kinds.get(source.format.name, 0) + prod(source.shape)
        scaled = any(isinstance(s.weights, Weights) and s.weights.scales is not None
                     for s in self.sources)  # fmt: skip
        return "BF16" if scaled or max(kinds, key=lambda k: kinds[k]) == "BF16" else "F16"


def read_config(folder: Folder) -> tuple[dict[str, Any], Architecture, str]:
    """(config.json, architecture, class) of a checkpoint; ConvertError if it is not known."""
    config = folder.required("config.json")
    path = folder.path / "config.json"
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConvertError(f"{path}: architectures = {names!r}: a class is expected")
    known = {
        name: found
        for found in architectures().values()
        if found.hugging_face
        for name in found.hugging_face.classes
    }
    if names[0] not in known:
        there = ", ".join(sorted(known))
        raise ConvertError(f"{path}: {names[0]} is not supported; supported are: {there}")
    return config, known[names[0]], names[0]


def read_model(
    folder: Folder,
    config: dict[str, Any],
    architecture: Architecture,
    kind: str,
    checkpoint: Checkpoint,
    *,
    name: str | None = None,
    ignored: Iterable[str] = (),
) -> Model:
    """Everything about a checkpoint of a class; ConvertError, GGUFError for what is not right."""
    source = architecture.hugging_face
    assert source is not None
    path = folder.path / "config.json"
    settings = Settings(_values(config, source, kind, path), path, "", ignored)
    values = source.settings(settings)
    made = source.tensors(settings)
    tied = settings.flag("tie_word_embeddings", source.tied)
    if not tied and not set(OUTPUT) <= set(architecture.optional):
        raise settings.refuse("tie_word_embeddings", "the embedding table is the output matrix")
    n_vocab = settings.integer("vocab_size", high=1 << 31)
    settings.refuse_unread()
    sizes = _dimensions(architecture, values, n_vocab, folder)
    sources = _sources(architecture, sizes, tied, made, checkpoint)
    warnings: list[str] = []
    tokens = read_tokens(folder, n_vocab)
    n_params = sum(prod(source.shape) for source in sources)
    metadata = general_metadata(folder, config, architecture.name, n_params, name)
    metadata |= {f"{architecture.name}.{key}": typed for key, typed in values.items()}
    metadata["general.quantization_version"] = ("u32", QUANTIZATION_VERSION)
    metadata |= {**tokens.metadata(), **special_metadata(folder, config, tokens, warnings)}
    verify(metadata, tokens, warnings)
    return Model(architecture.name, sizes, tied, sources, metadata, warnings)


def _values(config: dict[str, Any], source: HuggingFace, kind: str, path: Path) -> dict[str, Any]:
    """The text model's settings over transformers' own."""
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise ConvertError(f"{path}: text_config is {type(text).__name__}, not an object")
    return {**source.classes[kind], **(config if text is None else text), "architectures": [kind]}


def _dimensions(
    architecture: Architecture, values: Metadata, n_vocab: int, folder: Folder
) -> Dimensions:
    """The sizes; what the runtime would refuse of the settings is refused already."""
    plain = {
        f"{architecture.name}.{key}": np.array(v) if isinstance(v, list) else v
        for key, (_, v) in values.items()
    }
    config = Config(plain, architecture.name, folder.path / "config.json")
    sizes = read_dimensions(config, n_vocab)
    refuse_variants(config, ACTIVATION_NAMES[architecture.activation])
    architecture.plan(Context(config, sizes, {}, sizes.n_ctx_train))
    config.refuse_unread()
    return sizes


# Tensors


def _sources(
    architecture: Architecture,
    sizes: Dimensions,
    tied: bool,
    made: Mapping[str, NDArray[np.float32]],
    checkpoint: Checkpoint,
) -> list[Source]:
    """The tensors of the file; ConvertError unless all that is needed is there, and no other."""
    hf = architecture.hugging_face
    assert hf is not None
    named = _by_gguf_name(hf, checkpoint, tied)
    required, optional = declared(architecture, sizes, tied)
    missing = [name for name in required if name not in named]
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConvertError(
            f"{checkpoint.folder.path}: there is no tensor for {missing[0]!r}{more}: the checkpoint"
            " is not whole, or another model than its config.json says"
        )
    found = {}
    for name, weights in named.items():
        shape = required.get(name, optional.get(name))
        if shape is None:
            raise _unknown(checkpoint, weights.name, architecture.name)
        if weights.shape != shape:
            raise ConvertError(
                f"{weights.shard.path}: tensor {weights.name!r} has the shape {weights.shape}, "
                f"config.json says {shape}"
            )
        stem = name.split(".")[2] if name.startswith("blk.") else name
        head = sizes.head_size if stem in hf.permuted else 0
        offset = hf.norm_offset if name.endswith("_norm.weight") else 0.0
        found[name] = Source(name, shape, weights, head, offset)
    found |= {name: Source(name, array.shape, array) for name, array in made.items()}
    return [found[name] for name in in_order(found)]


def _by_gguf_name(hf: HuggingFace, checkpoint: Checkpoint, tied: bool) -> dict[str, Weights]:
    """The text model's tensors by the names they get."""
    layer = {theirs: ours for ours, theirs in hf.layer.items()}
    outside = {theirs: ours for ours, theirs in GLOBAL.items()}
    found: dict[str, Weights] = {}
    for name, weights in checkpoint.tensors.items():
        if name.endswith(UNUSED) or (hf.others and name.startswith(hf.others)):
            continue
        plain = name.replace(hf.inserted, "", 1) if hf.inserted else name
        if match := LAYER.fullmatch(plain):
            ours = layer.get(match[2])
            ours = ours and f"blk.{int(match[1])}.{ours}"
        else:
            ours = outside.get(plain)
        if ours is None or ours in found:
            raise _unknown(checkpoint, name, "this architecture")
        if not (tied and ours == "output.weight"):  # a copy of the table, which is not used
            found[ours] = weights
    return found


def _unknown(checkpoint: Checkpoint, name: str, architecture: str) -> ConvertError:
    path = checkpoint.tensors[name].shard.path
    return ConvertError(f"{path}: {architecture} has no use for tensor {name!r}: not supported")
