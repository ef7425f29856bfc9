"""Tools with simpler schemas, for chat templates that write types as a signature does.

The templates of Hermes and Command R recurse for ever at a type that may be null, and the one of
Command R+ refuses an object without additionalProperties. What a model may call, and with which
arguments, must not be decided here: only the prompt has the simpler schemas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_NAMED = ("properties", "$defs", "definitions")  # schemas by name
_INSIDE = ("items", "additionalProperties")
_DEEPEST = 64


def simpler_tools(tools: Sequence[Any]) -> list[Any]:
    """Tools in OpenAI's form, in which a schema has one type at most and never null."""
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or "parameters" not in function:
        return tool
    return {**tool, "function": {**function, "parameters": _schema(function["parameters"], 0)}}


def _schema(schema: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return schema
    found = dict(schema)
    kinds = schema.get("type")
    if isinstance(kinds, list) or kinds == "null":
        others = [kind for kind in kinds if kind != "null"] if isinstance(kinds, list) else []
        found.pop("type")
        found |= {"type": others[0]} if others else {}
    for name in _NAMED:
        if isinstance(options := schema.get(name), Mapping):
            found[name] = {key: _schema(option, depth + 1) for key, option in options.items()}
    for name in _INSIDE:
        if name in schema:
            found[name] = _schema(schema[name], depth + 1)
    if found.get("type") == "object" and depth:
        found.setdefault("additionalProperties", {})
    return found
