"""What may be done to logits before a token is drawn: the links of llama.cpp's sampler chain.

Pure functions of two kinds. Adjustments (`add_bias`, `penalize`, `dry`) change the logits of the
whole vocabulary. Filters take candidates, a pair (ids[k], logits[k]) in rising id, and return fewer
of them. None sorts a vocabulary: each orders no more of it than it needs. `add_bias`, `penalize`,
`weights`, `top_k`, `top_p`, `min_p`, `xtc` and `scale` are repeated in cuda/sampling/sample.cu, operation by
operation, with the same bits. This module knows no parameters, no tokenizer and no model.

Letters: V vocabulary, k candidates, n history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import log
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]
Probabilities = NDArray[np.float64]
Weights = NDArray[np.int64]
Candidates = tuple[Ids, Logits]

MAX_BREAKER_CHARS = 40
MAX_BREAKER_TAIL = 20  # tokens after the one in which a sequence breaker starts
MAX_BREAKER_TEXTS = 64
FLOAT32_MAX = float(np.finfo(np.float32).max)
LOG_FLOAT32_MAX = 88.7228391  # DRY's exponential stops where float32 does

WEIGHT_BITS = 40  # of the most probable candidate's weight
LOG2_E = 1.4426950408889634
EXP2 = (  # 2^x for |x| <= 1/2, to 1e-14: ln(2)^i / i!
    *(1.0, 0.6931471805599453, 0.24022650695910072, 0.05550410866482158, 0.009618129107628477),
    *(0.0013333558146428443, 0.0001540353039338161, 1.5252733804059841e-05),
    *(1.321548679014431e-06, 1.01780860092397e-07, 7.054911620801123e-09, 4.4455382718708116e-10),
)


def softmax(logits: Logits) -> Probabilities:
    """logits[k] -> probabilities[k]."""
    e = np.exp(logits.astype(np.float64) - float(logits.max()))
    return e / e.sum()


def weights(logits: Logits) -> Weights:
    """floor(2^40 e^(l - max l)) of logits[k], at least one of which is finite and none NaN.

    Whole numbers, whose sums are the same in any order and on any machine, and no library's
    exponential: single and double precision, no fused multiply-add, each rounding as written here.
    """
    with np.errstate(over="ignore"):
        below = (logits - logits.max()).astype(np.float64)
    turns = np.maximum(below * LOG2_E, -64.0)  # the weight is 0 long before
    whole = np.rint(turns)
    turns -= whole
    power = np.full_like(turns, EXP2[-1])
    for coefficient in EXP2[-2::-1]:
        power *= turns
        power += coefficient
    return np.ldexp(power, whole.astype(np.int32) + WEIGHT_BITS).astype(np.int64)


# Ordering


def largest(scores: NDArray, k: int) -> Ids:
    """Indices of the k largest of scores[n] in falling order, ties by index; no score may be NaN.

    At least k scores reach the bound and few others do, so few are sorted.
    """
    n = len(scores)
    indices = np.flatnonzero(scores >= _bound(scores, k)) if 4 * k < n else np.arange(n)
    order = np.argsort(-scores[indices], kind="stable")[:k]
    return indices[order]


def _bound(scores: NDArray, k: int) -> float:
    """A number that at least k of scores[n] reach: the k-th largest of column maxima, or of all."""
    columns = len(scores) // 64
    if 4 * k < columns:
        scores = scores[: columns * 64].reshape(64, columns).max(axis=0)
    at = len(scores) - k
    return np.partition(scores, at)[at]


def prefix(
    scores: NDArray,
    weights: Weights | Probabilities,
    mass: float,
    side: Literal["left", "right"] = "left",
) -> Ids:
    """Indices in falling order of scores[n], as many as it takes for weights[n] to sum to `mass`.

    Side "left" stops where the sum is `mass` or more, "right" where it is more.
    """
    n = len(scores)
    k = 64
    while True:
        k = min(k, n)
        indices = largest(scores, k)
        sums = np.cumsum(weights[indices]).astype(np.float64)
        last = int(np.searchsorted(sums, mass, side=side))
        if last < k or k == n:
            return indices[: last + 1]
        k *= 16


# Adjustments: logits[V] -> logits[V]


def add_bias(logits: Logits, bias: Mapping[int, float]) -> Logits:
    """l[id] + bias[id]."""
    out = logits.copy()
    out[list(bias)] += np.array(list(bias.values()), np.float32)  # no id is there twice
    return out


def penalize(
    logits: Logits, recent: Sequence[int], repeat: float, presence: float, frequency: float
) -> Logits:
    """Lower the logits of tokens that occur c > 0 times in recent[n].

    l > 0 is divided by `repeat`, l <= 0 multiplied by it (Keskar et al. 2019, with llama.cpp's rule
    for the sign); then c * frequency + presence is taken off.
    """
    out = logits.copy()
    ids, counts = np.unique(np.asarray(recent, dtype=np.int64), return_counts=True)
    seen = out[ids]
    with np.errstate(over="ignore"):  # of a logit that is near float32's end itself
        seen = np.where(seen > 0, seen / np.float32(repeat), seen * np.float32(repeat))
        out[ids] = seen - (counts * frequency + presence).astype(np.float32)
    return out


def suffix_matches(recent: Sequence[int]) -> list[int]:
    """z[i]: how many last tokens of recent[:n - i] equal those of recent[n]; z[0] = n.

    The Z algorithm over the reversed history: linear time.
    """
    s = list(reversed(recent))
    n = len(s)
    z = [n] * n
    left = right = 0  # s[left:right] equals s[:right - left]
    for i in range(1, n):
        length = min(right - i, z[i - left]) if i < right else 0
        while i + length < n and s[length] == s[i + length]:
            length += 1
        z[i] = length
        if i + length > right:
            left, right = i, i + length
    return z


def tokens_since_breaker(recent: Sequence[int], breakers: Iterable[Sequence[int]]) -> int:
    """How many tokens follow the last sequence breaker in recent[n]; n without one."""
    tails: dict[int, list[tuple[int, ...]]] = {}
    for head, *tail in breakers:
        tails.setdefault(head, []).append(tuple(tail))
    for start in range(len(recent) - 1, -1, -1):
        after = tuple(recent[start + 1 : start + 1 + MAX_BREAKER_TAIL])
        found = [len(t) for t in tails.get(recent[start], ()) if after[: len(t)] == t]
        if found:
            return len(recent) - start - 1 - max(found)
    return len(recent)


def repetitions(
    recent: Sequence[int], allowed: int, breakers: Iterable[Sequence[int]]
) -> dict[int, int]:
    """Tokens that would extend a repetition -> its length so far in tokens, at least `allowed`."""
    limit = tokens_since_breaker(recent, breakers)
    if len(recent) <= allowed or limit < allowed:
        return {}
    longest: dict[int, int] = {}
    for i, match in enumerate(suffix_matches(recent)):
        length = min(match, limit)
        if i > 0 and length >= allowed:
            follower = recent[len(recent) - i]
            longest[follower] = max(length, longest.get(follower, 0))
    return longest


def dry(
    logits: Logits,
    recent: Sequence[int],
    multiplier: float,
    base: float,
    allowed: int,
    breakers: Sequence[Sequence[int]] = (),
) -> Logits:
    """Don't Repeat Yourself: l - multiplier * base^(length - allowed) where one would go on.

    base is at least 1; the power, and what is taken off, are at most what float32 holds. A breaker
    of one token is not penalised itself. Source: text-generation-webui pull request 5677 by p-e-w;
    ggml-org/llama.cpp, llama_sampler_dry.
    """
    spared = {sequence[0] for sequence in breakers if len(sequence) == 1}
    highest = int(LOG_FLOAT32_MAX / log(base)) if base > 1 else 0  # any power of 1 is 1
    out = logits.copy()
    with np.errstate(over="ignore"):  # of a logit that is near float32's end itself
        for token, length in repetitions(recent, allowed, breakers).items():
            if token not in spared:
                penalty = multiplier * base ** min(length - allowed, highest)
                out[token] -= np.float32(min(penalty, FLOAT32_MAX))
    return out


def breaker_sequences(
    breakers: Iterable[str], pieces: Sequence[bytes], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Token sequences in which the text of a breaker may appear, for DRY.

    pieces[V] are the bytes of each token; `encode` turns text into ids without special tokens. A
    token that holds the breaker is a sequence by itself; one that ends inside the breaker is
    followed by the ids of what is missing. ValueError for more than MAX_BREAKER_TEXTS breakers.
    """
    breakers = list(breakers)
    if len(breakers) > MAX_BREAKER_TEXTS:
        raise ValueError(
            f"{len(breakers)} sequence breakers: at most {MAX_BREAKER_TEXTS} are possible"
        )
    found: dict[tuple[int, ...], None] = {}
    for breaker in breakers:
        text = breaker[:MAX_BREAKER_CHARS]
        whole = text.encode()
        heads = [(text[:i].encode(), text[i:]) for i in range(1, len(text))]
        tails = [(head, tuple(encode(rest))[:MAX_BREAKER_TAIL]) for head, rest in heads]
        for token, piece in enumerate(pieces):
            if whole in piece:
                found[(token,)] = None
            else:
                found.update(((token, *t), None) for head, t in tails if piece.endswith(head))
    return tuple(found)


