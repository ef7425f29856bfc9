"""Sources in Anthropic's messages: documents of plain text and results of a search become text.

What is quoted from them is not told in the answer, so `citations` has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...fields import Fields
from ..reading import texts_of

TEXT = {"text": "text"}


def with_sources_as_text(given: Fields) -> Fields:
    """A message or a result whose sources have become blocks of text; ApiError. A document that is
    no plain text is left as it is.
    """
    content = given.raw("content")
    if not isinstance(content, list):
        return given
    path = given.path("content")
    blocks = [
        _as_text(Fields(block, f"{path}[{i}]")) if isinstance(block, dict) else block
        for i, block in enumerate(content)
    ]
    return Fields({**given.values, "content": blocks}, given.where)


def _as_text(block: Fields) -> dict[str, Any]:
    kind = block.raw("type")
    if kind == "search_result":
        text: str | None = _search_result(block)
    else:
        text = _document(block.values) if kind == "document" else None
    return dict(block.values) if text is None else {"type": "text", "text": text}


def _search_result(block: Fields) -> str:
    """The title, the source and the texts of a search result."""
    head = [block.needed_text("title"), block.needed_text("source")]
    block.object("citations")
    texts = texts_of(block, "content", TEXT, "block")
    if texts is None or isinstance(block.raw("content"), str):
        raise block.error("content", "a list of blocks of text")
    return "\n".join([*head, *texts])


def _document(block: Mapping[str, Any]) -> str | None:
    """The title, the context and the text of a document; None where it has other than text."""
    source = block.get("source")
    if not isinstance(source, dict):
        return None
    kinds = {"text": source.get("data"), "content": source.get("content")}
    data = kinds.get(str(source.get("type")))
    if isinstance(data, list):
        parts = [part.get("text") for part in data if isinstance(part, dict)]
        texts = [part for part in parts if isinstance(part, str)]
        data = "\n".join(texts) if len(texts) == len(data) else None
    if not isinstance(data, str):
        return None
    head = [block[name] for name in ("title", "context") if isinstance(block.get(name), str)]
    return "\n".join([*head, data])
