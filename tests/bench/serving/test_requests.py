"""Requests: their lengths, their words, the fields they have, and what a seed repeats."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from ggpy.bench.serving.lengths import TokenRange, read_prompts, tokens, tokens_or_file
from ggpy.bench.serving.requests import DRAWN, LoadRequest, RequestOptions, requests
from ggpy.bench.serving.words import WORDS, PromptMaker, measured


def made(n: int, maker: PromptMaker | None = None, **options: Any) -> list[LoadRequest]:
    return list(requests(RequestOptions(**options), n, maker or PromptMaker()))


def body(request: LoadRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.body)
    return found


def prompt(request: LoadRequest) -> str:
    return str(body(request)["messages"][0]["content"])


def test_words_differ() -> None:
    assert len(WORDS) == len(set(WORDS)) > 100


@pytest.mark.parametrize("sizes", [{"a": 1, "bc": 2, "def": 3}, {"ab": 2, "cde": 3}, {"a": 1}])
def test_a_text_has_as_many_tokens_as_its_words_allow(sizes: dict[str, int]) -> None:
    maker = PromptMaker(sizes)
    for n in range(60):
        found = sum(sizes[word] for word in maker.text(n, random.Random(n)).split())
        assert found == n or (n - found < min(sizes.values()))


def test_words_are_measured_by_what_they_add() -> None:
    """The tokenizer of this test puts a token before a text, and cuts words into pairs."""
    counted = []

    async def count(text: str) -> int:
        counted.append(text)
        return 1 + sum((len(word) + 1) // 2 for word in text.split())

    maker = asyncio.run(measured(count))
    assert maker.is_measured and maker.sizes == {w: (len(w) + 1) // 2 for w in WORDS}
    assert len(counted) == len(WORDS)


def test_a_request() -> None:
    (found,) = made(1, input_len=TokenRange(20, 20), output_len=TokenRange(7, 7), model="m")
    assert len(prompt(found).split()) == found.n_input == 20 and found.max_tokens == 7
    del (fields := body(found))["messages"]
    assert fields == {
        "model": "m", "max_tokens": 7, "stream": True, "stream_options": {"include_usage": True}
    }  # fmt: skip


def test_the_fields_of_options() -> None:
    schema = {"type": "object"}
    (found,) = made(1, ignores_eos=True, temperature=0.5, schema=schema, extra={"top_k": 3})
    fields = body(found)
    assert fields["ignore_eos"] is True and fields["min_tokens"] == fields["max_tokens"] == 128
    assert fields["temperature"] == 0.5 and fields["top_k"] == 3
    assert fields["response_format"]["json_schema"]["schema"] == schema
    (found,) = made(1, api="completions", schema=schema)
    assert body(found)["json_schema"] == schema and len(body(found)["prompt"].split()) == 512


def test_lengths_are_drawn_from_a_range() -> None:
    found = made(300, input_len=TokenRange(3, 9), output_len=TokenRange(1, 4))
    assert {request.n_input for request in found} == {*range(3, 10)}
    assert {request.max_tokens for request in found} == {1, 2, 3, 4}
    assert all(len(prompt(request).split()) == request.n_input for request in found)


def test_a_shared_prefix_comes_before_the_rest() -> None:
    found = [prompt(r).split() for r in made(5, n_shared=30, input_len=TokenRange(10, 10))]
    assert len({tuple(words[:30]) for words in found}) == 1 and {len(w) for w in found} == {40}
    assert len({tuple(words[30:]) for words in found}) == 5


def test_a_seed_repeats_the_requests() -> None:
    options = {"abort_share": 0.5, "has_random_params": True, "output_len": TokenRange(5, 50)}
    first = made(40, seed=1, **options)
    assert first == made(40, seed=1, **options) != made(40, seed=2, **options)
    plain = made(40, seed=1, output_len=TokenRange(5, 50))
    assert [prompt(r) for r in first] == [prompt(r) for r in plain]


def test_the_share_that_is_cut_off() -> None:
    found = made(2000, abort_share=0.3, output_len=TokenRange(8, 8), input_len=TokenRange(1, 1))
    cuts = [request.cut_at for request in found if request.cut_at is not None]
    assert len(cuts) == pytest.approx(600, rel=0.1) and {*cuts} == {*range(4)}
    assert not any(request.cut_at is not None for request in made(99))
    assert all(request.cut_at is not None for request in made(99, abort_share=1.0))


def test_random_parameters() -> None:
    found = [body(request) for request in made(300, has_random_params=True)]
    for name in DRAWN:
        values = {json.dumps(fields[name]) for fields in found if name in fields}
        assert len(values) >= 3, name
        assert 90 < sum(name in fields for fields in found) < 210, name
    cut = made(100, has_random_params=True, abort_share=1.0)
    assert not any("stop" in body(request) for request in cut)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": "é", "max_tokens": 5},
        {"messages": [{"role": "system", "content": "s"}], "seed": 7},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    assert tokens_or_file(str(path)) == path and read_prompts(path) == rows
    found = [body(r) for r in made(3, prompts=read_prompts(path), output_len=TokenRange(2, 2))]
    assert [fields["max_tokens"] for fields in found] == [5, 2, 5]
    assert found[0]["messages"] == [{"role": "user", "content": "é"}] == found[2]["messages"]
    assert found[1]["messages"] == rows[1]["messages"] and found[1]["seed"] == 7
    assert body(made(1, prompts=rows, api="completions")[0])["prompt"] == "é"
    with pytest.raises(ValueError, match="needs --endpoint chat"):
        made(2, prompts=rows, api="completions")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ("{", "line 1 is no JSON"),
        ('{"prompt": "x"}\n[]', "line 2 must be an object"),
        ('{"prompt": "x", "messages": []}', "either"),
        ('{"prompt": "x", "max_tokens": "5"}', "max_tokens is '5'"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens is 0"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_ranges() -> None:
    assert tokens("512") == TokenRange(512, 512) and str(tokens("512")) == "512"
    assert tokens("128-2048") == TokenRange(128, 2048) and str(tokens("1-2")) == "1-2"
    for bad in ("0", "9-3", "-1", "a", "", "1-", "1.5"):
        with pytest.raises(ValueError, match="no number of tokens"):
            tokens(bad)
    with pytest.raises(ValueError, match="is no file"):
        tokens_or_file("/nowhere.jsonl")
