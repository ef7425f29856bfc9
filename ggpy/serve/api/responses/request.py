"""Reads a body of OpenAI's Responses API into a ChatRequest.

Nothing is stored here, so whatever refers to an earlier response is refused. Tools are read in
`tools`.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import ApiError
from ...events import AnswerOptions, ChatRequest, Constraint
from ...fields import Fields
from ..options import answer_options
from ..reading import (
    ApiCall,
    ChatMessages,
    part_type,
    reasoning_limits,
    refuse,
    result_of,
    texts_of,
)
from ..service import ServedModel
from .tools import called_name, echoed_tools, namespaces, read_tool_choice, read_tools

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
STORED = {
    "previous_response_id": "responses are not stored: send the whole conversation as input",
    "conversation": "conversations are not stored: send the whole conversation as input",
    "prompt": "prompts are not stored: send their text as instructions",
}
SEALED = "ggpy:"  # begins the encrypted_content that was made here


def read(fields: Fields, service: ServedModel, max_tokens: int | None = None) -> ApiCall:
    """Reads a body, or that of input_tokens. ApiError. max_tokens: of answers for which the body
    gives no max_output_tokens.
    """
    service.check_model(fields.text("model"))
    _refuse_stored(fields)
    tools = read_tools(fields)
    choice, tools = read_tool_choice(fields, tools)
    request = ChatRequest(
        messages=_messages(fields),
        options=_options(fields, service, max_tokens),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=fields.flag("parallel_tool_calls", True),
        template_variables=_template_variables(fields),
        **reasoning_limits(fields),
    )
    stream, timed = fields.flag("stream", False), fields.flag("timings_per_token", False)
    return ApiCall(request, stream, timed, _echo(fields, request))


def sealed(text: str) -> str:
    """What an agent is given as encrypted_content of reasoning: it hides nothing, but agents send
    back that field alone.
    """
    return SEALED + b64encode(text.encode("utf-8", "replace")).decode()


def unsealed(content: str | None) -> str:
    """The text of encrypted_content; "" for another server's."""
    if content is None or not content.startswith(SEALED):
        return ""
    try:
        return b64decode(content[len(SEALED) :], validate=True).decode()
    except ValueError:
        return ""


def _refuse_stored(fields: Fields) -> None:
    for name, why in STORED.items():
        if name in fields:
            refuse(fields, name, why)
    if fields.flag("background", False):
        refuse(fields, "background", "answers are not stored: leave it out, or stream the answer")
    fields.flag("store", False)


def _options(fields: Fields, service: ServedModel, max_tokens: int | None) -> AnswerOptions:
    """With llama.cpp's fields, as in chat completions."""
    fields.number("temperature", None, 0, 2)
    options = answer_options(
        fields, service.tokenizer, service.sampling_defaults(), max_tokens, _form(fields)
    )
    top_logprobs = fields.integer("top_logprobs", None, 0, 20)
    if "message.output_text.logprobs" not in fields.texts("include"):
        top_logprobs = top_logprobs or None
    elif top_logprobs is None:
        top_logprobs = 0
    return replace(
        options,
        max_tokens=fields.integer("max_output_tokens", options.max_tokens, 1),
        top_logprobs=top_logprobs,
        post_sampling=False,  # the API's log probabilities are the model's
    )


def _form(fields: Fields) -> Constraint | None:
    """text.format: whether the answer must be JSON, or match a schema."""
    text = fields.object("text")
    form = text and text.object("format")
    if not form:
        return None
    kind = form.one_of("type", ("text", "json_object", "json_schema"), "")
    if not kind:
        raise form.error("type", "one of text, json_object, json_schema")
    if kind == "json_schema":
        form.text("name")
        form.flag("strict", True)
        if form.object("schema") is None:
            raise form.error("schema", "an object")
        return Constraint("json_schema", json.dumps(form.raw("schema")), form.path("schema"))
    return Constraint("json_object") if kind == "json_object" else None


