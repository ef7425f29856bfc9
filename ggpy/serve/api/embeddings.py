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

from ...runtime.embedding import EUCLIDEAN
from ..errors import ApiError
from ..fields import Fields, is_whole
from .reading import refuse, texts_of
from .service import ServedModel

MOST_INPUTS = 2048
NEEDED = "a string, a list of strings, a list of token ids or a list of lists of token ids"

Input = str | list[int | str]  # a text, or ids with texts between them


@dataclass(frozen=True)
class EmbeddingsCall:
    """A body, read. dimensions: None is those of the model. norm: llama.cpp's embd_normalize."""

    inputs: list[Input]
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
    inputs = _inputs(fields, "content" if "content" in fields else "input")
    return EmbeddingsCall(inputs, norm=EUCLIDEAN if norm is None else norm)


def native_answer(
    vectors: Sequence[tuple[NDArray[np.float32], int]], call: EmbeddingsCall
) -> list[dict[str, Any]]:
    """The body of the answer of /embedding: a list of vectors for each input; ApiError."""
    return [
        {"index": i, "embedding": [_shown(x, call) for x in np.atleast_2d(v)]}
        for i, (v, _) in enumerate(vectors)
    ]


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


def _inputs(fields: Fields, name: str) -> list[Input]:
    """The inputs of a field; a list that has a whole number is one input, and an object, too."""
    value = fields.raw(name)
    if not isinstance(value, (str, list, dict)):
        raise fields.error(name, NEEDED)
    if isinstance(value, dict):
        return [_input(value, name)]
    if isinstance(value, str) or any(map(_is_id, value)):
        value = [value]
    if len(value) > MOST_INPUTS:
        told = f"{name} has {len(value)} entries: give at most {MOST_INPUTS}"
        raise ApiError(400, told, param=name)
    if not value:
        raise ApiError(400, f"{name} is empty: give at least one text", param=name)
    return [_input(entry, f"{name}[{i}]") for i, entry in enumerate(value)]


def _input(entry: Any, path: str) -> Input:
    """One input: a text, ids with texts between them, or one of llama.cpp's objects."""
    if isinstance(entry, dict):
        return _input_of_object(Fields(entry, path))
    if not (isinstance(entry, str) or _is_tokens(entry)):
        told = f"{path} is {entry!r:.60}: it must be a string or a list of token ids"
        raise ApiError(400, told, param=path)
    if not entry:
        raise ApiError(400, f"{path} is empty: give it a text or tokens", param=path)
    return entry


def _input_of_object(fields: Fields) -> Input:
    """The input of {"prompt_string": ...}, or of {"content": [{"type": "text", ...}]}."""
    if "prompt_string" in fields:
        if "multimodal_data" in fields:
            refuse(fields, "multimodal_data", "this model reads text only")
        prompt = fields.raw("prompt_string")
        if isinstance(prompt, dict):
            raise fields.error("prompt_string", "a string or a list of token ids")
        return _input(prompt, fields.path("prompt_string"))
    if not isinstance(fields.raw("content"), list):
        raise fields.error("content", 'a list of {"type": "text", "text": ...}')
    texts = texts_of(fields, "content", {"text": "text"}) or []
    return _input("".join(texts), fields.path("content"))


def _is_tokens(value: Any) -> bool:
    """Whether a value is a list of ids, perhaps with texts between them."""
    if not isinstance(value, list) or (value and not any(map(_is_id, value))):
        return False
    return all(isinstance(part, str) or _is_id(part) for part in value)


def _is_id(value: Any) -> bool:
    return is_whole(value) and value >= 0
