"""llama.cpp's own test vectors on real vocabularies, where their folder is there.

A vocabulary x.gguf stands beside x.gguf.inp, texts between marks, and x.gguf.out, a line of ids
for each.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from ggpy.gguf import File
from ggpy.tokenizer import Tokenizer
from ggpy.tokenizer.vocab import MODELS

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("GGPY_TEST_VOCAB") or CHECKOUT.parent / "shared" / "vocab")
KNOWN_ENDS = {
    "ggml-vocab-gpt-2": {50256},
    "ggml-vocab-llama-bpe": {128001, 128009},
    "ggml-vocab-llama-spm": {2},
    "ggml-vocab-qwen2": {128247, 151643, 151645},
}
NAMES = sorted({*KNOWN_ENDS, *(path.name[:-9] for path in FOLDER.glob("*.gguf.inp"))})


@cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(FOLDER / f"{name}.gguf")


@cache
def model_of(name: str) -> str:
    with File(FOLDER / f"{name}.gguf") as file:
        return file.metadata["tokenizer.ggml.model"]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Each vocabulary that has vectors."""
    if not (FOLDER / f"{request.param}.gguf.inp").is_file():
        pytest.skip(f"no vectors {request.param}.gguf.inp in {FOLDER}: set GGPY_TEST_VOCAB")
    model = model_of(request.param)
    if model not in MODELS:
        pytest.skip(f"{request.param} is of the model {model}, which is not supported")
    return request.param


def vectors(name: str) -> list[tuple[str, list[int]]]:
    texts = (FOLDER / f"{name}.gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = (FOLDER / f"{name}.gguf.out").read_text().split("\n")
    return [
        (text, [int(id) for id in line.split()]) for text, line in zip(texts, lines, strict=False)
    ]


def test_ids_are_llama_cpps(name: str) -> None:
    cases = vectors(name)
    assert len(cases) > 40
    for text, ids in cases:
        assert tokenizer(name).encode(text, add_special=False) == ids, ascii(text)


def test_text_comes_back(name: str) -> None:
    for text, ids in vectors(name):
        assert tokenizer(name).decode(ids) == text


def test_streamed_text_is_the_same(name: str) -> None:
    for text, ids in vectors(name):
        stream = tokenizer(name).stream(continues=False)
        assert "".join([stream.add(id) for id in ids]) + stream.finish() == text


@pytest.mark.parametrize("name", KNOWN_ENDS, indirect=True)
def test_tokens_that_end_an_answer(name: str) -> None:
    assert tokenizer(name).end_ids == KNOWN_ENDS[name]


def test_ids_of_a_whole_vocabulary_have_bytes(name: str) -> None:
    made = tokenizer(name)
    assert all(made.piece(id, special=True) for id in range(made.n_vocab))
