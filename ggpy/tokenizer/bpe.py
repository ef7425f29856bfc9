"""Byte-pair vocabularies (model "gpt2" and its like, and "gemma4") through the `tokenizers`
package.

A word is spelled in GPT-2's alphabet, one printable character for each byte, or for gemma4 in its
own characters, and the pair of lowest rank is merged until none is left. `pre` says how text is cut
into words; special tokens are cut out of the text before it comes here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from ..gguf import GGUFError
from ..util.messages import shown
from .pre import Pre
from .vocab import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models

_BLANK = "\u2581"
LONG_TEXT = 1000  # characters, which take some milliseconds to encode
_LINES = re.compile(r"\n+|[^\n]+")


class BpeEncoder:
    """Text to ids by merging bytes of words."""

    def __init__(self, vocab: Vocabulary) -> None:
        assert vocab.pre is not None
        self._tokenizer = _library_tokenizer(vocab, vocab.pre)

    def encode(self, text: str) -> list[int]:
        """Ids of text without special tokens; a long text lets other threads work meanwhile."""
        if len(text) < LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        # The package holds the GIL in `encode`, but not in `encode_batch`.
        (found,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return found.ids


class RawBpeEncoder(BpeEncoder):
    """Text to ids by merging characters of whole lines: gemma4."""

    def __init__(self, vocab: Vocabulary) -> None:
        super().__init__(vocab)
        self._newlines = {text: id for text, id in vocab.ids.items() if text.strip("\n") == ""}

    def encode(self, text: str) -> list[int]:
        """Ids of text without special tokens; a run of newlines that is a token is taken whole."""
        ids: list[int] = []
        for line in _LINES.findall(text.replace(" ", _BLANK)):
            if line in self._newlines:
                ids.append(self._newlines[line])
            else:
                ids += super().encode(line)
        return ids


def _library_tokenizer(vocab: Vocabulary, pre: Pre) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    tokenizer = Tokenizer(_model(vocab, pre))
    if not pre.raw:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return tokenizer


def _model(vocab: Vocabulary, pre: Pre) -> models.BPE:
    from tokenizers import models

    try:
        return models.BPE(
            vocab.ids,
            _pairs(vocab.merges),
            ignore_merges=pre.ignore_merges,
            byte_fallback=pre.raw,
        )
    except GGUFError:
        raise
    except Exception as error:  # the package raises the bare class
        raise GGUFError(f"tokenizer.ggml.merges: {error}") from None


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Each merge as a pair, split at its first blank after its first character, without repeats."""
    if len(set(merges)) != len(merges):
        merges = list(dict.fromkeys(merges))
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right) if left and right else _split_late(merge))
    return pairs


def _split_late(merge: str) -> tuple[str, str]:
    """The pair of a merge that begins with a blank; GGUFError for one that is no pair."""
    at = merge.find(" ", 1)
    if at < 0 or at + 1 == len(merge):
        raise GGUFError(
            f"tokenizer.ggml.merges: {shown(merge)} is not two tokens with a blank between them"
        )
    return merge[:at], merge[at + 1 :]


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: the character that stands for a byte -> the byte.

    Printable Latin-1 stands for itself, the other 68 bytes for U+0100 and up. Source: GPT-2's
    bytes_to_unicode.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    shifted = {chr(0x100 + number): byte for number, byte in enumerate(others)}
    return {**{chr(byte): byte for byte in plain}, **shifted}
