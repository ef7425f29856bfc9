"""Errors that a client is told: a status, a sentence that says what to do, and the field at fault.

The API that answers a request writes them in its own form. Nothing here knows a framework.
"""

from __future__ import annotations

from typing import Any

RETRY_AFTER = 5  # seconds after which a client may ask again
KINDS = {  # status -> OpenAI's type, Anthropic's type
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    501: ("not_supported_error", "invalid_request_error"),
    503: ("unavailable_error", "overloaded_error"),
}


class ApiError(Exception):
    """An error with an HTTP status. param: the field at fault, as a path ("messages[0].role").

    more: further fields of the error object in llama.cpp's form (n_ctx, n_prompt_tokens).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        more: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after, self.more = retry_after, more or {}

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of the answer."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def overflow_error(n_prompt: int, n_ctx: int, message: str, param: str | None = None) -> ApiError:
    """A prompt that is longer than the context, in OpenAI's code and llama.cpp's fields."""
    more = {"n_prompt_tokens": n_prompt, "n_ctx": n_ctx}
    return ApiError(400, message, param=param, code="context_length_exceeded", more=more)


def openai_error(error: ApiError) -> dict[str, Any]:
    """The body in OpenAI's form, with llama.cpp's fields: `code` is the status unless named."""
    kind = KINDS.get(error.status, KINDS[500])[0]
    code = error.code if error.code is not None else error.status
    told = {"message": error.message, "type": kind, "param": error.param, "code": code}
    return {"error": {**told, **error.more}}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """The body in Anthropic's form, in which the message names the field."""
    kind = KINDS.get(error.status, KINDS[500])[1]
    named = error.param is None or error.message.startswith(error.param)
    message = error.message if named else f"{error.param}: {error.message}"
    return {"type": "error", "error": {"type": kind, "message": message}}
