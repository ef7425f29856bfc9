"""A conversation with a model: its messages so far, and the ids that ask for the next answer.

It must not know where questions come from, or what becomes of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import Tokenizer


@dataclass
class Conversation:
    """Messages of a system, of a user and of a model, for a chat template.

    `messages` are dicts with "role" and "content": a program may read, save and replace them.
    """

    tokenizer: Tokenizer
    template: str  # Jinja
    system: str | None = None  # content of the first message, which `clear` keeps
    variables: Mapping[str, Any] = field(default_factory=dict)  # more variables of the template
    closed: Callable[[str], str] = str  # what becomes of the rendered prompt
    messages: list[dict[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove all messages but the system's."""
        self.messages = []
        if self.system is not None:
            self.say("system", self.system)

    def say(self, role: str, content: str) -> None:
        """Append a message."""
        self.messages.append({"role": role, "content": content})

    def take_back(self, role: str) -> str | None:
        """Removes the last message if it is of `role`, and returns its content; else None."""
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
        """The messages through the template, up to where the answer begins; ChatTemplateError."""
        rendered = self.tokenizer.apply_chat_template(
            self.messages, self.template, variables=self.variables
        )
        return self.tokenizer.encode_chat(self.closed(rendered))
