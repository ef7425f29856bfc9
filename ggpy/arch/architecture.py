"""An architecture: the tensors that its files have, and how it reads their settings.

The differences between architectures are data here. A declared tensor (a bias, a norm after the
attention) is used, and any other is refused; a setting that nobody reads is refused, too. Nothing
here knows what a tensor holds, or which machine computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..backends.experts import GatedActivation
from ..gguf import Tensor
from .config import Config, Dimensions, read_dimensions, refuse_variants
from .hugging_face import HuggingFace
from .kinds import KEY_LENGTH_SWA, read_kinds
from .layers import attention, delta, dense
from .layers.attention import QKV_BIAS, AttentionSettings
from .layers.delta import DeltaSettings
from .layers.dense import DenseSettings
from .layers.inputs import InputSettings
from .layers.moe import MoESettings

TensorsOf = Callable[[Dimensions, int | None], Mapping[str, str]]

# The tensors of every architecture; axes are Dimensions.letters. Names of LAYER follow "blk.0.".
GLOBAL = {"token_embd.weight": "V D", "output_norm.weight": "D"}
LAYER = {**attention.TENSORS, **dense.TENSORS}
POST_NORM = {**attention.POST_NORM, **dense.POST_NORM}
OUTPUT = {"output.weight": "V D"}  # optional: without it the embedding table is used
CLASSIFIER = {"cls.output.weight": "C D"}  # optional: a reranker's scores of the hidden state
# optional: the matrices that turn a pooled hidden state into an embedding
DENSE = {"dense_2.weight": "D2 D", "dense_3.weight": "D3 D2"}
ROPE_FREQS = {"rope_freqs.weight": "R/2"}
ROPE_FACTORS = {"rope_factors_long.weight": "R/2", "rope_factors_short.weight": "R/2"}
NORM_BIAS = {"output_norm.bias": "D"}
LAYER_NORM_BIAS = {**attention.NORM_BIAS, **dense.NORM_BIAS}

ACTIVATION_NAMES: dict[GatedActivation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_tanh", "gelu"),
    "swiglu_oai": ("swiglu_oai",),
}


@dataclass(frozen=True)
class LayerSettings:
    """The settings of one layer."""

    mixer: AttentionSettings | DeltaSettings
    ffn: DenseSettings | MoESettings | None
    parallel: bool = False  # mixer and ffn take the same x
    input: InputSettings | None = None  # the layer's own input, if it has one
    scale: float = 1.0  # multiplies x after the layer


@dataclass(frozen=True)
class ModelSettings:
    """The settings of a model, as its architecture reads them from a file."""

    layers: Sequence[LayerSettings]
    embedding_scale: float = 1.0
    soft_cap: float = 0.0  # of logits
    logit_scale: float = 1.0
    eps: float | None = None  # of all norms; None: the file's
    embedding_norm: bool = False  # an RMS norm of embeddings, without weights

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one; if False, a step has to contain whole texts."""
        mixers = [layer.mixer for layer in self.layers]
        return all(m.causal for m in mixers if isinstance(m, AttentionSettings))


@dataclass(frozen=True)
class Context:
    """The arguments of Architecture.read."""

    config: Config
    sizes: Dimensions
    tensors: Mapping[str, Tensor]
    n_ctx: int


class Declared(NamedTuple):
    """A tensor of a file: its axes in letters, and their lengths."""

    axes: str
    shape: tuple[int, ...]


