"""A checkpoint as a GGUF model: which tensor becomes which tensor of the file, and all metadata.

An architecture declares its tensors and settings (`arch.hugging_face`); this module finds them in
the checkpoint and checks them. What can be refused is refused here, before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arch import Architecture, architectures
from ..arch.architecture import OUTPUT, Context
from ..arch.config import Config, Dimensions
from ..arch.hugging_face import (
    GLOBAL,
    CheckpointSettings,
    HuggingFace,
    Transform,
    rope_freqs,
)
from ..arch.scheme import scale_of
from ..backends.interface import ActivationType
from ..formats import Format, by_name
from ..quantization.mix import in_order
from ..quantization.requantize import QUANTIZATION_VERSION
from ..util.messages import escaped, shown
from .checkpoint import Checkpoint
from .embedders.reranker import CLASSIFIER, PROMPT, SETTINGS, answer_rows, is_reranker
from .embedders.sentences import read_modules
from .experts import Gathered, gathered, with_gate_up
from .experts.tensors import Microscaled, PackedStack
from .folder import ConvertError, Folder
from .general import Counts, general_metadata
from .packed import Packed
from .scaled import Scaled
from .special import special_metadata, verify
from .vocabulary import MAX_VOCAB, read_tokens
from .weights import Weights

UNUSED = ("rotary_emb.inv_freq",)  # ends of names; settings say the same
KEPT = (Packed, PackedStack, Scaled, Microscaled)  # what a file can have without rounding again
LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
TABLE = GLOBAL["token_embd.weight"].removeprefix("model.")
TIE = "tie_word_embeddings"
Metadata = dict[str, tuple[str, Any]]


@dataclass(frozen=True)
class Source:
    """A tensor of the file, and how it is made of the checkpoint's."""

    name: str
    shape: tuple[int, ...]
    # An array: computed from settings, or scales of rows. A function returns scales of rows.
    weights: Gathered | NDArray[np.float32] | Callable[[], NDArray[np.float32]]
    head_size: int = 0  # rows of a head whose halves are to be interleaved; 0: rows stay
    offset: float = 0.0  # to be added to each weight
    transform: Transform | None = None

    @property
    def is_computed(self) -> bool:
        """Whether its numbers are computed from the checkpoint's, not copied."""
        t = self.transform
        moved = t is not None and (t.columns is not None or t.function is not None)
        return bool(self.offset) or moved

    @property
    def format(self) -> Format:
        """The format that its rows come in."""
        if isinstance(self.weights, np.ndarray) or callable(self.weights) or self.is_computed:
            return by_name("F32")
        return self.weights.format

    @property
    def is_quantised(self) -> bool:
        """Whether the checkpoint has it in a form that a file can keep."""
        return isinstance(self.weights, KEPT) and not self.is_computed

    def kept(self) -> list[Source]:
        """The tensors that keep the checkpoint's own numbers: [scales of rows,] values."""
        assert isinstance(self.weights, KEPT)
        values = self.weights.kept
        found = [replace(self, weights=values)]
        if values.scale is not None:
            scale = values.scale[self.order(len(values.scale))]
            found.insert(0, Source(scale_of(self.name), scale.shape, scale))
        return found

    def order(self, n_rows: int) -> NDArray[np.intp]:
        """For each of the file's first n_rows rows (whole heads), its index in the checkpoint."""
        if self.transform is not None and self.transform.rows is not None:
            return self.transform.rows[:n_rows]
        rows = np.arange(n_rows)
        if not self.head_size:
            return rows
        # The halves of each head in turn: 0, E/2, 1, E/2 + 1, ...
        return rows.reshape(-1, 2, self.head_size // 2).swapaxes(1, 2).reshape(-1)


@dataclass
class ModelConversion:
    """All that a file will hold, except for the choice of formats."""

    architecture: str
    sizes: Dimensions
    tied: bool
    sources: list[Source]  # in the order in which they are written
    metadata: Metadata
    warnings: list[str] = field(default_factory=list)
    activations: ActivationType = "f16"  # the input of quantised matrices is rounded to this type

    @property
    def is_quantised(self) -> bool:
        """Whether the checkpoint has matrices that a file can keep as they are."""
        return any(source.is_quantised for source in self.sources)

    @property
    def kept_as(self) -> str:
        """The file type in which quantised matrices stay as they are; "" where there are none."""
        formats = {s.weights.values.name if isinstance(s.weights, Scaled) else s.format.name
                   for s in self.sources if s.is_quantised}  # fmt: skip
        rounded = self.activations != "f16"
        for name, type in (("I8", "W8A8" if rounded else "W8A16"),
                           ("F8_E4M3", "W8A8_FP8" if rounded else "W8A16_FP8"),
                           ("Q4_1", "Q4_1"), ("Q4_0", "Q4_0"),
                           ("MXFP4", "MXFP4_MOE")):  # fmt: skip
            if name in formats:
                return type
        return ""

    @property
    def stored(self) -> str:
        """BF16 if most unquantised weights are BF16, or if 8-bit floats have scales of blocks; else
        F16.
        """
        kinds: dict[str, int] = {"F16": 0}
        for source in (source for source in self.sources if not source.is_quantised):
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
        raise ConvertError(f"{path}: architectures = {shown(names)}: a class is expected")
    known = {
        name: found
        for found in architectures().values()
        if found.hugging_face
        for name in found.hugging_face.classes
    }
    if names[0] not in known:
        there = ", ".join(sorted({found.name for found in known.values()}))
        problem = f"{escaped(names[0])} is not supported; supported are the classes of: {there}"
        raise ConvertError(f"{path}: {problem}")
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
    reranker: bool | None = None,
) -> ModelConversion:
    """Reads all but the weights; ConvertError, GGUFError for what is missing, wrong or unsupported.

    kind: the class in config.json. ignored: settings that need not be read. reranker: whether it
    answers "yes" or "no"; None: its name and card decide.
    """
    source = architecture.hugging_face
    assert source is not None
    path = folder.path / "config.json"
    settings = CheckpointSettings(_values(config, source, kind, path), path, "", ignored)
    values = source.settings(settings)
    made = source.tensors(settings)
    if not made and rope_freqs(settings):
        key = "rope_parameters" if settings.has("rope_parameters") else "rope_scaling"
        raise settings.refuse(key, f"files of {architecture.name} have no factors for RoPE")
    modules = read_modules(folder, checkpoint)
    values |= modules.metadata
    ranks = _ranks(reranker, architecture, folder, config)
    values |= SETTINGS if ranks else {}
    has_output = any(name.endswith(GLOBAL["output.weight"]) for name in checkpoint.tensors)
    tied = settings.flag(TIE, not has_output if source.tied is None else source.tied)
    if tied and has_output and config.get(TIE) is False:
        tied = False  # where settings of the text model contradict the outer ones, these are right
    if not has_output and (modules.is_embedder or _is_bare(checkpoint.tensors)):
        tied = True  # a model without a head, whatever its settings say
    if not tied and not set(OUTPUT) <= set(architecture.optional):
        raise settings.refuse(TIE, "the embedding table is the output matrix")
    n_vocab = settings.integer("vocab_size", high=MAX_VOCAB)
    n_nextn = max((settings.integer(key, 0, low=0) for key in source.nextn), default=0)
    settings.refuse_unread()
    sizes = _dimensions(architecture, values, n_vocab, folder)
    tokens = read_tokens(folder, n_vocab, source.characters)
    rows = answer_rows(tokens, folder) if ranks else None
    parts = SourceParts(made, modules.dense, rows, n_nextn)
    sources = _sources(architecture, sizes, tied, parts, checkpoint)
    tied = tied or ranks
    warnings = list(checkpoint.quantization.warnings)
    metadata = general_metadata(folder, config, architecture.name, _counts(sources), name)
    metadata |= {f"{architecture.name}.{key}": typed for key, typed in values.items()}
    metadata["general.quantization_version"] = ("u32", QUANTIZATION_VERSION)
    metadata |= {**tokens.metadata(), **special_metadata(folder, config, tokens, warnings)}
    metadata |= PROMPT if ranks else {}
    verify(metadata, tokens, warnings)
    activations = checkpoint.quantization.activations
    return ModelConversion(architecture.name, sizes, tied, sources, metadata, warnings, activations)


