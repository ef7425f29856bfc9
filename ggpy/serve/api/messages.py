"""Reads the messages and tools of an OpenAI chat request into the form that templates take."""

from __future__ import annotations

import json
from typing import Any

from ..errors import ApiError
from ..fields import Fields
from .reading import chosen_tool

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES = 10_000
MAX_TOOLS = 1024

Tools = list[dict[str, Any]]


def read_messages(body: Fields) -> list[dict[str, Any]]:
    """The messages, checked; ApiError 400 names the field that is wrong."""
    if "messages" not in body:
        raise body.error("messages", "a list of messages")
    messages = [_message(message) for message in body.items("messages")]
    if not messages:
        raise ApiError(400, "messages is empty: give at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        told = f"messages has {len(messages)} entries: give at most {MAX_MESSAGES}"
        raise ApiError(400, told, param="messages")
    return messages


def _message(given: Fields) -> dict[str, Any]:
    role = given.needed_text("role")
    if role not in ROLES:
        raise given.error("role", "one of " + ", ".join(ROLES))
    message: dict[str, Any] = {"role": role, "content": _content(given)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if name in given:
            message[name] = given.text(name)
    if "tool_calls" in given:
        message["tool_calls"] = [_call(call) for call in given.items("tool_calls")]
    if message["content"] is None:
        if role not in ("assistant", "tool"):  # a tool may return nothing
            raise given.error("content", "a string or a list of parts")
        if not message.get("tool_calls"):
            message["content"] = ""
    return message


def _content(given: Fields) -> str | None:
    """A text, or the texts of its parts."""
    content = given.raw("content")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise given.error("content", "a string or a list of parts")
    texts = []
    for part in given.items("content"):
        kind = part.text("type", "text")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            told = f"{part.path('type')} is {kind!r:.40}: this model reads text only"
            raise ApiError(400, told, param=part.path("type"))
        texts.append(part.needed_text("refusal" if kind == "refusal" else "text"))
    return "\n".join(texts)


def _call(given: Fields) -> dict[str, Any]:
    function = given.object("function")
    if function is None:
        raise given.error("function", "an object with name and arguments")
    arguments = function.raw("arguments", "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    called = {"name": function.filled_text("name"), "arguments": arguments}
    return {"id": given.text("id", ""), "type": "function", "function": called}


def read_tools(body: Fields) -> Tools:
    """The tools in OpenAI's form; ApiError 400."""
    tools = [_tool(tool) for tool in body.items("tools")]
    if len(tools) > MAX_TOOLS:
        raise ApiError(400, f"tools has {len(tools)} entries: at most {MAX_TOOLS}", param="tools")
    return tools


def _tool(given: Fields) -> dict[str, Any]:
    given.one_of("type", ("function",), "function")
    function = given.object("function")
    if function is None:
        raise given.error("function", "an object with a name")
    function.filled_text("name")
    function.text("description")
    function.object("parameters")
    return {"type": "function", "function": dict(function.values)}


def read_tool_choice(body: Fields, tools: Tools) -> tuple[str, Tools]:
    """("auto", "none", "required", or "name:" and the name of a tool; the tools to choose from)."""
    if not isinstance(body.raw("tool_choice"), dict):
        return body.one_of("tool_choice", ("auto", "none", "required"), "auto"), tools
    choice = Fields(body.raw("tool_choice"), body.path("tool_choice"))
    allowed = choice.object("allowed_tools")
    if allowed is None:
        return _named(choice, tools), tools
    names = {_named(item, tools) for item in allowed.items("tools")}
    kept = [tool for tool in tools if f"name:{tool['function']['name']}" in names]
    return allowed.one_of("mode", ("auto", "required"), "auto"), kept


def _named(given: Fields, tools: Tools) -> str:
    function = given.object("function")
    if function is None:
        raise given.error("function", "an object with the name of a tool")
    return chosen_tool(function, tools)
