"""Infill: what may be written into the middle of a text, for prompts of fill-in-the-middle.

Candidates whose texts begin alike count together, so that the model's wish to go on is not split
among spellings; few that are left are all probable, and the end comes early. Source:
ggml-org/llama.cpp, llama_sampler_infill; merged probabilities choose the candidates there, too,
and the logits of those that remain are as they were.

Letters: k candidates.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .filters import Candidates
from .ranking import softmax

END_WEIGHT = 3  # times k: how much the probability of an end counts against that of text
LEAST = 0.2  # probability of a candidate that is text
END_LOGIT = 1.0  # of the end that takes the place of all candidates, as in llama.cpp


class TokenTexts(Protocol):
    """What the sampler asks of a tokenizer."""

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        ...

    @property
    def end_of_turn_id(self) -> int | None:
        """The one of them that ends an answer in a conversation, or EOS."""
        ...

    @property
    def suppressed_ids(self) -> frozenset[int]:
        """The tokens that no answer may have."""
        ...

    def piece(self, id: int, special: bool = False) -> bytes:
        """The bytes of a token; b"" for a control token."""
        ...


def infill(candidates: Candidates, tokens: TokenTexts) -> Candidates:
    """Returns the ends alone, where they are probable; else the ends, and texts that are probable
    together with those that begin alike. Without such a text, the end of turn is all that remains,
    whether it was a candidate or not.
    """
    ids, logits = candidates
    order = np.argsort(-logits, kind="stable")
    falling = ids[order].tolist()
    p = softmax(logits)[order]
    is_end = np.array([id in tokens.end_ids for id in falling])
    p_end = float(p[is_end].sum())
    if END_WEIGHT * p_end * len(p) > float(p[~is_end].sum()):
        return _kept(candidates, order[is_end])
    p, merged = merge_prefixes([tokens.piece(id) for id in falling], p)
    kept = (p >= LEAST) | is_end
    n_texts = int((kept & ~is_end).sum())
    if not n_texts:
        end = tokens.end_of_turn_id
        return candidates if end is None else (np.array([end]), np.array([END_LOGIT], np.float32))
    p /= p[kept].sum()
    kept &= (p >= 1 / (n_texts + 1)) | is_end
    logits = logits.copy()
    logits[order[merged]] = -inf  # an end with a text may be one of them
    return _kept((ids, logits), order[kept])


def merge_prefixes(
    pieces: Sequence[bytes], p: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns p[k] with the less probable of two candidates, one of which begins with the other,
    added to the more probable one; and merged[k]: which were added, whose p is 0 now.

    Candidates of falling p are taken in turn, each with all that begin with it. Those without text
    or without probability stay alone.
    """
    sums, alive = p.tolist(), (p > 0).tolist()
    by_text = sorted(range(len(pieces)), key=pieces.__getitem__)
    texts = [pieces[i] for i in by_text]
    for i, prefix in enumerate(pieces):
        if not prefix or not alive[i]:
            continue
        start = end = bisect_left(texts, prefix)
        while end < len(texts) and texts[end].startswith(prefix):
            end += 1
        for j in sorted(by_text[start:end]):
            if j == i or not alive[j]:
                continue
            more, less = (j, i) if sums[j] > sums[i] else (i, j)
            sums[more] += sums[less]
            sums[less], alive[less] = 0.0, False
            if less == i:
                break
    return np.array(sums), (p > 0) & ~np.array(alive)


def _kept(candidates: Candidates, indices: NDArray[np.int64]) -> Candidates:
    rising = np.sort(indices)
    return candidates[0][rising], candidates[1][rising]
