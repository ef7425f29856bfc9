"""What the ways of dealing a product out give on a GPU, measured, as Markdown: SCHEDULES.md.

The product of many tokens is made with every schedule that its wrapper knows, and with orders of
tiles and depths of its rings that it does not choose: these are explicit specialisations, compiled
behind its source. Nothing here is used by the program itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ...backends.cuda.gemm import STATIC_SHARED
from ...formats import Format
from ...kernels.gemm.gemm_decode import Limits, MulMatTile
from ...kernels.gemm.gemm_wgmma import TILES, MulMatWgmma, instance, stage_columns, stages_of
from ...kernels.gemm.hopper import ROW_BLOCK, TILE_ROWS, has_wgmma
from ...kernels.gemm.tile_scheduler import PIECES, Cut, Schedule, fastest
from ...kernels.layout.pack import packed_bytes
from ...kernels.layout.tile import Layout, layout_of
from ..compile_ahead import Wishes, compile_ahead
from ..timing import Clock, Timing
from .operands import Operands

SHAPES = ((14336, 4096), (4096, 14336))  # rows and columns: up and down of Llama-3.1-8B
COLUMNS = ((1, 8), (16, 16), (64, 64), (512, 128), (512, 256), (2048, 128), (2048, 256))
WARPS, RINGS = (4, 8, 16), (1, 2, 3)  # of a block that has few tokens
TURNS, RUNS_OF_A_TURN = 4, 3
BARRIERS = 1 << 10  # bytes of shared memory (gemm_wgmma.cu)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Ring(Cut):
    """A cut whose blocks have `depth` stages of weights in shared memory instead of what fits."""

    layout: Layout | None = None
    depth: int = 0

    @property
    def shared(self) -> int:
        """Bytes that hold so many stages, and as many columns of activations."""
        if not self.depth or self.layout is None:
            return super().shared
        columns = stage_columns(self.layout)
        weights = TILE_ROWS * self.layout.chunk_bytes * columns // self.layout.chunk_k
        return BARRIERS + self.depth * (weights + 2 * columns * self.tokens)


@dataclass(frozen=True)
class Variant:
    """A row of the table."""

    name: str
    cut: Ring
    rows_first: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """How the product is compiled."""
        shared = f"template <> constexpr int SHARED<{self.cut.tokens}> = {self.cut.shared};"
        defines = {"ROWS_FIRST": 1} if self.rows_first else {}
        return {"extra_source": shared if self.cut.depth else "", "defines": defines}


def variants(layout: Layout, n_tokens: int, tokens: int, best: Cut) -> list[Variant]:
    """All of a column: `tokens` of a tile, where `best` is what would be chosen."""
    whole = Ring(tokens, False, layout=layout)
    shared, chosen = replace(whole, split=True), replace(whole, split=best.split, pairs=best.pairs)
    found = [
        Variant("data-parallel", whole),
        Variant("data-parallel, pairs", replace(whole, pairs=True)),
        *(Variant(f"split-K {n}", replace(shared, pieces=n)) for n in PIECES),
        Variant("stream-K", replace(shared, whole_first=False)),
        Variant("data-parallel + stream-K", shared),
    ]
    if n_tokens > tokens:
        found.append(Variant("rows first", replace(chosen, pairs=False), True))
    rings = (Variant(f"{n} stages", replace(chosen, depth=n)) for n in (2, 3, 4, 5))
    return found + [ring for ring in rings if ring.cut.shared <= chosen.shared]


class Varied(MulMatWgmma):
    """The product, compiled in some other way."""

    def __init__(self, device: Any, options: dict[str, Any]) -> None:
        super().__init__(device, device.sm_count)
        self._options = options

    def _kernel(self, layout: Layout, tokens: int, epilogue: Any, sharers: int) -> Any:
        name = instance(layout, tokens, epilogue, sharers)
        return self.device.kernel("gemm/gemm_wgmma.cu", name, **self._options)


def scheduled(cut: Cut, layout: Layout, rows: int, k: int, n: int, sms: int) -> Schedule | None:
    """How the product is dealt out; None where it cannot be."""
    try:
        return cut.deal(-(-rows // ROW_BLOCK), n, stages_of(layout, k).count, sms)
    except ValueError:
        return None


def table(o: Operands, clock: Any, format: Format, rows: int, k: int, say: Say) -> list[str]:
    """Microseconds of [n, k] x [k, rows] by schedule and tokens; what is chosen is bold."""
    layout, sms = layout_of(format, k), o.device.sm_count
    if layout is None:
        raise ValueError(f"{format.name} has no tiles of {k} columns: take another format")
    cells: dict[str, list[str]] = {}
    for at, (n, tokens) in enumerate(COLUMNS):
        best = fastest(TILES, -(-rows // ROW_BLOCK), n, stages_of(layout, k), sms)
        chosen = scheduled(best, layout, rows, k, n, sms)
        tried = variants(layout, n, tokens, best)
        for variant in tried:
            cells.setdefault(variant.name, [""] * len(COLUMNS))
        there = [v for v in tried if is_there(v, scheduled(v.cut, layout, rows, k, n, sms))]
        enqueue = [product_of(o, format, rows, k, n, v) for v in there]
        for variant, us in zip(there, in_turns(clock, enqueue), strict=True):
            taken = chosen and (chosen.name, best.tokens) == (variant.name, tokens)
            cells[variant.name][at] = f"**{us:.1f}**" if taken else f"{us:.1f}"
        say(f"{format.name} {rows} x {k}: {n} tokens, tiles of {tokens}")
    heads = [f"{n}" if n <= tokens else f"{n} ({tokens})" for n, tokens in COLUMNS]
    return markdown(["schedule", *heads], [[name, *row] for name, row in cells.items()])


def is_there(variant: Variant, schedule: Schedule | None) -> bool:
    """Whether it can be made, and is not what another row has."""
    named = variant.name.startswith(("data", "split", "stream"))
    return schedule is not None and (not named or variant.name == schedule.name)


def in_turns(clock: Any, enqueue: Sequence[Callable[[], None]]) -> list[float]:
    """Microseconds of each: measured one after the other several times, there and back, because a
    GPU that multiplies for long becomes slower.
    """
    times: list[list[float]] = [[] for _ in enqueue]
    for turn in range(TURNS):
        for i in range(len(enqueue))[:: 1 if turn % 2 else -1]:
            times[i].append(clock.each(enqueue[i], RUNS_OF_A_TURN).median)
    return [median(found) for found in times]


def product_of(
    o: Operands, format: Format, rows: int, k: int, n: int, variant: Variant
) -> Callable[[], None]:
    """Enqueues the product; weights are other ones at each launch."""
    layout = variant.cut.layout
    assert layout is not None
    product = o.made(("varied", str(variant.options)), lambda: Varied(o.device, variant.options))
    weights = o.matrix(format, rows, k)
    x = o.halves("x", 1, packed_bytes(n, k) // 2)
    out = o.floats("out", n, rows)

    def enqueue() -> None:
        tiles = weights().tiles
        product.launch([tiles], x.data, [out.data], n, cut=variant.cut)

    return enqueue


def token_table(o: Operands, clock: Any, format: Format, rows: int, k: int, say: Say) -> list[str]:
    """One token and eight, by the product that cuts K over the warps of a block."""
    forms = [(warps, stages) for warps in WARPS for stages in RINGS]
    found = [[f"{warps} warps, {stages} stages"] for warps, stages in forms]
    shared, sms = o.device.shared_bytes - STATIC_SHARED, o.device.sm_count
    products = [MulMatTile(o.device, Limits(shared, sms, stages, w)) for w, stages in forms]
    for n in (1, 8):
        enqueue = [_tokens(o, product, format, rows, k, n) for product in products]
        for row, us in zip(found, in_turns(clock, enqueue), strict=True):
            row.append(f"{us:.1f}")
        say(f"{format.name} {rows} x {k}: {n} tokens, without wgmma")
    found[-1][1:] = [f"**{cell}**" for cell in found[-1][1:]]
    return markdown(["schedule", "1", "8"], found)


def _tokens(
    o: Operands, product: MulMatTile, format: Format, rows: int, k: int, n: int
) -> Callable[[], None]:
    weights, x, out = o.matrix(format, rows, k), o.halves("x", n, k), o.floats("out", n, rows)

    def enqueue() -> None:
        tiles = weights().tiles
        assert tiles is not None
        product.launch([tiles], x.data, [out.data], n)

    return enqueue


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table's lines."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def report(device: Any, format: Format, clock: Any, say: Say) -> Iterator[str]:
    """All tables; ValueError on a GPU without the product."""
    if not has_wgmma(device.arch):
        raise ValueError(f"{device.arch} has no wgmma: schedules are measured on Hopper")
    o = Operands(device)
    for few in (False, True):
        for rows, k in SHAPES:
            what = "1 and 8 tokens" if few else "by tokens (and tokens of a tile)"
            yield f"{format.name}, {rows} x {k}, microseconds, {what}:"
            yield ""
            yield from (token_table if few else table)(o, clock, format, rows, k, say)
            yield ""


class Unmeasured:
    """A clock for a device that only notes what would be compiled."""

    def each(self, enqueue: Callable[[], None], runs: int) -> Timing:
        """Some time."""
        enqueue()
        return Timing([0.0])


def measured(device: Any, format: Format, processes: int | None, say: Say) -> Iterator[str]:
    """The report of a GPU, whose kernels are compiled first."""
    wishes = Wishes(device)
    list(report(wishes, format, Unmeasured(), lambda _: None))
    compile_ahead(wishes.wishes, device.target, processes, say)
    yield from report(device, format, Clock(device), say)