def _template_variables(fields: Fields) -> dict[str, Any]:
    """reasoning_effort, or enable_thinking where it is none; and any of chat_template_kwargs."""
    reasoning = fields.object("reasoning")
    effort = reasoning and reasoning.text("effort")
    variables: dict[str, Any] = {}
    if effort == "none":
        variables["enable_thinking"] = False
    elif effort:
        variables["reasoning_effort"] = effort
    extra = fields.object("chat_template_kwargs")
    return variables if extra is None else {**variables, **extra.values}


def _messages(fields: Fields) -> list[dict[str, Any]]:
    messages = ChatMessages()
    instructions = fields.text("instructions")
    if instructions:
        messages.say("system", instructions)
    given = fields.raw("input")
    if isinstance(given, str):
        messages.say("user", given)
    elif isinstance(given, list):
        for item in fields.items("input"):
            _add_item(messages, item)
    else:
        raise fields.error("input", "a string or a list of items")
    if not messages.messages:
        refuse(fields, "input", "there is nothing to answer: give at least one message")
    return messages.messages


def _add_item(messages: ChatMessages, item: Fields) -> None:
    kind = item.text("type") or "message"
    if kind == "item_reference":
        refuse(item, "type", "responses are not stored: send the item itself (store: false)")
    if kind not in ADD:
        raise item.error("type", "one of " + ", ".join(ADD))
    ADD[kind](messages, item)


def _add_message(messages: ChatMessages, item: Fields) -> None:
    role = ROLES.get(item.one_of("role", ROLES, ""))
    if role is None:
        raise item.error("role", "one of " + ", ".join(ROLES))
    texts = texts_of(item, "content", PARTS)
    if texts is None:
        raise item.error("content", "a string or a list of parts")
    messages.say(role, "\n".join(texts))


def _add_call(messages: ChatMessages, item: Fields) -> None:
    id, name = item.needed_text("call_id"), called_name(item)
    messages.call(id, name, item.needed_text("arguments"))


def _add_output(messages: ChatMessages, item: Fields) -> None:
    output = result_of(item, "output", PARTS)
    if output is None:
        raise item.error("output", "a string or a list of parts")
    messages.result(item.needed_text("call_id"), output)


def _add_reasoning(messages: ChatMessages, item: Fields) -> None:
    """What the model thought: the text itself, or that sealed here, or a summary."""
    content = [_part_text(part, ("reasoning_text", "text")) for part in item.items("content")]
    summary = [_part_text(part, ("summary_text",)) for part in item.items("summary")]
    text = "".join(content) or unsealed(item.text("encrypted_content")) or "\n".join(summary)
    if text:
        messages.think(text)


def _part_text(part: Fields, kinds: tuple[str, ...]) -> str:
    part_type(part, kinds)
    return part.needed_text("text")


ADD = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_output,
    "reasoning": _add_reasoning,
}


def _echo(fields: Fields, request: ChatRequest) -> dict[str, Any]:
    """Fields of the body that a response repeats, with the values that are in effect."""
    params, options = request.options.params, request.options
    reasoning, text = fields.object("reasoning"), fields.object("text")
    form = (text and text.raw("format")) or {"type": "text"}
    effort = reasoning and reasoning.text("effort")
    fields.one_of("truncation", ("auto", "disabled"), "disabled")
    return {
        "instructions": fields.text("instructions"),
        "max_output_tokens": options.max_tokens,
        "metadata": _metadata(fields),
        "namespaces": namespaces(fields),
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning": {"effort": effort, "summary": None},
        "sealed": "reasoning.encrypted_content" in fields.texts("include"),
        "temperature": params.temperature,
        "text": {"format": form},
        "tool_choice": fields.raw("tool_choice", "auto"),
        "tools": echoed_tools(fields, request.tools),
        "top_logprobs": options.top_logprobs or 0,
        "top_p": params.top_p,
        "user": fields.text("user"),
    }


def _metadata(fields: Fields) -> Mapping[str, Any]:
    metadata = fields.object("metadata")
    if metadata is None:
        return {}
    for name in metadata.values:
        metadata.text(name)
    if len(metadata.values) > 16:
        told = f"metadata has {len(metadata.values)} entries: give at most 16"
        raise ApiError(400, told, param="metadata")
    return metadata.values
