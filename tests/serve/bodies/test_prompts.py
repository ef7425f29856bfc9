"""Prompts of texts and ids: completions and embeddings read them by one rule, llama-server's."""

from __future__ import annotations

from typing import Any

import pytest
from running_server import RunningServer

from ggpy.serve.api.prompts import tokens_of
from ggpy.tokenizer import Tokenizer

TINY = Tokenizer.from_gguf("models/tiny/llama.gguf")
BOS, END = TINY.encode("<|im_end|>", parse_special=True)
HELLO, *_ = TINY.encode("hello", add_special=False)
# A value of "prompt" or "input" -> the number of tokens of each prompt.
READ: list[tuple[Any, list[int]]] = [
    ("hello<|im_end|>", [3]),
    (["hello", [BOS, HELLO], [HELLO]], [2, 2, 1]),
    ([BOS, "<|im_end|>", HELLO], [3]),
    (["hello", END, "<|im_end|>"], [4]),
    ([[HELLO, "<|im_end|>"], "hello"], [2, 2]),
    ({"prompt_string": "hello"}, [2]),
    (["hello", {"prompt_string": ["<|im_end|>", END]}], [2, 3]),
]
REFUSED: list[Any] = [
    *([1, -1], ["hello", -1], [1, 1 << 40], [1, None], [1, 1.5], [[1], 1.5], [True], [["hello"]]),
    *([], [[]], [[[1]]], {}, {"prompt_string": 1}, {"prompt_string": {"prompt_string": "a"}}, 1),
]


def test_special_tokens_are_read_and_one_text_gets_the_beginning() -> None:
    assert tokens_of("<|im_end|>", TINY) == tokens_of(["<|im_end|>"], TINY) == [BOS, END]
    assert tokens_of([HELLO, "<|im_end|>", "<|im_end|>"], TINY) == [HELLO, END, END]


@pytest.mark.parametrize(("prompt", "counts"), READ, ids=str)
def test_both_apis_read_the_same_tokens(
    server: RunningServer, prompt: Any, counts: list[int]
) -> None:
    vectors = server.post("/v1/embeddings", input=prompt).json()
    texts = server.post("/v1/completions", prompt=prompt, max_tokens=1).json()
    assert len(vectors["data"]) == len(texts["choices"]) == len(counts)
    for usage in (vectors["usage"], texts["usage"]):
        assert usage["prompt_tokens"] == sum(counts)


@pytest.mark.parametrize("prompt", REFUSED, ids=str)
def test_both_apis_refuse_the_same(server: RunningServer, prompt: Any) -> None:
    for path, name in (("/v1/embeddings", "input"), ("/v1/completions", "prompt")):
        refused = server.post(path, **{name: prompt})
        assert refused.status_code == 400, path
        assert refused.json()["error"]["param"].startswith(name)
