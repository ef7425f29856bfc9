"""Who may ask: API keys, as ASGI middleware.

Nothing here knows endpoints beyond which of them are public.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from ..api.anthropic import error_body
from ..errors import ApiError, openai_error
from .body import JsonAnswer

# "" is the prefix alone, which is answered with the way to the page.
PUBLIC = ("", "/", "/index.html", "/health", "/v1/health", "/models", "/v1/models")
ANTHROPIC = "/v1/messages"


def error_response(path: str, error: ApiError) -> JsonAnswer:
    """An error in the form of the API to which the path belongs."""
    form = error_body if path.startswith(ANTHROPIC) else openai_error
    return JsonAnswer(form(error), error.status, headers=error.headers)


class RequireKey:
    """Refuses requests without one of the keys, and gives each request the name of its client.

    The name is a digest of the key, or the client's address where no key is asked for.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], prefix: str, files: Sequence[str]
    ) -> None:
        """files: paths of the page, which are public."""
        self._app, self._prefix = app, prefix
        self._keys = [key.encode() for key in keys]
        self._public = {*PUBLIC, *files}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key = _key(scope)
        path = scope["path"].removeprefix(self._prefix)
        public = scope["method"] == "OPTIONS" or path in self._public
        if self._keys and not public and not self._known(key):
            error = ApiError(401, "the API key is missing or wrong: send Authorization: Bearer KEY")
            await error_response(path, error)(scope, receive, send)
            return
        scope.setdefault("state", {})["client"] = self._client(scope, key)
        await self._app(scope, receive, send)

    def _known(self, key: bytes) -> bool:
        """Compares with every key, in a time that does not tell how much of one is right."""
        return any([hmac.compare_digest(key, known) for known in self._keys])

    def _client(self, scope: Scope, key: bytes) -> str:
        if self._keys:
            return "key " + hashlib.blake2b(key, digest_size=8).hexdigest()
        address = scope.get("client")
        return str(address[0]) if address else ""


def _key(scope: Scope) -> bytes:
    """The key of a request: OpenAI's header or Anthropic's."""
    headers: dict[bytes, Any] = dict(scope["headers"])
    bearer = headers.get(b"authorization", b"")
    if bearer[:7].lower() == b"bearer ":
        return bytes(bearer[7:].strip())
    return bytes(headers.get(b"x-api-key", b""))
