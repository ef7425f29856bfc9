"""Measures the tile schedules of the prefill GEMM on a GPU, as Markdown tables.

Runs the Hopper prefill GEMM with every schedule that its wrapper supports, and with tile orders and
pipeline depths that the wrapper does not choose; these are explicit specialisations, compiled after
the kernel's source. Only tools/bench_kernels.py uses this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ...formats import Format
from ...kernels.gemm.gemm import STATIC_SHARED
from ...kernels.gemm.gemm_decode import GemmDecode, Limits
from ...kernels.gemm.gemm_wgmma import (
    ASSERTS,
    TILE_COSTS,
    GemmWgmma,
    instance,
    k_stages,
    stage_columns,
)
from ...kernels.gemm.hopper import ROW_BLOCK, TILE_ROWS, has_wgmma
from ...kernels.gemm.tile_scheduler import SPLIT_K, TileSchedule, Tiling, fastest
from ...kernels.layout.pack import packed_bytes
from ...kernels.layout.tile import Layout, layout_of
from ..compile_ahead import Wishes, compile_ahead
from ..timing import Clock, Timing
from .operands import Operands

SHAPES = ((14336, 4096), (4096, 14336))  # rows and columns: up and down of Llama-3.1-8B
COLUMNS = ((1, 8), (16, 16), (64, 64), (512, 128), (512, 256), (2048, 128), (2048, 256))
WARPS, STAGES = (4, 8, 16), (1, 2, 3)  # warps and stages of the decode GEMM
TURNS, RUNS_OF_A_TURN = 4, 3
BARRIERS = 1 << 10  # bytes of shared memory (gemm_wgmma.cu)
Say = Callable[[str], None]


@dataclass(frozen=True)
class StagedTiling(Tiling):
    """A tiling whose CTAs have `depth` stages of weights in shared memory instead of as many as
    fit.
    """

    layout: Layout | None = None
    depth: int = 0

    @property
    def shared(self) -> int:
        """Bytes for `depth` stages of weights and the same number of columns of x."""
        if not self.depth or self.layout is None:
            return super().shared
        columns = stage_columns(self.layout)
        weights = TILE_ROWS * self.layout.chunk_bytes * columns // self.layout.chunk_k
        return BARRIERS + self.depth * (weights + 2 * columns * self.tokens)


@dataclass(frozen=True)
class Variant:
    """A row of the table."""

    name: str
    tiling: StagedTiling
    rows_first: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Options for compiling the kernel."""
        shared = f"template <> constexpr int SHARED<{self.tiling.tokens}> = {self.tiling.shared};"
        defines = {"ROWS_FIRST": 1} if self.rows_first else {}
        extra_source = f"{ASSERTS}\n{shared if self.tiling.depth else ''}"
        return {"extra_source": extra_source, "defines": defines}


def variants(layout: Layout, n_tokens: int, tokens: int, best: Tiling) -> list[Variant]:
    """All variants of a column of the table. tokens: of a tile. best: the program's choice."""
    whole = StagedTiling(tokens, False, layout=layout)
    shared, chosen = replace(whole, split=True), replace(whole, split=best.split, pairs=best.pairs)
    found = [
        Variant("data-parallel", whole),
        Variant("data-parallel, pairs", replace(whole, pairs=True)),
        *(Variant(f"split-K {n}", replace(shared, split_k=n)) for n in SPLIT_K),
        Variant("stream-K", replace(shared, whole_waves_first=False)),
        Variant("data-parallel + stream-K", shared),
    ]
    if n_tokens > tokens:
        found.append(Variant("rows first", replace(chosen, pairs=False), True))
    staged = (Variant(f"{n} stages", replace(chosen, depth=n)) for n in (2, 3, 4, 5))
    return found + [staged for staged in staged if staged.tiling.shared <= chosen.shared]


class Varied(GemmWgmma):
    """The GEMM, compiled with other options."""

    def __init__(self, device: Any, options: dict[str, Any]) -> None:
        super().__init__(device, device.sm_count)
        self._options = options

    def _kernel(self, layout: Layout, tokens: int, epilogue: Any, cluster: int) -> Any:
        name = instance(layout, tokens, epilogue, cluster)
        return self.device.kernel("gemm/gemm_wgmma.cu", name, **self._options)


