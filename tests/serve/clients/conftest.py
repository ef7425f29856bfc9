"""A server whose context has room for tools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from running_server import RunningServer, running

N_CTX = 4096


@pytest.fixture(scope="session")
def roomy() -> Iterator[RunningServer]:
    """A server with a key, which all tests of a process share."""
    with running(n_ctx=N_CTX, api_keys=("sesame",), pooling="mean") as found:
        yield found
