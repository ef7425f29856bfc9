"""Reads GBNF, llama.cpp's notation for grammars, into a tree of its rules.

    root ::= "yes" | "no" reason?   # a comment
    reason ::= ": " [a-z ]{3,40}

Source: ggml-org/llama.cpp, grammars/README.md. A rule ends with its line, except in parentheses and
after `|`. Nothing here knows what becomes of the rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import GrammarError

MAX_DEPTH = 64  # of parentheses
MAX_REPEAT = 100_000
LAST_CHAR = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # no characters

Ranges = tuple[tuple[int, int], ...]  # first and last code point of each, rising, apart

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_COUNTS = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_SINGLE = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, eq=False)
class CharSet:
    """One character of these."""

    ranges: Ranges


@dataclass(frozen=True, eq=False)
class Series:
    """All items, one after the other."""

    items: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Alternatives:
    """One of the items."""

    items: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Repeat:
    """The item, `low` to `high` times; high None is without end."""

    item: Node
    low: int
    high: int | None


@dataclass(frozen=True, eq=False)
class RuleName:
    """What another rule says."""

    name: str


Node = CharSet | Series | Alternatives | Repeat | RuleName


def read_gbnf(text: str) -> dict[str, Node]:
    """The rules by name, "root" among them; GrammarError says what is wrong, and in which line."""
    return _GbnfReader(text).rules()


def joined(ranges: list[tuple[int, int]]) -> Ranges:
    """Ranges in rising order, without overlaps."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


def inverted(ranges: Ranges) -> Ranges:
    """All other characters."""
    found, start = [], 0
    for first, last in joined([*ranges, SURROGATES]):
        if start < first:
            found.append((start, first - 1))
        start = last + 1
    return (*found, (start, LAST_CHAR)) if start <= LAST_CHAR else tuple(found)


class _GbnfReader:
    """A place in the text, which moves on as parts are read."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0
        self.used: dict[str, int] = {}  # name -> where it is used first

    def error(self, message: str, at: int | None = None) -> GrammarError:
        line = self.text.count("\n", 0, self.at if at is None else at) + 1
        return GrammarError(f"GBNF, line {line}: {message}")

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def expect(self, text: str) -> None:
        if not self.text.startswith(text, self.at):
            raise self.error(f"{text} is missing before {self.text[self.at : self.at + 10]!r}")
        self.at += len(text)

    def name(self) -> str:
        match = _NAME.match(self.text, self.at)
        if not match:
            raise self.error(f"{self.text[self.at : self.at + 10]!r} is not the name of a rule")
        self.at = match.end()
        return match[0]

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self.skip(_LINES)
        while self.at < len(self.text):
            name = self.name()
            if name in found:
                raise self.error(f"there is a second rule {name}")
            self.skip(_BLANKS)
            self.expect("::=")
            self.skip(_LINES)
            found[name] = self.choice(_BLANKS)
            if self.at < len(self.text) and self.peek() not in "\r\n":
                raise self.error(f"{self.text[self.at : self.at + 10]!r} is not part of a rule")
            self.skip(_LINES)
        for name, at in self.used.items():
            if name not in found:
                raise self.error(f"there is no rule {name}", at)
        if "root" not in found:
            raise GrammarError("GBNF: there is no rule root, with which a text begins")
        return found

    def choice(self, blanks: re.Pattern[str]) -> Node:
        items = [self.series(blanks)]
        while self.peek() == "|":
            self.at += 1
            self.skip(_LINES)
            items.append(self.series(blanks))
        return items[0] if len(items) == 1 else Alternatives(tuple(items))

    def series(self, blanks: re.Pattern[str]) -> Node:
        items: list[Node] = []
        while (char := self.peek()) and char not in "|)\r\n":
            item = self.item()
            self.skip(blanks)
            while self.peek() in ("*", "+", "?", "{"):
                item = self.repeated(item)
                self.skip(blanks)
            items.append(item)
        return items[0] if len(items) == 1 else Series(tuple(items))

    def item(self) -> Node:
        char = self.peek()
        if char == '"':
            return self.literal()
        if char == "[":
            return self.char_class()
        if char == "(":
            return self.group()
        if char == ".":
            self.at += 1
            return CharSet(inverted(()))
        at, name = self.at, self.name()
        self.used.setdefault(name, at)
        return RuleName(name)

    def group(self) -> Node:
        self.at += 1
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"parentheses are nested more than {MAX_DEPTH} deep")
        self.skip(_LINES)
        found = self.choice(_LINES)
        self.expect(")")
        self.depth -= 1
        return found

    def repeated(self, item: Node) -> Node:
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1), "{": (0, 0)}[self.peek()]
        if self.peek() != "{":
            self.at += 1
            return Repeat(item, low, high)
        match = _COUNTS.match(self.text, self.at)
        if not match:
            raise self.error("a repetition is {m}, {m,} or {m,n}")
        self.at = match.end()
        low = int(match[1])
        high = int(match[3]) if match[3] else None if match[2] else low
        if max(low, high or 0) > MAX_REPEAT or (high is not None and high < low):
            raise self.error(f"{match[0]} must rise, and go to {MAX_REPEAT} at most")
        return Repeat(item, low, high)

    def literal(self) -> Node:
        self.at += 1
        chars = []
        while self.peek() != '"':
            code = self.code()
            chars.append(CharSet(((code, code),)))
        self.at += 1
        return chars[0] if len(chars) == 1 else Series(tuple(chars))

    def char_class(self) -> Node:
        self.at += 1
        negative = self.peek() == "^"
        self.at += negative
        ranges = []
        while self.peek() != "]":
            first = last = self.code()
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                last = self.code()
            if last < first:
                raise self.error(f"a range goes down, from U+{first:04X} to U+{last:04X}")
            ranges.append((first, last))
        self.at += 1
        found = joined(ranges)
        found = inverted(found) if negative else inverted(inverted(found))
        if not found:
            raise self.error("a character class holds no character")
        return CharSet(found)

    def code(self) -> int:
        """The code point of the next character, or of its escape."""
        char = self.peek()
        if not char or char in "\r\n":
            raise self.error("a text or a character class has no end")
        self.at += 1
        if char != "\\":
            return ord(char)
        kind = self.peek()
        self.at += 1
        if kind in _SINGLE:
            return ord(_SINGLE[kind])
        digits = self.text[self.at : self.at + _HEX.get(kind, 0)]
        if not re.fullmatch(r"[0-9A-Fa-f]+", digits) or len(digits) != _HEX[kind]:
            raise self.error(f"\\{kind}{digits} is no escape: \\n \\t \\r \\\\ \\xNN \\uNNNN ...")
        self.at += len(digits)
        code = int(digits, 16)
        if code > LAST_CHAR or SURROGATES[0] <= code <= SURROGATES[1]:
            raise self.error(f"\\{kind}{digits} is no character")
        return code
