"""Changes to the logits of the whole vocabulary: logits[V] -> logits[V]. `dry` has its own module.

Pure functions that return a new array. cuda/sampling/sample.cu repeats them with the same bits.

Letters: V vocabulary, n tokens of the history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .ranking import Logits


def add_bias(logits: Logits, bias: Mapping[int, float]) -> Logits:
    """Returns l[id] + bias[id]."""
    out = logits.copy()
    out[list(bias)] += np.array(list(bias.values()), np.float32)  # a mapping repeats no id
    return out


def penalize(
    logits: Logits, recent: Sequence[int], repeat: float, presence: float, frequency: float
) -> Logits:
    """Lowers the logits of tokens that occur c > 0 times in recent[n].

    l > 0 is divided by `repeat`, and l <= 0 multiplied by it (Keskar et al. 2019, with llama.cpp's
    rule for the sign); then c * frequency + presence is subtracted.
    """
    out = logits.copy()
    ids, counts = np.unique(np.asarray(recent, dtype=np.int64), return_counts=True)
    seen = out[ids]
    with np.errstate(over="ignore"):  # a logit may itself be near the end of float32
        seen = np.where(seen > 0, seen / np.float32(repeat), seen * np.float32(repeat))
        out[ids] = seen - (counts * frequency + presence).astype(np.float32)
    return out
