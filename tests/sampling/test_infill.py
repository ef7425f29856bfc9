"""The sampler infill: what it leaves, by hand and by llama.cpp's loops written out the slow way.

`plain` follows llama_sampler_infill_apply: candidates in falling probability; the ends alone where
three times their sum times the number of candidates exceeds the sum of the others; each pair of
which one text begins with the other merged into the more probable one; then thresholds of 0.2 and,
of what is left, of 1 / (texts + 1), which ends are exempt from. test_llama_cpp.py has whole chains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from sampling_cases import AllowedTokens, plain_softmax, random_logits

from ggpy.sampling import Sampler, SamplingParams
from ggpy.sampling.infill import infill

WORDS = ("", "a", "ab", "abc", "b", "ba", "c", "", "x", "xy", "ca", "cab", "d", "end")


@dataclass
class Words:
    """A vocabulary of texts."""

    texts: tuple[str, ...] = WORDS
    end_ids: frozenset[int] = frozenset({0, 13})
    end_of_turn_id: int | None = 0
    suppressed_ids: frozenset[int] = frozenset()

    def piece(self, id: int, special: bool = False) -> bytes:
        return self.texts[id].encode()


def of(p: dict[int, float], words: Words | None = None) -> list[int]:
    """What is left of candidates of these probabilities."""
    ids = np.array(sorted(p))
    logits = np.log([p[id] for id in ids]).astype(np.float32)
    kept, out = infill((ids, logits), words or Words())
    assert len(kept) == len(out) and np.isfinite(out).any()
    return kept.tolist()


def plain(logits: np.ndarray, words: Words) -> list[int]:
    """Ids that are left of candidates 0, 1, ... and that can be drawn."""
    found = plain_softmax(logits)
    cur = sorted(([id, p] for id, p in enumerate(found)), key=lambda c: -c[1])
    p_end = sum(p for id, p in cur if id in words.end_ids)
    if 3 * p_end * len(cur) > sum(found) - p_end:
        return sorted(id for id, _ in cur if id in words.end_ids)
    gone = set()
    for one in cur:
        for other in cur:
            if one[0] in gone:
                break
            a, b = words.texts[one[0]], words.texts[other[0]]
            if one is other or other[0] in gone or not a or not b.startswith(a):
                continue
            more, less = (other, one) if other[1] > one[1] else (one, other)
            more[1] += less[1]
            less[1] = 0
            gone.add(less[0])
    cur = [c for c in cur if c[1] >= 0.2 or c[0] in words.end_ids]
    n = sum(id not in words.end_ids for id, _ in cur)
    if not n:
        return [0]
    total = sum(p for _, p in cur)
    cur = [c for c in cur if c[1] / total >= 1 / (n + 1) or c[0] in words.end_ids]
    return sorted(id for id, _ in cur if id not in gone)


def test_ends_that_are_probable_are_all_that_remains() -> None:
    assert of({0: 0.11, 1: 0.49, 4: 0.4}) == [0]
    assert of({0: 0.09, 1: 0.5, 4: 0.4, 13: 0.01}) == [0, 13]
    assert of({0: 0.05, 1: 0.5, 4: 0.45}) == [0, 1, 4]


def test_texts_that_begin_alike_count_together() -> None:
    assert of({1: 0.1, 2: 0.15, 3: 0.05, 6: 0.7}) == [6], "0.3 is less than a third of all"
    assert of({1: 0.15, 2: 0.2, 3: 0.05, 6: 0.6}) == [2, 6]
    assert of({4: 0.4, 6: 0.4, 7: 0.2}) == [4, 6], "no text begins with nothing"


def test_an_end_takes_the_place_of_improbable_texts() -> None:
    flat = dict.fromkeys((1, 4, 6, 8, 12, 7), 1 / 6)
    assert of(flat) == [0]
    assert of(flat, Words(end_of_turn_id=None)) == sorted(flat)


def test_random_candidates_against_loops() -> None:
    kinds = set()
    for seed in range(300):
        logits = random_logits(len(WORDS), seed)
        logits[1:4] -= 12 * (seed % 5 == 0)
        logits *= (0.1, 1)[seed % 3 > 0]
        logits[[0, 13]] -= 12 if seed % 2 else 6
        kept, out = infill((np.arange(len(WORDS)), logits), Words())
        expected = plain(logits, Words())
        assert kept[np.isfinite(out)].tolist() == expected
        kinds.add((0 in expected, 13 in expected, min(3, len(expected))))
    assert kinds == {(True, True, 2), (True, True, 3)}, "both ends, alone or with texts"


def test_a_chain_with_it_is_neither_greedy_nor_on_a_gpu() -> None:
    params = SamplingParams(samplers=("infill", "temperature"), temperature=0, seed=1)
    sampler = Sampler(params, len(WORDS), tokens=Words())
    assert not sampler.chain.greedy and not sampler.chain.has_kernels
    logits = np.full(len(WORDS), -30, np.float32)
    logits[[1, 2, 3, 6]] = np.log([0.2, 0.2, 0.2, 0.4])
    assert sampler.sample(logits) == 6, "whose logit is the highest, though 0.6 begin with a"
    with pytest.raises(ValueError, match="infill: it needs a tokenizer"):
        Sampler(params, len(WORDS))


def test_a_mask_that_forbids_the_end_is_obeyed() -> None:
    params = SamplingParams(samplers=("infill",), seed=1)
    for mask, drawn in (((0, 1, 4, 6, 8, 12), {0}), ((1, 4, 6, 8, 12), {1, 4, 6, 8, 12})):
        sampler = Sampler(params, len(WORDS), (), AllowedTokens(*mask), Words())
        logits = np.zeros(len(WORDS), np.float32)
        logits[0] = -30
        assert {sampler.sample(logits) for _ in range(60)} == drawn
