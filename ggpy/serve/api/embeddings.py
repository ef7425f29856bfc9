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
from ..fields import Fields
from .prompts import Prompt, prompt_of, read_prompts
from .reading import texts_of
from .service import ServedModel

MOST_INPUTS = 2048


@dataclass(frozen=True)
class EmbeddingsCall:
    """A body, read. dimensions: None is those of the model. norm: llama.cpp's embd_normalize."""

    inputs: list[Prompt]
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


def _inputs(fields: Fields, name: str) -> list[Prompt]:
    return [_input(*entry) for entry in read_prompts(fields, name, MOST_INPUTS)]


def _input(entry: Any, path: str) -> Prompt:
    """A prompt that is not empty, or the text of {"content": [{"type": "text", ...}]}."""
    if isinstance(entry, dict) and "prompt_string" not in entry:
        fields = Fields(entry, path)
        if not isinstance(fields.raw("content"), list):
            raise fields.error("content", 'a list of {"type": "text", "text": ...}')
        entry = "".join(texts_of(fields, "content", {"text": "text"}) or [])
        path = fields.path("content")
    prompt = prompt_of(entry, path)
    if not prompt:
        raise ApiError(400, f"{path} is empty: give it a text or tokens", param=path)
    return prompt
