"""A picture of results: bars against their limits, and speed over depth and over sequences.

matplotlib is optional and imported only here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from errno import EISDIR, ENOENT
from functools import partial
from pathlib import Path
from typing import Any

from ..util.output_file import OutputFile
from .table import Row

WIDTH, BAR = 11.0, 0.32  # inches


def require(path: str) -> None:
    """ValueError or OSError if no picture can be written to this path: call it before measuring."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'ggpy[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    file = _named(path)
    if Path(path).is_dir() or file.is_dir():
        raise IsADirectoryError(EISDIR, "is a directory: name a file in it", path)
    if not file.parent.is_dir():
        raise FileNotFoundError(ENOENT, f"there is no folder {file.parent}", path)
    known = FigureCanvasBase.get_supported_filetypes()
    if file.suffix[1:].lower() not in known:
        raise ValueError(f"--plot {path}: the name ends in none of .{', .'.join(sorted(known))}")


def _named(path: str) -> Path:
    """The file to write: `path`, with .png if it has no suffix."""
    return Path(path if Path(path).suffix else f"{path}.png")


def pyplot() -> Any:
    """matplotlib.pyplot, which draws into files."""
    import matplotlib  # type: ignore[import-not-found,unused-ignore]

    matplotlib.use("agg")
    import matplotlib.pyplot  # type: ignore[import-not-found,unused-ignore]

    return matplotlib.pyplot


def save(figure: Any, path: str) -> None:
    """Writes the picture in the format of the path's suffix (none: PNG), and closes the figure."""
    figure.tight_layout()
    file = _named(path)
    try:
        with OutputFile(file) as out:
            figure.savefig(out.stream, format=file.suffix[1:])
    finally:
        pyplot().close(figure)


def draw(rows: Sequence[Row], path: str) -> int:
    """Writes the picture of the rows that have a speed; returns its number of panels."""
    plt = pyplot()
    rows = [row for row in rows if row["median_ts"]]
    panels: list[Callable[[Any], None]] = [partial(_bars, rows=rows)]
    generation = [row for row in rows if row["n_gen"] and not row["n_prompt"]]
    for field, label in (("n_depth", "tokens of context"), ("n_seq", "sequences")):
        if len({row[field] for row in generation}) > 1:
            panels.append(partial(_curves, rows=generation, field=field, label=label))
    heights = [1.2 + BAR * len(rows), *[4.0] * (len(panels) - 1)]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(WIDTH, sum(heights)), height_ratios=heights, squeeze=False
    )
    for panel, place in zip(panels, axes[:, 0], strict=True):
        panel(place)
    save(figure, path)
    return len(panels)


def _bars(axes: Any, rows: Sequence[Row]) -> None:
    """Each test's share of its limit."""
    rows = list(reversed(rows))
    percents = [row["percent_of_limit"] or 0 for row in rows]
    names = [f"{row['model_type']}  {row['test']}" for row in rows]
    axes.barh(range(len(rows)), [100] * len(rows), color="0.92")
    axes.barh(range(len(rows)), percents)
    axes.set_yticks(range(len(rows)), names)
    for i, row in enumerate(rows):
        axes.text(percents[i] + 1, i, f"{row['median_ts']:.0f} t/s", va="center", fontsize=8)
    axes.set_xlim(0, max(115, *percents) if percents else 115)
    axes.set_xlabel("% of the limit")


def _curves(axes: Any, rows: Sequence[Row], field: str, label: str) -> None:
    """Tokens per second over a field: a line for each model and value of the other field, if it has
    two points or more; the limit is dotted.
    """
    other = "n_seq" if field == "n_depth" else "n_depth"
    lines: dict[str, list[Row]] = {}
    for row in rows:
        fixed = f" x{row['n_seq']}" if other == "n_seq" else f" @ d{row['n_depth']}"
        name = f"{row['model_type']} tg{row['n_gen']}" + (fixed if row[other] > 1 else "")
        lines.setdefault(name, []).append(row)
    for name, line in lines.items():
        if len(line) < 2:
            continue
        line.sort(key=lambda row: row[field])
        x = [row[field] for row in line]
        (drawn,) = axes.plot(x, [row["median_ts"] for row in line], "o-", label=name)
        axes.plot(x, [row["limit_ts"] for row in line], ":", color=drawn.get_color())
    axes.set_xlabel(label)
    axes.set_ylabel("tokens a second")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
