"""Answers that match a JSON schema, a grammar or a regular expression: masks of allowed tokens."""

from .errors import GrammarError, GrammarLibraryMissing, GrammarUntried
from .lark import KINDS, Kind, grammar_kind, kind_and_text
from .masks import GrammarMask, Grammars

__all__ = [
    "KINDS",
    "GrammarError",
    "GrammarLibraryMissing",
    "GrammarMask",
    "GrammarUntried",
    "Grammars",
    "Kind",
    "grammar_kind",
    "kind_and_text",
]
