"""What a converted checkpoint has to compute: the logits of transformers, the text of llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import ggpy

NMSE = 1e-6  # of logits
PROMPT = (5, 300, 17, 99, 401, 260)

Logits = NDArray[np.float32]


def last_logits(
    path: Path, golden: Mapping[str, Logits], key: str, n_ctx: int = 256
) -> tuple[Logits, Logits]:
    """Logits of the last places of a text: ours, and those of `golden` ("name/length/logits")."""
    wanted = golden[key]
    ids = golden[key.removesuffix("logits") + "ids"]
    with ggpy.load(str(path), device="cpu", n_ctx=n_ctx) as model:
        return model.logits(ids.tolist())[-len(wanted) :], wanted


def check_logits(path: Path, golden: Mapping[str, Logits], key: str) -> None:
    """They are those of transformers, and not all alike."""
    got, wanted = last_logits(path, golden, key)
    assert np.std(wanted) > 0.1
    assert np.square(got - wanted).sum() / np.square(wanted).sum() <= NMSE
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def check_greedy_text(path: Path, ids: Sequence[int] = PROMPT, n: int = 12) -> None:
    """llama.cpp continues a text with the same tokens."""
    pytest.importorskip("xllamacpp", reason="the oracle wheel is not installed")
    from oracle import Oracle

    theirs = Oracle(path).greedy(list(ids), n).ids
    with ggpy.load(str(path), device="cpu", n_ctx=256) as model:
        ours = [piece.id for piece in model.generate(list(ids), max_tokens=n, temperature=0)]
    assert theirs == ours and len(ours) >= 5