Declarations = dict[str, Declared]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Architecture:
    """One `general.architecture`: its tensors, and how it reads the settings.

    | field | meaning |
    |---|---|
    | fused | tensor of a layer -> the tensors that are its rows, in order |
    | turns | the same for tensors that are interleaved by head, with the letter of the heads |
    | more | tensors that a layer (or with None the model) needs because of its sizes |
    | idle | tensors that a layer may have, and that nothing reads |
    | adapt | replaces settings and tensors of some files by their usual form |
    | understands | settings that most architectures refuse: see below |

    A fused tensor with a single part is stored under another name. `understands` has names of
    config.VARIANTS, and of sizes that differ between layers (config.read_dimensions).
    """

    name: str
    read: Callable[[Context], ModelSettings]
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    recurrent_layer: Mapping[str, str] | None = None  # tensors of layers with a recurrent state
    expert_layer: Mapping[str, str] | None = None  # tensors of layers with experts; None: `layer`
    optional: Mapping[str, str] = field(default_factory=lambda: OUTPUT)
    optional_layer: Mapping[str, str] = field(default_factory=lambda: QKV_BIAS)
    more: TensorsOf = lambda sizes, layer: {}
    idle: TensorsOf = lambda sizes, layer: {}
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    turns: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    adapt: Callable[[Config, dict[str, Tensor]], None] = lambda config, tensors: None
    understands: frozenset[str] = frozenset()
    layer_norm: bool = False  # its norms are layer norms
    hugging_face: HuggingFace | None = None  # checkpoints that can be converted

    def dimensions(self, config: Config, n_vocab: int) -> Dimensions:
        """The sizes of a file; GGUFError for impossible ones, or for unknown settings."""
        refuse_variants(config, self.understands)
        sizes = read_dimensions(config, n_vocab, self.understands, self.layer_norm)
        if KEY_LENGTH_SWA in self.understands:
            sizes = read_kinds(config, sizes)
        return sizes if self.recurrent_layer is None else delta.read_sizes(config, sizes)

    def settings(self, context: Context) -> ModelSettings:
        """All other settings of a file; UnsupportedModel names a setting that is unknown."""
        settings, config = self.read(context), context.config
        for ffn in {layer.ffn for layer in settings.layers if layer.ffn}:
            config.only("hidden_activation", *ACTIVATION_NAMES[ffn.activation])
        config.refuse_unread()
        return settings

    def layer_of(self, sizes: Dimensions, i: int) -> Mapping[str, str]:
        """The tensors that layer i needs."""
        return {**self._kind_of(sizes, i), **self.more(sizes, i)}

    def _kind_of(self, sizes: Dimensions, i: int) -> Mapping[str, str]:
        of = sizes.layers[i]
        if self.recurrent_layer is not None and of.recurrent is not None:
            return self.recurrent_layer
        if self.expert_layer is None or of.n_expert == 0:
            return self.layer
        shared = of.n_ff_shared > 0
        return {k: x for k, x in self.expert_layer.items() if shared or "Fs" not in x.split()}

    def parts_of(self, sizes: Dimensions, i: int) -> dict[str, tuple[str, ...]]:
        """The tensors of layer i that files store fused: name of the fused tensor -> parts."""
        found = {**self.fused, **{name: parts for name, (_, parts) in self.turns.items()}}
        layer = self.layer_of(sizes, i)
        return {name: parts for name, parts in found.items() if set(parts) <= set(layer)}

    def tensors(self, sizes: Dimensions) -> tuple[Declarations, Declarations]:
        """(tensors that a file needs, tensors that it may have) by name; fused ones in parts."""
        needed = declare({**GLOBAL, **self.more(sizes, None)}, sizes)
        allowed = declare(self.optional, sizes)
        for i in range(sizes.n_layer):
            needed |= declare(self.layer_of(sizes, i), sizes, i)
            allowed |= declare(self.optional_layer, sizes, i)
        unread = self.unread(sizes)
        return needed, {name: x for name, x in allowed.items() if name not in unread}

    def unread(self, sizes: Dimensions) -> Declarations:
        """The tensors that a file may have and that nothing reads."""
        found: Declarations = {}
        for i in (None, *range(sizes.n_layer)):
            found |= declare(self.idle(sizes, i), sizes, i)
        return found

    def stored(self, sizes: Dimensions, tied: bool) -> tuple[Shapes, Shapes]:
        """(shapes that a file needs, shapes that it may have) by name, with fused tensors whole.

        tied: the embedding table is also the output matrix, so the file has no other.
        """
        optional = {name: axes for name, axes in self.optional.items() if name not in OUTPUT}
        outside = {**GLOBAL, **self.more(sizes, None)}
        needed = shapes(declare(outside if tied else {**outside, **OUTPUT}, sizes))
        allowed = shapes(declare(optional, sizes))
        for i in range(sizes.n_layer):
            layer = shapes(declare(self.layer_of(sizes, i), sizes, i))
            for name, parts in self.parts_of(sizes, i).items():
                whole = [layer.pop(f"blk.{i}.{part}") for part in parts]
                layer[f"blk.{i}.{name}"] = (sum(rows for rows, *_ in whole), *whole[0][1:])
            needed |= layer
            allowed |= shapes(declare(self.optional_layer, sizes, i))
        return needed, {**allowed, **shapes(self.unread(sizes))}


def declare(axes: Mapping[str, str], sizes: Dimensions, layer: int | None = None) -> Declarations:
    """Tensors of a layer, or of none, by their full names."""
    at, letters = "" if layer is None else f"blk.{layer}.", sizes.letters(layer)
    lengths = {name: tuple(letters[axis] for axis in x.split()) for name, x in axes.items()}
    return {at + name: Declared(axes[name], shape) for name, shape in lengths.items()}


def shapes(declarations: Declarations) -> Shapes:
    """The shapes of declared tensors."""
    return {name: declared.shape for name, declared in declarations.items()}
