"""Values that a model writes as plain text, as Python or in Gemma's form, made into JSON text.

A tool's schema says which type is meant: "5" is a string for one tool and a number for another.
Nothing here knows how values are told apart in an answer, and nothing raises for a strange value:
it becomes a string.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

_PYTHON = {"True": "true", "False": "false", "None": "null"}
_STRING_OR_WORD = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\b(true|false|null)\b""", re.S)
_NUMBERED_OR_KEY = re.compile(
    r"""\0(\d+)\0|"(?:[^"\\]|\\.)*"|([^\s"{}\[\],:\0][^"{}\[\],:\0]*?)\s*(?=:)"""
    r"|\b(True|False|None)\b",
    re.S,
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_DEEPEST = 64
_SAID = frozenset(("type", "title", "description", "default", "examples"))
_OBJECT_KEYS = _SAID | {"properties", "required", "additionalProperties"}
_ARRAY_KEYS = _SAID | {"items"}


def types_of(schema: Any, key: str) -> frozenset[str]:
    """JSON types that a tool's schema allows for an argument; empty where it does not say."""
    return type_names(properties_of(schema).get(key))


def keys_of(schema: Any) -> list[str]:
    """Names of a tool's arguments, in the schema's order."""
    return list(properties_of(schema))


def properties_of(schema: Any) -> Mapping[str, Any]:
    """The properties of an object's schema; none where it does not say."""
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def is_only_properties(schema: Any, types: frozenset[str]) -> bool:
    """Whether a schema is of an object, and says no more than what its properties are."""
    is_object = types == {"object"} and bool(properties_of(schema))
    return is_object and not schema.keys() - _OBJECT_KEYS


def is_only_items(schema: Any, types: frozenset[str]) -> bool:
    """Whether a schema is of a list, and says no more than what its entries are."""
    is_list = types == {"array"} and bool(schema.get("items"))
    return is_list and not schema.keys() - _ARRAY_KEYS


def required_of(schema: Any) -> frozenset[str]:
    """Names of the properties that an object must have."""
    found = schema.get("required")
    return frozenset(key for key in found if isinstance(key, str)) if found else frozenset()


def type_name(types: frozenset[str]) -> str:
    """The type that a tag names, of which a number has one."""
    names = types - {"integer"} | ({"number"} if "integer" in types else set())
    return min(names, default="object")


def type_names(schema: Any, depth: int = 0) -> frozenset[str]:
    """JSON types that a value's schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return frozenset()
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else {t for t in _listed(kind) if isinstance(t, str)}
    if not found and (values := _listed(schema.get("enum"))):
        found = {_type_of(value) for value in values}
    for name in ("anyOf", "oneOf"):
        for option in _listed(schema.get(name)):
            found |= type_names(option, depth + 1)
    return frozenset(found)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _type_of(value: Any) -> str:
    for kinds, name in (((bool,), "boolean"), ((int,), "integer"), ((float,), "number"),
                        ((str,), "string"), ((list,), "array"), ((dict,), "object")):  # fmt: skip
        if isinstance(value, kinds):
            return name
    return "null"


def is_string(types: frozenset[str]) -> bool:
    """Whether a value must be a string, so that its text can be passed on as it comes."""
    return types == {"string"}


def escaped_json(text: str) -> str:
    """Text as it stands inside the quotes of a JSON string."""
    return dumped(text)[1:-1]


def typed(text: str, types: frozenset[str]) -> str:
    """JSON of a value written as plain text, of one of `types` (any, where empty)."""
    if is_string(types):
        return _string(text)
    value = text.strip()
    value = _PYTHON.get(value, value)
    try:
        found = _type_of(json.loads(value, parse_constant=_refused))
    except (ValueError, RecursionError):
        return python_json(text) if value[:1] in ("[", "{") else _string(text)
    allowed = not types or found in types or (found == "integer" and "number" in types)
    return value if allowed or "string" not in types else _string(text)


def _string(text: str) -> str:
    return dumped(text)


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def python_json(text: str) -> str:
    """JSON of a Python literal, in which true, false and null may stand too; else a string."""
    try:
        json.loads(text, parse_constant=_refused)
        return text.strip()
    except (ValueError, RecursionError):
        pass
    source = _STRING_OR_WORD.sub(_python_word, text)
    for attempt in (text, source):
        try:
            return dumped(ast.literal_eval(attempt.strip()))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    whole = text.strip()
    unescaped = len(whole) > 1 and whole[0] == whole[-1] and whole[0] in "'\""  # as of LFM2.5
    return _string(whole[1:-1] if unescaped else text)


def _python_word(match: re.Match[str]) -> str:
    return {"true": "True", "false": "False", "null": "None"}.get(match[1], match[0])


def dumped(value: Any) -> str:
    """JSON of a value; half a surrogate pair stays escaped, because UTF-8 has no bytes for it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value, allow_nan=False) if _SURROGATE.search(text) else text


def gemma_json(text: str, quote: str = '<|"|>') -> str:
    """JSON of a value in Gemma 4's form: strings between `quote`, keys bare."""
    parts = text.split(quote)
    if len(parts) % 2 == 0:
        return _string(text)
    # A string becomes its number between zeros, so that keys can be found outside strings.
    bare = "".join(p if i % 2 == 0 else f"\0{i}\0" for i, p in enumerate(parts))

    def quoted(match: re.Match[str]) -> str:
        if match[1]:
            return _string(parts[int(match[1])])
        return _string(match[2]) if match[2] else _PYTHON.get(match[0], match[0])

    whole = _NUMBERED_OR_KEY.sub(quoted, bare).strip()
    try:
        json.loads(whole, parse_constant=_refused)
    except (ValueError, RecursionError, IndexError):
        return _string("".join(parts)) if len(parts) > 1 else typed(text, frozenset())
    return whole
