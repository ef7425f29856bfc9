"""Reads a body of Anthropic's Messages API into a ChatRequest.

Fields that change nothing for a local model are ignored (cache_control, context_management,
service_tier, ...); tools that Anthropic's servers run, and anything but text, are refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from ....runtime.sequence import MAX_STOP_CHARS
from ...events import AnswerOptions, ChatRequest, Constraint
from ...fields import Fields
from ..options import answer_options
from ..reading import (
    MOST_TOKENS,
    ApiCall,
    ChatMessages,
    chosen_tool,
    function_tool,
    part_type,
    reasoning_limits,
    refuse,
    result_of,
    texts_of,
    unique_tools,
)
from ..service import ServedModel
from .sources import TEXT, with_sources_as_text

BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
# Claude Code puts this line before its system prompt. A part of it changes with every request,
# so that no page of the prompt could be reused.
BILLING = re.compile(r"\Ax-anthropic-billing-header:(?:\s*\w+=[^;\n]*;)*\s*")


def read(fields: Fields, service: ServedModel, counting: bool = False) -> ApiCall:
    """Reads a body, or that of count_tokens, which needs no max_tokens. ApiError."""
    service.check_model(fields.text("model"))
    fields.object("metadata")
    tools = unique_tools(fields.items("tools"), _tool)
    choice, parallel = _tool_choice(fields, tools)
    request = ChatRequest(
        messages=_messages(fields),
        options=_options(fields, service, counting),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        template_variables=_template_variables(fields),
        **_reasoning_limits(fields),
    )
    return ApiCall(request, fields.flag("stream", False))


def _options(fields: Fields, service: ServedModel, counting: bool) -> AnswerOptions:
    """With llama.cpp's fields, as in chat completions."""
    fields.number("temperature", None, 0, 1)
    fields.integer("top_k", None, 0, MOST_TOKENS)
    max_tokens = fields.integer("max_tokens", None, 1)
    if max_tokens is None and not counting:
        raise fields.error("max_tokens", "a whole number, 1 or more")
    options = answer_options(
        fields, service.tokenizer, service.sampling_defaults(), max_tokens, _form(fields)
    )
    stop = fields.texts("stop_sequences", longest=MAX_STOP_CHARS)
    # Its answers have no place for log probabilities and for the progress of a prompt.
    return replace(options, stop=(*stop, *options.stop), post_sampling=False, progress=False)


def _form(fields: Fields) -> Constraint | None:
    """output_config.format, or output_format as it was called before: a JSON schema that the answer
    must match.
    """
    config = fields.object("output_config")
    form = (config and config.object("format")) or fields.object("output_format")
    if not form:
        return None
    form.one_of("type", ("json_schema",), "json_schema")
    if form.object("schema") is None:
        raise form.error("schema", "an object")
    return Constraint("json_schema", json.dumps(form.raw("schema")), form.path("schema"))


def _template_variables(fields: Fields) -> dict[str, Any]:
    """enable_thinking, reasoning_effort, and any of chat_template_kwargs."""
    variables: dict[str, Any] = {}
    thinking = fields.object("thinking")
    if thinking is not None:
        kind = thinking.one_of("type", ("enabled", "disabled", "adaptive", "between_tools"), "")
        if not kind:
            raise thinking.error("type", "enabled, disabled or adaptive")
        thinking.integer("budget_tokens", None, 1)
        if kind in ("enabled", "disabled"):
            variables["enable_thinking"] = kind == "enabled"
    config = fields.object("output_config")
    effort = config and config.text("effort")
    if effort:
        variables["reasoning_effort"] = effort
    extra = fields.object("chat_template_kwargs")
    return variables if extra is None else {**variables, **extra.values}


