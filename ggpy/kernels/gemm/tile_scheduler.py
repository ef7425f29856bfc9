"""Schedules of GEMM work tiles: how the tiles of an output are assigned to the CTAs of a launch
(data-parallel, split-K, stream-K), and which schedule is fastest for a shape.

The output is divided into work tiles of 128 rows x `tokens`, and each tile into stages of K. A
schedule assigns stages of tiles to CTAs. This module only computes; it launches nothing. LOG.md and
docs/schedules.md have the measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

TOKENS = (8, 16, 32, 64, 128, 256)  # tokens of a work tile; one instance of the kernel each
SPLIT_K = (2, 3, 4, 5, 6, 7, 8)  # CTAs that may share a work tile


class Cost(NamedTuple):
    """Microseconds that a CTA needs for work tiles of a given number of tokens.

    step: 128 columns of K. output: the outputs of a tile. to_all: passing sums if all CTAs share
    all tiles (stream-K). to_each: passing sums, per CTA that shares the tile (split-K). of_all: the
    same, for each CTA that an SM has on average.
    """

    step: float
    output: float
    to_all: float
    to_each: float
    of_all: float = 0.0


@dataclass(frozen=True, eq=False)
class TileCosts:
    """The work tiles of a GEMM kernel, and their costs measured on an H200.

    costs: by tokens of a tile. always_split: tokens of tiles that always use stream-K, because they
    have few sums. memory: lower bound of microseconds per 128 columns and per bit of a weight, if
    two CTAs share an SM. one_cta_per_sm: CTAs never share an SM. halves_few: tokens that fit in
    one tile may be divided into two, if an SM has at most so many times 128 columns of work tiles.
    pairs: clusters of two CTAs make whole tiles, where possible.
    """

    costs: Mapping[int, Cost]
    always_split: tuple[int, ...] = ()
    memory: float = 0.0
    one_cta_per_sm: bool = False
    halves_few: float = 0.0
    pairs: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of a work tile; one instance of the kernel each."""
        return *self.always_split, *self.costs

    def sizes(self, n_tokens: int, steps_per_sm: float) -> tuple[int, ...]:
        """Tile sizes to consider for n_tokens tokens. steps_per_sm: work of an SM, in 128 columns
        of tiles that all tokens fit in.
        """
        size = next((size for size in self.tokens if size >= n_tokens), self.tokens[-1])
        may_halve = steps_per_sm <= self.halves_few and n_tokens <= size
        both = size // 2 in self.costs and (may_halve or size == TOKENS[-1])
        return (size // 2, size) if both else (size,)


@dataclass(frozen=True)
class KStages:
    """How K is divided: `count` stages of `columns` columns. bits: of a weight, scales included."""

    count: int
    columns: int
    bits: float


@dataclass(frozen=True)
class Tiling:
    """How to divide the output of a GEMM.

    tokens: of a work tile. split: CTAs share tiles. split_k: CTAs per shared tile; 0: all CTAs
    share all tiles evenly (stream-K). whole_waves_first: where several tiles use the same weights,
    waves of whole tiles precede the shared tiles. pairs: clusters of two CTAs copy the x of a tile
    for both, if no tile is left over (see may_pair). one_cta_per_sm: CTAs never share an SM.
    """

    tokens: int
    split: bool
    split_k: int = field(default=0, kw_only=True)
    whole_waves_first: bool = field(default=True, kw_only=True)
    pairs: bool = field(default=False, kw_only=True)
    one_cta_per_sm: bool = field(default=False, kw_only=True)

    @property
    def may_pair(self) -> bool:
        """Whether CTAs may form pairs: only whole tiles of the largest size."""
        return not self.split and self.tokens == TOKENS[-1]

    @property
    def ctas_per_sm(self) -> int:
        """Resident CTAs per SM."""
        return 1 if self.one_cta_per_sm or self.tokens > 64 else 2

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory of a CTA."""
        return (112 if self.ctas_per_sm == 2 else 226) << 10

    def whole_waves(self, tiles: int, token_blocks: int, ctas: int) -> int:
        """Waves of whole tiles. If each weight is used by one tile only, no wave must be whole."""
        if not self.split:
            return -(-tiles // ctas)
        if token_blocks == 1 or self.split_k or not self.whole_waves_first:
            return 0
        return tiles // ctas

    def schedule(self, row_blocks: int, n_tokens: int, stages: int, n_sms: int) -> TileSchedule:
        """The schedule of row_blocks x n_tokens outputs whose tiles have `stages` stages of K.

        Raises ValueError if split_k exceeds the stages, or needs more CTAs than are resident: some
        CTAs wait for others.
        """
        token_blocks = -(-n_tokens // self.tokens)
        tiles = row_blocks * token_blocks
        resident_ctas = n_sms * self.ctas_per_sm
        if self.split_k > stages or tiles * self.split_k > resident_ctas:
            raise ValueError(
                f"{tiles} tiles of {stages} stages cannot be split in {self.split_k} each: "
                f"{resident_ctas} CTAs are resident"
            )
        max_ctas = tiles * (self.split_k or (stages if self.split else 1))
        ctas = min(resident_ctas, max_ctas)
        waves = self.whole_waves(tiles, token_blocks, ctas)
        return TileSchedule(self, token_blocks, tiles, ctas, waves)


@dataclass(frozen=True)
class TileSchedule:
    """A schedule: `waves` waves of whole tiles for `ctas` CTAs, then the remaining of the `tiles`
    work tiles, divided along K if CTAs share them.
    """

    tiling: Tiling
    token_blocks: int
    tiles: int
    ctas: int
    waves: int

    @property
    def cluster(self) -> int:
        """CTAs of a cluster, which have the same tokens and adjacent rows at the same time: 2 if
        the tiling asks for pairs and allows them and no CTA and no row is left over, else 1.
        """
        even = self.tiles // self.token_blocks % 2 == 0 and self.ctas % 2 == 0
        return 2 if self.tiling.pairs and self.tiling.may_pair and even else 1

    @property
    def name(self) -> str:
        """The schedule's name in the literature."""
        if not self.tiling.split:
            return "data-parallel, pairs" if self.cluster > 1 else "data-parallel"
        if self.tiling.split_k:
            return f"split-K {self.tiling.split_k}"
        if self.waves and self.tiles % self.ctas:
            return "data-parallel + stream-K"
        return "data-parallel" if self.waves else "stream-K"


@cache
def fastest(
    tiles: TileCosts, row_blocks: int, n_tokens: int, stages: KStages, n_sms: int
) -> Tiling:
    """The fastest tiling of row_blocks x n_tokens outputs."""
    sizes = tiles.sizes(n_tokens, row_blocks * stages.count * stages.columns / 128 / n_sms)
    if sizes[-1] in tiles.always_split:
        return Tiling(sizes[-1], True, one_cta_per_sm=tiles.one_cta_per_sm)
    tilings = [
        Tiling(size, split, one_cta_per_sm=tiles.one_cta_per_sm)
        for size in sizes
        for split in (False, True)
    ]
    for tiling in [
        replace(tiling, split_k=n) for tiling in tilings if tiling.split for n in SPLIT_K
    ]:
        ctas = row_blocks * -(-n_tokens // tiling.tokens) * tiling.split_k
        if stages.count >= tiling.split_k and ctas <= n_sms * tiling.ctas_per_sm:
            tilings.append(tiling)
    best = min(tilings, key=lambda tiling: _us(tiling, tiles, row_blocks, n_tokens, stages, n_sms))
    return replace(best, pairs=tiles.pairs and best.may_pair)


def _us(
    tiling: Tiling, tiles: TileCosts, row_blocks: int, n_tokens: int, stages: KStages, n_sms: int
) -> float:
    """Estimated microseconds of a launch."""
    cost, n = tiles.costs[tiling.tokens], row_blocks * -(-n_tokens // tiling.tokens)
    ctas = n_sms * tiling.ctas_per_sm
    memory = tiles.memory * stages.bits if tiling.ctas_per_sm > 1 else 0.0
    stage = stages.columns / 128 * max(cost.step, memory)
    tile = stages.count * stage + cost.output
    if tiling.split_k:
        share = -(-stages.count // tiling.split_k) * stage + cost.output / tiling.split_k
        passed = cost.to_each + cost.of_all * n / n_sms
        return share + tiling.split_k * passed
    if tiling.split:
        # prefer whole tiles, which share reads better, unless splitting is 5% faster
        return 1.05 * (n * tile / ctas + cost.to_all)
    return -(-n // ctas) * tile
