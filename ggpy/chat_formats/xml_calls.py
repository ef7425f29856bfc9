"""Calls written with tags: a name, and for each argument a key and a value as plain text.

The tool's schema says which values are strings: these are passed on as they come, as JSON; others
when they are complete. Nothing here knows what stands around a call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .reader import MAX_HEADER, AnswerReader, MalformedCall, Steps, markers_pattern
from .values import escaped_json, is_string, typed, types_of

CDATA, CDATA_CLOSE = "<![CDATA[", "]]>"


@dataclass(frozen=True)
class Tags:
    """Behind a call's opener: NAME name_close, then key_open KEY key_close VALUE value_close ...

    name_close and key_close may begin with a quote. closers: what ends the call; the first is how
    it is written. key: pattern of what stands between key_open and key_close, with a group `key`,
    and `string`, "true" or "string" where the text says itself that the value is a string. name:
    pattern of what stands before name_close, with a group `name`. lines: a value stands on lines of
    its own.
    """

    name_close: str
    key_open: str
    key_close: str
    value_close: str
    closers: tuple[str, ...]
    key: str = r"\s*(?P<key>.*?)\s*"
    written_key: str = "{key}"  # how a grammar writes it; also {string} and {type}
    name: str = r"\s*(?P<name>.*?)\s*"
    after_name: str = ""  # what a grammar writes between the name and name_close, as a rule of it
    lines: bool = False
    bare_name: bool = False  # the first key or the end may close the name, too
    cdata: bool = False  # a value may stand in XML's <![CDATA[...]]>

    def read(self, reader: AnswerReader) -> Steps[None]:
        """One call, from its name to what closes it, with its deltas."""
        close = (self.name_close,) if self.name_close else ()
        ends = (*close, self.key_open, *self.closers) if self.bare_name else close
        text, end = yield from reader.until(ends, MAX_HEADER)
        match = re.fullmatch(self.name, text, re.S)
        if not match:
            raise MalformedCall(f"no name in {text!r:.60}")
        name = reader.known(match["name"])
        reader.begin_call(name)
        schema = reader.tools[name] if reader.tools else None
        if end in close:
            end = yield from self._next(reader)
        separator = "{"
        while end == self.key_open:
            separator = yield from self._argument(reader, schema, separator)
            end = yield from self._next(reader)
        reader.argue("{}" if separator == "{" else "}")
        reader.end_call()

    def _next(self, reader: AnswerReader) -> Steps[str]:
        """The marker that follows white space: of a key, of the end, or "" for other text."""
        yield from reader.space()
        for marker in (self.key_open, *self.closers):
            if (yield from reader.accept(marker)):
                return marker
        if not (yield from reader.peek()) or reader.starved:
            raise MalformedCall("no further argument")
        return ""

    def _argument(self, reader: AnswerReader, schema: object, separator: str) -> Steps[str]:
        header, _ = yield from reader.until((self.key_close,), MAX_HEADER)
        match = re.fullmatch(self.key, header, re.S)
        if not match:
            raise MalformedCall(f"no key in {header!r:.60}")
        key, groups = match["key"], match.groupdict()
        types = types_of(schema, key)
        if groups.get("string") in ("true", "string"):
            types = frozenset({"string"})
        yield from self._after_key(reader)
        opening = f'{separator}"{escaped_json(key)}": '
        quoted = self.cdata and (yield from reader.accept(CDATA))
        closer = CDATA_CLOSE if quoted else self.value_close
        if is_string(types):
            reader.argue(opening + '"')
            yield from read_string(reader, closer, self.lines)
            reader.argue('"')
        else:
            text, _ = yield from reader.until((closer,))
            reader.argue(opening + typed(self._trimmed(text), types))
        if quoted:
            yield from reader.space()
            yield from reader.expect(self.value_close)
        return ", "

    def _after_key(self, reader: AnswerReader) -> Steps[None]:
        """What stands between the key and its value."""
        if self.lines:
            yield from reader.accept("\n")

    def _trimmed(self, text: str) -> str:
        return text.removesuffix("\n") if self.lines else text


def read_string(reader: AnswerReader, closer: str, lines: bool = False) -> Steps[None]:
    """A string as it comes, up to after `closer`. lines: a line break before that is markup."""
    breaks = ("\n" + closer,) if lines else ()
    pattern = markers_pattern((closer, *breaks))
    while True:
        match = pattern.search(reader.text, reader.pos)
        end = match.start() if match else len(reader.text)
        reader.argue(escaped_json(reader.text[reader.pos : end]))
        reader.pos = end
        if match and match[1]:
            reader.pos = match.end()
            return
        if not (yield from reader.more()):
            raise MalformedCall("a value without end")


@dataclass(frozen=True)
class KeyedTags(Tags):
    """Tags in which a value has an opening marker of its own, as in GLM's <arg_value>."""

    value_open: str = ""

    def _after_key(self, reader: AnswerReader) -> Steps[None]:
        yield from reader.space()
        yield from reader.expect(self.value_open)
