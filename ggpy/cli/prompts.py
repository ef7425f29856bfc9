"""What the user said -> token ids: a prompt of the command line, of a file or of stdin; a chat.

This module reads text and applies chat templates. It knows neither options, nor the engine, nor the
terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer
    from ..tokenizer.conversation import Conversation


MAX_PROMPT = 1 << 26  # bytes of a single prompt, more than any context holds


class PromptError(ValueError):
    """A prompt or another text that cannot be read, or that this model has no use for."""


@dataclass(frozen=True)
class PromptSource:
    """Where a run finds its prompt."""

    text: str | None = None  # given on the command line
    file: str | None = None  # "-" is stdin
    chat: bool = False  # stdin has the lines of a chat


@dataclass(frozen=True)
class ChatSettings:
    """How prompts become messages."""

    wanted: bool | None = None  # None: if the model has a template; False: raw text is continued
    template: str | None = None  # Jinja; None is the model's own
    system: str | None = None  # content of the first message
    variables: Mapping[str, Any] = field(default_factory=dict)  # further ones of the template
    closed: Callable[[str], str] = str  # what becomes of a rendered prompt


def read_prompt(source: PromptSource, most: int | None = None) -> str | None:
    """The text of the command line, of a file, or of piped input; None asks for a chat.

    A file's last newline is taken away: editors end files with one. most: bytes of a file or of
    stdin, which may never end (`yes | ggpy run`); PromptError for more.
    """
    if source.text is not None:
        return source.text
    if source.file is not None and source.file != "-":
        with Path(source.file).open("rb") as file:
            text = _text(file, source.file, most)
    elif source.file == "-" or not (source.chat or sys.stdin.isatty()):
        text = _text(sys.stdin.buffer, "stdin", most)
        if not text:
            raise PromptError("stdin is empty: give a prompt there, or with -p or -f")
    else:
        return None
    return text.removesuffix("\n")


def _text(file: BinaryIO, name: str, most: int | None) -> str:
    data = file.read() if most is None else file.read(most + 1)
    if most is not None and len(data) > most:
        raise PromptError(f"{name} has over {most >> 20} MiB, more than any context holds")
    return decode(data, name)


def argument_or_file(text: str | None, flag: str, file: str | None) -> str | None:
    """A text of the command line or of a file, as it is; None for neither. PromptError, OSError."""
    if text is not None:
        return decode(text.encode("utf-8", "surrogateescape"), flag)
    return None if file is None else decode(Path(file).read_bytes(), file)


def decode(data: bytes, source: str) -> str:
    """UTF-8 bytes as text; PromptError says where they are no UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise PromptError(f"{source} is not UTF-8: {where} ({error.reason})") from None


def single(settings: ChatSettings, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of one prompt: through the chat template if there is one, else as raw text."""
    if template_of(settings, tokenizer) is None:
        if settings.system is not None:
            raise PromptError(
                "-sys needs a chat template, and this model has none: --chat-template"
            )
        return tokenizer.encode(prompt, parse_special=True)
    conversation = converse(settings, tokenizer)
    conversation.say("user", prompt)
    return conversation.ids()


def converse(settings: ChatSettings, tokenizer: Tokenizer) -> Conversation:
    """A conversation without a question; PromptError where there is no template for one."""
    from ..tokenizer.conversation import Conversation

    template = template_of(settings, tokenizer)
    if template is not None:
        told = settings.variables, settings.closed
        return Conversation(tokenizer, template, settings.system, *told)
    if settings.wanted is False:
        raise PromptError("--no-chat needs a prompt: give one with -p, -f or through a pipe")
    raise PromptError(
        "cannot chat: this model has no chat template: name one with --chat-template (chatml, "
        "llama3, ...), or give a prompt with -p, -f or through a pipe"
    )


def template_of(settings: ChatSettings, tokenizer: Tokenizer) -> str | None:
    """The template to use; None where raw text is continued."""
    if settings.wanted is False:
        return None
    return tokenizer.chat_template if settings.template is None else settings.template
