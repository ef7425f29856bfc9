"""The rerank API of Jina and Cohere: documents in the order of how well they answer a query.

A body with "texts" in place of "documents" gets the bare list of Text Embeddings Inference, as from
llama-server.
"""

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
    """A body, read. top_n: None is all documents. bare: whether the answer is a list."""

    query: str
    documents: list[str]
    top_n: int | None = None
    return_documents: bool = False
    bare: bool = False


def read(fields: Fields, service: ServedModel) -> RerankCall:
    """Reads a body. ApiError."""
    service.check_model(fields.text("model"))
    bare = "texts" in fields and "documents" not in fields
    return RerankCall(
        query=fields.needed_text("query"),
        documents=_documents(fields, "texts" if bare else "documents"),
        top_n=fields.integer("top_n", None, 1),
        return_documents=fields.flag("return_text" if bare else "return_documents", False),
        bare=bare,
    )


def answer(
    scores: Sequence[tuple[float, int]], call: RerankCall, model: str
) -> dict[str, Any] | list[dict[str, Any]]:
    """The body of the answer to (relevance, tokens) of each document, the best first. Documents of
    equal relevance keep their order.
    """
    order = sorted(range(len(scores)), key=lambda i: -scores[i][0])
    results = [_result(i, scores[i][0], call) for i in order[: call.top_n]]
    if call.bare:
        return results
    n_tokens = sum(n for _, n in scores)
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return {"object": "list", "model": model, "results": results, "usage": usage}


def _result(i: int, score: float, call: RerankCall) -> dict[str, Any]:
    if not isfinite(score):
        raise ApiError(500, f"the relevance of documents[{i}] is not a finite number")
    result: dict[str, Any] = {"index": i}
    result["score" if call.bare else "relevance_score"] = float(score)
    if call.return_documents:
        text = call.documents[i]
        result |= {"text": text} if call.bare else {"document": {"text": text}}
    return result


def _documents(fields: Fields, name: str) -> list[str]:
    """The texts of a list of texts, or of objects with a text."""
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
