"""Mirostat and adaptive-p: what they leave of candidates (ids[k], logits[k]), and what they learn.

Pure functions of candidates in rising id, and of numbers that follow from the draws before. The
sampler keeps these numbers. Sources: Basu et al. 2021, arXiv:2007.14966; ggml-org/llama.cpp,
llama_sampler_mirostat, llama_sampler_mirostat_v2 and llama_sampler_adaptive_p.

Letters: V vocabulary, k candidates.
"""

from __future__ import annotations

from math import exp, expm1, inf, log, log2

import numpy as np

from .filters import Candidates, top_k
from .ranking import Ids, Logits, largest, softmax, weights

N_ESTIMATE = 100  # candidates from which Mirostat 1 estimates the exponent of Zipf's law
PEAK, SHARPNESS, WIDTH = 5.0, 10.0, 0.3  # of adaptive-p's new logits


def mirostat(ids: Ids, logits: Logits, mu: float, n_vocab: int) -> Candidates:
    """Keeps as many of the most probable candidates as Zipf's law has, in a vocabulary of n_vocab
    tokens, up to a surprise of mu bits.
    """
    return top_k(ids, logits, n_of_surprise(logits, mu, n_vocab))


def n_of_surprise(logits: Logits, mu: float, n_vocab: int) -> int:
    """Returns k of Mirostat 1: 1 to len(logits).

    The exponent s is that of a line through ln p of the most probable candidates over ln of their
    rank; k = ((s - 1) 2^mu / (1 - V^(1 - s)))^(1 / s).
    """
    best = logits[largest(logits, N_ESTIMATE)].astype(np.float64)
    best = best[np.isfinite(best)]
    if len(best) < 2:
        return 1
    ranks = np.log(np.arange(1, len(best) + 1))
    t, b = np.diff(ranks), -np.diff(best)
    s = float(t @ b) / float(t @ t)
    if s <= 0:  # all are equally probable
        return len(logits)
    ratio = (1 - s) / expm1((1 - s) * log(n_vocab)) if s != 1 else 1 / log(n_vocab)
    exponent = (log(ratio) + mu * log(2)) / s
    return len(logits) if exponent >= log(len(logits)) else max(1, int(exp(exponent)))


def mirostat_2(ids: Ids, logits: Logits, mu: float) -> Candidates:
    """Keeps candidates of at most mu bits of surprise, and the most probable one."""
    kept = softmax(logits) >= 2.0 ** -min(max(mu, 0.0), 1000.0)
    kept[largest(logits, 1)] = True
    return ids[kept], logits[kept]


def surprise(candidates: Candidates, token: int) -> float:
    """Returns -log2 of the probability of a candidate that can be drawn."""
    ids, logits = candidates
    w = weights(logits)
    return log2(int(w.sum())) - log2(int(w[np.searchsorted(ids, token)]))


def probability(candidates: Candidates, token: int) -> float:
    """Returns the probability of a candidate."""
    ids, logits = candidates
    return float(softmax(logits)[np.searchsorted(ids, token)])


def adapt(ids: Ids, logits: Logits, target: float) -> Candidates:
    """Returns logits that are the higher, the nearer the probability of a candidate is to `target`:
    PEAK - SHARPNESS d^2 / (1 + d), d = |p - target| / WIDTH.
    """
    d = np.abs(softmax(logits) - target) / WIDTH
    new = (PEAK - SHARPNESS * d * d / (1 + d)).astype(np.float32)
    return ids, np.where(np.isfinite(logits), new, np.float32(-inf))
