"""What is particular to sentencepiece vocabularies: bytes, unknown tokens, pieces the library
refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ggpy.gguf import GGUFError
from ggpy.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def tokenizer(pieces: dict[str, tuple[int, float]], byte_tokens: bool = True, **more: Any):
    """A vocabulary of "<unk>", bytes perhaps, and pieces with their type and score."""
    pieces = {"<unk>": (2, 0.0), **pieces}
    tokens = [*pieces, *(BYTES if byte_tokens else [])]
    types = [kind for kind, _ in pieces.values()] + [6] * (len(tokens) - len(pieces))
    scores = [score for _, score in pieces.values()] + [0.0] * (len(tokens) - len(pieces))
    fields = {
        "model": "llama",
        "tokens": tokens,
        "token_type": np.array(types, np.int32),
        "scores": np.array(scores, np.float32),
        "add_bos_token": False,
        "add_space_prefix": False,
        **more,
    }
    return Tokenizer({f"tokenizer.ggml.{key}": value for key, value in fields.items()})


ABC = {"a": (1, -9.0), "b": (1, -9.0), "c": (1, -9.0), "ab": (1, -2.0), "bc": (1, -1.0)}


def test_the_pair_of_highest_score_is_merged() -> None:
    made = tokenizer(ABC)
    assert [made.text(id) for id in made.encode("abc")] == ["a", "bc"]
    lower = tokenizer(ABC | {"bc": (1, -3.0)})
    assert [lower.text(id) for id in lower.encode("abc")] == ["ab", "c"]


def test_characters_without_a_token_become_bytes() -> None:
    made = tokenizer(ABC)
    assert [made.text(id) for id in made.encode("a\u00e9\0")] == ["a", "<0xC3>", "<0xA9>", "<0x00>"]


def test_or_the_unknown_token_where_there_are_no_bytes() -> None:
    made = tokenizer(ABC, byte_tokens=False)
    assert [made.text(id) for id in made.encode("a\u00e9b")] == ["a", "<unk>", "b"]


def test_bytes_count_whatever_their_type() -> None:
    types = np.ones(len(ABC) + 1 + 256, np.int32)
    made = tokenizer(ABC, token_type=types)
    assert [made.text(id) for id in made.encode("\u00e9")] == ["<0xC3>", "<0xA9>"]


def test_no_piece_or_several_may_be_unknown() -> None:
    none = tokenizer(ABC | {"<unk>": (1, 0.0)})
    assert [none.text(id) for id in none.encode("abc\n")] == ["a", "bc", "<0x0A>"]
    several = tokenizer(ABC | {"<unk>": (2, 0.0), "<x>": (2, 0.0), "<y>": (2, 0.0)})
    assert several.encode("abc") == none.encode("abc")
    control = tokenizer(ABC | {"<unk>": (3, 0.0)})
    assert control.encode("abc") == none.encode("abc")


@pytest.mark.parametrize("piece", ["a\0b", "\0", "x" * 5000, ""])
def test_pieces_that_the_library_refuses_are_kept_out_of_it(piece: str) -> None:
    made = tokenizer(ABC | {piece: (1, 5.0)})
    assert made.n_vocab == 1 + len(ABC) + 1 + 256
    text = f"abc{piece}<ggpy:6>"
    assert made.decode(made.encode(text)) == text
    assert 1 + len(ABC) not in made.encode(text)


@pytest.mark.parametrize("score", [float("inf"), float("-inf"), 3e38])
def test_extreme_scores_are_scores(score: float) -> None:
    made = tokenizer(ABC | {"ab": (1, score)})
    assert made.decode(made.encode("abcab")) == "abcab"


def test_what_the_library_refuses_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggpy.tokenizer.spm.model_proto", lambda vocab: b"\xff\xff")
    with pytest.raises(GGUFError, match="sentencepiece refuses this vocabulary"):
        tokenizer(ABC)


def test_control_tokens_in_text_are_only_text() -> None:
    pieces = {"<s>": (3, 0.0), "<": (1, -1.0), "s": (1, -1.0), ">": (1, -1.0), "<s": (1, -1.0)}
    made = tokenizer(pieces)
    assert [made.text(id) for id in made.encode("<s>")] == ["<s", ">"]
    assert [made.text(id) for id in made.encode("<s>", parse_special=True)] == ["<s>"]
