"""The commands of a chat: /help, /system, /save and the others.

A message is a command if its first word begins with / and has no other /: a path begins a question,
and so does a command with a space before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..util.messages import escaped
from ..util.output_file import write_whole

if TYPE_CHECKING:
    from ..tokenizer.conversation import Conversation
    from .chat import Chat

ROLES = ("system", "user", "assistant")
LARGEST = 64 << 20  # bytes of a file that /load reads
NO_SYSTEM = "none"  # after /system


class Command(NamedTuple):
    """What a command is called, what follows it, and what it does."""

    names: tuple[str, ...]
    argument: str  # "" for nothing, "[TEXT]" for something that may be left out
    meaning: str
    run: Callable[[Chat, str], None]


def run(chat: Chat, text: str) -> bool:
    """Do what a message says if it is a command, else return False; ValueError, OSError."""
    match = re.fullmatch(r"(/[^\s/]*)(?:\s+(.*))?", text.rstrip(), re.DOTALL)
    if match is None:
        return False
    word, argument = match[1], match[2] or ""
    command = next((c for c in COMMANDS if word in c.names), None)
    if command is None:
        raise ValueError(f"unknown command {escaped(word)}; /help lists the commands")
    if argument and not command.argument:
        raise ValueError(f"nothing may follow {word}; /help lists the commands")
    if not argument and command.argument and not command.argument.startswith("["):
        raise ValueError(f"{word} needs a {command.argument}; /help lists the commands")
    command.run(chat, argument)
    return True


def names() -> list[str]:
    """The first name of each command."""
    return [command.names[0] for command in COMMANDS]


def show_help(chat: Chat, word: str) -> None:
    """Tell about a command, or about all and the keys where `word` is none."""
    calls = [f"{c.names[0]} {c.argument}".rstrip() for c in COMMANDS]
    width = max(map(len, calls))
    lines = {c: f"{call:{width}}  {c.meaning}" for c, call in zip(COMMANDS, calls, strict=True)}
    about = [line for c, line in lines.items() if f"/{word.removeprefix('/')}" in c.names]
    chat.remark("\n".join(about or [*lines.values(), "", *KEYS]))


def set_system(chat: Chat, text: str) -> None:
    """Show, set or remove the system message; what was said stays."""
    conversation = chat.conversation
    if not text:
        chat.remark(f"system message: {conversation.system or NO_SYSTEM}")
        return
    with unless_refused(conversation):
        said = [message for message in conversation.messages if message["role"] != "system"]
        conversation.system = None if text == NO_SYSTEM else text
        conversation.clear()
        conversation.messages += said
    chat.remark(f"(the system message is {'set' if conversation.system else 'removed'})")


def regenerate(chat: Chat, _: str) -> None:
    """Answer the last question again."""
    before = list(chat.conversation.messages)
    chat.conversation.take_back("assistant")
    question = chat.conversation.take_back("user")
    if question is None:
        raise ValueError("there is no question yet")
    if not chat.ask(question):
        chat.conversation.messages = before


def clear(chat: Chat, _: str) -> None:
    """Forget what was said."""
    chat.conversation.clear()
    chat.remark("(the conversation is forgotten)")


def save(chat: Chat, name: str) -> None:
    """Write the conversation to a file, which may only replace another conversation."""
    path = _path(name)
    if path.exists():
        read(path)
    messages = chat.conversation.messages
    write_whole(path, json.dumps({"messages": messages}, indent=1, ensure_ascii=False) + "\n")
    chat.remark(f"({len(messages)} messages saved in {escaped(path)})")


def load(chat: Chat, name: str) -> None:
    """Replace the conversation by that of a file."""
    messages = read(_path(name))
    conversation = chat.conversation
    with unless_refused(conversation):
        has_system = bool(messages) and messages[0]["role"] == "system"
        conversation.system = messages[0]["content"] if has_system else None
        conversation.messages = messages
    chat.remark(f"({len(messages)} messages loaded; /regenerate answers the last question again)")


def leave(chat: Chat, _: str) -> None:
    """End the chat."""
    chat.is_over = True


def _path(name: str) -> Path:
    """The file of a name, which may stand in quotes, as in a shell."""
    quoted = len(name) > 2 and name[0] == name[-1] and name[0] in "\"'"
    return Path(name[1:-1] if quoted else name).expanduser()


def read(path: Path) -> list[dict[str, str]]:
    """The messages in a file that `save` wrote; ValueError for another file, OSError."""
    wrong = f"{path} is not a conversation that /save wrote"
    if path.exists() and (not path.is_file() or path.stat().st_size > LARGEST):
        raise ValueError(wrong)
    try:
        messages = json.loads(path.read_bytes())["messages"]
        pairs = [(message["role"], message["content"]) for message in messages]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(wrong) from None
    if not all(role in ROLES and isinstance(content, str) for role, content in pairs):
        raise ValueError(wrong)
    return [{"role": role, "content": content} for role, content in pairs]


@contextmanager
def unless_refused(conversation: Conversation) -> Iterator[None]:
    """Undo what the block did to a conversation if the model's template refuses it; ValueError."""
    before = conversation.system, list(conversation.messages)
    try:
        yield
        conversation.say("user", "")
        conversation.ids()
        conversation.take_back("user")
    except BaseException:
        conversation.system, conversation.messages = before
        raise


COMMANDS = (
    Command(("/help", "/?"), "[COMMAND]", "show this page", show_help),
    Command(
        *(("/system",), "[TEXT]"),
        *(f"set the system message, or show it; {NO_SYSTEM} removes it", set_system),
    ),
    Command(("/regenerate", "/regen"), "", "answer the last question again", regenerate),
    Command(("/clear",), "", "forget the conversation, but not the system message", clear),
    Command(("/save",), "FILE", "write the conversation to FILE, as JSON", save),
    Command(("/load",), "FILE", "go on with the conversation in FILE", load),
    Command(("/exit", "/quit"), "", "end the chat, as Ctrl-D does", leave),
)
KEYS = (
    "Enter sends. Alt-Enter, Ctrl-J, or Enter after a \\ starts a new line.",
    "A pasted text is one message. The arrow keys recall earlier messages.",
    "Ctrl-C stops an answer. A message that begins with a space is no command.",
)
