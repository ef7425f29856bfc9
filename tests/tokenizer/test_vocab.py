"""Vocabularies that are wrong are refused with the field's name; what files leave out gets its
default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import small_vocab

from ggpy.gguf import File, GGUFError
from ggpy.tokenizer import Tokenizer, TokenType

Metadata = dict[str, Any]
KEY = "tokenizer.ggml."


def bpe(**changes: Any) -> Metadata:
    """A byte-level vocabulary with fields replaced, or left out where the value is ..."""
    return changed(small_vocab.byte_level("gpt-2"), changes)


def spm(**changes: Any) -> Metadata:
    return changed(small_vocab.sentencepiece(True), changes)


def changed(metadata: Metadata, changes: Metadata) -> Metadata:
    metadata |= {KEY + name: value for name, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not ...}


N_BPE = len(bpe()[KEY + "tokens"])
N_SPM = len(spm()[KEY + "tokens"])
BAD: dict[str, tuple[Callable[..., Metadata], Metadata, str]] = {
    "no model": (bpe, {"model": ...}, "model: is missing; known: llama, gpt2, gemma4"),
    "unknown model": (bpe, {"model": "bert"}, "model: 'bert' is not supported"),
    "model is a number": (bpe, {"model": 3}, "model: is int, not a string"),
    "no tokens": (bpe, {"tokens": ...}, "tokens: is missing"),
    "empty tokens": (bpe, {"tokens": []}, "tokens: is empty"),
    "tokens are numbers": (bpe, {"tokens": np.arange(9)}, "tokens: is ndarray, not an array of"),
    "a token twice": (bpe, {"tokens": ["a", "b", "a"]}, "tokens: 'a' stands at 0 and at 2"),
    "types too short": (bpe, {"token_type": np.ones(3, int)}, f"has 3 entries for {N_BPE} tokens"),
    "types are floats": (spm, {"token_type": np.ones(N_SPM)}, "token_type: holds float64"),
    "types are text": (spm, {"token_type": ["1"] * N_SPM}, "token_type: holds"),
    "scores too short": (spm, {"scores": np.zeros(5)}, f"scores: has 5 entries for {N_SPM} tokens"),
    "a score is NaN": (spm, {"scores": np.full(N_SPM, np.nan)}, "scores: entry 0 is not a number"),
    "no merges": (bpe, {"merges": ...}, "merges: is missing"),
    "merges are numbers": (bpe, {"merges": np.arange(4)}, "merges: is ndarray"),
    "merge without blank": (bpe, {"merges": ["ab"]}, "merges: 'ab' is not two tokens"),
    "merge with nothing after": (bpe, {"merges": ["a "]}, "merges: 'a ' is not two tokens"),
    "empty merge": (bpe, {"merges": [""]}, "merges: '' is not two tokens"),
    "merge of no token": (bpe, {"merges": ["a zzz"]}, "merges: .*zzz.* out of vocabulary"),
    "merge into no token": (bpe, {"merges": ["z z"]}, "merges: .*zz.* out of vocabulary"),
    "unknown pre-tokenizer": (bpe, {"pre": "qwen9"}, "pre: unknown pre-tokenizer 'qwen9'; known:"),
    "pre is a number": (bpe, {"pre": 2}, "pre: is int, not a string"),
    "eos is an array": (bpe, {"eos_token_id": np.ones(2, int)}, "is ndarray, not a token id"),
    "eos is text": (bpe, {"eos_token_id": "</s>"}, "eos_token_id: is str, not a token id"),
    "add_bos is a number": (bpe, {"add_bos_token": 1}, "add_bos_token: is int, not true or false"),
    "neither bytes nor unknown": (
        spm,
        {"tokens": ["<s>", "</s>", "a"], "token_type": ..., "scores": ...},
        "neither all of <0x00> to <0xFF> nor an unknown token",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_vocabularies_are_refused(case: str) -> None:
    make, changes, message = BAD[case]
    with pytest.raises(GGUFError, match=message):
        Tokenizer(make(**changes))


def test_the_message_names_the_file() -> None:
    with pytest.raises(GGUFError, match=r"^some/model\.gguf: tokenizer\.ggml\.pre: unknown"):
        Tokenizer(bpe(pre="qwen9"), "some/model.gguf")
    with pytest.raises(GGUFError, match=r"^some/model\.gguf: tokenizer\.ggml\.merges: 'ab'"):
        Tokenizer(bpe(merges=["ab"]), "some/model.gguf")


def test_a_file_without_pre_gets_the_default_and_a_warning() -> None:
    text = "12345 = 'x'"
    tokenizer = Tokenizer(bpe(pre=...))
    assert tokenizer.encode(text) == Tokenizer(bpe(pre="default")).encode(text)
    assert len(tokenizer.warnings) == 1 and "tokenizer.ggml.pre is missing" in tokenizer.warnings[0]
    assert Tokenizer(bpe()).warnings == ()


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (bpe(), (False, False)),
        (bpe(pre="llama-bpe"), (True, False)),
        (bpe(pre="tekken"), (True, False)),
        (bpe(pre="llama-bpe", add_bos_token=False), (False, False)),
        (bpe(pre="llama-bpe", bos_token_id=...), (False, False)),
        (bpe(add_bos_token=True, add_eos_token=True), (True, True)),
        (spm(), (True, False)),
        (spm(add_bos_token=False, add_eos_token=True), (False, True)),
        (small_vocab.gemma4(), (True, False)),
        (small_vocab.gemma4() | {KEY + "add_bos_token": False}, (True, False)),
    ],
)
def test_bos_and_eos_are_added_as_llama_cpp_does(metadata: Metadata, expected: Any) -> None:
    tokenizer = Tokenizer(metadata)
    assert (tokenizer.add_bos, tokenizer.add_eos) == expected
    ids = tokenizer.encode("a")
    assert (ids[0] == tokenizer.bos_id, ids[-1] == tokenizer.eos_id) == expected
    plain = tokenizer.encode("a", add_special=False)
    assert tokenizer.bos_id not in plain and tokenizer.eos_id not in plain


def test_ids_that_files_leave_out() -> None:
    assert Tokenizer(spm(bos_token_id=..., eos_token_id=...)).bos_id == 1
    tokenizer = Tokenizer(bpe(bos_token_id=..., eos_token_id=0xFFFFFFFF))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)


def test_what_llama_cpp_ignores() -> None:
    given = {"bos_token_id": N_SPM, "padding_token_id": -7}
    given |= {"scores": np.zeros(N_SPM + 3), "token_type": np.ones(N_SPM + 3, int)}
    tokenizer = Tokenizer(spm(**given))
    assert tokenizer.bos_id == 1
    assert f"bos_token_id is {N_SPM}, but the vocabulary has the ids 0 to" in tokenizer.warnings[0]
    assert "padding_token_id is -7" in tokenizer.warnings[1]
    tokenizer = Tokenizer(bpe(add_bos_token=True, bos_token_id=...))
    assert not tokenizer.add_bos and "nothing is added" in tokenizer.warnings[0]


def test_old_names_of_tokens_for_infilling() -> None:
    names = {f"{name}_token_id": n for n, name in enumerate(("prefix", "suffix", "middle"))}
    assert Tokenizer(bpe(**names)).infill_ids == {"pre": 0, "suf": 1, "mid": 2}


def test_several_ends() -> None:
    ends = {"eos_token_id": 3, "eos_token_ids": np.array([3, 5, N_BPE, -1])}
    assert {3, 5} <= Tokenizer(bpe(**ends)).end_ids <= set(range(N_BPE))


def test_suppressed_tokens_are_those_of_the_vocabulary_that_end_nothing() -> None:
    settings = {"eos_token_id": 3, "suppress_tokens": np.array([7, 3, 5, 7, N_BPE, -1], np.int32)}
    assert Tokenizer(bpe(**settings)).suppressed_ids == {5, 7}
    assert not Tokenizer(bpe()).suppressed_ids


def test_empty_tokens_get_names() -> None:
    tokens = [*bpe()[KEY + "tokens"], "", ""]
    types = np.array([*bpe()[KEY + "token_type"], 1, 1])
    tokenizer = Tokenizer(bpe(tokens=tokens, token_type=types))
    assert tokenizer.text(N_BPE) == f"[EMPTY_{N_BPE}]"
    assert tokenizer.encode("abc") == Tokenizer(bpe()).encode("abc")


def test_types_without_a_name_are_undefined_and_show_nothing() -> None:
    types = bpe()[KEY + "token_type"].copy()
    types[100] = 99
    assert Tokenizer(bpe(token_type=types)).piece(100, special=True) == b""
    types[100] = TokenType.UNUSED
    assert Tokenizer(bpe(token_type=types)).piece(100, special=True) == b""


def test_the_first_of_equal_merges_counts() -> None:
    merges = ["b c", "a b", "b c"]
    tokens = [*bpe()[KEY + "tokens"][:262], "bc", "ab"]
    tokenizer = Tokenizer(bpe(tokens=tokens, token_type=..., merges=merges))
    assert [tokenizer.text(id) for id in tokenizer.encode("abc")] == ["a", "bc"]


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "vocab.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    metadata = bpe(pre="qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(metadata[KEY + "tokens"])
    writer.add_token_types(metadata[KEY + "token_type"].tolist())
    writer.add_token_merges(metadata[KEY + "merges"])
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    expected = Tokenizer(metadata).encode("Hello 123")
    tokenizer = Tokenizer.from_gguf(path)
    assert tokenizer.encode("Hello 123") == expected
    assert tokenizer.chat_template == "{{ messages }}"
    with File(path) as file:
        assert Tokenizer.from_gguf(file).encode("Hello 123") == expected
    with pytest.raises(GGUFError, match="no such file"):
        Tokenizer.from_gguf(tmp_path / "absent.gguf")