def _ranks(
    wanted: bool | None, architecture: Architecture, folder: Folder, config: dict[str, Any]
) -> bool:
    """Whether to write a reranker; ConvertError if `wanted` and the architecture has none."""
    possible = CLASSIFIER in architecture.optional
    if wanted and not possible:
        raise ConvertError(f"{folder.path}: {architecture.name} cannot be converted as a reranker")
    return possible and (is_reranker(folder, config) if wanted is None else wanted)


def _counts(sources: Iterable[Source]) -> Counts:
    """How many weights there are; experts' biases count as shared, as in llama.cpp."""
    of_experts = [source.shape for source in sources if len(source.shape) == 3]
    total = sum(prod(source.shape) for source in sources)
    expert = sum(prod(shape[1:]) for shape in of_experts)
    shared = total - sum(map(prod, of_experts))
    return Counts(total, shared, expert, of_experts[0][0] if of_experts else 0)


def _values(config: dict[str, Any], source: HuggingFace, kind: str, path: Path) -> dict[str, Any]:
    """The settings of the text model; those it lacks have transformers' defaults for the class."""
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise ConvertError(f"{path}: text_config is {type(text).__name__}, not an object")
    found = {**source.classes[kind], **(config if text is None else text), "architectures": [kind]}
    for key in (TIE, *source.beside):  # outer settings, where the text model has none
        if key in config:
            found.setdefault(key, config[key])
    return found


def _plain(kind: str, value: Any) -> Any:
    """A value as the reader of a GGUF file returns it."""
    return np.array(value) if isinstance(value, list) and kind != "arr[str]" else value


def _dimensions(
    architecture: Architecture, values: Metadata, n_vocab: int, folder: Folder
) -> Dimensions:
    """The sizes; GGUFError for settings that the runtime would refuse."""
    plain = {f"{architecture.name}.{key}": _plain(kind, v) for key, (kind, v) in values.items()}
    config = Config(plain, architecture.name, folder.path / "config.json")
    sizes = architecture.dimensions(config, n_vocab)
    architecture.settings(Context(config, sizes, {}, sizes.n_ctx_train))
    return sizes


