"""What a file's metadata says about its tokens, checked once so that no encoder has to doubt it.

It reads `tokenizer.ggml.*` into a `Vocabulary` and refuses what does not fit together, naming the
field. It must not know how text becomes ids: `spm` and `bpe` do that from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..gguf import GGUFError, PackedStrings
from ..util.messages import shown
from .pre import Pre, lookup

_ABSENT = (-1, 0xFFFFFFFF)  # what converters write for "there is no such token"
_SPM_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}  # llama.cpp's, for model "llama" alone


class TokenType(IntEnum):
    """The values of tokenizer.ggml.token_type."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass
class Vocabulary:
    """The tokens of one file, as it has them, but for `types`, which `special.mark` corrects."""

    model: str  # "llama" (sentencepiece), "gpt2" (byte-level BPE) or "gemma4" (BPE over characters)
    tokens: Sequence[str]
    types: NDArray[np.int8]  # [n_vocab], TokenType of each
    ids: dict[str, int]
    scores: NDArray[np.float32] | None  # [n_vocab]
    merges: Sequence[str]
    pre: Pre | None  # None for sentencepiece
    named: dict[str, int]  # "bos", "eos", "eot", ... -> id, those that the file names
    ends: list[int]  # more ids that end an answer, beside "eos"
    suppressed: list[int]  # ids that no answer has
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    name: str = ""  # general.name
    chat_template: str | None = None
    tool_template: str | None = None  # for conversations with tools, if that is another
    warnings: list[str] = field(default_factory=list)

    @property
    def escapes_blanks(self) -> bool:
        """Whether tokens write U+2581 for a blank, instead of using GPT-2's alphabet of bytes."""
        return self.pre is None or self.pre.raw

    def of_type(self, *types: TokenType) -> list[int]:
        """The ids of the tokens of these types, in increasing order."""
        return np.flatnonzero(np.isin(self.types, types)).tolist()

    def forget_tables(self) -> None:
        """Empties `ids`, `merges` and `scores`, which are read only while encoders are made, and
        packs `tokens`. It frees tens of megabytes.
        """
        self.ids, self.merges, self.scores = {}, [], None
        if not isinstance(self.tokens, PackedStrings):
            self.tokens = PackedStrings(self.tokens)

    def byte_ids(self) -> list[int] | None:
        """The ids of <0x00> to <0xFF>, or None if any of the 256 is missing."""
        found = [self.ids.get(f"<0x{byte:02X}>") for byte in range(256)]
        return [id for id in found if id is not None] if None not in found else None


