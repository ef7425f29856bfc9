"""What the server counts, in Prometheus's text format: llama.cpp's names, and ggpy's own.

Nothing here knows HTTP or how an answer is made.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from ..runtime.stats import EngineStats
from .events import Finished

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
NO_DRAFTS = " (there are none)"


class TimeHistogram:
    """How many times were at most each of BOUNDS."""

    def __init__(self) -> None:
        self.counts, self.total = [0] * (len(BOUNDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Count a time."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def lines(self, name: str) -> Iterator[str]:
        """The histogram in Prometheus's form."""
        n = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            n += count
            yield f'{name}_bucket{{le="{bound}"}} {n}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {n}"


class Metrics:
    """The counts of one server. The event loop alone uses them."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # of each (path, status)
        self.first_token, self.whole = TimeHistogram(), TimeHistogram()
        self.n_generated = self.n_prompt = self.n_cached = self.n_longest = 0
        self.decode_seconds = self.prefill_seconds = 0.0

    def answered(self, end: Finished) -> None:
        """Count an answer that is complete."""
        usage, seconds = end.usage, end.timings
        self.n_generated += usage.n_generated
        self.n_prompt += usage.n_prompt - usage.n_cached
        self.n_cached += usage.n_cached
        self.n_longest = max(self.n_longest, usage.n_prompt + usage.n_generated)
        self.prefill_seconds += seconds.prefill
        self.decode_seconds += seconds.decode
        self.first_token.add(seconds.queued + seconds.prefill)
        self.whole.add(seconds.queued + seconds.prefill + seconds.decode)

    def embedded(self, n_tokens: int, seconds: float) -> None:
        """Count texts that became vectors, as prompts; seconds: with their wait."""
        self.n_prompt += n_tokens
        self.prefill_seconds += seconds

    def text(self, stats: EngineStats) -> str:
        """All metrics."""
        return "\n".join([*self._llama_cpp(stats), *self._own(stats)]) + "\n"

    def _llama_cpp(self, s: EngineStats) -> Iterator[str]:
        used = 1 - s.n_pages_free / s.n_pages if s.n_pages else 0.0
        busy = s.generated_tokens_total / s.steps_total if s.steps_total else 0.0
        prompts, answers = self.prefill_seconds, self.decode_seconds
        counters: dict[str, tuple[float, str]] = {
            "prompt_tokens_total": (self.n_prompt, "prompt tokens evaluated"),
            "prompt_seconds_total": (prompts, "seconds of prompts"),
            "tokens_predicted_total": (self.n_generated, "tokens of answers"),
            "tokens_predicted_seconds_total": (answers, "seconds of answers"),
            "prompt_tokens_cached_total": (self.n_cached, "prompt tokens found in the cache"),
            "n_tokens_max": (self.n_longest, "tokens of the longest prompt with its answer"),
            "n_decode_total": (s.steps_total, "steps of the engine"),
            "spec_decode_num_draft_tokens_total": (0, f"tokens of drafts{NO_DRAFTS}"),
            "spec_decode_num_accepted_tokens_total": (0, f"drafted tokens accepted{NO_DRAFTS}"),
            "spec_decode_num_drafts_total": (0, f"drafts verified{NO_DRAFTS}"),
        }
        gauges: dict[str, tuple[float, str]] = {
            "n_busy_slots_per_decode": (busy, "answers of a step on average"),
            "prompt_tokens_seconds": (_speed(self.n_prompt, prompts), "prompt tokens a second"),
            "predicted_tokens_seconds": (_speed(self.n_generated, answers), "tokens a second"),
            "kv_cache_usage_ratio": (used, "share of the pages in use"),
            "requests_processing": (s.n_running, "answers that run"),
            "requests_deferred": (s.n_waiting, "requests that wait"),
        }
        for kind, metrics in (("counter", counters), ("gauge", gauges)):
            for name, (value, told) in metrics.items():
                yield from _metric(f"llamacpp:{name}", kind, value, told)

    def _own(self, s: EngineStats) -> Iterator[str]:
        cached, evaluated = s.cached_tokens_total, s.prompt_tokens_total
        found: tuple[tuple[str, str, int, str], ...] = (
            ("kv_pages", "gauge", s.n_pages, "pages of the KV cache"),
            ("kv_pages_free", "gauge", s.n_pages_free, "free pages, cached ones among them"),
            ("kv_pages_cached", "gauge", s.n_pages_cached, "pages of the prefix cache"),
            ("prompt_tokens_cached_total", "counter", cached, "prompt tokens found in the cache"),
            ("prompt_tokens_evaluated_total", "counter", evaluated, "the other prompt tokens"),
            ("preemptions_total", "counter", s.preemptions_total, "answers that gave pages back"),
        )
        for name, kind, value, told in found:
            yield from _metric(f"ggpy:{name}", kind, value, told)
        yield from _head("ggpy:http_requests_total", "counter", "requests by path and status")
        for (path, status), n in sorted(self.requests.items()):
            yield f'ggpy:http_requests_total{{path="{path}",status="{status}"}} {n}'
        histograms = {"time_to_first_token": self.first_token, "request": self.whole}
        for name, histogram in histograms.items():
            yield from _head(f"ggpy:{name}_seconds", "histogram", "with the wait in the queue")
            yield from histogram.lines(f"ggpy:{name}_seconds")


def _speed(n: int, seconds: float) -> float:
    return n / seconds if seconds else 0.0


def _head(name: str, kind: str, told: str) -> Iterator[str]:
    yield f"# HELP {name} {told}"
    yield f"# TYPE {name} {kind}"


def _metric(name: str, kind: str, value: float, told: str) -> Iterator[str]:
    yield from _head(name, kind, told)
    yield f"{name} {value:.6f}" if isinstance(value, float) else f"{name} {value}"
