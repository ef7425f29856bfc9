"""All routes: the core's, those of the other APIs, and the page's."""

from __future__ import annotations

from starlette.routing import Route
from starlette.types import ASGIApp

from .app import Server, make_app


def make_routed_app(server: Server) -> ASGIApp:
    """The application with every API."""
    more: list[Route] = []
    return make_app(server, more)
