"""Fixtures of the tests of block formats."""

import importlib.util
from pathlib import Path

import pytest
from format_cases import Ggml

import ggpy.formats
from ggpy.formats import Format


@pytest.fixture(scope="session")
def ggml() -> Ggml:
    """The oracle; a test that wants it is skipped where its package is not installed."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        pytest.skip("xllamacpp, which carries ggml, is not installed")
    return Ggml(next(Path(spec.origin).parent.glob("*.so")))


@pytest.fixture(params=ggpy.formats.all_formats(), ids=lambda format: format.name)
def format(request) -> Format:
    """Each block format."""
    return request.param
