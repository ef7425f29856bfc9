"""A picture of a load test: how its times are distributed, and tokens a second over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..plot import pyplot, save
from .client import LoadRun
from .record import StreamRecord
from .summary import TIMES, Document, percentile, samples_of
from .table import has_token_times, load_of

WIDTH, HEIGHT = 11.0, 3.2  # inches, of a row of panels
LEAST = 1e-3  # ms that a logarithmic axis shows
BINS = 200  # of the time axis at most


def draw(run: LoadRun, found: Document, path: str) -> int:
    """Writes the picture; returns its number of panels."""
    samples = samples_of(run.records)
    if not has_token_times(found):
        samples.pop("token")
    shown = {name: sorted(values) for name, values in samples.items() if values}
    n_rows = (len(shown) + 2) // 2
    figure, axes = pyplot().subplots(n_rows, 2, squeeze=False, figsize=(WIDTH, HEIGHT * n_rows))
    panels = list(axes.flat)
    for axis, (name, values) in zip(panels, shown.items(), strict=False):
        _cumulated(axis, TIMES[name], values)
    _over_time(panels[len(shown)], run)
    for axis in panels[len(shown) + 1 :]:
        axis.remove()
    title = found["label"] or found["model"] or found["url"]
    figure.suptitle(f"{title}, {load_of(found)}: {found['output_ts']:.0f} output tokens/s")
    save(figure, path)
    return len(shown) + 1


def _cumulated(axis: Any, meaning: str, ordered: Sequence[float]) -> None:
    """The share of samples below each time, on a logarithmic axis; p50 and p99 are marked."""
    n = len(ordered)
    places = [*range(0, n, max(1, n // 2000)), n - 1]
    ms_of = [max(LEAST, 1e3 * ordered[i]) for i in places]
    axis.step(ms_of, [100 * (i + 1) / n for i in places], where="post")
    for percent, style in ((50, ":"), (99, "--")):
        ms = 1e3 * percentile(ordered, percent)
        axis.axvline(ms, color="0.5", linestyle=style, label=f"p{percent} {ms:.4g} ms")
    axis.set_title(f"{meaning}, {n} samples", fontsize=9)
    axis.set_xlabel("ms")
    axis.set_ylabel("% below")
    axis.set_ylim(0, 101)
    axis.set_xscale("log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, loc="lower right")


def _over_time(axis: Any, run: LoadRun) -> None:
    """Output tokens a second while the test went on."""
    seconds = run.end - run.start
    bin_s = max(seconds / BINS, min(1.0, seconds / 10), 1e-6)
    counts: Counter[int] = Counter()
    for record in run.records:
        per_event = _tokens_of_event(record)
        for at, count in zip(record.arrivals, record.counts, strict=True):
            counts[int((at - run.start) / bin_s)] += round(count * per_event)
    bins = range(max(counts, default=0) + 1)
    axis.step([i * bin_s for i in bins], [counts[i] / bin_s for i in bins], where="post")
    axis.set_title(f"output tokens a second, over {bin_s:.2g} s each", fontsize=9)
    axis.set_xlabel("s")
    axis.set_ylim(bottom=0)


def _tokens_of_event(record: StreamRecord) -> float:
    return record.n_tokens / record.n_events if record.n_events else 0.0
