"""What is wrong with a grammar, and the library that reads grammars, imported when it is needed."""

from __future__ import annotations

import re
from typing import Any

from ..util.messages import one_line

LONGEST = 500  # characters of a message


class GrammarError(ValueError):
    """A grammar that is wrong, not supported or too complex, or a token that it does not allow."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message, LONGEST))


class GrammarUntried(GrammarError):
    """A grammar that could not be tried, through no fault of its own: it may be tried again."""


class GrammarLibraryMissing(GrammarError, ImportError):
    """llguidance is not installed."""


def library() -> Any:
    """llguidance; GrammarLibraryMissing says how to install it."""
    try:
        import llguidance
    except ImportError:
        raise GrammarLibraryMissing(
            "grammars and JSON schemas need llguidance: pip install 'ggpy[grammar]'"
        ) from None
    return llguidance


_PLACE = re.compile(r"(?:at )?\d+\(\d+\): (failed to compile JSON schema: |(?=invalid regex))")
_EXPLAINED = {
    "NoExtensionBias": "no text matches the grammar",
    "panic": "llguidance cannot compile the grammar: simplify it",
}


def reason(message: str) -> str:
    """llguidance's message without the text of the grammar that it quotes."""
    lines = message.splitlines() or ["unknown"]
    first = lines[0].partition(" Enable 'coerce_one_of'")[0]
    if "regex parse error" in first:
        wrong = (line.strip() for line in lines if line.strip().startswith("error: "))
        return f"invalid regex: {next(wrong, first).removeprefix('error: ')}"
    for word, explained in _EXPLAINED.items():
        if first.startswith(word):
            return explained
    return _PLACE.sub("", first, count=1)
