"""Logits, candidates and masks for tests of the sampler chain."""

from __future__ import annotations

import math

import numpy as np


def candidates(*probabilities: float) -> tuple[np.ndarray, np.ndarray]:
    """Candidates 10, 11, ... of these probabilities."""
    logits = np.log(np.array(probabilities)).astype(np.float32)
    return np.arange(10, 10 + len(probabilities)), logits


def random_logits(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, n).astype(np.float32)


def plain_softmax(logits: np.ndarray) -> list[float]:
    best = float(max(logits))
    weights = [math.exp(float(x) - best) for x in logits]
    total = sum(weights)
    return [w / total for w in weights]


class AllowedTokens:
    """A mask that always allows the same tokens, and remembers what it accepted."""

    finished = False

    def __init__(self, *allowed: int) -> None:
        self.allowed = set(allowed)
        self.accepted: list[int] = []

    def fill(self, row: np.ndarray) -> None:
        bits = np.zeros(32 * len(row), np.uint8)
        bits[sorted(self.allowed)] = 1
        row[:] = np.packbits(bits, bitorder="little").view("<i4")

    def accept(self, token: int) -> None:
        if token not in self.allowed:
            raise ValueError(f"token {token} is not allowed")
        self.accepted.append(token)


class FailingMask(AllowedTokens):
    """A mask that cannot be computed."""

    def fill(self, row: np.ndarray) -> None:
        row[:] = -1
        raise ValueError("too complex")


def random_mask(n_vocab: int, n_allowed: int, seed: int = 0) -> AllowedTokens:
    """A mask of so many random tokens."""
    ids = np.random.default_rng(seed).permutation(n_vocab)[:n_allowed].tolist()
    return AllowedTokens(*ids)