class _Reader:
    """Typed access to metadata; every refusal names the file and the field."""

    def __init__(self, metadata: Mapping[str, Any], path: str) -> None:
        self.metadata = metadata
        self.path = path

    def fail(self, key: str, problem: str) -> GGUFError:
        return GGUFError(f"{self.path}: {key}: {problem}" if self.path else f"{key}: {problem}")

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self.metadata.get(key, default)
        if value is not None and not isinstance(value, str):
            raise self.fail(key, f"is {type(value).__name__}, not a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, (bool, np.bool_)):
            raise self.fail(key, f"is {type(value).__name__}, not true or false")
        return bool(value)

    def strings(self, key: str) -> Sequence[str]:
        value = self.metadata.get(key)
        if value is None:
            raise self.fail(key, "is missing: the file has no tokenizer that can be read from it")
        if not isinstance(value, (list, PackedStrings)) or not (set(map(type, value)) <= {str}):
            raise self.fail(key, f"is {type(value).__name__}, not an array of strings")
        return value

    def numbers(self, key: str, kinds: str, n_vocab: int) -> NDArray[Any] | None:
        """The array with one entry for each token, or None; its numpy kind must be in `kinds`."""
        value = self.metadata.get(key)
        if value is None:
            return None
        array = np.asarray(value)
        if array.ndim != 1 or (array.dtype.kind not in kinds and array.size):
            raise self.fail(key, f"holds {array.dtype}, not plain numbers, one a token")
        if len(array) < n_vocab:
            raise self.fail(key, f"has {len(array)} entries for {n_vocab} tokens")
        return array[:n_vocab]

    def token_id(self, key: str, n_vocab: int, warnings: list[str]) -> int | None:
        """The id, or None where there is none; one outside the vocabulary is ignored, as llama.cpp
        does: files of fine-tuned models may name a padding token that nobody added.
        """
        value = self.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise self.fail(key, f"is {type(value).__name__}, not a token id")
        if value in _ABSENT:
            return None
        if not 0 <= value < n_vocab:
            ids = f"the vocabulary has the ids 0 to {n_vocab - 1}"
            warnings.append(f"{key} is {value}, but {ids}: it is ignored")
            return None
        return int(value)


_NAMED = (
    *("bos", "eos", "eot", "eom", "unknown", "padding"),
    *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
)
_OLD_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
MODELS = ("llama", "gpt2", "gemma4")


def read_vocabulary(metadata: Mapping[str, Any], path: str = "") -> Vocabulary:
    """The vocabulary in a file's metadata; GGUFError names the field that is missing or wrong."""
    reader = _Reader(metadata, path)
    model = reader.text("tokenizer.ggml.model")
    if model not in MODELS:
        problem = "is missing" if model is None else f"{shown(model)} is not supported"
        raise reader.fail("tokenizer.ggml.model", f"{problem}; known: {', '.join(MODELS)}")
    if model == "llama" and reader.metadata.get("tokenizer.ggml.pre") == "gemma4":
        model = "gemma4"  # Ollama's converter calls it "llama"
    tokens, ids = _read_tokens(reader)
    warnings: list[str] = []
    pre = _read_pre(reader, model, warnings)
    named = _read_named(reader, model, len(tokens), warnings)
    spm = model == "llama"
    return Vocabulary(
        model=model,
        tokens=tokens,
        types=_read_types(reader, len(tokens)),
        ids=ids,
        scores=_read_scores(reader, len(tokens), spm),
        merges=[] if spm else reader.strings("tokenizer.ggml.merges"),
        pre=pre,
        named=named,
        ends=_read_ids(reader, "eos_token_ids", len(tokens)),  # Ollama's converter writes it
        suppressed=_read_ids(reader, "suppress_tokens", len(tokens)),
        add_bos=_read_add(reader, "bos", named, pre.add_bos if pre else True, warnings)
        or (pre is not None and pre.raw and "bos" in named),  # gemma4 always has BOS
        add_eos=_read_add(reader, "eos", named, False, warnings),
        add_space_prefix=spm and reader.flag("tokenizer.ggml.add_space_prefix", True),
        name=reader.text("general.name") or "",
        chat_template=reader.text("tokenizer.chat_template"),
        tool_template=reader.text("tokenizer.chat_template.tool_use"),
        warnings=warnings,
    )


def _read_tokens(reader: _Reader) -> tuple[Sequence[str], dict[str, int]]:
    key = "tokenizer.ggml.tokens"
    tokens = reader.strings(key)
    if not tokens:
        raise reader.fail(key, "is empty: there is nothing to make text of")
    if "" in tokens:  # as llama.cpp calls them, so that they stay apart
        tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        first = next(id for id, token in enumerate(tokens) if ids[token] != id)
        raise reader.fail(
            key, f"{shown(tokens[first])} stands at {first} and at {ids[tokens[first]]}"
        )
    return tokens, ids


def _read_types(reader: _Reader, n_vocab: int) -> NDArray[np.int8]:
    types = reader.numbers("tokenizer.ggml.token_type", "iu", n_vocab)
    if types is None:
        return np.full(n_vocab, TokenType.NORMAL, np.int8)
    known = (types >= TokenType.UNDEFINED) & (types <= TokenType.BYTE)
    return np.where(known, types, TokenType.UNDEFINED).astype(np.int8)


def _read_scores(reader: _Reader, n_vocab: int, needed: bool) -> NDArray[np.float32] | None:
    key = "tokenizer.ggml.scores"
    scores = reader.numbers(key, "fiu", n_vocab)
    if scores is None:
        return np.zeros(n_vocab, np.float32) if needed else None
    scores = scores.astype(np.float32)
    if np.isnan(scores).any():
        raise reader.fail(key, f"entry {int(np.isnan(scores).argmax())} is not a number")
    return scores


def _read_pre(reader: _Reader, model: str, warnings: list[str]) -> Pre | None:
    key = "tokenizer.ggml.pre"
    if model == "llama":
        return None
    if model == "gemma4":
        return lookup("gemma4")
    name = reader.text(key)
    if not name:
        warnings.append(
            f"{key} is missing: words are cut by 'default', which may not be the model's way"
        )
        return lookup("default")
    try:
        return lookup(name)
    except ValueError as error:
        raise reader.fail(key, str(error)) from None


def _read_named(reader: _Reader, model: str, n_vocab: int, warnings: list[str]) -> dict[str, int]:
    def read(name: str) -> int | None:
        return reader.token_id(f"tokenizer.ggml.{name}_token_id", n_vocab, warnings)

    found = {name: read(name) for name in _NAMED}
    for name, old in _OLD_NAMES.items():
        if found[name] is None:
            found[name] = read(old)
    if model == "llama":
        for name, default in _SPM_DEFAULTS.items():
            given = reader.metadata.get(f"tokenizer.ggml.{name}_token_id")
            if found[name] is None and given not in _ABSENT and default < n_vocab:
                found[name] = default
    return {name: id for name, id in found.items() if id is not None}


def _read_ids(reader: _Reader, name: str, n_vocab: int) -> list[int]:
    """An array of ids without those outside the vocabulary."""
    ids = np.asarray(reader.metadata.get(f"tokenizer.ggml.{name}", []))
    whole = ids.ndim == 1 and ids.dtype.kind in "iu"
    return [int(id) for id in ids if 0 <= id < n_vocab] if whole else []


def _read_add(
    reader: _Reader, which: str, named: Mapping[str, int], default: bool, warnings: list[str]
) -> bool:
    """Whether `which` ("bos", "eos") is put around text; False if there is no such token."""
    key = f"tokenizer.ggml.add_{which}_token"
    wanted = reader.flag(key, default)
    if wanted and which not in named and key in reader.metadata:
        warnings.append(f"{key} is true, but no tokenizer.ggml.{which}_token_id: nothing is added")
    return wanted and which in named
