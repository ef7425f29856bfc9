"""Calls written in JSON: objects that name the tool, or a name followed by the arguments.

The arguments are passed on as they come, because they are JSON already: only raw control characters
inside strings, which models write and JSON forbids, become escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from .reader import MAX_HEADER, AnswerReader, MalformedCall, Steps
from .values import dumped

_PLAIN = re.compile(r"[\s,:0-9A-Za-z+\-.]*")  # JSON outside strings, without brackets
_IN_STRING = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]+")
_CONTROL = re.compile(r"[\x00-\x1f]")
_MAX_DEPTH = 200

Emit = Callable[[str], object]


def _ignore(text: str) -> None:
    pass


def _escape(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]


@dataclass(frozen=True)
class JsonObjects:
    """{"name": ..., "arguments": {...}}: the names of the keys differ. key_is_name: {NAME: {...}}.

    wrappers: keys whose value is the object meant, as in {"function": {"name": ...}}.
    """

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    wrappers: tuple[str, ...] = ("function",)
    key_is_name: bool = False
    first: tuple[str, ...] = ()  # keys that a bare object must begin with; any, where empty
    before: str = ""  # members that a grammar writes before the name, as a rule of it
    after: str = ""  # and after the arguments

    def read(self, reader: AnswerReader) -> Steps[None]:
        """One object, with its deltas."""
        call = _Call(self, reader)
        yield from call.members(self.first)
        call.finish()

    def continues(self, left: str, following: str) -> bool:
        """See `ChatFormat.continues`."""
        return following == "{" and "]" not in left


class _Call:
    """One object as it is read: what it said so far."""

    def __init__(self, syntax: JsonObjects, reader: AnswerReader) -> None:
        self.syntax, self.reader = syntax, reader
        self.name: str | None = None
        self.arguments: str | None = None  # given before the name

    def members(self, first: tuple[str, ...] = (), depth: int = 0) -> Steps[None]:
        """The object from its brace to its end."""
        reader = self.reader
        yield from reader.expect("{")
        yield from reader.space()
        while not (yield from reader.accept("}")):
            key = yield from _string(reader)
            if first and key not in first:
                raise MalformedCall(f"begins with {key!r:.60}")
            first = ()
            yield from reader.space()
            yield from reader.expect(":")
            yield from reader.space()
            yield from self._member(key, depth)
            yield from reader.space()
            if not (yield from reader.accept(",")) and (yield from reader.peek()) != "}":
                raise MalformedCall("no comma")
            yield from reader.space()

    def _member(self, key: str, depth: int) -> Steps[None]:
        reader, syntax = self.reader, self.syntax
        following = yield from reader.peek()
        if syntax.key_is_name and self.name is None:
            self._named(key)
            yield from self._arguments()
        elif key in syntax.wrappers and following == "{" and depth < 4:
            yield from self.members(depth=depth + 1)
        elif key in syntax.names and following == '"' and self.name is None:
            self._named((yield from _string(reader)))
        elif key in syntax.arguments:
            yield from self._arguments()
        else:
            yield from json_value(reader, _ignore)

    def _named(self, name: str) -> None:
        self.name = self.reader.known(name)
        self.reader.begin_call(name)
        if self.arguments is not None:
            self.reader.argue(self.arguments)

    def _arguments(self) -> Steps[None]:
        if self.arguments is not None:
            return (yield from json_value(self.reader, _ignore))
        self.arguments = ""
        if self.name is not None:
            return (yield from arguments_value(self.reader, self.reader.argue))
        found: list[str] = []
        yield from arguments_value(self.reader, found.append)
        self.arguments = "".join(found)

    def finish(self) -> None:
        """The object has ended: so has the call, or it was none."""
        if self.name is None:
            raise MalformedCall("no name")
        if self.arguments is None:
            self.reader.argue("{}")
        self.reader.end_call()


@dataclass(frozen=True)
class NameThenJson:
    """A header with the name, `opener`, and the arguments as a JSON object.

    header: matches what stands before `opener`, with a group `name`. written: how a grammar writes
    it, with {name}. id_open: what stands before an id of nine characters after the name, if there
    is one.
    """

    opener: str
    header: str = r"\s*(?P<name>\S+)\s*"
    written: str = "{name}"
    id_open: str = ""

    def read(self, reader: AnswerReader) -> Steps[None]:
        """One name and its arguments, with their deltas."""
        text, _ = yield from reader.until((self.opener,), MAX_HEADER)
        match = re.fullmatch(self.header, text, re.S)
        if not match:
            raise MalformedCall(f"no name in {text!r:.60}")
        name = reader.known(match["name"])
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            raise MalformedCall("no arguments")
        reader.begin_call(name)
        yield from json_value(reader, reader.argue)
        reader.end_call()


def _string(reader: AnswerReader) -> Steps[str]:
    """The text of a JSON string that is next."""
    if (yield from reader.peek()) != '"':
        raise MalformedCall("no string")
    found: list[str] = []
    yield from json_value(reader, found.append)
    try:
        text = json.loads("".join(found))
    except ValueError:
        raise MalformedCall("a string that is none") from None
    return str(text)


def arguments_value(reader: AnswerReader, emit: Emit) -> Steps[None]:
    """Arguments: an object as it comes, one that is written in a string, or null for none."""
    following = yield from reader.peek()
    if following == '"':
        emit(_object_in((yield from _string(reader))))
    elif following == "{":
        yield from json_value(reader, emit)
    elif (yield from reader.accept("null")):
        emit("{}")
    else:
        raise MalformedCall("arguments that are no object")


def _object_in(text: str) -> str:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise MalformedCall("arguments in a string that are no object") from None
    if not isinstance(value, dict):
        raise MalformedCall("arguments in a string that are no object")
    try:
        return dumped(value)
    except ValueError:
        raise MalformedCall("arguments that JSON cannot write") from None


def json_value(reader: AnswerReader, emit: Emit) -> Steps[None]:
    """One JSON value, given to `emit` as it comes; MalformedCall at what JSON cannot have."""
    brackets: list[str] = []
    while True:
        if not brackets:
            following = yield from reader.peek()
            if following not in ("{", "[", '"'):
                return (yield from _scalar(reader, emit))
        yield from _plain(reader, emit)
        char = yield from reader.peek()
        if char in ("{", "["):
            brackets.append("}" if char == "{" else "]")
        elif brackets and char == brackets[-1]:
            brackets.pop()
        elif char != '"':
            raise MalformedCall(f"{char!r} in JSON")
        if len(brackets) > _MAX_DEPTH:
            raise MalformedCall("nested too deeply")
        reader.pos += 1
        emit(char)
        if char == '"':
            yield from _rest_of_string(reader, emit)
        if not brackets:
            return


def _plain(reader: AnswerReader, emit: Emit) -> Steps[None]:
    while True:
        match = _PLAIN.match(reader.text, reader.pos)
        if match and match[0]:
            emit(match[0])
            reader.pos = match.end()
        if reader.pos < len(reader.text) or not (yield from reader.more()):
            return


def _scalar(reader: AnswerReader, emit: Emit) -> Steps[None]:
    length = 0
    while True:
        match = _SCALAR.match(reader.text, reader.pos)
        if match:
            emit(match[0])
            length += len(match[0])
            reader.pos = match.end()
        if reader.pos < len(reader.text) or not (yield from reader.more()):
            break
    if not length:
        raise MalformedCall("no value")


def _rest_of_string(reader: AnswerReader, emit: Emit) -> Steps[None]:
    """A string after its first quote, to its last one."""
    while True:
        match = _IN_STRING.match(reader.text, reader.pos)
        if match and match[0]:
            emit(_CONTROL.sub(_escape, match[0]))
            reader.pos = match.end()
        taken = yield from reader.peek()
        if taken == "\\":
            taken = yield from reader.peek(2)
        if not taken or taken == "\\":
            raise MalformedCall("a string without end")
        if taken[0] in '"\\':
            reader.pos += len(taken)
            emit(taken)
        if taken == '"':
            return
