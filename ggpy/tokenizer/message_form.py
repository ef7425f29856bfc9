"""Messages in OpenAI's form, checked, and in the form that a chat template wants.

Templates differ: some want the arguments of calls as a dict and some as JSON text, some want a
missing content as "" and some as none, some iterate over parts of a content, some know no tools at
all, some no system message, or none after the first message. `probes` finds out what a template
wants by rendering, `TemplateForm.adapted` rewrites messages. The caller passes the function that
renders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
_EXAMPLE = '{"role": "user", "content": "Hello"}'
_CALL = '{"type": "function", "function": {"name": ..., "arguments": ...}}'

Message = dict[str, Any]


# Checks


def checked_messages(messages: object) -> list[Message]:
    """A copy of messages, dicts with "role" and "content"; ValueError says which one is wrong.

    A content of text parts becomes one text, the arguments of a call become a dict if they are JSON
    of an object, and a tool's message without a name gets the name in its call.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f"messages is {messages!r:.60}: give a list of dicts like {_EXAMPLE}")
    if not messages:
        raise ValueError(f"messages is empty: give at least one, like {_EXAMPLE}")
    checked = [_checked(message, f"messages[{i}]") for i, message in enumerate(messages)]
    _name_results(checked)
    return checked


def _checked(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} is {message!r:.60}: give a dict like {_EXAMPLE}")
    if (role := message.get("role")) not in ROLES:
        known = ", ".join(ROLES)
        raise ValueError(f"{where} has the role {role!r:.60}: it must be one of {known}")
    copy = dict(message)
    for name in ("tool_calls", "reasoning_content", "name", "tool_call_id"):
        if copy.get(name) is None:
            copy.pop(name, None)
        elif name != "tool_calls" and not isinstance(copy[name], str):
            raise ValueError(f"{where}.{name} is {copy[name]!r:.60}: it must be a text")
    if role == "assistant" and "tool_calls" in copy:
        copy["tool_calls"] = _checked_calls(copy["tool_calls"], f"{where}.tool_calls")
    silent = role == "assistant" and (copy.get("tool_calls") or "reasoning_content" in copy)
    copy["content"] = _checked_content(copy.get("content"), where, bool(silent))
    return copy


def _checked_content(content: object, where: str, may_be_none: bool) -> str | None:
    if isinstance(content, str) or (content is None and may_be_none):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where} has the content {content!r:.60}: it must be a text")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            must = f'content[{i}] must be {{"type": "text", "text": ...}}'
            shown = f"of type {kind!r:.60}" if kind else f"{content!r:.60}"
            raise ValueError(f"{where} has the content {shown}: {must}")
        texts.append(text)
    return "\n".join(texts)


