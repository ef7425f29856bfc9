"""Logits and candidates for tests of the sampler chain."""

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
    weights = [math.exp(float(x) - float(max(logits))) for x in logits]
    return [w / sum(weights) for w in weights]
