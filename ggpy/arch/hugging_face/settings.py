"""A reader of config.json that refuses unknown keys. Nothing here opens a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...util.messages import escaped
from ..config import Config, UnsupportedModel, short

# Settings that do not change what a model computes for a given text: training, other runtimes,
# names. The tokenizer handles special tokens.
HARMLESS = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "model_type", "transformers_version"),
        *("torch_dtype", "dtype", "use_cache", "cache_implementation", "initializer_range"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
        *("pretraining_tp", "return_dict", "output_attentions", "output_hidden_states"),
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
        *("chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type"),
        *("max_length", "temperature", "top_k", "top_p", "typical_p", "do_sample", "num_beams"),
        *("repetition_penalty", "length_penalty", "num_return_sequences", "diversity_penalty"),
        *("num_beam_groups", "tokenizer_class", "model_max_length", "unsloth_version"),
        *("unsloth_fixed", "is_llama_config", "transformers.js_config", "quantization_config"),
        *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),  # training
        *("attention_bias", "mlp_bias"),  # the tensors say it: one that is not known is refused
    }
)


class CheckpointSettings(Config):
    """A config.json, or a part of it. Every read is checked; `null` counts as absent.

    ignored: keys that count as harmless, whatever their values.
    """

    def __init__(
        self, values: Mapping[str, Any], path: object, part: str = "", ignored: Iterable[str] = ()
    ) -> None:
        super().__init__({}, "", path)
        self._part = part  # "rope_scaling.", for messages
        self._values = {k: v for k, v in values.items() if v is not None}
        self.ignored = frozenset(ignored)
        self.nulls = values.keys() - self._values.keys()

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def numbers(self, key: str) -> list[float]:
        """An array of finite numbers; empty when there is none."""
        value = self._value(key, ())
        good = isinstance(value, (list, tuple)) and all(type(x) in (int, float) for x in value)
        if not good or not all(abs(x) < 1e12 for x in value):
            raise self._wrong(key, value, "an array of numbers")
        return [float(x) for x in value]

    def part(self, key: str, more: Mapping[str, Any] | None = None) -> CheckpointSettings:
        """The object below a key, with `more` as defaults; the defaults alone if there is none."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        given = {k: v for k, v in value.items() if v is not None}
        return CheckpointSettings({**(more or {}), **given}, self.path, f"{key}.", self.ignored)

    def refuse_unread(self) -> None:
        """Raise UnsupportedModel for unread settings, unless they are false, 0 or empty."""
        known = self._read | HARMLESS | self.ignored
        unread = {k: v for k, v in self._values.items() if k not in known and v}
        if unread:
            first = list(unread.items())[:4]
            said = ", ".join(f"{self._part}{escaped(k)} = {short(v)}" for k, v in first)
            raise UnsupportedModel(
                f"{self.path}: not supported: {said}{', ...' if len(unread) > 4 else ''};"
                " if it changes nothing, say --ignore-setting NAME"
            )

    def refuse(self, key: str, why: str) -> UnsupportedModel:
        """The error for a value that cannot be converted."""
        value = self._values.get(key)
        return UnsupportedModel(f"{self._at(key)} = {short(value)} is not supported: {why}")

    def _at(self, key: str) -> str:
        return f"{self.path}: {self._part}{key}"
