"""Reads the messages and tools of an OpenAI chat request into the form that templates take.

The older form of tools, functions, becomes the newer one: `functions`, `function_call`, messages
of the role "function".
"""

from __future__ import annotations

import json
from typing import Any

from ..errors import ApiError
from ..fields import Fields
from .reading import UNREAD, chosen_tool, is_unread, refuse

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
MAX_MESSAGES = 10_000
MAX_TOOLS = 1024

Tools = list[dict[str, Any]]


def read_messages(body: Fields) -> list[dict[str, Any]]:
    """The messages, checked; ApiError 400 names the field that is wrong."""
    if "messages" not in body:
        raise body.error("messages", "a list of messages")
    messages: list[dict[str, Any]] = []
    for given in body.items("messages"):
        message = _message(given)
        if "function_call" in given:
            message["tool_calls"] = [_called(given, f"call{len(messages):05}")]
        if message["role"] == "function":
            message = _result(given, message["content"], messages)
        messages.append(message)
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
    message: dict[str, Any] = {"role": role, "content": _content(given, role)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if name in given:
            message[name] = given.text(name)
    if "tool_calls" in given:
        message["tool_calls"] = [_call(call) for call in given.items("tool_calls")]
    if message["content"] is None:
        if role not in ("assistant", "tool", "function"):  # a tool may return nothing
            raise given.error("content", "a string or a list of parts")
        if not message.get("tool_calls") and "function_call" not in given:
            message["content"] = ""
    return message


def _called(given: Fields, id: str) -> dict[str, Any]:
    """The call of an assistant's message in the older form, which names no id."""
    if given.text("role") != "assistant":
        refuse(given, "function_call", "only an assistant calls functions: leave it out")
    if "tool_calls" in given:
        refuse(given, "function_call", "it is the older form of tool_calls: give one of them")
    called = given.object("function_call")
    assert called is not None
    return {"id": id, "type": "function", "function": _function_call(called)}


def _result(given: Fields, content: str | None, before: list[dict[str, Any]]) -> dict[str, Any]:
    """What a function returned, as the result of its last call."""
    name = given.filled_text("name")
    calls = (call for message in reversed(before) for call in message.get("tool_calls", ()))
    ids = [call["id"] for call in calls if call["function"]["name"] == name]
    result = {"role": "tool", "name": name, "content": content or ""}
    return {**result, "tool_call_id": ids[0]} if ids else result


def _content(given: Fields, role: str) -> str | None:
    """A text, or the texts of its parts. A picture that a tool returned becomes UNREAD."""
    content = given.raw("content")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise given.error("content", "a string or a list of parts")
    texts = []
    for part in given.items("content"):
        kind = part.text("type", "text") or "text"
        if role in ("tool", "function") and "type" in part and is_unread(part, TEXTS):
            texts.append(UNREAD)
            continue
        if kind not in TEXTS:
            told = f"{part.path('type')} is {kind!r:.40}: this model reads text only"
            raise ApiError(400, told, param=part.path("type"))
        texts.append(part.needed_text(TEXTS[kind]))
    return "\n".join(texts)


def _call(given: Fields) -> dict[str, Any]:
    function = given.object("function")
    if function is None:
        raise given.error("function", "an object with name and arguments")
    called = _function_call(function)
    return {"id": given.text("id", ""), "type": "function", "function": called}


def _function_call(function: Fields) -> dict[str, str]:
    arguments = function.raw("arguments", "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return {"name": function.filled_text("name"), "arguments": arguments}


def read_tools(body: Fields) -> Tools:
    """The tools in OpenAI's form, or the functions of the older one; ApiError 400."""
    name = "functions" if "functions" in body else "tools"
    if name == "functions" and "tools" in body:
        refuse(body, "functions", "they are the older form of tools: give one of them")
    read = _function if name == "functions" else _tool
    tools = [read(tool) for tool in body.items(name)]
    if len(tools) > MAX_TOOLS:
        raise ApiError(400, f"{name} has {len(tools)} entries: at most {MAX_TOOLS}", param=name)
    return tools


def _tool(given: Fields) -> dict[str, Any]:
    given.one_of("type", ("function",), "function")
    function = given.object("function")
    if function is None:
        raise given.error("function", "an object with a name")
    return _function(function)


def _function(function: Fields) -> dict[str, Any]:
    function.filled_text("name")
    function.text("description")
    function.object("parameters")
    return {"type": "function", "function": dict(function.values)}


def read_tool_choice(body: Fields, tools: Tools) -> tuple[str, Tools]:
    """("auto", "none", "required", or "name:" and the name of a tool; the tools to choose from)."""
    if "function_call" in body:
        return _function_choice(body, tools), tools
    if not isinstance(body.raw("tool_choice"), dict):
        return body.one_of("tool_choice", ("auto", "none", "required"), "auto"), tools
    choice = Fields(body.raw("tool_choice"), body.path("tool_choice"))
    allowed = choice.object("allowed_tools")
    if allowed is None:
        return _named(choice, tools), tools
    names = {_named(item, tools) for item in allowed.items("tools")}
    kept = [tool for tool in tools if f"name:{tool['function']['name']}" in names]
    return allowed.one_of("mode", ("auto", "required"), "auto"), kept


def _function_choice(body: Fields, tools: Tools) -> str:
    """The choice of the older form: "auto", "none", or an object with a name."""
    if "tool_choice" in body:
        refuse(body, "function_call", "it is the older form of tool_choice: give one of them")
    if "functions" not in body:
        refuse(body, "function_call", "there are no functions: give some, or tool_choice")
    if isinstance(body.raw("function_call"), dict):
        choice = Fields(body.raw("function_call"), "function_call")
        return chosen_tool(choice, tools, "functions")
    return body.one_of("function_call", ("auto", "none"), "auto")


def _named(given: Fields, tools: Tools) -> str:
    function = given.object("function")
    if function is None:
        raise given.error("function", "an object with the name of a tool")
    return chosen_tool(function, tools)
