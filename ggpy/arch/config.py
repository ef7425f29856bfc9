"""Typed readers of a model file's settings. An unknown setting is refused by name.

A `Config` holds the keys under `<architecture>.` and remembers which were read; `refuse_unread`
then names all others. An architecture thus declares that it understands a key by reading it, and in
no other place. Nothing here knows what a setting does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..backends.states import Recurrent
from ..gguf import GGUFError
from ..util.messages import escaped, shown
from .expert_sizes import expert_sizes

# Settings that do not change what a decoder computes.
HARMLESS = frozenset(
    {
        "attention.layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon",
        "classifier.pooling_type",
        "decoder_start_token_id",
        "pooling_type",
        "rope.scaling.finetuned",
        "tensor_data_layout",
        "vocab_size",  # the rows of the embedding table say the same
        # written by Ollama's converter: for images, or redundant
        *("attention.head_dim", "image_token_id", "image_token_index", "spatial_merge_size"),
        *("mrope_sections", "rope.mrope_section", "rope.mrope_interleaved"),
        *("vision_start_token_id", "vision_end_token_id"),
    }
)

OF_IMAGES = ("vision.", "audio.", "mm.")  # settings of encoders of images and sounds

# Settings that change the computation, and the values that do not.
VARIANTS: dict[str, tuple[object, ...]] = {
    "expert_count": (0, 1),  # one expert is a dense feed-forward
    "expert_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "leading_dense_block_count": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
}

# A file with more is damaged.
MAX_LAYERS, MAX_WIDTH, MAX_HEADS, MAX_HEAD_SIZE, MAX_CONTEXT = 4096, 1 << 20, 4096, 65536, 1 << 28


AGAIN = "fetch another file of the model, or convert it again"


class UnsupportedModel(GGUFError):
    """The file is valid, but it asks for something that is not implemented."""


class Config:
    """The settings of one architecture; every read is checked for type and range."""

    def __init__(
        self, metadata: Mapping[str, Any], architecture: str, path: object = "model"
    ) -> None:
        self.architecture = architecture
        self.path = path
        prefix = architecture + "."
        self._values = {k[len(prefix) :]: v for k, v in metadata.items() if k.startswith(prefix)}
        self._read: set[str] = set()

    def assume(self, settings: Mapping[str, Any]) -> None:
        """Continue as if the file had these settings."""
        self._values |= settings

    def has(self, key: str) -> bool:
        """Whether the file sets the key; this does not count as reading it."""
        return key in self._values

    def integer(
        self, key: str, default: int | None = None, low: int = 1, high: int = MAX_WIDTH
    ) -> int:
        """An integer in [low, high]; without a default the key is required."""
        value = self._value(key, default)
        if isinstance(value, np.ndarray):
            value = self._common(key, value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "an integer")
        if not low <= value <= high:
            raise self._wrong(key, value, f"between {low} and {high}")
        return value

    def integers(
        self,
        key: str,
        n: int,
        default: tuple[int, ...] | None = None,
        low: int = 1,
        high: int = MAX_WIDTH,
        same: bool = False,
    ) -> tuple[int, ...]:
        """One integer for each of n layers, from an array, or from a number for all layers.

        same: an array with different numbers is refused.
        """
        value = self._value(key, default)
        if not self.has(key):
            return tuple(value)
        if same or not isinstance(value, np.ndarray):
            return (self.integer(key, low=low, high=high),) * n
        if value.dtype.kind not in "iu" or value.shape != (n,):
            raise self._wrong(key, value, f"{n} integers, one for each layer")
        if not ((low <= value) & (value <= high)).all():
            raise self._wrong(key, value, f"each between {low} and {high}")
        return tuple(value.tolist())

    def real(
        self, key: str, default: float | None = None, low: float = 0.0, high: float = 1e12
    ) -> float:
        """A finite number in [low, high]; without a default the key is required."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, value, "a number")
        if not low <= value <= high:  # NaN fails too
            raise self._wrong(key, value, f"between {low:g} and {high:g}")
        return float(value)

    def text(self, key: str, default: str) -> str:
        """A string, or the default."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def windowed_layers(self, n_layer: int, period: int | None = None) -> list[bool]:
        """Which layers have a window. The file has one bool for each layer, or a period; the last
        layer of a period has no window. period: the default; None: the file must have bools.
        """
        key = "attention.sliding_window_pattern"
        pattern = self.raw(key)
        if isinstance(pattern, np.ndarray) or period is None:
            pattern = np.asarray(pattern)
            if pattern.dtype != np.bool_ or pattern.ndim != 1 or len(pattern) < n_layer:
                raise UnsupportedModel(
                    f"{self._at(key)} must be one bool for each of {n_layer} layers"
                )
            return [bool(x) for x in pattern[:n_layer]]
        period = self.integer(key, period, low=0)
        return [period == 0 or i % period < period - 1 for i in range(n_layer)]

    def raw(self, key: str) -> Any:
        """The value as the file has it, or None; the caller checks it."""
        return self._value(key, None) if self.has(key) else None

    def only(self, key: str, *accepted: object) -> None:
        """Raise UnsupportedModel if the file has the key with a value that is not accepted."""
        value = self.raw(key)
        if value is not None and (isinstance(value, np.ndarray) or value not in accepted):
            only = " or ".join(map(str, accepted))
            raise UnsupportedModel(
                f"{self._at(key)} = {short(value)} is not supported (only {only} is)"
            )

    def refuse_unread(self) -> None:
        """Raise UnsupportedModel, with the names of the settings, if nobody read some."""
        left = set(self._values) - self._read - HARMLESS
        unread = sorted(key for key in left if not key.startswith(OF_IMAGES))
        if unread:
            first = ", ".join(
                f"{self.architecture}.{escaped(k)} = {short(self._values[k])}" for k in unread[:4]
            )
            raise UnsupportedModel(
                f"{self.path}: not supported: {first}{', ...' if len(unread) > 4 else ''}"
            )

    def _value(self, key: str, default: Any) -> Any:
        self._read.add(key)
        if key in self._values:
            return self._values[key]
        if default is None:
            raise GGUFError(f"{self._at(key)} is missing: {AGAIN}")
        return default

    def _common(self, key: str, values: np.ndarray) -> int:
        if values.size == 0 or values.dtype.kind not in "iu" or (values != values.flat[0]).any():
            raise UnsupportedModel(
                f"{self._at(key)} = {short(values)} differs from layer to layer: not supported"
            )
        return int(values.flat[0])

    def _at(self, key: str) -> str:
        return f"{self.path}: {self.architecture}.{key}"

    def _wrong(self, key: str, value: object, expected: str) -> GGUFError:
        return GGUFError(f"{self._at(key)} = {short(value)}: expected {expected}")


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one layer; the letters are those of backends/interface.py."""

    n_head: int  # H
    n_head_kv: int  # G
    key_size: int  # E
    value_size: int  # Ev
    n_ff: int  # F
    n_expert: int = 0  # X; 0: the feed-forward is dense
    n_ff_expert: int = 0  # Fx, F of each expert
    n_ff_shared: int = 0  # Fs, F of the shared expert
    recurrent: Recurrent | None = None  # the state of a layer without keys and values
    windowed: bool = False
    shares_keys: bool = False  # the layer reads the keys and values of another layer

    def letters(self) -> dict[str, int]:
        """The sizes by the letters that declare the axes of a layer's tensors."""
        h, g, e, ev = self.n_head, self.n_head_kv, self.key_size, self.value_size
        products = {"HE": h * e, "GE": g * e, "HEv": h * ev, "GEv": g * ev}
        widths = {"F": self.n_ff, "Fx": self.n_ff_expert, "Fs": self.n_ff_shared}
        found = {"H": h, "G": g, "E": e, "X": self.n_expert, "1": 1, **widths, **products}
        return {**found, **self._recurrent_letters()}

    def _recurrent_letters(self) -> dict[str, int]:
        r = self.recurrent
        if r is None:
            return {}
        heads = {"Hk": r.n_k_head, "Hv": r.n_v_head, "2Hv": 2 * r.n_v_head}
        return {**heads, "S": r.size, "HvS": r.n_v_head * r.size, "K": r.channels, "taps": r.taps}


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a model; the letters are those of backends/interface.py."""

    n_embd: int  # D
    n_vocab: int  # V
    n_rot: int  # rotated elements of a head
    n_ctx_train: int
    eps: float
    layers: tuple[LayerSizes, ...]
    layer_norm: bool = False  # norms are layer norms
    n_class: int = 1  # C, classes of the classifier, if there is one
    dense: tuple[int, int] = (0, 0)  # D2, D3: rows of the dense matrices of embedders
    n_nextn: int = 0  # blocks for multi-token prediction after the layers; not used
    n_input: int = 0  # I, size of each layer's own input; 0: layers have none

    @property
    def n_layer(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def layer(self) -> LayerSizes:
        """The sizes that all layers share, without states; ValueError if layers differ."""
        return _common(replace(layer, recurrent=None) for layer in self.layers)

    @property
    def attention(self) -> LayerSizes:
        """The sizes of heads that all layers share; ValueError if layers differ."""
        widths: dict[str, Any] = {"n_ff": 0, "n_expert": 0, "n_ff_expert": 0, "n_ff_shared": 0}
        return _common(replace(layer, recurrent=None, **widths) for layer in self.layers)

    def letters(self, layer: int | None = None) -> dict[str, int]:
        """The sizes by the letters that declare axes: those of a layer, or outside of layers."""
        i, n_layer = self.n_input, self.n_layer
        sizes = {"D": self.n_embd, "V": self.n_vocab, "R/2": self.n_rot // 2, "C": self.n_class}
        sizes |= {"I": i, "LI": i * n_layer, **dict(zip(("D2", "D3"), self.dense, strict=True))}
        return sizes if layer is None else {**sizes, **self.layers[layer].letters()}


def _common(layers: Iterable[LayerSizes]) -> LayerSizes:
    first, *others = dict.fromkeys(layers)
    if others:
        raise ValueError(f"layers of {1 + len(others)} sizes, where all have to have one")
    return first


def read_dimensions(
    config: Config, n_vocab: int, understood: Collection[str] = (), layer_norm: bool = False
) -> Dimensions:
    """The sizes of a file; GGUFError if heads cannot share keys and values evenly. n_vocab: rows
    of the embedding table.

    understood: settings that may differ between layers; if attention.value_length is one of them,
    value size and key size may differ. layer_norm: norms are layer norms.
    """
    n_nextn = config.integer("nextn_predict_layers", 0, low=0, high=MAX_LAYERS)
    layers = _layer_sizes(config, understood, n_nextn)
    return Dimensions(
        n_embd=config.integer("embedding_length"),
        n_vocab=n_vocab,
        n_rot=_n_rot(config, min(layer.key_size for layer in layers)),
        n_ctx_train=config.integer("context_length", high=MAX_CONTEXT),
        eps=config.real(f"attention.layer_norm_{'' if layer_norm else 'rms_'}epsilon", high=1.0),
        layers=layers,
        layer_norm=layer_norm,
        n_class=_n_class(config),
        dense=_dense(config),
        n_nextn=n_nextn,
    )


def _n_class(config: Config) -> int:
    """The number of class labels in the file; 1 if it has none, as in llama.cpp."""
    key = "classifier.output_labels"
    labels = config.raw(key) if config.has(key) else [""]
    if not isinstance(labels, list) or not labels:
        at = f"{config.path}: {config.architecture}.{key}"
        raise GGUFError(f"{at} = {short(labels)}: expected an array of strings")
    return len(labels)


def _dense(config: Config) -> tuple[int, int]:
    """Rows of dense_2.weight and dense_3.weight, which are multiplied one after the other."""
    width = config.integer("embedding_length")
    rows = []
    for name in ("dense_2", "dense_3"):
        n_in = config.integer(f"{name}_feat_in", width)
        if n_in != width:
            at = f"{config.path}: {config.architecture}.{name}_feat_in"
            raise GGUFError(f"{at} = {n_in}, but the matrix is given vectors of {width}")
        width = config.integer(f"{name}_feat_out", width)
        rows.append(width)
    return rows[0], rows[1]


def _layer_sizes(
    config: Config, understood: Collection[str], n_nextn: int
) -> tuple[LayerSizes, ...]:
    n_layer = config.integer("block_count", low=1 + n_nextn, high=MAX_LAYERS) - n_nextn

    def read(key: str, default: tuple[int, ...] | None, high: int) -> tuple[int, ...]:
        return config.integers(key, n_layer, default, high=high, same=key not in understood)

    heads = read("attention.head_count", None, MAX_HEADS)
    heads_kv = read("attention.head_count_kv", heads, MAX_HEADS)
    for n, n_kv in zip(heads, heads_kv, strict=True):
        if n % n_kv:
            raise GGUFError(
                f"{config.path}: {n} query heads cannot share {n_kv} key/value heads evenly:"
                f" {config.architecture}.attention.head_count and .head_count_kv"
            )
    keys = read("attention.key_length", _divided(config, heads), MAX_HEAD_SIZE)
    values = read("attention.value_length", keys, MAX_HEAD_SIZE)
    if values != keys and "attention.value_length" not in understood:
        raise UnsupportedModel(
            f"{config.path}: heads of {keys[0]} for keys and {values[0]} for values are not"
            f" supported: {config.architecture}.attention.key_length and .value_length"
        )
    none = (0,) * n_layer if "expert_count" in understood else None  # all layers have experts
    widths = read("feed_forward_length", none, MAX_WIDTH)
    experts = expert_sizes(config, widths, understood)
    columns = zip(heads, heads_kv, keys, values, widths, experts, strict=True)
    return tuple(LayerSizes(*sizes, *of_experts) for *sizes, of_experts in columns)


def _divided(config: Config, heads: tuple[int, ...]) -> tuple[int, ...]:
    """The default key sizes: the width divided by the heads."""
    n_embd = config.integer("embedding_length")
    for n_head in heads:
        if not config.has("attention.key_length") and n_embd % n_head:
            raise GGUFError(f"{config.path}: width {n_embd} does not divide into {n_head} heads")
    return tuple(n_embd // n_head for n_head in heads)


def _n_rot(config: Config, key_size: int) -> int:
    n_rot = config.integer("rope.dimension_count", key_size, low=2, high=key_size)
    if n_rot % 2:
        raise GGUFError(
            f"{config.path}: {config.architecture}.rope.dimension_count = {n_rot} is odd"
        )
    return n_rot


def refuse_variants(config: Config, understood: Collection[str] = ()) -> None:
    """Refuse settings that change the computation (VARIANTS), except those in `understood`."""
    for key, values in VARIANTS.items():
        if key not in understood:
            config.only(key, *values)


def short(value: object) -> str:
    """A value for a message, in at most 60 characters."""
    return shown(value, 60)
