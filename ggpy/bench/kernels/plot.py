"""Plots measured kernels: the roofline, and how much of its limit each kernel reaches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..plot import pyplot, save
from .table import Document, Row

WIDTH, HEIGHT = 11.0, 6.0  # inches per panel
MARKERS = "os^Dv<>p*hX"


def draw(found: Document, path: str) -> int:
    """Write the plot of the rows with measurements; return its number of panels."""
    plt = pyplot()
    rows = [row for row in found["rows"] if row["us"]]
    counted = [row for row in rows if row["flops"]]
    figure, axes = plt.subplots(2 if counted else 1, 1, squeeze=False)
    figure.set_size_inches(WIDTH, HEIGHT * len(axes))
    if counted:
        _roofline(axes[0, 0], found, counted)
    _bandwidth(axes[-1, 0], found, rows)
    save(figure, path)
    return len(axes)


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by what was measured."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["what"], []).append(row)
    return found


def _roofline(axes: Any, found: Document, rows: Sequence[Row]) -> None:
    """Operations per second over operations per byte, below the limits of memory and arithmetic."""
    for marker, (what, some) in zip(MARKERS * 9, groups(rows).items(), strict=False):
        intensity = [row["flops"] / row["nbytes"] for row in some]
        axes.plot(intensity, [row["tflop_s"] for row in some], marker, ms=4, label=what)
    if found["bandwidth"]:
        low, high = 0.1, max(4e3, max(row["flops"] / row["nbytes"] for row in rows))
        x = np.geomspace(low, high, 200)
        roof = np.minimum(x * found["bandwidth"], found["matrix_rate"]) / 1e12
        axes.plot(x, roof, "k-", lw=1)
    _finish(axes, "operations per byte", "TFLOP/s", found)


def _bandwidth(axes: Any, found: Document, rows: Sequence[Row]) -> None:
    """Bytes per second over microseconds: small kernels are bound by their launch."""
    for marker, (what, some) in zip(MARKERS * 9, groups(rows).items(), strict=False):
        axes.plot(
            [row["us"] for row in some], [row["gb_s"] for row in some], marker, ms=4, label=what
        )
    if found["bandwidth"]:
        axes.axhline(found["bandwidth"] / 1e9, color="k", lw=1)
    _finish(axes, "microseconds", "GB/s", found)


def _finish(axes: Any, x: str, y: str, found: Document) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(f"{found['gpu']}, {found['time'][:10]}", fontsize=9)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=7, ncol=2, loc="lower right")
