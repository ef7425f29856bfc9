"""Usage in OpenAI's form, and timings and progress in llama.cpp's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..events import Finished, PromptProgress


def usage_of(ends: Sequence[Finished]) -> dict[str, Any]:
    """The usage of answers to one prompt."""
    first = ends[0].usage
    n_generated = sum(end.usage.n_generated for end in ends)
    n_reasoning = sum(end.usage.n_reasoning for end in ends)
    return {
        "prompt_tokens": first.n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": first.n_prompt + n_generated,
        "prompt_tokens_details": {"cached_tokens": first.n_cached},
        "completion_tokens_details": {"reasoning_tokens": n_reasoning},
    }


def timings_of(end: Finished) -> dict[str, Any]:
    """What llama.cpp's clients show of an answer.

    The time of the decode begins with the first token, so that its speed is that of the others.
    """
    usage, seconds = end.usage, end.timings
    n_prompt = usage.n_prompt - usage.n_cached
    return {
        "cache_n": usage.n_cached,
        **_phase("prompt", n_prompt, n_prompt, seconds.prefill),
        **_phase("predicted", usage.n_generated, usage.n_generated - 1, seconds.decode),
        "queued_ms": round(1e3 * seconds.queued, 3),
    }


def progress_of(read: PromptProgress, timed: bool = False) -> dict[str, Any]:
    """What a chunk says of how much of a prompt is read. timed: its timings, too."""
    tokens = {"total": read.n_prompt, "cache": read.n_cached, "processed": read.n_read}
    told = {"prompt_progress": {**tokens, "time_ms": round(1e3 * read.seconds)}}
    if not timed:
        return told
    n = read.n_read - read.n_cached
    phases = {**_phase("prompt", n, n, read.seconds), **_phase("predicted", 0, 0, 0.0)}
    return {**told, "timings": {"cache_n": read.n_cached, **phases}}


def _phase(name: str, n: int, n_timed: int, seconds: float) -> dict[str, Any]:
    timed = n_timed > 0 and seconds > 0
    return {
        f"{name}_n": n,
        f"{name}_ms": round(1e3 * seconds, 3),
        f"{name}_per_token_ms": round(1e3 * seconds / n_timed, 3) if timed else 0.0,
        f"{name}_per_second": round(n_timed / seconds, 3) if timed else 0.0,
    }