def scheduled(
    tiling: Tiling, layout: Layout, rows: int, k: int, n: int, sms: int
) -> TileSchedule | None:
    """The schedule of the GEMM; None if the tiling does not support the shape."""
    try:
        return tiling.schedule(-(-rows // ROW_BLOCK), n, k_stages(layout, k).count, sms)
    except ValueError:
        return None


def table(o: Operands, clock: Any, format: Format, rows: int, k: int, say: Say) -> list[str]:
    """Microseconds of [n, k] x [k, rows] by schedule and tokens; the program's choice is bold."""
    layout, sms = layout_of(format, k), o.device.sm_count
    if layout is None:
        raise ValueError(f"{format.name} has no tiles of {k} columns: take another format")
    cells: dict[str, list[str]] = {}
    for at, (n, tokens) in enumerate(COLUMNS):
        best = fastest(TILE_COSTS, -(-rows // ROW_BLOCK), n, k_stages(layout, k), sms)
        chosen = scheduled(best, layout, rows, k, n, sms)
        tried = variants(layout, n, tokens, best)
        for variant in tried:
            cells.setdefault(variant.name, [""] * len(COLUMNS))
        there = [v for v in tried if is_there(v, scheduled(v.tiling, layout, rows, k, n, sms))]
        enqueue = [product_of(o, format, rows, k, n, v) for v in there]
        for variant, us in zip(there, in_turns(clock, enqueue), strict=True):
            taken = chosen and (chosen.name, best.tokens) == (variant.name, tokens)
            cells[variant.name][at] = f"**{us:.1f}**" if taken else f"{us:.1f}"
        say(f"{format.name} {rows} x {k}: {n} tokens, tiles of {tokens}")
    heads = [f"{n}" if n <= tokens else f"{n} ({tokens})" for n, tokens in COLUMNS]
    return markdown(["schedule", *heads], [[name, *row] for name, row in cells.items()])


def is_there(variant: Variant, schedule: TileSchedule | None) -> bool:
    """Whether the variant can run and no other row measures the same schedule."""
    named = variant.name.startswith(("data", "split", "stream"))
    return schedule is not None and (not named or variant.name == schedule.name)


def in_turns(clock: Any, enqueue: Sequence[Callable[[], None]]) -> list[float]:
    """Median microseconds of each, measured in turns in alternating order, because a GPU lowers its
    clocks while it multiplies for long.
    """
    times: list[list[float]] = [[] for _ in enqueue]
    for turn in range(TURNS):
        for i in range(len(enqueue))[:: 1 if turn % 2 else -1]:
            times[i].append(clock.each(enqueue[i], RUNS_OF_A_TURN).median)
    return [median(found) for found in times]


def product_of(
    o: Operands, format: Format, rows: int, k: int, n: int, variant: Variant
) -> Callable[[], None]:
    """Returns a function that enqueues the GEMM, with other weights at each launch."""
    layout = variant.tiling.layout
    assert layout is not None
    product = o.cached(("varied", str(variant.options)), lambda: Varied(o.device, variant.options))
    weights = o.matrix(format, rows, k)
    x = o.f16("x", 1, packed_bytes(n, k) // 2)
    out = o.floats("out", n, rows)

    def enqueue() -> None:
        tiles = weights().tiles
        product.launch([tiles], x.data, [out.data], n, tiling=variant.tiling)

    return enqueue


def token_table(o: Operands, clock: Any, format: Format, rows: int, k: int, say: Say) -> list[str]:
    """One token and eight tokens, by the decode GEMM, which splits K over the warps of a CTA."""
    forms = [(warps, stages) for warps in WARPS for stages in STAGES]
    found = [[f"{warps} warps, {stages} stages"] for warps, stages in forms]
    shared, sms = o.device.shared_bytes - STATIC_SHARED, o.device.sm_count
    products = [GemmDecode(o.device, Limits(shared, sms, stages, w)) for w, stages in forms]
    for n in (1, 8):
        enqueue = [_tokens(o, product, format, rows, k, n) for product in products]
        for row, us in zip(found, in_turns(clock, enqueue), strict=True):
            row.append(f"{us:.1f}")
        say(f"{format.name} {rows} x {k}: {n} tokens, without wgmma")
    found[-1][1:] = [f"**{cell}**" for cell in found[-1][1:]]
    return markdown(["schedule", "1", "8"], found)


def _tokens(
    o: Operands, product: GemmDecode, format: Format, rows: int, k: int, n: int
) -> Callable[[], None]:
    weights, x, out = o.matrix(format, rows, k), o.f16("x", n, k), o.floats("out", n, rows)

    def enqueue() -> None:
        tiles = weights().tiles
        assert tiles is not None
        product.launch([tiles], x.data, [out.data], n)

    return enqueue


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def report(device: Any, format: Format, clock: Any, say: Say) -> Iterator[str]:
    """All tables; ValueError on a GPU that does not support the GEMM."""
    if not has_wgmma(device.arch):
        raise ValueError(f"{device.arch} has no wgmma: schedules are measured on Hopper")
    o = Operands(device)
    for decode in (False, True):
        for rows, k in SHAPES:
            what = "1 and 8 tokens" if decode else "by tokens (and tokens of a tile)"
            yield f"{format.name}, {rows} x {k}, microseconds, {what}:"
            yield ""
            yield from (token_table if decode else table)(o, clock, format, rows, k, say)
            yield ""


class Unmeasured:
    """A clock for a device that only records what would be compiled."""

    def each(self, enqueue: Callable[[], None], runs: int) -> Timing:
        """A constant time."""
        enqueue()
        return Timing([0.0])


def measured(device: Any, format: Format, processes: int | None, say: Say) -> Iterator[str]:
    """The report of a GPU. All kernels are compiled first."""
    wishes = Wishes(device)
    list(report(wishes, format, Unmeasured(), lambda _: None))
    compile_ahead(wishes.wishes, device.target, processes, say)
    yield from report(device, format, Clock(device), say)
