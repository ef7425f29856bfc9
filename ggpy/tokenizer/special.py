"""Tokens that are more than text: which of them end an answer, and how they are cut out of text
before it is encoded.

The lists of texts and the corrections of types are llama.cpp's: files often say less than their
templates use. Splitting follows it too, longest token first over the whole text. This module must
not know how the text between special tokens is encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .vocab import TokenType, Vocabulary

# Tokens that end an answer wherever a vocabulary has them.
END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
# Those of them that end a turn of a conversation; of several in a vocabulary the first.
TURN_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<EOT>", "_<EOT>", "[EOT]", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>"),
)
# Tokens for filling in the middle, which files may name by a key instead.
FIM_TEXTS = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>"),
        *("<PRE>", "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>"),
        *("<SUF>", "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>"),
        *("<MID>", "\u2581<MID>", "<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Tokens that are part of an answer, although they look like control tokens (gpt-oss).
SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")

_NAMED_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_SPACES = " \t\n\v\f\r"  # C's isspace
_HEAD = 3  # characters by which splitting looks tokens up


def mark(vocab: Vocabulary) -> frozenset[int]:
    """Correct the types of well-known tokens in `vocab`, and return the ids that end an answer."""
    _find_fim(vocab)
    ends = {vocab.named[name] for name in _NAMED_ENDS if name in vocab.named} | {*vocab.ends}
    for id in _present(vocab, END_TEXTS):
        ends.add(id)
        vocab.types[id] = TokenType.CONTROL
    for id in _present(vocab, SHOWN_TEXTS):
        vocab.types[id] = TokenType.USER_DEFINED
    if turns := _present(vocab, TURN_TEXTS):
        vocab.named.setdefault("eot", turns[0])
    texts = {vocab.tokens[id] for id in ends}
    if _end_is_a_part(texts):
        _demote(vocab, ends, "<|end|>", TokenType.USER_DEFINED)
    if "<|tool_response>" in texts:  # gemma4, where it is an HTML tag
        _demote(vocab, ends, "</s>", TokenType.NORMAL)
    return frozenset(ends)


def _present(vocab: Vocabulary, texts: Iterable[str]) -> list[int]:
    return [vocab.ids[text] for text in texts if text in vocab.ids]


def _find_fim(vocab: Vocabulary) -> None:
    for name, texts in FIM_TEXTS.items():
        found = _present(vocab, texts)
        if found and name not in vocab.named:
            vocab.named[name] = found[0]
            vocab.types[found[0]] = TokenType.CONTROL


def _end_is_a_part(texts: set[str]) -> bool:
    """Whether <|end|> closes one message of several (gpt-oss, solar-open) and not the answer."""
    return bool(texts & {"<|call|>", "<|calls|>"}) and bool(texts & {"<|return|>", "<|flush|>"})


def _demote(vocab: Vocabulary, ends: set[int], text: str, to: TokenType) -> None:
    id = vocab.ids.get(text)
    if id in ends:
        ends.discard(id)
        vocab.types[id] = to


class Splitter:
    """Cuts text at special tokens: user-defined ones always, control and unknown ones on demand."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._strips = _strips_after(vocab)
        types = TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNKNOWN
        self._texts = {id: vocab.tokens[id] for id in vocab.of_type(*types)}
        self._user = _by_head(vocab, types[:1])
        self._all = _by_head(vocab, types)

    def split(self, text: str, parse_special: bool) -> list[str | int]:
        """Pieces of text and ids of special tokens in order; no piece is empty."""
        parts: list[str | int] = [text] if text else []
        for id in self._in(text, self._all if parse_special else self._user):
            parts = [new for part in parts for new in self._cut(part, id)]
        return parts

    def _in(self, text: str, by_head: dict[str, list[int]]) -> list[int]:
        """The tokens that occur in `text`, longest first, as bytes count."""
        found = [
            id
            for head, ids in by_head.items()
            if head in text
            for id in ids
            if self._texts[id] in text
        ]
        return sorted(found, key=lambda id: (-len(self._texts[id].encode()), id))

    def _cut(self, part: str | int, id: int) -> Iterator[str | int]:
        if isinstance(part, int):
            yield part
            return
        for number, piece in enumerate(part.split(self._texts[id])):
            if number:
                yield id
                piece = piece.lstrip(_SPACES) if id in self._strips else piece
            if piece:
                yield piece


def _by_head(vocab: Vocabulary, types: tuple[TokenType, ...]) -> dict[str, list[int]]:
    """Ids of these types by their first characters: one `in` for thousands of similar tokens."""
    table: dict[str, list[int]] = {}
    for id in vocab.of_type(*types):
        table.setdefault(vocab.tokens[id][:_HEAD], []).append(id)
    return table


def _strips_after(vocab: Vocabulary) -> frozenset[int]:
    """Ids of tokens that swallow the blanks after them: Phi-3's rule, which files do not carry."""
    if not any(name in vocab.name.lower() for name in ("phi-3", "phi3")):
        return frozenset()
    special = vocab.of_type(TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    kept = _present(vocab, ("<unk>", "<s>", "<|endoftext|>"))
    return frozenset({*special, *_present(vocab, ("</s>",))}.difference(kept))
