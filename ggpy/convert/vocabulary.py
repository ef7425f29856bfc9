"""The tokens of a checkpoint as metadata: texts, types, scores or merges, as llama.cpp writes them.

The files in the folder decide: tokenizer.model is sentencepiece's; a tokenizer.json is byte-level
BPE, sentencepiece's BPE given by its merges, or Gemma 4's BPE over characters. `special` finds
special tokens. Knows no weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..tokenizer import TokenType
from ..util.messages import cut, one_line, shown
from .folder import ConvertError, Folder, Limit
from .pretokenizer import pre_name, refused

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MODEL, JSON, CONFIG, ADDED = (
    *("tokenizer.model", "tokenizer.json"),
    *("tokenizer_config.json", "added_tokens.json"),
)
MAX_VOCAB = 1 << 19  # tokens; the largest vocabularies have 262144
# Gemma's file, with 262144 tokens: 33 MB, 0.53 million arrays (merges), 1.4 million commas.
JSON_LIMIT = Limit(48 << 20, 1_000_000, 2_000_000)
MAX_MODEL = 16 << 20  # bytes; Gemma's has 5 MB
MAX_PARTS = 16  # parts of all post-processors together, and ids that one of them puts for a token
MAX_REPLACED = 4  # steps of a normalizer, and characters that a step puts for one character
BLANK = "\u2581"
PADDING_SCORE, ADDED_SCORE = -10000.0, -1000.0  # llama.cpp's
NOT_IN_GGUF = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
BYTE = re.compile("<0x[0-9A-F]{2}>")
# Gemma 4's tokens that mark the parts of an answer: its reader has to see them.
VISIBLE = tuple(f"<{a}{x}{b}>" for x in ("channel", "tool_call", "tool_response")
                for a, b in (("|", ""), ("", "|")))  # fmt: skip
VISIBLE += ('<|"|>',)
# Control tokens, although checkpoints do not call them special: Gemma's, deepseek-coder's.
LOOK_SPECIAL = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")


@dataclass
class Tokens:
    """What a file will say about its tokens."""

    model: str  # "llama", "gpt2" or "gemma4"
    pre: str  # the pre-tokenizer; "" where `model` implies it
    texts: list[str]
    types: list[int]
    scores: list[float] | None = None  # of "llama" and "gemma4"
    merges: list[str] = field(default_factory=list)  # of "gpt2" and "gemma4"
    space_prefix: bool = True  # sentencepiece's blank before text
    encode: Callable[[str], list[int]] | None = None  # the checkpoint's own tokenizer, to compare
    named: dict[str, int] = field(default_factory=dict)  # special ids that the library knows

    def metadata(self) -> dict[str, tuple[str, Any]]:
        """Key -> (type, value), without those of special tokens."""
        found: dict[str, tuple[str, Any]] = {
            "tokenizer.ggml.model": ("str", self.model),
            **({"tokenizer.ggml.pre": ("str", self.pre)} if self.pre else {}),
            "tokenizer.ggml.tokens": ("arr[str]", self.texts),
        }
        if self.scores is not None:
            found["tokenizer.ggml.scores"] = ("arr[f32]", self.scores)
        found["tokenizer.ggml.token_type"] = ("arr[i32]", self.types)
        if self.merges:
            found["tokenizer.ggml.merges"] = ("arr[str]", self.merges)
        if not self.space_prefix:
            found["tokenizer.ggml.add_space_prefix"] = ("bool", False)
        return found


def read_tokens(folder: Folder, n_vocab: int, characters: bool = False) -> Tokens:
    """The n_vocab tokens of a folder; ConvertError for a tokenizer that is not supported.

    characters: BPE over characters (Gemma 4), from tokenizer.json even beside a tokenizer.model.
    """
    if not characters and (model := folder.read(MODEL, MAX_MODEL)) is not None:
        return _sentencepiece(folder, model, n_vocab)
    content = folder.json(JSON, JSON_LIMIT)
    if content is None:
        raise ConvertError(f"{folder.path}: has neither {MODEL} nor {JSON}: download it as well")
    kind = content.get("model", {})
    if not isinstance(kind, dict) or kind.get("type", "BPE") != "BPE":
        name = kind.get("type") if isinstance(kind, dict) else kind
        raise ConvertError(
            f"{folder.path / JSON}: a tokenizer of type {shown(name)} is not supported"
        )
    for key in NOT_IN_GGUF:
        if kind.get(key):
            raise ConvertError(
                f"{folder.path / JSON}: model.{key} = {shown(kind[key], 40)} is not supported"
            )
    check_growth(content, folder.path / JSON)
    if characters:
        return _merged_characters(folder, content, n_vocab)
    return (_merged_pieces if kind.get("byte_fallback") else _byte_level)(folder, content, n_vocab)


def check_growth(content: dict[str, Any], path: object) -> None:
    """ConvertError for a tokenizer.json that makes a long text of a short one: by post-processors
    that repeat it, or by normalizers that replace one character with many.
    """
    steps = steps_of(content.get("post_processor"), "processors")
    repeats = [sum(_n_parts(step.get(side)) for step in steps) for side in ("single", "pair")]
    if max(len(steps), *repeats) > MAX_PARTS:
        problem = f"the post-processor has {max(len(steps), *repeats)} parts"
        raise ConvertError(f"{path}: {problem}, {MAX_PARTS} are the most there may be")
    for step in steps:
        special = step.get("special_tokens")
        for token in special.values() if isinstance(special, dict) else ():
            if isinstance(token, dict) and _n_parts(token.get("ids")) > MAX_PARTS:
                raise ConvertError(f"{path}: the post-processor puts many ids for one token")
    steps = steps_of(content.get("normalizer"), "normalizers")
    texts = [step.get(key) for step in steps for key in ("content", "prepend")]
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    if max(len(steps), longest) > MAX_REPLACED:
        problem = f"a normalizer of {len(steps)} steps that puts {longest} characters for one"
        raise ConvertError(f"{path}: {problem} is not supported, {MAX_REPLACED} are the most")


def steps_of(given: Any, key: str) -> list[dict[str, Any]]:
    """The single processors of a processor, which may be nested sequences (`key`), in order."""
    found, waiting = [], [given]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict) and isinstance(below := step.get(key), list):
            waiting += reversed(below)
        elif isinstance(step, dict):
            found.append(step)
    return found


def _n_parts(template: Any) -> int:
    if isinstance(template, str):
        return len(template.split())
    return len(template) if isinstance(template, (list, dict)) else 0


def looks_special(text: str) -> bool:
    """Whether llama.cpp takes an added token for a control token by its text."""
    wrapped = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    return text in LOOK_SPECIAL or any(text.startswith(a) and text.endswith(b) for a, b in wrapped)


# sentencepiece's own file


def _sentencepiece(folder: Folder, model: bytes, n_vocab: int) -> Tokens:
    from sentencepiece import SentencePieceProcessor

    path = folder.path / MODEL
    try:
        library = SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        reason = one_line(str(error), 500)
        raise ConvertError(f"{path}: sentencepiece cannot read it: {reason}") from None
    _check_normalisation(library, path)
    found = _unused(n_vocab)
    for id in range(min(library.vocab_size(), n_vocab)):
        found.texts[id] = library.id_to_piece(id)
        found.types[id] = _piece_type(library, id)
        found.scores[id] = library.get_score(id)  # type: ignore[index]
    for id, text, special in _added_pieces(folder):
        if id < n_vocab:
            _put(found, id, text, special)
    # The library does not say whether it adds a blank, so a text is tried.
    found.space_prefix = library.normalize("a").startswith(BLANK)
    found.encode = lambda text: library.encode(text, out_type=int)
    given = (folder.json(CONFIG) or {}).get("add_prefix_space")
    if isinstance(given, bool) and given is not found.space_prefix:
        found.space_prefix, found.encode = given, None  # the library's ids would differ
    ids = ("bos", library.bos_id()), ("eos", library.eos_id()), ("unk", library.unk_id())
    found.named = {name: id for name, id in ids if 0 <= id < n_vocab}
    return found


def _unused(n_vocab: int) -> Tokens:
    """A sentencepiece vocabulary of n_vocab unused tokens."""
    return Tokens(
        "llama",
        "default",
        [f"[PAD{id}]" for id in range(n_vocab)],
        [int(TokenType.UNUSED)] * n_vocab,
        [PADDING_SCORE] * n_vocab,
    )


def _check_normalisation(library: Any, path: object) -> None:
    """ConvertError for a model that normalises text: a GGUF file cannot say how."""
    for text in ("a  b ", "\ufb01 \u2460", "\uff21\u30ac", "A\u00c4\u0130"):
        wanted = text.replace(" ", BLANK)
        if library.normalize(text).removeprefix(BLANK) != wanted:
            problem = f"it makes {shown(library.normalize(text))} of {text!r}"
            raise ConvertError(f"{path}: a tokenizer that normalises is not supported: {problem}")


def _piece_type(library: Any, id: int) -> int:
    kinds = (
        (library.is_unknown, TokenType.UNKNOWN),
        (library.is_control, TokenType.CONTROL),
        (library.is_unused, TokenType.UNUSED),
        (library.is_byte, TokenType.BYTE),
    )
    return int(next((kind for test, kind in kinds if test(id)), TokenType.NORMAL))


def _put(found: Tokens, id: int, text: str, special: bool) -> None:
    """Puts an added token in the place of the one with its id."""
    control = special or looks_special(text)
    found.types[id] = int(TokenType.CONTROL if control else TokenType.USER_DEFINED)
    found.texts[id] = text if control else text.replace(BLANK, " ")
    if found.scores is not None:
        found.scores[id] = ADDED_SCORE


def _added_pieces(folder: Folder) -> Iterator[tuple[int, str, bool]]:
    """(id, text, special) of tokens that were added to a sentencepiece vocabulary."""
    for text, id in (folder.json(ADDED) or {}).items():
        if type(id) is not int or id < 0:
            raise ConvertError(f"{folder.path / ADDED}: {shown(text)} has the id {shown(id)}")
        yield id, text, False
    decoder = (folder.json(CONFIG) or {}).get("added_tokens_decoder") or {}
    path = folder.path / CONFIG
    if not isinstance(decoder, dict):
        raise ConvertError(f"{path}: added_tokens_decoder is no object")
    entries = [{**entry, "id": id} for id, entry in decoder.items() if isinstance(entry, dict)]
    yield from added_entries(entries, path)
    content = folder.json(JSON, JSON_LIMIT) if not entries else None
    yield from added_entries((content or {}).get("added_tokens") or [], folder.path / JSON)


def added_entries(entries: Any, path: object) -> Iterator[tuple[int, str, bool]]:
    """(id, text, special) of each entry of added_tokens in tokenizer.json, or of its kin."""
    if not isinstance(entries, list):
        raise ConvertError(f"{path}: added_tokens is no array")
    for entry in entries:
        content = entry.get("content") if isinstance(entry, dict) else None
        id = cut(str(entry.get("id")), 12) if isinstance(entry, dict) else ""
        if not isinstance(content, str) or not id.isdecimal() or len(id) > 9:
            raise ConvertError(f"{path}: {shown(entry)} is no added token")
        yield int(id), content, bool(entry.get("special"))


# tokenizer.json


def _byte_level(folder: Folder, content: dict[str, Any], n_vocab: int) -> Tokens:
    """Byte-level BPE: added tokens have their own types, all others are normal."""
    path = folder.path / JSON
    library = _library(folder)
    _check_normalizer(content.get("normalizer"), path)
    ignore_merges = bool(content["model"].get("ignore_merges"))
    with refused(path):
        pre = pre_name(library, ignore_merges, path)
    found = Tokens("gpt2", pre, *_listed(content, n_vocab, path))
    for id, text, special in added_entries(content.get("added_tokens") or [], path):
        _check_id(id, n_vocab, text, path)
        _put(found, id, text, special)
    found.merges = [_joined(merge, path) for merge in content["model"].get("merges") or []]
    found.encode = lambda text: library.encode(text, add_special_tokens=False).ids
    return found


def _merged_pieces(folder: Folder, content: dict[str, Any], n_vocab: int) -> Tokens:
    """Sentencepiece's BPE from a tokenizer.json: tokens of earlier merges have higher scores."""
    path = folder.path / JSON
    library = _library(folder)
    texts, types = _listed(content, n_vocab, path)
    merges = [_joined(merge, path) for merge in content["model"].get("merges") or []]
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    last = float(len(merges))
    scores = [-float(ranks.get(text, last)) for text in texts]
    types = [int(TokenType.BYTE) if BYTE.fullmatch(t) else k for t, k in zip(texts, types)]  # noqa: B905
    found = Tokens("llama", "default", texts, types, scores)
    for id, text, special in added_entries(content.get("added_tokens") or [], path):
        _check_id(id, n_vocab, text, path)
        _put(found, id, text, special)
    unknown = content["model"].get("unk_token")
    if unknown in texts:
        found.named["unk"] = texts.index(unknown)
        found.types[found.named["unk"]] = int(TokenType.UNKNOWN)
    found.encode = lambda text: library.encode(text, add_special_tokens=False).ids
    with refused(path):
        first = library.encode("a", add_special_tokens=False).tokens[0]
    found.space_prefix = first.startswith(BLANK)
    return found


