"""What several tests need: real models, where they can be had, and the tiny ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # before numpy: its threads spin on a busy machine

TINY = Path(__file__).resolve().parent.parent / "models" / "tiny"


def real_model(name: str) -> Path:
    """A model of ggpy.hub: from the folder $GGPY_TEST_MODELS, the cache, or the registry."""
    from ggpy import hub

    known = {model.name: model.file for model in hub.KNOWN}
    folder = os.environ.get("GGPY_TEST_MODELS")
    if folder and Path(folder, known[name]).is_file():
        return Path(folder, known[name])
    try:
        return hub.resolve(name)
    except (OSError, ValueError) as error:
        pytest.skip(f"no {name}: {error}")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, 98 MB."""
    return real_model("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma-3-270M, 253 MB."""
    return real_model("gemma3-270m")


@pytest.fixture(scope="session")
def tiny_path() -> Callable[[str], Path]:
    """The tiny model of an architecture."""
    return lambda architecture: TINY / f"{architecture}.gguf"
