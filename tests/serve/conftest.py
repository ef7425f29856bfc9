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
