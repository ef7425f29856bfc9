"""Texts that a mask allows: a given one, or a random one."""

from __future__ import annotations

import numpy as np

from ggpy.grammar import GrammarMask
from ggpy.sampling import allowed_tokens, n_words
from ggpy.tokenizer import Tokenizer


def allowed(mask: GrammarMask, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of the tokens that may follow."""
    row = np.full(n_words(tokenizer.n_vocab), -1, np.int32)
    mask.fill(row)
    return np.flatnonzero(allowed_tokens(row, tokenizer.n_vocab))


def accepts(mask: GrammarMask, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text, in tokens of one byte, can be written to its end."""
    for byte in text.encode():
        token = tokenizer._vocab.tokens.index(f"<0x{byte:02X}>")
        if token not in allowed(mask, tokenizer):
            return False
        mask.accept(token)
    ids = set(allowed(mask, tokenizer).tolist())
    assert not ids & tokenizer.end_ids or ids >= tokenizer.end_ids, (
        "some end tokens end, others not"
    )
    return ids >= tokenizer.end_ids


def random_text(
    mask: GrammarMask, tokenizer: Tokenizer, rng: np.random.Generator, hurry: int = 60
) -> str:
    """A random text that the mask allows; after `hurry` tokens it closes whatever it can."""
    pieces = [tokenizer.piece(id) for id in range(tokenizer.n_vocab)]
    text = b""
    for n in range(1000):
        ids = allowed(mask, tokenizer).tolist()
        ends = [id for id in ids if id in tokenizer.end_ids]
        if ends and (mask.finished or n > hurry or rng.random() < 0.3):
            mask.accept(ends[0])
            return text.decode()
        ids = [id for id in ids if id not in ends]
        closing = _closing(text) if n > hurry and rng.random() < 0.7 else ()
        token = int(rng.choice([id for id in ids if pieces[id] in closing] or ids))
        mask.accept(token)
        text += pieces[token]
    raise AssertionError(f"no end after {n + 1} tokens: {text[:200]!r}")


def _closing(text: bytes) -> tuple[bytes, ...]:
    """What may close the innermost part of a text in JSON: of a string a quote, or a digit."""
    inside = text.replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"') % 2
    return (b'"', b"7") if inside else (b"}", b"]", b",")
