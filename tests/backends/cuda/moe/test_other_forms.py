"""Experts that files have in other forms than in one tensor of three axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from other_forms import FORMS

from tools import make_tiny

from ....arch.test_forward import BIASES
from ..test_backend import PAGES, Pair, ids_of
from .test_moe import MoEPair


def check(pair: Pair | MoEPair) -> None:
    """A prompt of many tokens beside one of few, and single tokens of both."""
    pair.step([(ids_of(n, n), 0, t) for n, t in ((66, PAGES[1]), (5, PAGES[0]))], list(range(71)))
    for i in range(3):
        pair.step([([40 + i], 66 + i, PAGES[1]), ([50 + i], 5 + i, PAGES[0])])


def test_experts_apart(machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMS["experts apart"]
    path = make_tiny.write(tmp_path / "apart.gguf", "llama", form.settings, form.changed())
    check(MoEPair(machine, path, monkeypatch))


def test_a_feed_forward_with_biases(machine: Any, tmp_path: Path) -> None:
    """Which is an expert that every token takes."""
    check(Pair(machine, make_tiny.write(tmp_path / "biases.gguf", "llama", tensors=BIASES)))
