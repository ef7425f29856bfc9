"""Grammars for the tiny models' 453 tokens, some of which are single bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ggpy.grammar import Grammars
from ggpy.tokenizer import Tokenizer

pytest.importorskip("llguidance")


@pytest.fixture(scope="session")
def tokenizer(tiny_path: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_gguf(tiny_path("llama"))


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)
