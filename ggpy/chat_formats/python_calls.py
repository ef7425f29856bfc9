"""Calls written as Python, f(a=1, b="x"), and in Gemma 4's form, call:f{a:1,b:<|"|>x<|"|>}.

An argument is passed on when it is complete, as JSON. Nothing here evaluates anything but literals.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .json_calls import JsonObjects
from .reader import MAX_HEADER, AnswerReader, MalformedCall, Steps
from .values import escaped_json, gemma_json, keys_of, python_json, typed, types_of

_NAME = re.compile(r"[\w.\-]*")
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)\s*")
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_PIECE = re.compile(r"""[^'"()\[\]{},\\<]+|.""", re.S)


@dataclass(frozen=True)
class PythonCalls:
    """name(key=value, ...), several with commas between them."""

    def read(self, reader: AnswerReader) -> Steps[None]:
        """One call with its deltas; `print(` around it is no call."""
        name = yield from self._name(reader)
        if name == "print" and name not in (reader.tools or ()):
            name = yield from self._name(reader)
        reader.begin_call(reader.known(name))
        schema = reader.tools[name] if reader.tools else None
        positions = iter(keys_of(schema))
        separator, end = "{", ","
        while end == ",":
            text, end = yield from expression(reader, ")")
            if not text.strip():
                continue
            match = _KEY.match(text)
            key = match[1] if match else next(positions, None)
            if key is None:
                raise MalformedCall("an argument without name")
            value = python_json(text[match.end() :] if match else text)
            reader.argue(f'{separator}"{escaped_json(key)}": {value}')
            separator = ", "
        reader.argue("{}" if separator == "{" else "}")
        reader.end_call()

    def _name(self, reader: AnswerReader) -> Steps[str]:
        yield from reader.space()
        name = yield from reader.skip(_NAME)
        yield from reader.expect("(")
        return name

    def continues(self, left: str, following: str) -> bool:
        """See `ChatFormat.continues`."""
        return ("," in left or "\n" in left) and "]" not in left


@dataclass(frozen=True)
class JsonOrPython(JsonObjects):
    """Objects of JSON, as the template asks for, or Python: Llama 4 writes both."""

    def read(self, reader: AnswerReader) -> Steps[None]:
        """One call with its deltas."""
        if (yield from reader.peek()) == "{":
            yield from super().read(reader)
        else:
            yield from PythonCalls().read(reader)

    def continues(self, left: str, following: str) -> bool:
        """See `ChatFormat.continues`."""
        is_json = super().continues(left, following)
        return is_json or PythonCalls().continues(left, following)


@dataclass(frozen=True)
class GemmaCalls:
    """call:name{key:value,...}, strings between <|"|>."""

    quote: str = '<|"|>'

    def read(self, reader: AnswerReader) -> Steps[None]:
        """One call with its deltas."""
        yield from reader.expect("call:")
        header, _ = yield from reader.until(("{",), MAX_HEADER)
        name = reader.known(header.strip())
        reader.begin_call(name)
        schema = reader.tools[name] if reader.tools else None
        separator, end = "{", ","
        while end == ",":
            text, end = yield from expression(reader, "}", self.quote)
            if not text.strip():
                continue
            key, colon, value = text.partition(":")
            if not colon:
                raise MalformedCall("an argument without name")
            key = key.strip().removeprefix(self.quote).removesuffix(self.quote)
            reader.argue(f'{separator}"{escaped_json(key)}": {self._value(value, schema, key)}')
            separator = ", "
        reader.argue("{}" if separator == "{" else "}")
        reader.end_call()

    def _value(self, text: str, schema: object, key: str) -> str:
        plain = self.quote not in text and text.strip()[:1] not in ("{", "[")
        return typed(text.strip(), types_of(schema, key)) if plain else gemma_json(text, self.quote)


def expression(reader: AnswerReader, closer: str, quote: str = "") -> Steps[tuple[str, str]]:
    """Text up to a comma or `closer` outside brackets and strings, and which of the two it was.

    quote: what strings stand between, or in brackets JSON's quotes; Python's quotes, where empty.
    """
    found: list[str] = []
    brackets: list[str] = []
    while True:
        char = yield from reader.peek()
        if not char:
            raise MalformedCall("an argument without end")
        if char in (",", closer) and not brackets:
            reader.pos += 1
            return "".join(found), char
        if quote and (yield from reader.accept(quote)):
            text, _ = yield from reader.until((quote,))
            found.append(quote + text + quote)
        elif char in ('"' if brackets else "") if quote else char in "'\"":
            found.append((yield from _quoted(reader, char)))
        else:
            found.append(_piece(reader, brackets))


def _piece(reader: AnswerReader, brackets: list[str]) -> str:
    match = _PIECE.match(reader.text, reader.pos)
    assert match is not None
    reader.pos = match.end()
    char = match[0]
    if char in _PAIRS:
        brackets.append(_PAIRS[char])
    elif char in (")", "]", "}") and (not brackets or brackets.pop() != char):
        raise MalformedCall(f"a {char!r} that nothing opens")
    return char


def _quoted(reader: AnswerReader, quote: str) -> Steps[str]:
    """A string of Python that is next, with its quotes.

    Some templates escape nothing in a string, and models follow them: a quote ends the string only
    where an argument or a list can go on.
    """
    long = yield from reader.peek(3)
    marker = quote * 3 if long == quote * 3 else quote
    reader.pos += len(marker)
    found = [marker]
    while True:
        text, end = yield from reader.until((marker, "\\"))
        found.append(text + end)
        if end == marker:
            if len(marker) == 3 or (yield from _ends_string(reader)):
                return "".join(found)
            continue
        escaped = yield from reader.peek()
        reader.pos += len(escaped)
        found.append(escaped)


def _ends_string(reader: AnswerReader) -> Steps[bool]:
    """Whether what follows a quote may follow a string: further syntax, or another string."""
    following = yield from reader.peek()
    while following[-1:].isspace():
        longer = yield from reader.peek(len(following) + 1)
        if len(longer) == len(following):
            return True
        following = longer
    return following[-1:] in (*",)]}:", "") or (len(following) > 1 and following[-1] in "'\"")