# Tensors


@dataclass(frozen=True)
class SourceParts:
    """How a file differs from the tensors that are found by their names."""

    made: Mapping[str, NDArray[np.float32]]  # tensors computed from settings
    dense: Mapping[str, Gathered]  # matrices after the pooling
    classifier: Transform | None  # makes the classifier of the output matrix, which is left out
    n_nextn: int  # blocks after the layers (multi-token prediction), which are left out


def _sources(
    architecture: Architecture,
    sizes: Dimensions,
    tied: bool,
    parts: SourceParts,
    checkpoint: Checkpoint,
) -> list[Source]:
    """The tensors of the file in order; ConvertError if one is missing, has another shape, or is
    unknown and outside of the n_nextn blocks after the layers.
    """
    hf = architecture.hugging_face
    assert hf is not None
    after = range(sizes.n_layer, sizes.n_layer + parts.n_nextn)
    named = {**_by_gguf_name(hf, checkpoint, tied, after), **parts.dense}
    if parts.classifier is not None:
        named[CLASSIFIER] = named.pop("output.weight", named["token_embd.weight"])
        tied = True
    required, optional = architecture.stored(sizes, tied)
    required = with_gate_up(required, named)
    missing = [name for name in required if name not in named and name not in parts.made]
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
            raise _unknown(weights, architecture.name)
        stem = name.split(".")[2] if name.startswith("blk.") else name
        transform = parts.classifier if name == CLASSIFIER else _transform(hf, sizes, name)
        ours, wanted = weights.shape, shape
        if transform is not None:
            ours = tuple(n for n in ours if n > 1)
            wanted = (transform.n_rows or shape[0], *shape[1:])
        if ours != wanted:
            raise ConvertError(
                f"{weights.shard.path}: tensor {shown(weights.name)} has the shape {weights.shape},"
                f" config.json says {wanted}"
            )
        head = sizes.attention.key_size if stem in hf.permuted else 0
        offset = hf.norm_offset if name.endswith("_norm.weight") and stem != "ssm_norm" else 0.0
        found[name] = Source(name, shape, weights, head, offset, transform)
    found |= {name: Source(name, array.shape, array) for name, array in parts.made.items()}
    return [found[name] for name in in_order(found)]


def _transform(hf: HuggingFace, sizes: Dimensions, name: str) -> Transform | None:
    """How the tensor `name` of the file is made; None if it is copied."""
    if not name.startswith("blk."):
        return None
    _, layer, stem, *_ = name.split(".")
    return hf.transforms(sizes.layers[int(layer)]).get(stem)


def _by_gguf_name(
    hf: HuggingFace, checkpoint: Checkpoint, tied: bool, left_out: range
) -> dict[str, Gathered]:
    """The text model's tensors by their names in the file, without the layers `left_out`."""
    layer: dict[str, list[str]] = {}
    for ours, theirs in hf.layer.items():
        layer.setdefault(theirs, []).append(ours)
    outside = {theirs: ours for ours, theirs in hf.outside.items()}
    found: dict[str, Gathered] = {}
    bare = _is_bare(checkpoint.tensors)
    of_experts = (hf.transposed, hf.interleaved, hf.together)
    for name, weights in gathered(checkpoint.tensors, *of_experts).items():
        if name.endswith(UNUSED) or (hf.others and name.startswith(hf.others)):
            continue
        plain = name.replace(hf.inserted, "", 1) if hf.inserted else name
        plain = f"model.{plain}" if bare else plain
        match = LAYER.fullmatch(plain)
        if match and int(match[1]) in left_out:
            continue
        if match:
            names = [f"blk.{int(match[1])}.{x}" for x in layer.get(match[2], ())]
        else:
            names = [outside[plain]] if plain in outside else []
        if not names and _is_idle_bias(checkpoint, name):
            continue
        if not names or names[0] in found:
            raise _unknown(weights, "this architecture")
        if not (tied and names == ["output.weight"]):  # a copy of the table, which is not used
            found |= dict.fromkeys(names, weights)
    return found


def _is_bare(names: Iterable[str]) -> bool:
    """Whether the model was saved without a head, so that names lack the prefix "model."."""
    return TABLE in names


def _is_idle_bias(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is one of the biases, all zeros, that GPTQ's tools give to every matrix."""
    matrix = checkpoint.tensors.get(name.removesuffix(".bias") + ".weight")
    bias = checkpoint.tensors.get(name)
    if bias is None or not (name.endswith(".bias") and isinstance(matrix, Packed)):
        return False
    if len(bias.shape) != 1:
        return False
    return not bias.format.dequantize(bias.rows(0, bias.shape[0])).any()


def _unknown(weights: Gathered, architecture: str) -> ConvertError:
    return ConvertError(
        f"{weights.shard.path}: {architecture} has no use for tensor {shown(weights.name)}: "
        "not supported"
    )
