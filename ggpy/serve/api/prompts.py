"""Prompts without a conversation, as completions and embeddings take them: texts, ids of tokens,
ids with texts between them, and llama.cpp's objects. The rule is llama-server's.

Nothing here knows what a prompt is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...tokenizer import Tokenizer
from ..errors import ApiError
from ..fields import Fields, is_whole, shown
from .reading import refuse

Prompt = str | Sequence[int | str]  # a text, or ids with texts between them
NEEDED = "a string, a list of token ids, or a list of these"


def read_prompts(fields: Fields, name: str, most: int) -> list[tuple[Any, str]]:
    """The prompts of a field, each as it is and with its path: a list with an id in it is one, any
    other list has one in each entry.
    """
    value = fields.raw(name)
    if not isinstance(value, (str, list, dict)):
        raise fields.error(name, NEEDED)
    path = fields.path(name)
    if not isinstance(value, list) or any(map(is_whole, value)):
        return [(value, path)]
    if len(value) > most:
        told = f"{path} has {len(value)} entries: give at most {most}"
        raise ApiError(400, told, param=path)
    if not value:
        raise ApiError(400, f"{path} is empty: give at least one text", param=path)
    return [(entry, f"{path}[{i}]") for i, entry in enumerate(value)]


def prompt_of(entry: Any, path: str) -> Prompt:
    """One prompt: a text, ids with or without texts between them, or {"prompt_string": ...}."""
    if isinstance(entry, dict):
        fields = Fields(entry, path)
        if "multimodal_data" in fields:
            refuse(fields, "multimodal_data", "this model reads text only")
        entry, path = fields.raw("prompt_string"), fields.path("prompt_string")
    if isinstance(entry, str):
        return entry
    if isinstance(entry, list) and any(map(is_whole, entry)):
        wrong = [part for part in entry if not isinstance(part, str) and not is_whole(part)]
        if not wrong:
            return entry
        told = f"{path} has {shown(wrong[0])} in it: give token ids, and strings between them"
        raise ApiError(400, told, param=path)
    told = f"{path} is {shown(entry)}: it must be a string or a list of token ids"
    raise ApiError(400, told, param=path)


def tokens_of(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """The ids of a prompt: special tokens are read in its texts, and a text at its beginning gets
    the model's beginning token.
    """
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, parse_special=True)
    ids: list[int] = []
    for i, part in enumerate(prompt):
        if isinstance(part, str):
            ids += tokenizer.encode(part, add_special=not i, parse_special=True)
        else:
            ids.append(part)
    return ids