# Filters: (ids[k], logits[k]) in rising id -> fewer of them


def top_n_sigma(ids: Ids, logits: Logits, n: float) -> Candidates:
    """Candidates within n standard deviations of the highest logit; -inf counts for neither.

    Source: Tang et al. 2024, arXiv:2411.07641.
    """
    if n <= 0 or len(ids) < 2:
        return ids, logits
    finite = logits[np.isfinite(logits)]
    with np.errstate(over="ignore"):  # -inf keeps all
        lowest = finite.max() - np.float32(n * finite.std(dtype=np.float64))
    keep = logits >= lowest
    return ids[keep], logits[keep]


def top_k(ids: Ids, logits: Logits, k: int) -> Candidates:
    """The k candidates of highest logit; k = 0 or less keeps all."""
    if k <= 0 or k >= len(ids):
        return ids, logits
    return _keep(ids, logits, largest(logits, k))


def typical_p(ids: Ids, logits: Logits, p: float) -> Candidates:
    """The fewest candidates, of surprise nearest to the entropy, that together hold more than p.

    Source: Meister et al. 2022, arXiv:2202.00666.
    """
    if p >= 1 or len(ids) < 2:
        return ids, logits
    probabilities = softmax(logits)
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)  # nats; inf where the probability is 0
    entropy = float(probabilities @ np.where(probabilities > 0, surprise, 0))
    return _keep(ids, logits, prefix(-np.abs(surprise - entropy), probabilities, p, side="right"))