def _checked_calls(calls: object, where: str) -> list[Message]:
    if not isinstance(calls, list):
        raise ValueError(f"{where} is {calls!r:.60}: it must be a list of {_CALL}")
    return [_checked_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _checked_call(call: object, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise ValueError(f"{where} is {call!r:.60}: it must be {_CALL}")
    if not isinstance(name := function.get("name"), str) or not name:
        raise ValueError(f"{where}.function.name is {name!r:.60}: it must be a text")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, (str, Mapping)):
        must = "it must be a JSON text of an object"
        raise ValueError(f"{where}.function.arguments is {arguments!r:.60}: {must}")
    function = {**function, "arguments": _as_dict(arguments)}
    return {"type": "function", **call, "function": function}


def _as_dict(arguments: Any) -> Any:
    """Arguments as a dict, if they are JSON of an object; else their text."""
    if not isinstance(arguments, str):
        return dict(arguments or {})
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _name_results(messages: list[Message]) -> None:
    """Give a tool's message the name of the call that it answers."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[str(call.get("id"))] = call["function"]["name"]
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])


# Forms


@dataclass(frozen=True)
class TemplateForm:
    """What a template wants. knows_x: it shows x; if it does not, `adapted` puts x into a text."""

    arguments_as_text: bool = False
    content_none: bool = False  # of an assistant that calls; else ""
    content_parts: bool = False
    knows_calls: bool = True
    knows_results: bool = True
    knows_several_calls: bool = True  # in one message
    knows_text_with_thought: bool = True  # both in a message with calls
    knows_developer: bool = False
    knows_system: bool = True  # as the first message
    knows_late_system: bool = True  # a system message after others
    knows_question_after_result: bool = True  # without an answer in between
    thinking: bool = False  # the name of reasoning_content in messages
    reasoning: bool = False  # or this one

    def adapted(self, messages: Sequence[Message]) -> list[Message]:
        """Checked messages as the template wants them."""
        known = messages if self.knows_several_calls else _one_call_each(messages)
        known = [self._in_known_role(message) for message in known]
        if not (self.knows_system and self.knows_late_system):
            known = self._without_system(known)
        if not self.knows_question_after_result:
            known = _questions_in_results(known)
        return [self._adapted(message) for message in known]

    def _in_known_role(self, message: Message) -> Message:
        if message["role"] == "developer" and not self.knows_developer:
            return {**message, "role": "system"}
        if message["role"] == "tool" and not self.knows_results:
            return {"role": "user", "content": _result_in_words(message)}
        return message

    def _without_system(self, messages: Sequence[Message]) -> list[Message]:
        """Moves the texts of system messages that the template does not know to their neighbours:
        after the question or result before them, or else before the next question.
        """
        found: list[Message] = []
        waiting: list[str] = []
        for i, message in enumerate(messages):
            known = self.knows_late_system if i else self.knows_system
            if message["role"] not in ("system", "developer") or known:
                if waiting and message["role"] == "user":
                    message = _joined(message, [*waiting, message["content"]])
                    waiting = []
                found.append(message)
            elif found and found[-1]["role"] != "assistant":
                found[-1] = _joined(found[-1], [found[-1]["content"], message["content"]])
            else:
                waiting.append(message["content"])
        return [*found, {"role": "user", "content": "\n\n".join(waiting)}] if waiting else found

    def _adapted(self, message: Message) -> Message:
        copy = dict(message)
        if copy.get("tool_calls"):
            copy = self._with_calls(copy)
        elif copy["content"] is None:
            copy["content"] = ""
        for name in ("thinking", "reasoning"):
            if getattr(self, name) and "reasoning_content" in copy:
                copy[name] = copy["reasoning_content"]
        if self.content_parts and isinstance(copy["content"], str):
            copy["content"] = [{"type": "text", "text": copy["content"]}]
        return copy

    def _with_calls(self, message: Message) -> Message:
        calls = message["tool_calls"]
        if not self.knows_calls:
            said = [message["content"]] if message["content"] else []
            said += [_call_in_words(call["function"]) for call in calls]
            rest = {k: v for k, v in message.items() if k != "tool_calls"}
            return {**rest, "content": "\n".join(said)}
        if self.arguments_as_text:
            calls = [{**call, "function": _with_text(call["function"])} for call in calls]
        none = None if self.content_none else ""
        thought = message.get("reasoning_content")
        if not self.knows_text_with_thought and thought and message["content"]:
            both = f"{thought}\n\n{message['content']}"
            message = {**message, "reasoning_content": both, "content": None}
        return {**message, "tool_calls": calls, "content": message["content"] or none}


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Splits a message with several calls into a message for each call, followed by its result."""
    found: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        n = next((i for i, m in enumerate(rest) if m["role"] != "tool"), len(rest))
        results, rest = rest[:n], rest[n:]
        for call in calls:
            found.append({**message, "tool_calls": [call]})
            message = {"role": "assistant", "content": None}
            ids = [result.get("tool_call_id") for result in results]
            if call.get("id") in ids:
                found.append(results.pop(ids.index(call.get("id"))))
        found += results
    return found


def _questions_in_results(messages: Sequence[Message]) -> list[Message]:
    """Appends a user's message to the result or user's message that comes just before it."""
    found: list[Message] = []
    for message in messages:
        if message["role"] == "user" and found and found[-1]["role"] in ("tool", "user"):
            found[-1] = _joined(found[-1], [found[-1]["content"], message["content"]])
        else:
            found.append(message)
    return found


def _joined(message: Message, texts: Sequence[str]) -> Message:
    return {**message, "content": "\n\n".join(text for text in texts if text)}


def _with_text(function: Message) -> Message:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": text}


def _call_in_words(function: Message) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return json.dumps({"tool_call": call}, ensure_ascii=False)


def _result_in_words(message: Message) -> str:
    result = {"name": message.get("name"), "content": message["content"]}
    return json.dumps({"tool_response": result}, ensure_ascii=False)


# Probes

_NAME, _KEY, _VALUE, _WORD = "probe_tool", "probe_key", "Vzqx", "Qmvx"
_CALLS = [
    {"id": "call00001", "type": "function",
     "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
]  # fmt: skip
_CALLER = {"role": "assistant", "content": None, "tool_calls": _CALLS}
_SECOND = "Zhfp"
_REASONING = re.compile(r"""\.reasoning\b|\[['"]reasoning['"]\]""")
_TWICE = [
    *_CALLS,
    {"id": "call00002", "type": "function",
     "function": {"name": _NAME, "arguments": {_KEY: _SECOND}}},
]  # fmt: skip
_RESULT = {"role": "tool", "content": "Rkwz", "tool_call_id": "call00001", "name": _NAME}
_SYSTEM, _LATE = ({"role": "system", "content": text} for text in ("Gjwk", "Xpfy"))
_SAID = {"role": "assistant", "content": _VALUE}
_NEXT = {"role": "user", "content": "Wjqt"}
_SCHEMA = {"type": "object", "properties": {_KEY: {"type": "string", "description": "A value."}}}
_TOOLS = [
    {"type": "function",
     "function": {"name": _NAME, "description": "A tool.", "parameters": _SCHEMA}}
]  # fmt: skip


def probes(template: str, rendered: Callable[[Sequence[Message], Any], str]) -> TemplateForm:
    """The form of a template. rendered: (messages, tools) -> prompt, "" where it refuses them."""
    user = {"role": "user", "content": _WORD}
    parts = {"role": "user", "content": [{"type": "text", "text": _WORD}]}
    in_parts = _WORD not in rendered([user], None) and _WORD in rendered([parts], None)
    base = TemplateForm(
        content_parts=in_parts,
        knows_developer="developer" in template,
        thinking="thinking" in template and "reasoning_content" not in template,
        reasoning=bool(_REASONING.search(template)) and "reasoning_content" not in template,
    )
    form = _with_tools(base, template, rendered, user)
    if form.knows_calls:
        form = _with_calls(form, rendered, user)
    if not rendered(form.adapted([user]), None):
        return form  # it refuses a question alone: there is nothing to compare with
    return _with_system(_with_questions(form, rendered, user), rendered, user)


def _replaced(form: TemplateForm, **changes: bool) -> TemplateForm:
    return TemplateForm(**{**form.__dict__, **changes})


def _with_system(form: TemplateForm, rendered: Callable[..., str], user: Message) -> TemplateForm:
    """Finds out where the template takes system messages, which is where it shows their text."""
    shows = _WORD in rendered(form.adapted([user]), None)

    def takes(*messages: Message) -> bool:
        text = rendered(form.adapted(messages), _TOOLS if _RESULT in messages else None)
        told = [m["content"] for m in messages if m["role"] == "system"]
        return all(x in text for x in told) if shows else bool(text)

    first = takes(_SYSTEM, user)
    before = (_SYSTEM, user) if first else (user,)
    late = takes(*before, _LATE, _SAID, user)
    if form.knows_calls and form.knows_results:
        late = late and takes(*before, _CALLER, _RESULT, _LATE)
    return _replaced(form, knows_system=first, knows_late_system=late)


def _with_tools(
    form: TemplateForm, template: str, rendered: Callable[..., str], user: Message
) -> TemplateForm:
    """How the template takes calls and results."""
    if "tool" not in template:
        return _replaced(form, knows_calls=False, knows_results=False)
    for text, none in ((False, False), (False, True), (True, False), (True, True)):
        found = _replaced(form, arguments_as_text=text, content_none=none)
        if _shows_calls(found, rendered, user):
            return _with_results(found, rendered, user)
    return _with_results(_replaced(form, knows_calls=False), rendered, user)


def _with_calls(form: TemplateForm, rendered: Callable[..., str], user: Message) -> TemplateForm:
    """Whether the template takes two calls in a message, and text beside reasoning before one."""
    results = [_RESULT, {**_RESULT, "tool_call_id": "call00002"}]
    twice = {**_CALLER, "tool_calls": _TWICE}
    several = _SECOND in rendered(form.adapted([user, twice, *results]), _TOOLS)
    both = {**_CALLER, "content": "Gjwk", "reasoning_content": "Xpfy"}
    text = bool(rendered(form.adapted([user, both, _RESULT]), _TOOLS))
    return _replaced(form, knows_several_calls=several, knows_text_with_thought=text)


def _with_questions(
    form: TemplateForm, rendered: Callable[..., str], user: Message
) -> TemplateForm:
    """Whether the template takes a question after a result: some want an answer in between."""
    text = rendered(form.adapted([user, _CALLER, _RESULT, _NEXT]), _TOOLS)
    known = _NEXT["content"] in text or _WORD not in rendered(form.adapted([user]), None)
    return _replaced(form, knows_question_after_result=known)


def _shows_calls(form: TemplateForm, rendered: Callable[..., str], user: Message) -> bool:
    plain = rendered(form.adapted([user, _SAID]), _TOOLS)
    as_repr = f"{{'{_KEY}'"
    # Some templates leave out an assistant's message that is the last one.
    for messages in ([user, _CALLER], [user, _CALLER, _RESULT]):
        calls = rendered(form.adapted(messages), _TOOLS)
        written = calls.count(_NAME) > plain.count(_NAME) and _VALUE in calls
        if written and calls.count(as_repr) <= plain.count(as_repr):
            return True
    return False


def _with_results(form: TemplateForm, rendered: Callable[..., str], user: Message) -> TemplateForm:
    shown = _RESULT["content"] in rendered(form.adapted([user, _CALLER, _RESULT]), _TOOLS)
    return form if shown else _replaced(form, knows_results=False)
