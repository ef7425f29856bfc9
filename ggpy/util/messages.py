"""Text from a file, made fit for a message: on one line, short, without control codes.

A file comes from strangers. A name or a value in it may hold escape codes, line breaks or
megabytes, so code that puts it into a message passes it through one of these functions.
"""

from __future__ import annotations

import reprlib

LONGEST = 2000  # characters of a message
LONGEST_LOG = 20_000  # characters of a compiler's log, or of a traceback


def shown(value: object, limit: int = 80) -> str:
    """A value as Python writes it, strings in quotes; about `limit` characters at most."""
    if isinstance(value, str):
        return cut(repr(cut(value, limit)), 2 * limit)
    if hasattr(value, "tolist"):  # numpy's
        value = value.reshape(-1)[:limit].tolist()  # type: ignore[attr-defined]
    return cut(_brief(limit).repr(value), limit)


def escaped(text: object, limit: int = 200) -> str:
    """A text without quotes, cut to `limit` characters; unprintable ones are written as \\x1b."""
    return "".join(c if c.isprintable() else _escape(c) for c in cut(str(text), limit))


def utf8(text: str) -> str:
    """A file's name, or a word of the command line, with U+FFFD for bytes that are no UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def one_line(text: str, limit: int = LONGEST) -> str:
    """A message on one line; of a long one, the beginning and the end."""
    return escaped(" ".join(_ends(text, limit).split()), 2 * limit)


def lines(text: str, limit: int = LONGEST_LOG) -> str:
    """A compiler's log or a traceback, with its lines; of a long one, the beginning and the end."""
    kept = _ends(text, limit).expandtabs().splitlines()
    return "\n".join(escaped(line, 2 * limit) for line in kept)


def cut(text: str, limit: int) -> str:
    """A text; if it has more than `limit` characters, its beginning and "..."."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _ends(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit * 3 // 4]} ... {text[-(limit // 4) :]}"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _brief(limit: int) -> reprlib.Repr:
    """repr that never builds more than it shows."""
    found = reprlib.Repr()
    found.maxlevel = 3
    found.maxlist = found.maxtuple = found.maxdict = found.maxset = limit // 2
    found.maxstring = found.maxother = limit
    return found
