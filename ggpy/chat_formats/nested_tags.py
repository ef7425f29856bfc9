"""Calls written with a tag for each argument, in which lists and objects are tags again.

MiniMax M3 writes them. Every tag has a marker before it, which no value contains. The tool's schema
says which values are strings: these are passed on as they come, as JSON. Nothing here knows what
stands around a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .reader import MAX_HEADER, AnswerReader, MalformedCall, Steps
from .values import escaped_json, is_string, properties_of, type_names, typed
from .xml_calls import read_string

ITEM = "item"  # the tag of an entry of a list
_DEEPEST = 64


@dataclass(frozen=True)
class NestedTags:
    """Behind a call's opener: NAME name_close, then tags up to one that closes the call. opener:
    the marker before every tag.
    """

    opener: str
    name_close: str = '">'
    closer: str = "</invoke>"  # as a grammar writes it

    def read(self, reader: AnswerReader) -> Steps[None]:
        """One call, from its name to what closes it, with its deltas."""
        text, _ = yield from reader.until((self.name_close,), MAX_HEADER)
        name = reader.known(text.strip())
        reader.begin_call(name)
        schema = reader.tools[name] if reader.tools else None
        key = yield from self._next(reader)
        if key is None:
            reader.argue("{}")
        else:
            yield from self._inside(reader, schema, key, False, 0)
        reader.end_call()

    def _next(self, reader: AnswerReader) -> Steps[str | None]:
        """The name of a tag that opens after white space; None where one closes."""
        yield from reader.space()
        yield from reader.expect(self.opener)
        return (yield from self._tag(reader))

    def _tag(self, reader: AnswerReader) -> Steps[str | None]:
        closes = yield from reader.accept("</")
        if not closes:
            yield from reader.expect("<")
        name, _ = yield from reader.until((">",), MAX_HEADER)
        return None if closes else name.strip()

    def _inside(
        self, reader: AnswerReader, schema: Any, first: str, listed: bool, depth: int
    ) -> Steps[None]:
        """An object, or a list, from after its first tag to after the one that closes it."""
        if depth > _DEEPEST:
            raise MalformedCall("values nest too deeply")
        separator, key = "[" if listed else "{", first
        while True:
            reader.argue(separator if listed else f'{separator}"{escaped_json(key)}": ')
            yield from self._value(reader, _within(schema, None if listed else key), depth)
            separator = ", "
            following = yield from self._next(reader)
            if following is None:
                break
            key = following
        reader.argue("]" if listed else "}")

    def _value(self, reader: AnswerReader, schema: Any, depth: int) -> Steps[None]:
        """A value, up to after the tag that closes it."""
        types = type_names(schema)
        if is_string(types):
            reader.argue('"')
            yield from read_string(reader, self.opener)
            if (yield from self._tag(reader)) is not None:
                raise MalformedCall("a tag in a string")
            reader.argue('"')
            return
        text, _ = yield from reader.until((self.opener,))
        first = yield from self._tag(reader)
        if first is not None:
            listed = first == ITEM and ("array" in types or "object" not in types)
            yield from self._inside(reader, schema, first, listed, depth + 1)
        elif not text.strip() and types & {"array", "object"}:
            reader.argue("[]" if "array" in types else "{}")
        else:
            reader.argue(typed(text, types))


def _within(schema: Any, key: str | None) -> Any:
    """The schema of a property, or of an entry of a list; None where it does not say."""
    if key is not None:
        return properties_of(schema).get(key)
    return schema.get("items") if isinstance(schema, Mapping) else None
