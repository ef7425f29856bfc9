"""How long prompts and answers are: a number, a range, or a file of prompts.

It imports nothing that takes time, so that --help is fast.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST = 1 << 30  # bytes of a file of prompts


@dataclass(frozen=True)
class TokenRange:
    """A number of tokens from `low` to `high`, all equally likely."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    def draw(self, random_: random.Random) -> int:
        return random_.randint(self.low, self.high)


DEFAULT_INPUT, DEFAULT_OUTPUT = TokenRange(512, 512), TokenRange(128, 128)


def tokens(text: str) -> TokenRange:
    """The range that "512" or "128-2048" means; ValueError."""
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    low = int(match[1]) if match else 0
    high = int(match[2] or low) if match else 0
    if not 1 <= low <= high:
        raise ValueError(f"{text!r} is no number of tokens like 512, and no range like 128-2048")
    return TokenRange(low, high)


def tokens_or_file(text: str) -> TokenRange | Path:
    """A range of tokens, or else the file of prompts with that name; ValueError."""
    if re.fullmatch(r"[0-9-]+", text):
        return tokens(text)
    path = Path(text)
    if not path.is_file():
        raise ValueError(f"{text!r} is no file of prompts, and no number of tokens like 512")
    return path


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines with "prompt" or "messages"; ValueError, OSError."""
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; {LARGEST} are read: split it")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            found.append(_prompt(line, f"{path}, line {number}"))
    if not found:
        raise ValueError(f"{path} has no prompts: give a line of JSON for each")
    return found


def _prompt(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    if not isinstance(found, dict) or ("prompt" in found) == ("messages" in found):
        raise ValueError(f'{where} must be an object with either "prompt" or "messages"')
    most = found.get("max_tokens", 1)
    if type(most) is not int or most < 1:
        raise ValueError(f"{where}: max_tokens is {most!r}: it must be a whole number, 1 or more")
    return found
