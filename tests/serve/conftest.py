"""A server of a tiny model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from running_server import RunningServer, running


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """A server without keys, which all tests of a process share."""
    with running(metrics=True) as found:
        yield found


@pytest.fixture(scope="session")
def roomy() -> Iterator[RunningServer]:
    """A server with a key and a context for tools, which all tests of a process share."""
    with running(n_ctx=4096, api_keys=("sesame",), pooling="mean") as found:
        yield found
