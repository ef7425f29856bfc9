"""Chat templates: a file's Jinja program and a list of messages become the text of a prompt.

A template comes with the file, so it is a program by a stranger. Jinja's sandbox keeps it away
from Python's insides but not from looping for hours or asking for a gigabyte, so it runs in a
process of its own (`chat_child`) with the time, memory and output it may use, and that process
dies with it. Where the system has no such limits (Windows), or does not enforce the one on memory
(macOS), the time limit on the clock remains. This module must not know tokens: the prompt it
returns is encoded elsewhere.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..util.messages import escaped

MAX_TEMPLATE = 1_000_000  # characters; the longest known template has 30 thousand
MAX_CHARS = 8_000_000  # characters of a prompt: some two million tokens
MEMORY = (
    256 << 20
)  # bytes of address space for the rendering process, of which Python takes some 40 MB
MEMORY_PER_BYTE = 32  # and so much more for each byte of messages
LONGEST = 500  # characters of what a template says of messages that it refuses
OUT_OF_MEMORY = 70  # exit status of `chat_child`

ROLES = ("system", "user", "assistant")
_EXAMPLE = '{"role": "user", "content": "Hello"}'

_CHILD = Path(__file__).with_name("chat_child.py")
_GRACE = 4.0  # the clock may show this many times the processor time, on a busy machine


class ChatTemplateError(ValueError):
    """A template is wrong, refuses the messages or needs too much; `line` is where, if known."""

    def __init__(self, message: str, line: int | None = None) -> None:
        where = "chat template" if line is None else f"chat template, line {line}"
        super().__init__(f"{where}: {escaped(message, LONGEST)}")
        self.line = line


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos: str = "",
    eos: str = "",
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    timeout: float = 1.0,
    max_chars: int = MAX_CHARS,
) -> str:
    """The prompt for `messages`, each with "role" and "content"; ChatTemplateError if none.

    `bos` and `eos` are the texts of those tokens; `add_generation_prompt` opens the answer. The
    template may use `timeout` seconds of processor time and write `max_chars` characters.
    Semantics: transformers' apply_chat_template.
    """
    if len(template) > MAX_TEMPLATE:
        raise ChatTemplateError(f"has {len(template)} characters, the limit is {MAX_TEMPLATE}")
    variables = {
        "messages": list(messages),
        "tools": None if tools is None else list(tools),
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos,
        "eos_token": eos,
    }
    request = _to_json({"template": template, "variables": variables, "max_chars": max_chars})
    limits = (str(timeout), str(MEMORY + MEMORY_PER_BYTE * len(request)))
    return _answer(_run(limits, request, timeout), timeout)


def checked_messages(messages: object) -> list[dict[str, str]]:
    """A copy of messages, dicts with "role" and "content"; ValueError says which one is wrong."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f"messages is {messages!r:.60}: give a list of dicts like {_EXAMPLE}")
    if not messages:
        raise ValueError(f"messages is empty: give at least one, like {_EXAMPLE}")
    return [_checked(message, number) for number, message in enumerate(messages)]


def _checked(message: object, number: int) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{number}] is {message!r:.60}: give a dict like {_EXAMPLE}")
    if (role := message.get("role")) not in ROLES:
        known = ", ".join(ROLES)
        raise ValueError(f"messages[{number}] has the role {role!r:.60}: it must be one of {known}")
    if not isinstance(content := message.get("content"), str):
        raise ValueError(f"messages[{number}] has the content {content!r:.60}: it must be a text")
    return dict(message)


def _to_json(request: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(request).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"cannot take these messages or tools: {error}") from None


def _run(
    limits: tuple[str, str], request: bytes, timeout: float
) -> subprocess.CompletedProcess[bytes]:
    # Isolated (-I) and without site (-S): it starts sooner, and runs nothing of the user's.
    command = [sys.executable or "python3", "-I", "-S", str(_CHILD), *limits, *_library_folders()]
    # Where processor time is limited, the clock is a second line; elsewhere it is the only one.
    clock = timeout * (_GRACE if hasattr(signal, "setitimer") else 1.0) + 1.0
    try:
        return subprocess.run(
            command,
            input=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=clock,
            env=_environment(),
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except subprocess.TimeoutExpired:
        raise ChatTemplateError(f"was not done after {clock:g} s") from None
    except OSError as error:
        raise ChatTemplateError(f"no process could be started to render it: {error}") from None


def _environment() -> dict[str, str]:
    """Nothing that a template could find out about the user; Windows starts no process without."""
    return {k: v for k, v in os.environ.items() if os.name == "nt" and k.upper() == "SYSTEMROOT"}


def _library_folders() -> list[str]:
    """Where the packages are that the child needs, without importing them here."""
    folders = []
    for package in ("jinja2", "markupsafe"):
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise ChatTemplateError(f"rendering it needs {package}: pip install {package}")
        folders.append(str(Path(spec.origin).parent.parent))
    return folders


def _answer(child: subprocess.CompletedProcess[bytes], timeout: float) -> str:
    if child.returncode == 0:
        answer = json.loads(child.stdout)
        if "error" in answer:
            raise ChatTemplateError(answer["error"], answer["line"])
        return str(answer["text"])
    if child.returncode == OUT_OF_MEMORY:
        raise ChatTemplateError(f"needs more than {MEMORY >> 20} MB of memory")
    if child.returncode == -getattr(signal, "SIGPROF", 0):
        raise ChatTemplateError(f"needs more than {timeout:g} s of processor time")
    raise ChatTemplateError(f"the process that renders it ended with status {child.returncode}")
