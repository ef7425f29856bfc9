"""The rerank API of Jina and Cohere: documents in the order of how well they answer a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from ..errors import ApiError
from ..fields import Fields
from .service import ServedModel

MOST_DOCUMENTS = 2048


@dataclass(frozen=True)
class RerankCall:
    """A body, read. top_n: None is all documents."""

    query: str
    documents: list[str]
    top_n: int | None = None
    return_documents: bool = False


def read(fields: Fields, service: ServedModel) -> RerankCall:
    """Reads a body. ApiError."""
    service.check_model(fields.text("model"))
    return RerankCall(
        query=fields.needed_text("query"),
        documents=_documents(fields),
        top_n=fields.integer("top_n", None, 1),
        return_documents=fields.flag("return_documents", False),
    )


def answer(scores: Sequence[tuple[float, int]], call: RerankCall, model: str) -> dict[str, Any]:
    """The body of the answer to (relevance, tokens) of each document, the best first; equals stay
    in the order of the body.
    """
    order = sorted(range(len(scores)), key=lambda i: -scores[i][0])
    results = [_result(i, scores[i][0], call) for i in order[: call.top_n]]
    n_tokens = sum(n for _, n in scores)
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return {"object": "list", "model": model, "results": results, "usage": usage}


def _result(i: int, score: float, call: RerankCall) -> dict[str, Any]:
    if not isfinite(score):
        raise ApiError(500, f"the relevance of documents[{i}] is not a finite number")
    result: dict[str, Any] = {"index": i, "relevance_score": float(score)}
    return {**result, "document": {"text": call.documents[i]}} if call.return_documents else result


def _documents(fields: Fields) -> list[str]:
    """The texts of "documents"; "texts", as Text Embeddings Inference names them, is the same."""
    name = "documents" if "documents" in fields or "texts" not in fields else "texts"
    value = fields.raw(name)
    if not isinstance(value, list):
        raise fields.error(name, "a list of strings or of objects with a text")
    if not 0 < len(value) <= MOST_DOCUMENTS:
        told = f"{name} has {len(value)} entries: give 1 to {MOST_DOCUMENTS}"
        raise ApiError(400, told, param=name)
    return [_text(entry, f"{fields.path(name)}[{i}]") for i, entry in enumerate(value)]


def _text(entry: object, path: str) -> str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, dict):
        return Fields(entry, path).needed_text("text")
    told = f"{path} is {entry!r:.60}: it must be a string or an object with a text"
    raise ApiError(400, told, param=path)
