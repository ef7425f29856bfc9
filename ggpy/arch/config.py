"""Typed readers of a model file's settings: what is not understood is refused by name.

A `Config` sees the keys under `<architecture>.` and remembers which were read; `refuse_unread` then
names any other. Reading a key is therefore the one place where an architecture declares that it
understands it. Nothing here knows what a setting does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..gguf import GGUFError
from ..util.messages import escaped, shown

# Settings that change nothing in what a decoder computes.
HARMLESS = frozenset(
    {
        "attention.layer_norm_epsilon",
        "decoder_start_token_id",
        "pooling_type",
        "rope.scaling.finetuned",
        "tensor_data_layout",
    }
)

MAX_LAYERS, MAX_WIDTH, MAX_HEADS, MAX_CONTEXT = (
    4096,
    1 << 20,
    4096,
    1 << 28,
)  # more is a damaged file


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
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def raw(self, key: str) -> Any:
        """The value as the file has it, or None; the caller checks it."""
        return self._value(key, None) if self.has(key) else None

    def only(self, key: str, *accepted: object) -> None:
        """Refuse the key, if the file has it, unless its value is one that is implemented."""
        value = self.raw(key)
        if value is not None and (isinstance(value, np.ndarray) or value not in accepted):
            only = " or ".join(map(str, accepted))
            raise UnsupportedModel(
                f"{self._at(key)} = {short(value)} is not supported (only {only} is)"
            )

    def refuse_unread(self) -> None:
        """UnsupportedModel naming the settings that nobody read."""
        unread = sorted(set(self._values) - self._read - HARMLESS)
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
            raise GGUFError(f"{self._at(key)} is missing")
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
class Dimensions:
    """The sizes every architecture has; the letters are those of backends/interface.py."""

    n_layer: int
    n_embd: int  # D
    n_head: int  # H
    n_head_kv: int  # G
    head_size: int  # E
    n_ff: int  # F
    n_vocab: int  # V
    n_rot: int  # rotated elements of a head
    n_ctx_train: int
    eps: float

    def letters(self) -> dict[str, int]:
        """Sizes by the names that tensor declarations use."""
        h, g, e = self.n_head, self.n_head_kv, self.head_size
        sizes = {"D": self.n_embd, "F": self.n_ff, "V": self.n_vocab, "E": e}
        return {**sizes, "HE": h * e, "GE": g * e, "R/2": self.n_rot // 2}


def read_dimensions(config: Config, n_vocab: int) -> Dimensions:
    """The sizes; GGUFError unless heads divide and the vocabulary has n_vocab tokens."""
    n_embd = config.integer("embedding_length")
    n_head = config.integer("attention.head_count", high=MAX_HEADS)
    n_head_kv = config.integer("attention.head_count_kv", n_head, high=MAX_HEADS)
    if n_head % n_head_kv:
        raise GGUFError(
            f"{config.path}: {n_head} query heads cannot share {n_head_kv} key/value heads evenly"
        )
    head_size = _head_size(config, n_embd, n_head)
    n_rot = config.integer("rope.dimension_count", head_size, low=2, high=head_size)
    if n_rot % 2:
        raise GGUFError(
            f"{config.path}: {config.architecture}.rope.dimension_count = {n_rot} is odd"
        )
    size = config.integer("vocab_size", n_vocab, high=1 << 31)
    if size != n_vocab:
        raise GGUFError(
            f"{config.path}: vocab_size is {size}, but the embedding table has {n_vocab} rows"
        )
    return Dimensions(
        n_layer=config.integer("block_count", high=MAX_LAYERS),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_size=head_size,
        n_ff=config.integer("feed_forward_length"),
        n_vocab=n_vocab,
        n_rot=n_rot,
        n_ctx_train=config.integer("context_length", high=MAX_CONTEXT),
        eps=config.real("attention.layer_norm_rms_epsilon", high=1.0),
    )


def _head_size(config: Config, n_embd: int, n_head: int) -> int:
    if not config.has("attention.key_length") and n_embd % n_head:
        raise GGUFError(f"{config.path}: width {n_embd} does not divide into {n_head} heads")
    key = config.integer("attention.key_length", n_embd // n_head, high=65536)
    value = config.integer("attention.value_length", key, high=65536)
    if value != key:
        raise UnsupportedModel(
            f"{config.path}: heads of {key} for keys and {value} for values are not supported"
        )
    return key


def refuse_variants(config: Config, activations: Iterable[str]) -> None:
    """Refuse the settings by which files of these architectures ask for another computation."""
    for key in ("expert_count", "expert_used_count", "expert_shared_count", "nextn_predict_layers"):
        config.only(key, 0)
    for key in ("attention.clamp_kqv", "attention.max_alibi_bias", "leading_dense_block_count"):
        config.only(key, 0)
    for key in ("logit_scale", "embedding_scale", "residual_scale"):
        config.only(key, 0, 1)
    config.only("attention.causal", True)
    config.only("use_parallel_residual", False)
    config.only("hidden_activation", *activations)


def short(value: object) -> str:
    """A value for a message, in 60 characters at most."""
    return shown(value, 60)
