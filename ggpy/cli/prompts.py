"""What the user said -> token ids: prompts of the command line, a file or stdin; conversations.

This module reads text and renders chat templates. It knows neither the engine nor the terminal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .options import unescape

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer


class PromptError(ValueError):
    """A prompt that cannot be read, or that this model has no use for."""


def read_prompt(options: argparse.Namespace) -> str | None:
    """The text of -p, of -f, or of piped input; None asks for an interactive chat.

    Escapes are replaced in -p only, and only from files is a last newline taken away: what is in a
    file is meant as it is, but editors end it with a newline.
    """
    if options.prompt is not None:
        return spoken(options, options.prompt, "-p")
    if options.file is not None and options.file != "-":
        text = decode(Path(options.file).read_bytes(), options.file)
    elif options.file == "-" or not (options.chat or sys.stdin.isatty()):
        text = decode(sys.stdin.buffer.read(), "stdin")
        if not text:
            raise PromptError("stdin is empty: give a prompt there, or with -p or -f")
    else:
        return None
    return text.removesuffix("\n")


def spoken(options: argparse.Namespace, text: str, source: str) -> str:
    """A text of the command line, with escapes replaced if the options say so."""
    text = decode(text.encode("utf-8", "surrogateescape"), source)
    return unescape(text) if options.escape else text


def decode(data: bytes, source: str) -> str:
    """UTF-8 bytes as text; PromptError says where they are no UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise PromptError(f"{source} is not UTF-8: {where} ({error.reason})") from None


def template_of(options: argparse.Namespace, tokenizer: Tokenizer) -> str | None:
    """The chat template to use; None where raw text is continued."""
    if options.chat is False:
        return None
    if options.chat_template_file:
        path = Path(options.chat_template_file)
        return decode(path.read_bytes(), options.chat_template_file)
    if options.chat_template:
        from ..tokenizer.templates import choose

        return choose(options.chat_template)
    return tokenizer.chat_template


class Conversation:
    """Messages so far, and the ids that ask for the next answer."""

    def __init__(self, tokenizer: Tokenizer, template: str, system: str | None = None):
        self.tokenizer = tokenizer
        self.template = template
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})

    def say(self, role: str, content: str) -> None:
        """Append a message."""
        self.messages.append({"role": role, "content": content})

    def take_back(self, role: str) -> str | None:
        """Remove the last message if it is of `role`; its content."""
        if self.messages and self.messages[-1]["role"] == role:
            return self.messages.pop()["content"]
        return None

    def forget_oldest(self) -> bool:
        """Remove the oldest question and its answer; False where only the last question is left."""
        questions = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        if len(questions) < 2:
            return False
        del self.messages[questions[0] : questions[1]]
        return True

    def ids(self) -> list[int]:
        """The conversation through the template, up to where the model's answer begins."""
        from ..tokenizer.chat import render

        def text(id: int | None) -> str:
            return "" if id is None else self.tokenizer.text(id)

        bos, eos = text(self.tokenizer.bos_id), text(self.tokenizer.eos_id)
        return self.tokenizer.encode_chat(render(self.template, self.messages, bos=bos, eos=eos))


def single(options: argparse.Namespace, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of one prompt: through the chat template if there is one, else as raw text."""
    template = template_of(options, tokenizer)
    if template is None:
        if options.system_prompt is not None:
            raise PromptError(
                "-sys needs a chat template, and this model has none: --chat-template"
            )
        return tokenizer.encode(prompt, parse_special=True)
    conversation = converse(options, tokenizer)
    conversation.say("user", prompt)
    return conversation.ids()


def converse(options: argparse.Namespace, tokenizer: Tokenizer) -> Conversation:
    """An empty conversation; PromptError where there is no template for one."""
    template = template_of(options, tokenizer)
    if template is None:
        why = "--no-chat turns chats off" if options.chat is False else "this model has no template"
        raise PromptError(f"cannot chat: {why}; give a prompt with -p, -f or through a pipe")
    system = options.system_prompt
    return Conversation(tokenizer, template, system and spoken(options, system, "-sys"))
