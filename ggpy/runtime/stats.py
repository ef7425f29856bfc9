"""Counts of what an engine has done, and of what it holds at the moment."""

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

    def add_prompt(self, n: int, n_cached: int) -> None:
        """Count the prompt of a sequence that has its first token, or needs none."""
        self.query_tokens += n
        self.cached_tokens += n_cached


@dataclass(frozen=True)
class EngineStats:
    """An engine at one moment. Pages count in all groups of layers; totals only grow.

    The hit rate of the prefix cache is cached_tokens_total / query_tokens_total.
    """

    n_running: int
    n_waiting: int
    n_pages: int
    n_pages_free: int  # without a reference, pages of the prefix cache included
    n_pages_cached: int  # pages of the prefix cache without a reference
    prompt_tokens_total: int  # evaluated; again after a preemption, with the answer so far
    generated_tokens_total: int
    cached_tokens_total: int  # tokens of answered prompts that were reused
    query_tokens_total: int  # all tokens of these prompts
    preemptions_total: int
    steps_total: int