def _reasoning_limits(fields: Fields) -> dict[str, Any]:
    """budget_tokens of thinking that is enabled, or llama.cpp's fields."""
    limits, thinking = reasoning_limits(fields), fields.object("thinking")
    if thinking is not None and thinking.raw("type") == "enabled":
        budget = thinking.integer("budget_tokens", None, 1)
        return limits if budget is None else {**limits, "reasoning_budget": budget}
    return limits


def _tool(tool: Fields) -> dict[str, Any]:
    if (tool.text("type") or "custom") != "custom":
        refuse(tool, "type", "a tool of Anthropic's: leave it out, or give one with input_schema")
    name = tool.filled_text("name")
    schema = tool.object("input_schema")
    if schema is None:
        raise tool.error("input_schema", "an object")
    description = tool.text("description") or ""
    return function_tool(name, description, schema.values, tool.flag("strict", False))


def _tool_choice(fields: Fields, tools: tuple[dict, ...]) -> tuple[str, bool]:
    """(tool_choice of a ChatRequest, whether several calls are allowed)."""
    choice = fields.object("tool_choice")
    if choice is None:
        return "auto", True
    kind = choice.one_of("type", ("auto", "any", "tool", "none"), "")
    if not kind:
        raise choice.error("type", "one of auto, any, tool, none")
    parallel = not choice.flag("disable_parallel_tool_use", False)
    if kind == "tool":
        return chosen_tool(choice, tools), parallel
    if kind == "any" and not tools:
        refuse(choice, "type", "there are no tools: give some")
    return "required" if kind == "any" else kind, parallel


def _messages(fields: Fields) -> list[dict[str, Any]]:
    if fields.raw("messages") is None:
        raise fields.error("messages", "a list of messages")
    messages = ChatMessages()
    system = texts_of(fields, "system", TEXT, "block") or []
    kept = [text for text in (BILLING.sub("", text) for text in system) if text]
    if kept:
        messages.say("system", "\n".join(kept))
    for message in fields.items("messages"):
        _add_message(messages, message)
    if all(message["role"] == "system" for message in messages.messages):
        refuse(fields, "messages", "there is nothing to answer: give at least one message")
    return messages.messages


def _add_message(messages: ChatMessages, message: Fields) -> None:
    role = message.one_of("role", BLOCKS, "")
    if not role:
        raise message.error("role", "one of " + ", ".join(BLOCKS))
    content = message.raw("content")
    if isinstance(content, str):
        messages.say(role, content)
        return
    if not isinstance(content, list):
        raise message.error("content", "a string or a list of blocks")
    said: list[str] = []
    for block in with_sources_as_text(message).items("content"):
        kind = part_type(block, BLOCKS[role])
        if kind == "text":
            said.append(block.needed_text("text"))
        else:
            ADD[kind](messages, block)
    # After the results of calls, which must follow the calls.
    if said:
        messages.say(role, "\n".join(said))


def _add_tool_use(messages: ChatMessages, block: Fields) -> None:
    id, name, given = block.needed_text("id"), block.filled_text("name"), block.object("input")
    if given is None:
        raise block.error("input", "an object")
    messages.call(id, name, json.dumps(given.values, ensure_ascii=False))


def _add_tool_result(messages: ChatMessages, block: Fields) -> None:
    """Says in the text that a result is an error: no chat template has a place for it."""
    id = block.needed_text("tool_use_id")
    text = result_of(with_sources_as_text(block), "content", TEXT, "block") or ""
    if block.flag("is_error", False) and "error" not in text[:40].lower():
        text = f"Error: {text}"
    messages.result(id, text)


def _add_thinking(messages: ChatMessages, block: Fields) -> None:
    block.text("signature")
    messages.think(block.needed_text("thinking"))


def _add_redacted(messages: ChatMessages, block: Fields) -> None:
    """Nothing: only Anthropic can read it."""
    block.text("data")


ADD = {
    "tool_use": _add_tool_use,
    "tool_result": _add_tool_result,
    "thinking": _add_thinking,
    "redacted_thinking": _add_redacted,
}
