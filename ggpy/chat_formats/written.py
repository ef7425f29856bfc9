"""Earlier calls as the model writes them, for chat templates that say how calls are written but do
not write them: a model must not see its own calls in another form, because it would take that over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .chat_format import ChatFormat
from .json_calls import JsonObjects, NameThenJson
from .python_calls import PythonCalls

Message = Mapping[str, Any]


def can_write(chat_format: ChatFormat) -> bool:
    """Whether calls of the format can be written here."""
    known = isinstance(chat_format.syntax, JsonObjects | NameThenJson | PythonCalls)
    return known and chat_format.channels is None and not chat_format.needs_instructions


def with_written_calls(messages: Sequence[Message], chat_format: ChatFormat) -> list[Message]:
    """Messages in OpenAI's form, whose calls have become text; results keep the names of calls."""
    found: list[Message] = []
    names: dict[Any, str] = {}
    for message in messages:
        calls = message.get("tool_calls") or ()
        names |= {call.get("id"): call["function"]["name"] for call in calls}
        if calls:
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            text, said = message.get("content") or "", written(calls, chat_format)
            said = said if text else said.removeprefix(chat_format.begun)
            message = {**rest, "content": text + said}
        elif message["role"] == "tool" and message.get("tool_call_id") in names:
            message = {"name": names[message["tool_call_id"]], **message}
        found.append(message)
    return found


def written(calls: Sequence[Message], chat_format: ChatFormat) -> str:
    """Calls in OpenAI's form as the model writes them."""
    opener, closer = chat_format.call_gap
    before = chat_format.call_open + opener
    after = closer + chat_format.call_close
    texts = [before + _call(call["function"], chat_format.syntax) + after for call in calls]
    if chat_format.section_each:
        return chat_format.between.join(_section(text, chat_format) for text in texts)
    text = chat_format.between.join(texts)
    return _section(f"[{text}]" if chat_format.listed else text, chat_format)


def _section(text: str, chat_format: ChatFormat) -> str:
    gap = chat_format.section_gap
    head, tail = chat_format.section_open, chat_format.section_close
    return (head + gap if head else "") + text + (gap + tail if tail else "")


def _call(function: Message, syntax: Any) -> str:
    name, arguments = function["name"], _object(function.get("arguments"))
    plain = json.dumps(arguments, ensure_ascii=False)
    if isinstance(syntax, PythonCalls):
        return f"{name}({', '.join(f'{k}={_python(v)}' for k, v in arguments.items())})"
    if isinstance(syntax, NameThenJson):
        return syntax.written.format(name=name) + syntax.opener + plain
    if syntax.key_is_name:
        return f"{{{json.dumps(name)}: {plain}}}"
    head = f'{{"{syntax.names[0]}": {json.dumps(name)}, "{syntax.arguments[0]}": '
    return f"{head}{plain}}}"


def _object(arguments: Any) -> Mapping[str, Any]:
    """Arguments as an object; a text that is none stands in one."""
    if isinstance(arguments, Mapping):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _python(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
