"""Reads what the APIs have in common: the limits of reasoning, texts, tools, the conversation.

Every error names the field. Nothing here knows the names of an API's fields.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ..errors import ApiError
from ..events import ChatRequest
from ..fields import Fields, shown

OTHER_MEDIA = ("image", "document", "file", "audio")  # in the types of parts
MOST_TOKENS = 2**31 - 1
LONGEST_MESSAGE = 4096  # characters
UNREAD = "(This model reads text only: it cannot see what the tool returned.)"


@dataclass(frozen=True)
class ApiCall:
    """A body, read. stream: whether a stream is wanted, timed: with timings. echo: fields that
    the answer repeats.
    """

    request: ChatRequest
    stream: bool = False
    timed: bool = False
    echo: Mapping[str, Any] = field(default_factory=dict)


def refuse(fields: Fields, name: str, why: str) -> NoReturn:
    """Raises the error that a value is well-formed but cannot be served. why: with the remedy."""
    path, value = fields.path(name), fields.raw(name)
    told = f" is {shown(value)}" if isinstance(value, (str, int, float)) else ""
    raise ApiError(400, f"{path}{told}: {why}", param=path)


def reasoning_limits(fields: Fields) -> dict[str, Any]:
    """llama.cpp's fields that limit the reasoning of an answer, as arguments of a ChatRequest."""
    names = ("reasoning_budget_tokens", "thinking_budget_tokens")  # the first is llama.cpp's choice
    given = [n for name in names if (n := fields.integer(name, None, -1, MOST_TOKENS)) is not None]
    message = fields.text("reasoning_budget_message")
    if message is not None and len(message) > LONGEST_MESSAGE:
        told = f"{len(message)} characters are too many: give at most {LONGEST_MESSAGE}"
        raise ApiError(400, f"reasoning_budget_message: {told}", param="reasoning_budget_message")
    return {"reasoning_budget": given[0] if given else -1, "reasoning_message": message}


def texts_of(
    fields: Fields, name: str, kinds: Mapping[str, str], sort: str = "part"
) -> list[str] | None:
    """The texts of a field that is a string or a list of typed parts; None where it is missing.

    kinds: type of a part -> the name of its text. sort: what the API calls a part.
    """
    value = fields.raw(name)
    if value is None or isinstance(value, str):
        return None if value is None else [value]
    if not isinstance(value, list):
        raise fields.error(name, f"a string or a list of {sort}s")
    return [part.needed_text(kinds[part_type(part, kinds)]) for part in fields.items(name)]


def result_of(
    fields: Fields, name: str, kinds: Mapping[str, str], sort: str = "part"
) -> str | None:
    """What a tool returned, as one text; None where it is missing. Arguments as of `texts_of`.

    A picture or a file becomes UNREAD, which tells the model: an agent sends the whole conversation
    in every request, so an error would end it for good.
    """
    value = fields.raw(name)
    if not isinstance(value, list):
        texts = texts_of(fields, name, kinds, sort)
        return None if texts is None else texts[0]
    return "\n".join(
        UNREAD if is_unread(part, kinds) else part.needed_text(kinds[part_type(part, kinds)])
        for part in fields.items(name)
    )


def is_unread(part: Fields, known: Collection[str]) -> bool:
    """Whether a part is a picture, a document or a sound, which no model here can take."""
    kind = part.needed_text("type")
    return kind not in known and any(word in kind for word in OTHER_MEDIA)


def part_type(part: Fields, known: Collection[str]) -> str:
    """The type of a part, one of those known. An error says that pictures cannot be read."""
    kind = part.needed_text("type")
    if kind in known:
        return kind
    if is_unread(part, known):
        refuse(part, "type", "this model reads text only: leave it out or give its text")
    raise part.error("type", "one of " + ", ".join(known))


def function_tool(name: str, description: str, parameters: Any, strict: bool) -> dict[str, Any]:
    """A tool in OpenAI's form. "strict" is there only where it is true: templates print tools."""
    told = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {**told, "strict": True} if strict else told}


def tool_names(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of tools in OpenAI's form."""
    return [tool["function"]["name"] for tool in tools]


def unique_tools(items: Iterable[Fields], read: Callable[[Fields], dict]) -> tuple[dict, ...]:
    """Tools, of which `read` reads one."""
    tools: dict[str, dict] = {}
    for item in items:
        tool = read(item)
        name = tool["function"]["name"]
        if name in tools:
            refuse(item, "name", "another tool has this name: rename one of them")
        tools[name] = tool
    return tuple(tools.values())


def chosen_tool(choice: Fields, tools: Iterable[Mapping[str, Any]], listed: str = "tools") -> str:
    """A tool_choice that names a tool: "name:X". It must be one of the tools. listed: the field
    that has them.
    """
    name, known = choice.needed_text("name"), tool_names(tools)
    if name not in known:
        told = f"it is not in {listed}: give one of {', '.join(known) or listed}"
        refuse(choice, "name", told)
    return f"name:{name}"


class ChatMessages:
    """Collects messages in OpenAI's form.

    Neighbours of one role become one message: chat templates may refuse two. What an assistant
    thinks, says and calls between two other messages is one message too.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def say(self, role: str, text: str) -> None:
        """A message of a system, a user or an assistant."""
        message = self._last(role)
        before = message["content"]
        message["content"] = f"{before}\n\n{text}" if before else text

    def think(self, text: str) -> None:
        """What an assistant thought."""
        message = self._last("assistant")
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def call(self, id: str, name: str, arguments: str) -> None:
        """An assistant's call of a tool. arguments: JSON text."""
        function = {"name": name, "arguments": arguments}
        calls = self._last("assistant").setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": function})

    def result(self, id: str, text: str) -> None:
        """What a call returned."""
        self.messages.append({"role": "tool", "tool_call_id": id, "content": text})

    def _last(self, role: str) -> dict[str, Any]:
        """The last message, if it has this role, else a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]
