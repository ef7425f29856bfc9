"""Small checkpoints and what they become."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from checkpoints import to_gguf, write

Converted = Callable[[str], Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """The folder of a kind; read-only by agreement."""
    root = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda name: write(root / name, name))


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory, checkpoint: Converted) -> Converted:
    """The file in F32 of a kind."""
    root = tmp_path_factory.mktemp("converted")
    return cache(lambda name: to_gguf(checkpoint(name), root / f"{name}.gguf"))
