"""Servers of a tiny model and of scripted answers, and a browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from running_server import RunningServer, running
from scripted_service import ScriptedService, serving
from support.serve.browser import Browser


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


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[ScriptedService, str]]:
    """A service whose answers a test scripts, and the address at which it is served."""
    service = ScriptedService()
    with serving(service) as address:
        yield service, address


@pytest.fixture
def service(scripted: tuple[ScriptedService, str]) -> ScriptedService:
    """That service, as new."""
    scripted[0].__init__()  # type: ignore[misc]
    return scripted[0]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser with a profile of its own."""
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()
