"""Filters of candidates: (ids[k], logits[k]) in rising id -> fewer of them, or scaled logits.

Pure functions. cuda/sampling/sample.cu repeats `top_k`, `top_p`, `min_p`, `xtc` and `scale` with
the same bits. This module knows no parameters, no tokenizer and no model.
"""

from __future__ import annotations

from math import log

import numpy as np
from numpy.typing import NDArray

from .ranking import Ids, Logits, largest, prefix, softmax, weights

Candidates = tuple[Ids, Logits]


def top_n_sigma(ids: Ids, logits: Logits, n: float) -> Candidates:
    """Keeps candidates within n standard deviations of the highest logit; n = 0 or less keeps all.

    The standard deviation is that of the finite logits. Source: Tang et al. 2024, arXiv:2411.07641.
    """
    if n <= 0 or len(ids) < 2:
        return ids, logits
    is_finite = np.isfinite(logits)
    finite = logits if is_finite.all() else logits[is_finite]
    with np.errstate(over="ignore"):  # -inf keeps all
        lowest = finite.max() - np.float32(n * finite.std(dtype=np.float64))
    return _keep(ids, logits, np.flatnonzero(logits >= lowest))


def top_k(ids: Ids, logits: Logits, k: int) -> Candidates:
    """Keeps the k candidates of highest logit; k = 0 or less keeps all."""
    if k <= 0 or k >= len(ids):
        return ids, logits
    return _keep(ids, logits, np.sort(largest(logits, k)))


def typical_p(ids: Ids, logits: Logits, p: float, min_keep: int = 0) -> Candidates:
    """Keeps the fewest candidates, nearest to the entropy in surprise, that together hold more
    than p; at least min_keep.

    Source: Meister et al. 2022, arXiv:2202.00666.
    """
    if p >= 1 or len(ids) < 2:
        return ids, logits
    w = weights(logits)
    below = logits.astype(np.float64)
    below -= float(logits.max())
    np.maximum(below, -64.0, out=below)  # a weight is 0 from -28 on
    total = float(w.sum())
    below -= float(w @ below) / total  # surprise is its negative, and entropy the mean surprise
    scores = np.negative(np.abs(below, out=below), out=below)
    kept = prefix(scores, w, p * total, side="right")
    return _keep(ids, logits, _at_least(min_keep, kept, scores))


def top_p(ids: Ids, logits: Logits, p: float, least: float = 0.0, min_keep: int = 0) -> Candidates:
    """Keeps the fewest most probable candidates that together hold p or more, at least min_keep.

    least: then those that `min_p` keeps; it is asked first, because few are left to be put in
    order. It is given without min_keep.

    Source: Holtzman et al. 2019, arXiv:1904.09751.
    """
    if p >= 1:
        return min_p(ids, logits, least)
    w = weights(logits)
    mass = p * float(w.sum())
    if least > 0:
        probable = np.flatnonzero(logits >= _lowest(logits, least))
        w, (ids, logits) = w[probable], _keep(ids, logits, probable)
        if float(w.sum()) < mass:
            return ids, logits
    return _keep(ids, logits, _at_least(min_keep, prefix(logits, w, mass), logits))


def min_p(ids: Ids, logits: Logits, p: float, min_keep: int = 0) -> Candidates:
    """Keeps candidates at least p times as probable as the best one (Nguyen et al. 2024), and at
    least min_keep.
    """
    if p <= 0:
        return ids, logits
    kept = np.flatnonzero(logits >= _lowest(logits, p))
    return _keep(ids, logits, _at_least(min_keep, kept, logits))


def xtc(ids: Ids, logits: Logits, threshold: float, min_keep: int = 0) -> Candidates:
    """Excludes top choices: drops all candidates of probability `threshold` or more but the least
    probable one of them; none, where fewer than min_keep would remain.

    Source: text-generation-webui pull request 6335 by p-e-w.
    """
    w = weights(logits)
    above = np.flatnonzero(w >= threshold * float(w.sum()))
    if len(above) < 2 or len(ids) - (len(above) - 1) < min_keep:
        return ids, logits
    excluded = above[largest(logits[above], len(above))[:-1]]
    return np.delete(ids, excluded), np.delete(logits, excluded)


def scale(ids: Ids, logits: Logits, temperature: float, level: bool = False) -> Candidates:
    """Returns (l - max l) / temperature; at 0 or less, the best candidate alone.

    level: max l / temperature, up to 1e20, is added, for links to which the sign of a logit
    matters.
    """
    if temperature <= 0:
        return _keep(ids, logits, largest(logits, 1))
    divisor, best = np.float32(max(temperature, 1e-30)), logits.max()
    with np.errstate(over="ignore"):
        scaled = (logits - best) / divisor
        return ids, scaled + np.clip(best / divisor, -1e20, 1e20) if level else scaled


def dynamic_temperature(
    logits: Logits, temperature: float, spread: float, exponent: float
) -> float:
    """Returns temperature - spread to temperature + spread, rising with the entropy of logits[k].

    The entropy is taken relative to that of k equal logits, and raised to `exponent`.
    """
    if spread <= 0 or len(logits) < 2:
        return temperature
    probabilities = softmax(logits)
    positive = probabilities[probabilities > 0]
    relative = float(-(positive @ np.log(positive))) / log(len(logits))
    low, high = max(0.0, temperature - spread), temperature + spread
    return low + (high - low) * min(max(relative, 0.0), 1.0) ** exponent


def _lowest(logits: Logits, p: float) -> np.float32:
    """The lowest logit of a candidate p times as probable as the best one."""
    return np.float32(logits.max() + np.float32(log(p)))


def _at_least(n: int, kept: Ids, scores: NDArray) -> Ids:
    """Rising indices of scores[k] that are kept, or of the n largest where they are fewer."""
    return kept if len(kept) >= n else np.sort(largest(scores, n))


def _keep(ids: Ids, logits: Logits, indices: Ids) -> Candidates:
    """The candidates at rising indices."""
    if len(indices) == len(ids):
        return ids, logits
    is_whole = int(ids[-1]) == len(ids) - 1  # rising ids are then their own indices
    return indices if is_whole else ids[indices], logits[indices]
