"""OpenAI's embeddings API: texts or token ids to vectors, as numbers or as base64; and llama.cpp's
/embedding.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ApiError
from ..fields import Fields, is_whole
from .reading import refuse
from .service import ServedModel

MOST_INPUTS = 2048
NEEDED = "a string, a list of strings, a list of token ids or a list of lists of token ids"


MAX_ABSOLUTE, EUCLIDEAN = 0, 2  # of embd_normalize; others are p of the p-norm
INT16 = 32760.0  # to what MAX_ABSOLUTE scales the largest value


@dataclass(frozen=True)
class EmbeddingsCall:
    """A body, read. dimensions: None is those of the model. norm: llama.cpp's embd_normalize."""

    inputs: list[str | list[int]]
    base64: bool = False
    dimensions: int | None = None
    norm: int = EUCLIDEAN


def read(fields: Fields, service: ServedModel) -> EmbeddingsCall:
    """Reads a body. ApiError."""
    service.check_model(fields.text("model"))
    return EmbeddingsCall(
        inputs=_inputs(fields, "input"),
        base64=fields.one_of("encoding_format", ("float", "base64"), "float") == "base64",
        dimensions=fields.integer("dimensions", None, 1),
    )


def read_native(fields: Fields) -> EmbeddingsCall:
    """Reads a body of /embedding, which has "content" or "input". ApiError."""
    norm = fields.integer("embd_normalize", EUCLIDEAN, -1, 1 << 31)
    if norm == -1:
        refuse(fields, "embd_normalize", "vectors have no other length here than 1: give 0 or more")
    inputs = _inputs(fields, "content" if "content" in fields else "input")
    return EmbeddingsCall(inputs, norm=EUCLIDEAN if norm is None else norm)


def native_answer(
    vectors: Sequence[tuple[NDArray[np.float32], int]], call: EmbeddingsCall
) -> list[dict[str, Any]]:
    """The body of the answer of /embedding; ApiError."""
    return [
        {"index": i, "embedding": [_shown(normalized(v, call.norm), call)]}
        for i, (v, _) in enumerate(vectors)
    ]


def normalized(vector: NDArray[np.float32], norm: int) -> NDArray[np.float32]:
    """vector[D] of length 1, with another length: as embd_normalize says."""
    if norm == EUCLIDEAN:
        return vector
    sizes = np.abs(vector.astype(np.float64))
    largest = float(sizes.max())
    if norm == MAX_ABSOLUTE or largest == 0:
        length = largest / INT16
    else:
        length = largest * float(((sizes / largest) ** norm).sum()) ** (1 / norm)
    return (vector / length if length > 0 else vector).astype(np.float32)


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


def _inputs(fields: Fields, name: str) -> list[str | list[int]]:
    """The texts and lists of ids of a field; a list of whole numbers is one input."""
    value = fields.raw(name)
    if not isinstance(value, (str, list)):
        raise fields.error(name, NEEDED)
    if isinstance(value, str) or (value and all(map(_is_id, value))):
        value = [value]
    if len(value) > MOST_INPUTS:
        told = f"{name} has {len(value)} entries: give at most {MOST_INPUTS}"
        raise ApiError(400, told, param=name)
    if not value:
        raise ApiError(400, f"{name} is empty: give at least one text", param=name)
    for i, entry in enumerate(value):
        _check(entry, f"{name}[{i}]")
    return value


def _check(entry: object, path: str) -> None:
    if not (all(map(_is_id, entry)) if isinstance(entry, list) else isinstance(entry, str)):
        told = f"{path} is {entry!r:.60}: it must be a string or a list of token ids"
        raise ApiError(400, told, param=path)
    if not entry:
        raise ApiError(400, f"{path} is empty: give it a text or tokens", param=path)


def _is_id(value: Any) -> bool:
    return is_whole(value) and value >= 0
