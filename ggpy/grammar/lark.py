"""A grammar of any kind -> the same in Lark, as llguidance reads it; GrammarError.

Every grammar says `no_forcing`: where only one text can follow, llguidance would allow just one way
to write it in tokens, and that need not be the model's. Nothing here knows tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from .errors import GrammarError, library
from .gbnf import read_gbnf
from .lexemes import lark_of

Kind = Literal["json_schema", "json_object", "gbnf", "lark", "regex"]
KINDS: tuple[str, ...] = get_args(Kind)
MAX_BYTES = {"gbnf": 200_000}  # of a grammar's text, in UTF-8
MAX_BYTES_ELSE = 1_000_000

# Between the parts of JSON: nothing, a blank, or line breaks with an indent, as in llama.cpp's
# grammar for JSON. Without bounds a model may write blanks for ever.
WHITESPACE = r"(?: |\n{1,2}[ \t]{0,20})"
# All that a schema may say of how it is read; what is not supported is an error.
JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
}
_OPTIONS = re.compile(r"^[ \t]*%llguidance\b[ \t]*(.*)$", re.M)


def kind_and_text(
    grammar: str | None, json_schema: str | Mapping[str, Any] | None
) -> tuple[str, str] | None:
    """What `Grammars.compile` takes, of a grammar or a JSON schema; None for neither.

    GrammarError for both, and for a schema that is no JSON.
    """
    if grammar is not None and json_schema is not None:
        raise GrammarError("grammar and json_schema are given: give one of them")
    if grammar is not None:
        return grammar_kind(grammar), grammar
    if json_schema is None:
        return None
    if isinstance(json_schema, str):
        return "json_schema", json_schema
    if not isinstance(json_schema, (Mapping, bool)):
        raise GrammarError(f"json_schema is {json_schema!r:.60}: give a dict, or a text of JSON")
    try:
        return "json_schema", json.dumps(json_schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"json_schema cannot be written as JSON: {error}") from None


def grammar_kind(text: str) -> Literal["lark", "gbnf"]:
    """Lark, whose first line begins with %llguidance as in llama.cpp, or GBNF."""
    return "lark" if text.lstrip().startswith("%llguidance") else "gbnf"


def to_lark(kind: str, text: str) -> str:
    """The grammar `text` of a kind; GrammarError where it is wrong already as a text."""
    if kind not in KINDS:
        raise GrammarError(f"{kind!r:.60} is no kind of grammar: give one of {', '.join(KINDS)}")
    if not isinstance(text, str):
        raise GrammarError(f"the grammar is {text!r:.60}: give a text")
    most = MAX_BYTES.get(kind, MAX_BYTES_ELSE)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise GrammarError("the grammar is no text: it has half of a surrogate pair") from None
    if size > most:
        raise GrammarError(f"the grammar has {size} bytes: the limit is {most}, so shorten it")
    lark = _WRITERS[kind](text)
    # At the end, where llguidance's last options count and no line of the text gets another number.
    return f"{lark}\n%llguidance {json.dumps({**_options(lark), 'no_forcing': True})}\n"


def _json_schema(text: str) -> str:
    return f"start: %json {_to_json(_read_schema(text))}"


def _json_object(text: str) -> str:
    return _json_schema('{"type": "object"}')


def _read_schema(text: str) -> dict[str, Any]:
    """The schema with our own options, whatever it says itself."""
    try:
        schema = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from None
    if schema is False:
        raise GrammarError("the JSON schema is false: nothing matches it")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("the JSON schema must be an object, or true or false")
    return {**schema, "x-guidance": JSON_OPTIONS}


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deeply") from None


def _gbnf(text: str) -> str:
    return lark_of(read_gbnf(text))


def _regex(text: str) -> str:
    written = json.loads(library().LLMatcher.grammar_from_regex(text))
    return str(written["grammars"][0]["lark_grammar"])


def _options(lark: str) -> dict[str, Any]:
    """What a grammar in Lark says of how it is read, the last time that it does."""
    options: dict[str, Any] = {}
    for match in _OPTIONS.finditer(lark):
        try:
            options = dict(json.loads(match[1]))
        except (ValueError, TypeError, RecursionError) as error:
            raise GrammarError(f"%llguidance must be a JSON object in one line: {error}") from None
    return options


_WRITERS: dict[str, Callable[[str], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "gbnf": _gbnf,
    "lark": str,
    "regex": _regex,
}
