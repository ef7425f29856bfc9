"""What `Model.generate` takes: prompts, keywords, and the sampling parameters that they give.

Nothing here knows a model or an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, Protocol

import numpy as np

from .sampling import SamplingParams, Split, TokenMask
from .sampling.keywords import SamplingKeywords

Prompt = str | Sequence[int]
Form = tuple[str, str]  # kind and text of a grammar
Compile = Callable[[str, str], TokenMask]  # makes the mask of a form


class Limiter(Protocol):
    """How answers to prompts of a chat reason, as `chat_formats.ReasoningLimit` says."""

    def fitted(self, form: Form | None, max_tokens: int | None) -> Limiter:
        """The same for answers of a form, the kind and the text of a grammar."""
        ...

    def mask(self, prompt: Sequence[int], compile: Compile) -> TokenMask | None:
        """The mask of an answer to the ids of a prompt; None where there is nothing to limit."""
        ...

    def split(self, prompt: Sequence[int]) -> Split | None:
        """What tells reasoning from the text of an answer; None where that is not told apart."""
        ...


class GenerateKeywords(SamplingKeywords, total=False):
    """The keyword arguments of `Model.generate`, which `Model.chat` takes too."""

    max_tokens: int | None
    stop: str | Iterable[str]
    logprobs: bool
    top_logprobs: int
    context_shift: bool
    n_keep: int
    params: SamplingParams | None
    grammar: str | None
    json_schema: str | Mapping[str, Any] | None
    reasoning: Limiter | None


def is_list_of_prompts(prompt: Any) -> bool:
    """Whether the elements of a prompt are prompts, not ids of tokens."""
    several = isinstance(prompt, (list, tuple)) and len(prompt) > 0
    return several and isinstance(prompt[0], (str, list, tuple, Mapping, np.ndarray))


def chosen_sampling(params: SamplingParams | None, given: Mapping[str, Any]) -> SamplingParams:
    """The parameters with those that were given by name."""
    if params is None:
        params = SamplingParams()
    elif not isinstance(params, SamplingParams):
        raise ValueError(f"params is {params!r:.60}: give a SamplingParams, or keywords")
    names = [f.name for f in fields(SamplingParams)]
    for name in given:
        if name not in names:
            similar = get_close_matches(name, [*names, *GenerateKeywords.__annotations__], 1)
            hint = f": did you mean {similar[0]}?" if similar else ""
            raise TypeError(f"generate has no parameter {name}{hint}")
    return replace(params, **given)
