"""What an engine has done, and what it has at the moment, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Totals:
    """Counts since the engine was made."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    query_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


@dataclass(frozen=True)
class EngineStats:
    """An engine at one moment. Pages are those of all groups of layers; totals only grow.

    The hit rate of the prefix cache is cached_tokens_total / query_tokens_total.
    """

    n_running: int
    n_waiting: int
    n_pages: int
    n_pages_free: int  # without a reference: those of the prefix cache are among them
    n_pages_cached: int  # without a reference, and found again by their text
    prompt_tokens_total: int  # evaluated; after a preemption once more, with the answer so far
    generated_tokens_total: int
    cached_tokens_total: int  # of prompts that were answered: not evaluated, but there
    query_tokens_total: int  # all of these prompts
    preemptions_total: int
    steps_total: int
