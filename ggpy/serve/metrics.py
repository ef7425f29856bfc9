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

    def text(self, stats: EngineStats) -> str:
        """All metrics."""
        return "\n".join([*self._llama_cpp(stats), *self._own(stats)]) + "\n"

    def _llama_cpp(self, s: EngineStats) -> Iterator[str]:
        used = 1 - s.n_pages_free / s.n_pages if s.n_pages else 0.0
        yield from _metric("llamacpp:prompt_tokens_total", "counter", self.n_prompt)
        yield from _metric("llamacpp:prompt_seconds_total", "counter", self.prefill_seconds)
        yield from _metric("llamacpp:tokens_predicted_total", "counter", self.n_generated)
        yield from _metric(
            "llamacpp:tokens_predicted_seconds_total", "counter", self.decode_seconds
        )
        yield from _metric("llamacpp:prompt_tokens_cached_total", "counter", self.n_cached)
        yield from _metric("llamacpp:n_tokens_max", "counter", self.n_longest)
        yield from _metric("llamacpp:n_decode_total", "counter", s.steps_total)
        busy = s.generated_tokens_total / s.steps_total if s.steps_total else 0.0
        yield from _metric("llamacpp:n_busy_slots_per_decode", "gauge", busy)
        speeds = (self.n_prompt, self.prefill_seconds), (self.n_generated, self.decode_seconds)
        for name, (n, seconds) in zip(("prompt", "predicted"), speeds, strict=True):
            speed = n / seconds if seconds else 0.0
            yield from _metric(f"llamacpp:{name}_tokens_seconds", "gauge", speed)
        yield from _metric("llamacpp:kv_cache_usage_ratio", "gauge", used)
        yield from _metric("llamacpp:requests_processing", "gauge", s.n_running)
        yield from _metric("llamacpp:requests_deferred", "gauge", s.n_waiting)

    def _own(self, s: EngineStats) -> Iterator[str]:
        yield from _metric("ggpy:kv_pages", "gauge", s.n_pages)
        yield from _metric("ggpy:kv_pages_free", "gauge", s.n_pages_free)
        yield from _metric("ggpy:kv_pages_cached", "gauge", s.n_pages_cached)
        yield from _metric("ggpy:prompt_tokens_cached_total", "counter", s.cached_tokens_total)
        yield from _metric("ggpy:prompt_tokens_evaluated_total", "counter", s.prompt_tokens_total)
        yield from _metric("ggpy:preemptions_total", "counter", s.preemptions_total)
        yield "# TYPE ggpy:http_requests_total counter"
        for (path, status), n in sorted(self.requests.items()):
            yield f'ggpy:http_requests_total{{path="{path}",status="{status}"}} {n}'
        histograms = {"time_to_first_token": self.first_token, "request": self.whole}
        for name, histogram in histograms.items():
            yield f"# TYPE ggpy:{name}_seconds histogram"
            yield from histogram.lines(f"ggpy:{name}_seconds")


def _metric(name: str, kind: str, value: float) -> Iterator[str]:
    yield f"# TYPE {name} {kind}"
    yield f"{name} {value:.6f}" if isinstance(value, float) else f"{name} {value}"