def _merged_characters(folder: Folder, content: dict[str, Any], n_vocab: int) -> Tokens:
    """BPE over characters, with a token for each byte (Gemma 4). Added tokens that are in the
    vocabulary are normal, unless they are special or the reader of an answer has to see them.
    """
    path = folder.path / JSON
    library = _library(folder)
    texts, types = _listed(content, n_vocab, path)
    types = [int(TokenType.BYTE) if BYTE.fullmatch(t) else k for t, k in zip(texts, types)]  # noqa: B905
    found = Tokens("gemma4", "", texts, types, [ADDED_SCORE] * n_vocab)
    for id, text, special in added_entries(content.get("added_tokens") or [], path):
        _check_id(id, n_vocab, text, path)
        if text in VISIBLE or (texts[id] != text and not special):
            found.types[id] = int(TokenType.USER_DEFINED)
        elif special:
            found.types[id] = int(TokenType.CONTROL)
        texts[id] = text
    found.merges = [_joined(merge, path) for merge in content["model"].get("merges") or []]
    found.space_prefix = False
    found.encode = lambda text: library.encode(text, add_special_tokens=False).ids
    return found


def _library(folder: Folder) -> Tokenizer:
    from tokenizers import Tokenizer

    text = folder.text(JSON, JSON_LIMIT.nbytes)
    assert text is not None
    with refused(folder.path / JSON):
        return Tokenizer.from_str(text)


