"""Reads the tools of a Responses body, and which of them may be called.

Tools that run on OpenAI's servers, or whose calls are not JSON, are left out as llama-server does:
coding agents list them in every request, and work with the functions that remain. A namespace holds
functions, as Codex lists those of an MCP server: the model is given each with the namespace in its
name, and the API names both. Nothing here knows messages or answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ...fields import Fields
from ..reading import chosen_tool, function_tool, refuse, tool_names, unique_tools

Tools = tuple[dict[str, Any], ...]


def read_tools(fields: Fields) -> Tools:
    """The functions among the tools, those of namespaces too, in OpenAI's form; ApiError."""
    functions = (_with_full_name(item, space) for item, space in _functions(fields))
    return unique_tools(functions, _tool)


def namespaces(fields: Fields) -> dict[str, tuple[str, str]]:
    """Name of a function as the model is given it -> (its namespace, its name there)."""
    listed = ((space, item.filled_text("name")) for item, space in _functions(fields) if space)
    return {full_name(*names): names for names in listed}


def full_name(space: str, name: str) -> str:
    """The name of a namespace's function as the model is given it."""
    return f"{space.removesuffix('__')}__{name}"


def called_name(call: Fields) -> str:
    """The name of the function that an item calls, as the model was given it."""
    return _with_full_name(call, call.text("namespace")).filled_text("name")


def read_tool_choice(fields: Fields, tools: Tools) -> tuple[str, Tools]:
    """(tool_choice of a ChatRequest, the tools among which it chooses); ApiError."""
    value = fields.raw("tool_choice", "auto")
    if isinstance(value, dict):
        choice = Fields(value, "tool_choice")
        kind = choice.one_of("type", ("function", "allowed_tools"), "")
        if kind == "function":
            return _chosen(choice, tools), tools
        if kind == "allowed_tools":
            return _allowed(choice, tools)
        raise choice.error("type", "function or allowed_tools")
    mode = fields.one_of("tool_choice", ("auto", "none", "required"), "auto")
    if mode == "required" and not tools:
        refuse(fields, "tool_choice", "there are no functions among the tools: give some")
    return mode, tools


def echoed_tools(fields: Fields, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools that the model was given, as the body gave them."""
    names = set(tool_names(tools))
    return [
        _echoed(item.values)
        for item in fields.items("tools")
        if any(name in names for name in _full_names(item))
    ]


def _echoed(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return tool if tool["type"] == "namespace" else {"strict": False, "parameters": {}, **tool}


def _full_names(item: Fields) -> Collection[str]:
    """Names of the functions that an entry of the tools stands for."""
    listed = _functions_of(item)
    return [_with_full_name(function, space).filled_text("name") for function, space in listed]


def _functions(fields: Fields) -> Iterator[tuple[Fields, str | None]]:
    """Each function, and its namespace if it has one."""
    for item in fields.items("tools"):
        yield from _functions_of(item)


def _functions_of(item: Fields) -> Iterator[tuple[Fields, str | None]]:
    kind = item.needed_text("type")
    if kind == "function":
        yield item, None
    elif kind == "namespace":
        space = item.filled_text("name")
        for inner in item.items("tools"):
            if inner.needed_text("type") == "function":
                yield inner, space


def _with_full_name(item: Fields, space: str | None) -> Fields:
    if not space:
        return item
    return Fields({**item.values, "name": full_name(space, item.filled_text("name"))}, item.where)


def _tool(tool: Fields) -> dict[str, Any]:
    schema = tool.object("parameters")
    name, description = tool.filled_text("name"), tool.text("description") or ""
    strict = tool.flag("strict", False)
    return function_tool(name, description, {} if schema is None else schema.values, strict)


def _chosen(choice: Fields, tools: Tools) -> str:
    return chosen_tool(_with_full_name(choice, choice.text("namespace")), tools)


def _allowed(choice: Fields, tools: Tools) -> tuple[str, Tools]:
    """allowed_tools: the functions that it names."""
    mode = choice.one_of("mode", ("auto", "required"), "auto")
    allowed = [t for t in choice.items("tools") if t.needed_text("type") == "function"]
    names = {_chosen(item, tools) for item in allowed}
    kept = tuple(t for t in tools if f"name:{t['function']['name']}" in names)
    if mode == "required" and not kept:
        refuse(choice, "tools", "it names no function: name at least one")
    return mode, kept
