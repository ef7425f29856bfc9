"""Chunks of positions, and queries that grow with their position, at numbers that can be tested."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from plain_moe import PlainMoE

from ggpy import arch
from ggpy.arch import llama4
from ggpy.backends.interface import AttentionTemperature
from ggpy.backends.numpy.backend import Reference
from ggpy.gguf import File
from ggpy.runtime.engine import Engine
from tools import make_tiny

from .test_forward import IDS, our_logits

CHUNK, SCALE = 8, 0.5


class NoTokens:
    end_ids: frozenset[int] = frozenset()
    suppressed_ids: frozenset[int] = frozenset()


class Chunked(PlainMoE):
    """With a short chunk, in layers without rope a temperature."""

    chunk = CHUNK

    def attention(self, i: int, x: np.ndarray) -> np.ndarray:
        self.whole = (i + 1) % 4 == 0
        return super().attention(i, x)

    def sharp(self, position: int) -> float:
        return 1 + SCALE * np.log(1 + (position + 1) // CHUNK) if self.whole else 1.0


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file whose chunks are short."""
    monkeypatch.setattr(llama4, "CHUNK", CHUNK)
    temperature = AttentionTemperature(SCALE, CHUNK, offset=1)
    monkeypatch.setattr(llama4, "TEMPERATURE", temperature)
    return make_tiny.write(tmp_path / "tiny.gguf", "llama4")


def test_chunks_and_temperature(short: Path) -> None:
    expected = Chunked(short, 64).logits(IDS)
    np.testing.assert_allclose(our_logits(short, 64, IDS), expected, atol=1e-4, rtol=1e-4)
    assert np.abs(our_logits(short, CHUNK - 1, IDS[:7]) - expected[:7]).max() < 1e-4


def test_chunks_matter(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunked = our_logits(short, 64, IDS)
    monkeypatch.setattr(llama4, "CHUNK", 8192)
    difference = np.abs(our_logits(short, 64, IDS) - chunked)
    assert difference[: CHUNK - 1].max() < 1e-5 < 0.05 < difference[CHUNK:].max()


def test_a_ring_of_pages_holds_what_a_chunk_needs(short: Path) -> None:
    """Token by token, and in steps that end within chunks: longer than the pages of a ring."""
    ids = [IDS[i % len(IDS)] - i % 7 * (i % len(IDS) > 0) for i in range(300)]
    ops = Reference(1)
    with File(short) as file:
        decoder = arch.load(file, ops, 320, n_batch=64)
        shape = decoder.cache_shape(1, 320, 64)
        assert sorted(group.n_pages for group in shape.groups) == [3, 5]
        stepped = Engine(decoder, ops, NoTokens(), 320).logits(ids)
    whole = our_logits(short, 320, ids)
    np.testing.assert_allclose(stepped, whole, atol=1e-5, rtol=1e-5)


def test_released_numbers(tmp_path: Path) -> None:
    """In a context of a chunk no layer has one; in a longer one the first three of four have."""
    path = make_tiny.write(tmp_path / "tiny.gguf", "llama4", {"context_length": 16384})
    with File(path) as file:
        short, long = (arch.load(file, Reference(1), n) for n in (8191, 8193))
    assert {layer.mixer.spec.window for layer in short.layers} == {0}
    assert all(layer.mixer.temperature is None for layer in short.layers)
    mixers = [layer.mixer for layer in long.layers]
    assert [m.spec.window for m in mixers] == [8192] * 3 + [0]
    assert [m.chunked for m in mixers] == [True] * 3 + [False]
    assert [m.temperature is None for m in mixers] == [True] * 3 + [False]
