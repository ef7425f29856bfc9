"""JSON in and out: a request's body, bounded in size and time, and an answer's."""

from __future__ import annotations

import asyncio
import json
import re
from math import isinf
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from ..errors import ApiError
from ..fields import Fields

LONG_BODY = 256 << 10  # bytes from which parsing leaves the event loop
MAX_DEPTH = 200  # of lists and objects in each other: Python's JSON recurses
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # as JSON escapes one


async def read_body(request: Request, most: int, timeout: float) -> Fields:
    """The JSON object of a body of at most `most` bytes, sent within `timeout` seconds; ApiError.

    An empty body is an empty object.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        told = f"the body is encoded as {encoding!r:.40}, which is not supported: send plain JSON"
        raise ApiError(415, told)
    try:
        data = await asyncio.wait_for(_bytes(request, most), timeout)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body had not arrived after {timeout:g} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the client closed the connection within the body") from None
    if not data:
        return Fields({})
    if len(data) < LONG_BODY:
        return _object(data)
    return await asyncio.to_thread(_object, data)


async def _bytes(request: Request, most: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_large(most)
    parts: list[bytes] = []
    n = 0
    async for part in request.stream():
        n += len(part)
        if n > most:
            raise _too_large(most)
        parts.append(part)
    return b"".join(parts)


class JsonAnswer(JSONResponse):
    """JSON in ASCII, so that a lone surrogate in a client's text cannot break it."""

    def render(self, content: Any) -> bytes:
        """The bytes of the body."""
        return json.dumps(content, separators=(",", ":")).encode()


def _refuse_constant(name: str) -> None:
    """NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    """A number, which 1e999 is not in 64 bits."""
    value = float(text)
    if isinf(value):
        raise ValueError(f"{text:.40} is too large a number")
    return value


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes, which is the limit")


def _object(data: bytes) -> Fields:
    value: Any
    try:
        value = json.loads(
            data.decode("utf-8-sig"), parse_float=_finite, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError as error:
        told = f"the body is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        raise ApiError(400, told) from None
    except json.JSONDecodeError as error:
        told = f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise ApiError(400, told) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # a number with thousands of digits
        raise ApiError(400, f"the body is not JSON that can be read: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise _too_deep()
    if SURROGATE.search(data):
        _refuse_surrogates(value)
    return Fields(value)


def _too_deep() -> ApiError:
    return ApiError(400, f"the body nests its lists and objects too deeply: at most {MAX_DEPTH}")


def _is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects stand in more than `most` others."""
    level = [value]
    for _ in range(most):
        inner = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for values in inner for v in values if isinstance(v, (dict, list))]
        if not level:
            return False
    return True


def _refuse_surrogates(value: Any) -> None:
    """ApiError names the text that has half of a surrogate pair, which is no character."""
    left = [("", value)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            left += [(path or "the body", key) for key in value]
            left += [(f"{path}.{key}" if path else key, inner) for key, inner in value.items()]
        elif isinstance(value, list):
            left += [(f"{path}[{i}]", inner) for i, inner in enumerate(value)]
        elif isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
            told = f"{path} has half of a surrogate pair, which is no character: leave it out"
            raise ApiError(400, told, param=path)