def top_p(ids: Ids, logits: Logits, p: float) -> Candidates:
    """The fewest most probable candidates that together hold p or more.

    Source: Holtzman et al. 2019, arXiv:1904.09751.
    """
    if p >= 1:
        return ids, logits
    w = weights(logits)
    return _keep(ids, logits, prefix(logits, w, p * float(w.sum())))


def min_p(ids: Ids, logits: Logits, p: float) -> Candidates:
    """Candidates at least p times as probable as the best one (Nguyen et al. 2024)."""
    if p <= 0:
        return ids, logits
    keep = logits >= logits.max() + np.float32(log(p))
    return ids[keep], logits[keep]


def xtc(ids: Ids, logits: Logits, threshold: float) -> Candidates:
    """Exclude top choices: of the candidates that reach `threshold`, only the last one stays.

    Whether it applies at all is the caller's draw. Source: text-generation-webui pull request 6335
    by p-e-w.
    """
    w = weights(logits)
    above = np.flatnonzero(w >= threshold * float(w.sum()))
    if len(above) < 2:
        return ids, logits
    excluded = above[largest(logits[above], len(above))[:-1]]
    return np.delete(ids, excluded), np.delete(logits, excluded)


def dynamic_temperature(
    logits: Logits, temperature: float, spread: float, exponent: float
) -> float:
    """temperature +- spread, rising with the entropy of logits[k] over the highest possible one."""
    if spread <= 0 or len(logits) < 2:
        return temperature
    probabilities = softmax(logits)
    positive = probabilities[probabilities > 0]
    relative = float(-(positive @ np.log(positive))) / log(len(logits))
    low, high = max(0.0, temperature - spread), temperature + spread
    return low + (high - low) * min(max(relative, 0.0), 1.0) ** exponent


def scale(ids: Ids, logits: Logits, temperature: float) -> Candidates:
    """(l - max l) / temperature; at 0 or less the best candidate alone."""
    if temperature <= 0:
        return _keep(ids, logits, largest(logits, 1))
    with np.errstate(over="ignore"):
        return ids, (logits - logits.max()) / np.float32(max(temperature, 1e-30))


def _keep(ids: Ids, logits: Logits, indices: Ids) -> Candidates:
    indices = np.sort(indices)
    return ids[indices], logits[indices]