def _check_normalizer(normalizer: Any, path: object) -> None:
    """ConvertError unless all steps are NFC, which is left out as in llama.cpp: ids of text that is
    not in NFC differ.
    """
    steps = normalizer.get("normalizers", [normalizer]) if isinstance(normalizer, dict) else []
    for step in steps:
        if not isinstance(step, dict) or step.get("type") != "NFC":
            raise ConvertError(f"{path}: normalizer {shown(step)} is not supported")


def _listed(content: dict[str, Any], n_vocab: int, path: object) -> tuple[list[str], list[int]]:
    """(texts, types) by id; ids without a token are padding."""
    vocab = content["model"].get("vocab")
    if not isinstance(vocab, dict) or not set(map(type, vocab.values())) <= {int}:
        raise ConvertError(f"{path}: model.vocab is no object of ids")
    texts = [f"[PAD{id}]" for id in range(n_vocab)]
    types = [int(TokenType.UNUSED)] * n_vocab
    for text, id in vocab.items():
        _check_id(id, n_vocab, text, path)
        texts[id] = text
        types[id] = int(TokenType.NORMAL)
    return texts, types


def _check_id(id: int, n_vocab: int, text: str, path: object) -> None:
    if not 0 <= id < n_vocab:
        raise ConvertError(
            f"{path}: {shown(text)} has the id {id}, config.json says vocab_size is {n_vocab}"
        )


def _joined(merge: Any, path: object) -> str:
    """A merge as one string; blanks inside a token are spelled as in GPT-2."""
    if isinstance(merge, str):
        return merge
    if not isinstance(merge, list) or len(merge) != 2 or set(map(type, merge)) != {str}:
        raise ConvertError(f"{path}: {shown(merge)} is no merge")
    return " ".join(part.replace(" ", "\u0120") for part in merge)
