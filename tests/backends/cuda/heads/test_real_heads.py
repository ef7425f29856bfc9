"""Each architecture with heads of the sizes that published models have: the divergence of a GPU
from the reference is at most 1e-4, without any slack.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.make_tiny import MODELS

from ..moe.test_moe import MoEPair
from ..test_backend import PAGES, Pair, ids_of
from .real_heads import HYBRIDS, write_real_heads


def check(machine: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A prompt beside another, single tokens of both, and a token beside a prompt."""
    path = write_real_heads(folder / "real-heads.gguf", name, monkeypatch)
    moe = bool(MODELS[name].experts)
    pair = MoEPair(machine, path, monkeypatch) if moe else Pair(machine, path)
    assert pair.slack == 1
    pair.step([(ids_of(n, n), 0, t) for n, t in ((66, PAGES[1]), (5, PAGES[0]))], list(range(71)))
    for i in range(4):  # directly, recorded for each place, replayed
        pair.step([([40 + i], 66 + i, PAGES[1]), ([50 + i], 5 + i, PAGES[0])])
    pair.step([([7], 70, PAGES[1]), (ids_of(21), 0, PAGES[3])])


@pytest.mark.parametrize("name", MODELS)
def test_divergence(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check(gpu, tmp_path, monkeypatch, name)


@pytest.mark.parametrize("name", [HYBRIDS[0], HYBRIDS[-1]])
def test_divergence_of_hybrids(
    emulator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    check(emulator, tmp_path, monkeypatch, name)
