"""Plots a model in several types: quality against size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..plot import pyplot, save

WIDTH, HEIGHT = 9.0, 4.5  # inches per panel
MB = 1e6


@dataclass(frozen=True)
class Quality:
    """A model in a type; values have standard errors. The original model has no kl."""

    name: str
    matrices: str  # how many matrices have the type: "30 of 211"
    bits: float  # bits per weight over all tensors
    nbytes: int
    ppl: tuple[float, float]
    kl: tuple[float, float] | None = None
    same_top: float | None = None  # share of tokens


def draw(found: Sequence[Quality], path: str) -> int:
    """Write the plot; return its number of points."""
    plt = pyplot()
    figure, (above, below) = plt.subplots(2, 1, sharex=True)
    figure.set_size_inches(WIDTH, 2 * HEIGHT)
    n = _panel(above, [(q, q.kl) for q in found if q.kl is not None])
    above.set_ylabel("mean KL divergence")
    if any(q.kl and q.kl[0] > 0 for q in found):
        above.set_yscale("log")
    n += _panel(below, [(q, q.ppl) for q in found])
    below.set_ylabel("perplexity")
    below.set_xlabel("MB of all tensors")
    save(figure, path)
    return n


def _panel(axes: Any, points: Sequence[tuple[Quality, tuple[float, float]]]) -> int:
    """Draw a named point with its error bars for each; return the number of points."""
    for quality, (value, error) in points:
        megabytes = quality.nbytes / MB
        axes.errorbar([megabytes], [value], yerr=[error], fmt="o", capsize=3)
        place = {"xytext": (5, 5), "textcoords": "offset points", "fontsize": 8}
        axes.annotate(quality.name, (megabytes, value), **place)
    axes.grid(True, alpha=0.3)
    return len(points)
