"""Tiles: the layout of weights in device memory (cuda/layout/tile.cuh), its sizes, and repacking.

Format.tile gives the parameters of a tile: bits per code, columns per scale, kind of scales. The
generic kernels multiply formats without Format.tile directly from quant blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ...device.base import Buffer, Device, Ptr
from ...formats import Format
from ..blocks.block_kernel import block_kernel

ROWS = 16  # rows of a tile
GROWTH = 1.25  # see `grows`
LINE = 128  # chunks start at multiples of so many bytes


@dataclass(frozen=True)
class Layout:
    """One instance of the C++ template Tile<bits, group, scales, chunk_k, values>."""

    bits: int
    group: int
    scales: str  # a name of enum Scales
    chunk_k: int
    values: str = ""  # the C++ type of the values of codes; "": Integers

    @property
    def type_name(self) -> str:
        """The C++ type."""
        values = f", {self.values}" if self.values else ""
        return f"Tile<{self.bits}, {self.group}, Scales::{self.scales}, {self.chunk_k}{values}>"

    @property
    def is_float(self) -> bool:
        """Whether the tile holds f16 weights, without scales."""
        return self.bits == 16

    @property
    def is_scaled(self) -> bool:
        """Whether groups have scales. GEMMs then need the sums of the activations of a group."""
        return not self.is_float and self.scales != "NONE"

    @property
    def group_sums(self) -> int:
        """f32 numbers that ActivationSums (scaled_sums.cuh) has of a group of columns of a token:
        of zero points, of minimums, or none.
        """
        if not self.is_scaled or self.is_e2m1:
            return 0
        return 2 if self.scales in ("D", "E8") else 1

    @property
    def is_table(self) -> bool:
        """Whether codes index a table of values."""
        return self.values.startswith("Table") or self.is_e2m1

    @property
    def is_e2m1(self) -> bool:
        """Whether codes are 4-bit floats, which become f16 by their bits, without the table."""
        return self.values == "E2M1"

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes from a chunk (16 rows x chunk_k columns) to the next one, padding included."""
        return -(-self.used_bytes // LINE) * LINE

    @cached_property
    def used_bytes(self) -> int:
        """Bytes of a chunk that GEMMs read: without padding."""
        groups = self.chunk_k // self.group
        per_row = {"D": 2 * groups, "DM": 4 * groups, "SUB": 2 + groups, "SUB_8": 2 + groups}
        per_row |= {"SUB_M4": 4 + groups, "SUB_M6": 4 + 3 * groups // 2, "E8": groups}
        scales = per_row[self.scales] if self.is_scaled else 0
        return ROWS * (self.chunk_k * self.bits // 8 + scales)

    def chunks(self, k: int) -> int:
        """The number of chunks of a tile row with k columns."""
        return -(-k // self.chunk_k)

    def nbytes(self, n_rows: int, k: int) -> int:
        """Bytes of a matrix [n_rows, k], padding included."""
        return -(-n_rows // ROWS) * self.chunks(k) * self.chunk_bytes

    def read_bytes(self, n_rows: int, k: int) -> int:
        """Bytes of a matrix [n_rows, k] that a GEMM reads."""
        return -(-n_rows // ROWS) * self.chunks(k) * self.used_bytes


def layout_of(format: Format, k: int) -> Layout | None:
    """The tile layout of a matrix with k columns, or None if the matrix stays in quant blocks."""
    if format.tile is None or k % 8:
        return None
    bits, group, scales = format.tile
    if bits == 16:
        return Layout(16, 32, "D", 64)
    if scales.startswith("SUB"):
        return Layout(bits, group, scales, 256, values_type(format.tile_values))
    chunk_k = 256 if bits <= 4 and group == 32 and k % 256 == 0 else 128
    return Layout(bits, group, scales, chunk_k, values_type(format.tile_values))


def grows(format: Format) -> bool:
    """Whether tiles of this format take at least GROWTH times the memory of its quant blocks.

    This holds for codebook formats: tiles store the values, quant blocks only indices.
    """
    layout = layout_of(format, 256)
    return layout is not None and layout.nbytes(ROWS, 256) >= GROWTH * ROWS * format.row_bytes(256)


def values_type(values: Sequence[int] | str) -> str:
    """The C++ type of Format.tile_values. A table becomes Table<words> with four bytes per word."""
    if isinstance(values, str) or not values:
        return str(values or "")
    words = [
        sum((value & 255) << 8 * i for i, value in enumerate(values[at : at + 4]))
        for at in range(0, len(values), 4)
    ]
    return f"Table<{', '.join(f'{word:#010x}' for word in words)}>"


@dataclass(frozen=True)
class TiledMatrix:
    """w[n_rows, k] in tiles. With row_scale, float [n_rows], row n is w[n] * row_scale[n]; of
    experts, of which `data` is the first, float [n_experts], and expert x is w[x] * row_scale[x].
    """

    layout: Layout
    n_rows: int
    k: int
    data: Buffer | Ptr
    row_scale: Buffer | Ptr | None = None

    @property
    def tile_rows(self) -> int:
        """The number of tile rows of 16 rows. The last tile row may be partly empty."""
        return -(-self.n_rows // ROWS)


def repack(
    device: Device, format: Format, blocks: Buffer | Ptr, n_rows: int, k: int, out: Buffer | Ptr
) -> TiledMatrix:
    """Enqueue the repacking of quant blocks [n_rows, k] into tiles.

    `out` has layout.nbytes(n_rows, k) bytes. Raises ValueError if the format has no tile layout.
    """
    layout = layout_of(format, k)
    if layout is None:
        raise ValueError(f"{format.name} with {k} columns has no tile layout")
    kernel = block_kernel(device, "layout/repack.cu", "repack", format, layout.type_name)
    kernel.launch((layout.chunks(k), -(-n_rows // ROWS)), 128, (blocks, out, n_rows, k))
    return TiledMatrix(layout, n_rows, k, out)
