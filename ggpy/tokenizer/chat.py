"""Chat templates: a file's Jinja program and a list of messages become the text of a prompt.

A template comes with the file, so it is a program by a stranger. Jinja's sandbox keeps it away
from Python's insides but not from looping for hours or asking for a gigabyte, so each rendering
runs in a process of its own (`chat_child`) with the time, memory and output it may use, and that
process dies with it. Where the system has no such limits (Windows), or does not enforce the one on
memory (macOS), the time limit on the clock remains. This module must not know tokens: the prompt it
returns is encoded elsewhere.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..util.messages import escaped
from .chat_child import OUT_OF_MEMORY
from .message_form import RESERVED, TemplateForm, checked_messages, probes
from .renderer import Renderer, RendererError

__all__ = ["ChatTemplateError", "checked_messages", "checked_variables", "form_of", "render"]

MAX_TEMPLATE = 1_000_000  # characters; the longest known template has 30 thousand
MAX_CHARS = 8_000_000  # characters of a prompt: some two million tokens
MEMORY = (
    256 << 20
)  # bytes of address space for the rendering process, of which Python takes some 40 MB
MEMORY_PER_BYTE = 32  # bytes of address space in addition, for each byte of messages
LONGEST = 500  # characters of a template's own error message that are shown

_RENDERER = Renderer()


class ChatTemplateError(ValueError):
    """A template is wrong, refuses the messages or exceeds a limit; `line` is its line, if known.

    refused: the template itself raised an error, within its limits of time and memory.
    """

    def __init__(self, message: str, line: int | None = None, refused: bool = False) -> None:
        where = "chat template" if line is None else f"chat template, line {line}"
        super().__init__(f"{where}: {escaped(message, LONGEST)}")
        self.line, self.refused = line, refused


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos: str = "",
    eos: str = "",
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    timeout: float = 1.0,
    max_chars: int = MAX_CHARS,
) -> str:
    """The prompt for `messages`, which are neither checked nor adapted; ChatTemplateError.

    `bos` and `eos` are the texts of those tokens; `add_generation_prompt` opens the answer;
    `variables` are more variables of the template. A template may use `timeout` seconds of
    processor time and write `max_chars` characters. Semantics: transformers' apply_chat_template.
    """
    if len(template) > MAX_TEMPLATE:
        raise ChatTemplateError(f"has {len(template)} characters, the limit is {MAX_TEMPLATE}")
    named = {
        **(variables or {}),
        "messages": list(messages),
        "tools": list(tools) if tools else None,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos,
        "eos_token": eos,
    }
    request = _to_json({"variables": named, "max_chars": max_chars})
    memory = MEMORY + MEMORY_PER_BYTE * len(request)
    try:
        status, body = _RENDERER.ask(template, request, timeout, memory)
    except RendererError as error:
        raise ChatTemplateError(str(error)) from None
    return _answer(status, body, timeout, memory)


def _to_json(request: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(request).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"cannot take these messages or tools: {error}") from None


def _answer(status: int, body: bytes, timeout: float, memory: int) -> str:
    if status == 0:
        answer = json.loads(body)
        if "error" in answer:
            raise ChatTemplateError(answer["error"], answer["line"], refused=True)
        return str(answer["text"])
    if status == OUT_OF_MEMORY:
        raise ChatTemplateError(f"needs more than {memory >> 20} MiB of memory")
    if status == -getattr(signal, "SIGPROF", 0):
        raise ChatTemplateError(f"needs more than {timeout:g} s of processor time")
    raise ChatTemplateError(f"the process that renders it ended with status {status}")


def checked_variables(variables: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """`variables` of a template; ValueError for a name that is set for every template."""
    for name in variables or {}:
        if name in RESERVED:
            raise ValueError(f"the template variable {name!r} cannot be set: leave it out")
    return variables or {}


@lru_cache(maxsize=64)
def form_of(template: str) -> TemplateForm:
    """How a template wants messages, found by rendering small conversations."""

    def rendered(messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
        try:
            return render(template, messages, tools=tools)
        except ChatTemplateError as error:
            if not error.refused:
                raise
            return ""

    return probes(template, rendered)
