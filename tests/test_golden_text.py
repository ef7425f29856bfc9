"""Real models continue prompts as llama.cpp does (tests/golden/make_golden.py).

Two correct runtimes may part where the two best logits are nearly equal, so a place where they are
within 0.05 proves nothing and the texts are compared up to the first one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import ggpy
from ggpy.sampling import SamplingParams

GOLDEN = Path(__file__).resolve().parent / "golden"
TIE = 0.05  # logits


def load_golden(name: str) -> list[dict]:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["cases"]


class Golden(NamedTuple):
    """A model, its cases, and what it says at each golden token given those before it."""

    model: ggpy.Model
    cases: list[dict]
    gaps: list[np.ndarray]  # how far the two best logits are apart
    best: list[list[int]]  # the best id


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def golden(request) -> Iterator[Golden]:
    """Each model is loaded once and let go before the next."""
    path = request.getfixturevalue(request.param)
    cases = load_golden({"gemma3": "gemma3-270m"}.get(request.param, request.param))
    cases = cases if request.param == "smollm2" else cases[::4]  # the larger model takes longer
    with ggpy.load(path, device="cpu", n_ctx=128, n_seq=len(cases), n_threads=1) as model:
        gaps, best = zip(*(gaps_and_best(model, case) for case in cases), strict=True)
        yield Golden(model, cases, list(gaps), list(best))


def gaps_and_best(model: ggpy.Model, case: dict) -> tuple[np.ndarray, list[int]]:
    prompt, ids = case["prompt_ids"], case["ids"]
    logits = model.logits(prompt + ids[:-1])[len(prompt) - 1 :]
    two = -np.partition(-logits, 1, axis=1)[:, :2]
    return two[:, 0] - two[:, 1], logits.argmax(axis=1).tolist()


def test_prompts_are_tokenized_alike(golden):
    encode = golden.model.tokenizer.encode
    for case in golden.cases:
        assert encode(case["prompt"], parse_special=True) == case["prompt_ids"]


def test_every_token_that_is_no_tie_is_the_best_one(golden):
    compared = 0
    for case, gaps, best in zip(golden.cases, golden.gaps, golden.best, strict=True):
        clear = np.flatnonzero(gaps > TIE)
        assert [best[i] for i in clear] == [case["ids"][i] for i in clear], case["prompt"]
        compared += len(clear)
    assert compared > 21 * len(golden.cases)


def test_greedy_text_is_the_same_up_to_the_first_tie(golden):
    """All prompts in one ragged batch."""
    engine, greedy = golden.model.engine, SamplingParams(temperature=0)
    running = []
    for case, gaps in zip(golden.cases, golden.gaps, strict=True):
        n = int(np.argmax([*(gaps <= TIE), True]))
        running.append((case, engine.add(case["prompt_ids"], greedy, max_tokens=n), n))
    while engine.busy:
        engine.step()
    for case, sequence, n in running:
        assert sequence.ids[sequence.n_prompt :] == case["ids"][:n], case["prompt"]
        if n == len(case["ids"]):
            text = "".join(piece.text for piece in sequence.pieces)
            assert text.rstrip("\ufffd") == case["text"].rstrip("\ufffd")
    whole = sum(n == len(case["ids"]) for case, _, n in running)
    assert whole >= len(running) // 4, "whole texts"


def test_keys_and_values_in_chunks_and_pages_equal_the_whole(smollm2):
    """A prompt over several pages, in chunks that are no multiple of a page, on a real model."""
    with ggpy.load(smollm2, device="cpu", n_ctx=256, n_batch=50, n_threads=1) as model:
        ids = model.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 14)
        chunked = model.logits(ids)
        model.engine.n_batch = 256
        np.testing.assert_allclose(chunked, model.logits(ids), atol=2e-3)
        assert len(ids) > 128
