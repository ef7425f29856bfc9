"""Sentencepiece vocabularies (model "llama": Llama 1 and 2, Mistral, Phi-3, Gemma 1 to 3) through
the `sentencepiece` package.

The package reads a ModelProto, so one is written from the file's tokens, scores and types, three
fields for each piece. It is written here, because protobuf's own builder takes seconds for Gemma's
262144 pieces. Special tokens are cut out of the text before it comes here; the package must not
know that they are special.
"""

from __future__ import annotations

import numpy as np

from ..gguf import GGUFError
from ..util.messages import one_line
from .vocab import TokenType, Vocabulary

_LONGEST = 4096  # bytes of a piece; sentencepiece refuses somewhat longer ones
_VARINT, _BYTES = 0, 2  # protobuf wire types
_TYPE_BPE = 2  # TrainerSpec.ModelType


class SpmEncoder:
    """Text to ids by merging the pair of highest score; characters without a token become bytes."""

    def __init__(self, vocab: Vocabulary) -> None:
        from sentencepiece import SentencePieceProcessor

        self._prefix = " " if vocab.add_space_prefix else ""
        try:
            self._processor = SentencePieceProcessor(model_proto=model_proto(vocab))
        except RuntimeError as error:
            reason = one_line(str(error), 500)
            raise GGUFError(f"sentencepiece refuses this vocabulary: {reason}") from None

    def encode(self, text: str) -> list[int]:
        """Ids of text that follows a special token or nothing."""
        ids: list[int] = self._processor.encode(self._prefix + text, out_type=int)
        return ids


def model_proto(vocab: Vocabulary) -> bytes:
    """The serialized sentencepiece ModelProto of a vocabulary; GGUFError where none can be made.

    Source: sentencepiece_model.proto, messages ModelProto, TrainerSpec and NormalizerSpec.
    """
    byte_ids = vocab.byte_ids()
    kinds, unknown = _piece_types(vocab, byte_ids)
    scores = np.zeros(len(kinds), "<f4")
    if vocab.scores is not None:
        scores[: len(vocab.scores)] = vocab.scores
    texts = [token.encode() for token in vocab.tokens]
    if unknown == len(texts):
        texts.append(b"")
    _rename(texts, kinds, vocab.ids)
    trainer = _field(3, _TYPE_BPE) + _field(35, int(byte_ids is not None))
    # No charsmap ("identity"), no dummy prefix; blanks are kept, and written as U+2581.
    normalizer = _field(1, b"identity") + _field(3, 0) + _field(4, 0) + _field(5, 1)
    return _pieces(texts, scores, kinds) + _field(2, trainer) + _field(3, normalizer)


def _piece_types(vocab: Vocabulary, byte_ids: list[int] | None) -> tuple[bytearray, int]:
    """The type of each piece, and the id of the unknown piece, of which there must be exactly one.

    If no token can be it, a piece is appended after the last token.
    """
    kinds = vocab.types.copy()
    # User-defined tokens are cut out of the text before; their pieces are like any other here.
    kinds[np.isin(kinds, (TokenType.USER_DEFINED, TokenType.UNDEFINED))] = TokenType.NORMAL
    kinds[np.isin(kinds, (TokenType.UNKNOWN, TokenType.BYTE))] = TokenType.CONTROL
    if byte_ids is not None:
        kinds[byte_ids] = TokenType.BYTE
    unknown = vocab.named.get("unknown", -1)
    if 0 <= unknown < len(kinds) and kinds[unknown] == TokenType.CONTROL:
        kinds[unknown] = TokenType.UNKNOWN
        return bytearray(kinds.tobytes()), unknown
    if byte_ids is None:
        raise GGUFError(
            "tokenizer.ggml.tokens: has neither all of <0x00> to <0xFF> nor an unknown token:"
            " text outside the vocabulary could not be encoded"
        )
    return bytearray(kinds.tobytes()) + bytes((TokenType.UNKNOWN,)), len(kinds)


def _rename(texts: list[bytes], kinds: bytearray, ids: dict[str, int]) -> None:
    """Give pieces that sentencepiece would refuse a name, and a type that no text matches."""
    for id, text in enumerate(texts):
        if not text or len(text) > _LONGEST or b"\0" in text:
            name = f"<ggpy:{id}>"
            while name in ids:
                name += ">"
            texts[id] = name.encode()
            if kinds[id] != TokenType.UNKNOWN:
                kinds[id] = TokenType.CONTROL


def _pieces(texts: list[bytes], scores: np.ndarray, kinds: bytearray) -> bytes:
    """ModelProto.pieces: for each token a message with its text, score (f32) and type."""
    raw_scores = scores.tobytes()
    out = []
    for id, text in enumerate(texts):
        head = b"\x0a" + _varint(len(text))
        size = _varint(len(head) + len(text) + 7)
        score = raw_scores[4 * id : 4 * id + 4]
        out.append(b"\x0a%b%b%b\x15%b\x18%c" % (size, head, text, score, kinds[id]))
    return b"".join(out)


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value)
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    if value < 128:
        return _SMALL[value]
    return _SMALL_MORE[value & 127] + _varint(value >> 7)


_SMALL = [bytes((value,)) for value in range(128)]
_SMALL_MORE = [bytes((value | 128,)) for value in range(128)]
