"""OpenAI's embeddings API: texts or token ids to vectors, as numbers or as base64."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ApiError
from ..fields import Fields
from .service import ServedModel

MOST_INPUTS = 2048
NEEDED = "a string, a list of strings, a list of token ids or a list of lists of token ids"


@dataclass(frozen=True)
class EmbeddingsCall:
    """A body, read. dimensions: None is those of the model."""

    inputs: list[str | list[int]]
    base64: bool = False
    dimensions: int | None = None


def read(fields: Fields, service: ServedModel) -> EmbeddingsCall:
    """Reads a body. ApiError."""
    service.check_model(fields.text("model"))
    return EmbeddingsCall(
        inputs=_inputs(fields),
        base64=fields.one_of("encoding_format", ("float", "base64"), "float") == "base64",
        dimensions=fields.integer("dimensions", None, 1),
    )


def answer(
    vectors: Sequence[tuple[NDArray[np.float32], int]], call: EmbeddingsCall, model: str
) -> dict[str, Any]:
    """The body of the answer to vectors and their tokens. ApiError for too many dimensions."""
    data = [
        {"object": "embedding", "index": i, "embedding": _shown(cut(v, call.dimensions), call)}
        for i, (v, _) in enumerate(vectors)
    ]
    n_tokens = sum(n for _, n in vectors)
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def cut(vector: NDArray[np.float32], n: int | None) -> NDArray[np.float32]:
    """The first n values of vector[D], divided by their length."""
    if n is None or n == len(vector):
        return vector
    if n > len(vector):
        told = f"dimensions is {n}: the model has {len(vector)}, give at most as many"
        raise ApiError(400, told, param="dimensions")
    head = vector[:n].astype(np.float64)
    length = float(np.linalg.norm(head))
    return (head / length if length > 0 else head).astype(np.float32)


def _shown(vector: NDArray[np.float32], call: EmbeddingsCall) -> str | list[float]:
    if not np.isfinite(vector).all():
        raise ApiError(500, "a vector has a value that is not a finite number")
    if call.base64:
        return b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.astype(np.float64).tolist()


def _inputs(fields: Fields) -> list[str | list[int]]:
    """The texts and lists of ids of "input"; a list of whole numbers is one input."""
    value = fields.raw("input")
    if not isinstance(value, (str, list)):
        raise fields.error("input", NEEDED)
    if isinstance(value, str) or (value and all(map(_is_id, value))):
        value = [value]
    if len(value) > MOST_INPUTS:
        told = f"input has {len(value)} entries: give at most {MOST_INPUTS}"
        raise ApiError(400, told, param="input")
    if not value:
        raise ApiError(400, "input is empty: give at least one text", param="input")
    for i, entry in enumerate(value):
        _check(entry, f"input[{i}]")
    return value


def _check(entry: object, path: str) -> None:
    if not (all(map(_is_id, entry)) if isinstance(entry, list) else isinstance(entry, str)):
        told = f"{path} is {entry!r:.60}: it must be a string or a list of token ids"
        raise ApiError(400, told, param=path)
    if not entry:
        raise ApiError(400, f"{path} is empty: give it a text or tokens", param=path)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
