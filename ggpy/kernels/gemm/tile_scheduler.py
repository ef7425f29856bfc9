"""How a product of tiles is dealt out to the multiprocessors of a GPU: the schedules of the
literature by name, and which of them is taken for a shape.

Output is cut into tiles of 128 rows x `tokens`, and each tile into stages of K. A schedule says
which blocks of threads make which of them. Pure arithmetic: nothing is launched here. What each
schedule gives has been measured: SCHEDULES.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

TOKENS = (8, 16, 32, 64, 128, 256)  # of a tile of output, an instance each
PIECES = (2, 4, 8)  # of a tile that so many blocks share


class Cost(NamedTuple):
    """Microseconds that tiles of so many tokens take of a block: 128 columns, the outputs of a
    tile, handing sums over where all blocks share all tiles, and for each of a tile's pieces.
    """

    step: float
    output: float
    to_all: float
    to_each: float


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of a product, and what they take on an H200 (SCHEDULES.md).

    costs: by the tokens of a tile. few: tokens of tiles with so few sums that all blocks share all
    of them. memory: microseconds of 128 columns at least, for each bit of a weight, where two
    blocks share a multiprocessor. alone: none do. halved: tokens that fit in one tile may be cut
    into two. pairs: whole tiles are made by pairs of blocks, where they may be.
    """

    costs: Mapping[int, Cost]
    few: tuple[int, ...] = ()
    memory: float = 0.0
    alone: bool = False
    halved: bool = False
    pairs: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of a tile, an instance each."""
        return *self.few, *self.costs

    def sizes(self, n_tokens: int) -> tuple[int, ...]:
        """Those that so many tokens may be cut into."""
        size = next((size for size in self.tokens if size >= n_tokens), self.tokens[-1])
        halved = self.halved and n_tokens <= size
        both = size // 2 in self.costs and (halved or size == TOKENS[-1])
        return (size // 2, size) if both else (size,)


@dataclass(frozen=True)
class Stages:
    """How K is cut: `count` stages of `columns` each, of weights of `bits`, scales included."""

    count: int
    columns: int
    bits: float


@dataclass(frozen=True)
class Cut:
    """How a product is to be dealt out: tokens of a tile, and whether blocks share tiles.

    pieces: blocks that share each tile, or 0: all blocks share all tiles evenly. whole_first:
    where tiles share weights, rounds of whole tiles come before those that are shared. pairs:
    where none is left over, two blocks copy the activations of a tile for both; see may_pair.
    alone: no two blocks share a multiprocessor.
    """

    tokens: int
    split: bool
    pieces: int = field(default=0, kw_only=True)
    whole_first: bool = field(default=True, kw_only=True)
    pairs: bool = field(default=False, kw_only=True)
    alone: bool = field(default=False, kw_only=True)

    @property
    def may_pair(self) -> bool:
        """Whether there are pairs: of whole tiles alone, of many tokens."""
        return not self.split and self.tokens == TOKENS[-1]

    @property
    def per_multiprocessor(self) -> int:
        """Blocks that a multiprocessor runs at the same time."""
        return 1 if self.alone or self.tokens > 64 else 2

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory of a block."""
        return (112 if self.per_multiprocessor == 2 else 226) << 10

    def rounds(self, tiles: int, token_blocks: int, blocks: int) -> int:
        """Rounds of whole tiles. Where each weight is used once, none of them need be whole."""
        if not self.split:
            return -(-tiles // blocks)
        if token_blocks == 1 or self.pieces or not self.whole_first:
            return 0
        return tiles // blocks

    def deal(self, row_blocks: int, n_tokens: int, stages: int, multiprocessors: int) -> Schedule:
        """The schedule of row_blocks x n_tokens outputs with so many stages of K each.

        ValueError where `pieces` do not divide the stages, or need more blocks than run at the
        same time: some of them wait for others.
        """
        token_blocks = -(-n_tokens // self.tokens)
        tiles = row_blocks * token_blocks
        at_once = multiprocessors * self.per_multiprocessor
        if self.pieces and (stages % self.pieces or tiles * self.pieces > at_once):
            raise ValueError(
                f"{tiles} tiles of {stages} stages cannot be split in {self.pieces} each: "
                f"{at_once} blocks run at the same time"
            )
        most = tiles * (self.pieces or (stages if self.split else 1))
        blocks = min(at_once, most)
        rounds = self.rounds(tiles, token_blocks, blocks)
        return Schedule(self, token_blocks, tiles, blocks, rounds)


@dataclass(frozen=True)
class Schedule:
    """`tiles` of output for `blocks` of threads: so many rounds of whole ones, then those that are
    left, cut along K where blocks share them.
    """

    cut: Cut
    token_blocks: int
    tiles: int
    blocks: int
    rounds: int

    @property
    def sharers(self) -> int:
        """Blocks of a cluster, which have the same tokens of neighbouring rows at the same time:
        2 where these are to be pairs and may, and no block and no row is left over, else 1.
        """
        even = self.tiles // self.token_blocks % 2 == 0 and self.blocks % 2 == 0
        return 2 if self.cut.pairs and self.cut.may_pair and even else 1

    @property
    def name(self) -> str:
        """As the literature has it."""
        if not self.cut.split:
            return "data-parallel, pairs" if self.sharers > 1 else "data-parallel"
        if self.cut.pieces:
            return f"split-K {self.cut.pieces}"
        if self.rounds and self.tiles % self.blocks:
            return "data-parallel + stream-K"
        return "data-parallel" if self.rounds else "stream-K"


@cache
def fastest(
    tiles: Tiles, row_blocks: int, n_tokens: int, stages: Stages, multiprocessors: int
) -> Cut:
    """The fastest cut of row_blocks x n_tokens outputs of a product."""
    sizes = tiles.sizes(n_tokens)
    if sizes[-1] in tiles.few:
        return Cut(sizes[-1], True, alone=tiles.alone)
    cuts = [Cut(size, split, alone=tiles.alone) for size in sizes for split in (False, True)]
    for cut in [replace(cut, pieces=n) for cut in cuts if cut.split for n in PIECES]:
        blocks = row_blocks * -(-n_tokens // cut.tokens) * cut.pieces
        if stages.count % cut.pieces == 0 and blocks <= multiprocessors * cut.per_multiprocessor:
            cuts.append(cut)
    best = min(cuts, key=lambda cut: _us(cut, tiles, row_blocks, n_tokens, stages, multiprocessors))
    return replace(best, pairs=tiles.pairs and best.may_pair)


def _us(
    cut: Cut, tiles: Tiles, row_blocks: int, n_tokens: int, stages: Stages, multiprocessors: int
) -> float:
    """Microseconds of a launch."""
    cost, n = tiles.costs[cut.tokens], row_blocks * -(-n_tokens // cut.tokens)
    blocks = multiprocessors * cut.per_multiprocessor
    memory = tiles.memory * stages.bits if cut.per_multiprocessor > 1 else 0.0
    tile = stages.count * stages.columns / 128 * max(cost.step, memory) + cost.output
    if cut.pieces:
        return tile / cut.pieces + cut.pieces * cost.to_each
    if cut.split:
        # Whole tiles share what they read better: nearly as good is not good enough.
        return 1.05 * (n * tile / blocks + cost.to_all)
    return -(-n // blocks) * tile
