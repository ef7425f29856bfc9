"""blocks_to_f16.cu, to tiles and to rows: every weight is rounded once, padding is 0."""

from __future__ import annotations

import numpy as np
import pytest
from cases import random_rows
from kernel_buffers import Output, upload
from tile_cases import IN_BLOCKS

from ggpy.device.compile import compile_cubin
from ggpy.formats import Format, by_name
from ggpy.kernels.blocks.block_kernel import BlockMatrix, compile_options, expression
from ggpy.kernels.layout.blocks_to_f16 import F16_TILES, blocks_to_f16_rows, blocks_to_f16_tiles
from ggpy.kernels.layout.embed_tile import EmbedTile
from ggpy.kernels.layout.tile import ROWS, TiledMatrix

NAMES = [f.name for f in IN_BLOCKS]
SHAPES = [(1, 1), (37, 3), (16, 5)]  # (rows, blocks per row)


def blocks_of(format: Format, rows: int, columns: int) -> np.ndarray:
    """Random blocks, uint8[rows, bytes]."""
    rng = np.random.default_rng([rows, columns, format.type_id])
    return random_rows(format, rows, columns, rng)


def halved(values: np.ndarray) -> np.ndarray:
    """The nearest f16 values, saturated to the largest finite f16."""
    return np.clip(values, -65504, 65504).astype(np.float16)


def rows_of(device, w: BlockMatrix) -> np.ndarray:
    """float16[rows, columns] from the kernel. Checks that the kernel wrote nothing past the end."""
    out = Output(device, 2 * w.rows * w.columns)
    blocks_to_f16_rows(device, w, out.buffer)
    return out.read(np.float16, (w.rows, w.columns))


def tiles_of(device, w: BlockMatrix) -> np.ndarray:
    """float16 of all tiles, including padding rows and columns."""
    out = Output(device, F16_TILES.nbytes(w.rows, w.columns))
    tiles = blocks_to_f16_tiles(device, w, out.buffer)
    out.read(np.uint8, (out.nbytes,))
    rows, columns = tiles.tile_rows * ROWS, F16_TILES.chunks(w.columns) * F16_TILES.chunk_k
    whole = TiledMatrix(F16_TILES, rows, columns, tiles.data)
    ids = upload(device, np.arange(rows, dtype=np.int32))
    found = Output(device, 4 * rows * columns)
    EmbedTile(device).launch(whole, ids, ids, found.buffer, rows, 1.0)
    return found.read(np.float32, (rows, columns)).astype(np.float16)


@pytest.mark.parametrize("name", [*NAMES, "BF16", "Q4_0"])
def test_every_weight_once(machine, name):
    format = by_name(name)
    for rows, n_blocks in SHAPES:
        columns = n_blocks * max(8, format.block_size)
        blocks = blocks_of(format, rows, columns)
        w = BlockMatrix(format, rows, columns, upload(machine, blocks))
        expected = halved(format.dequantize(blocks))
        assert np.array_equal(rows_of(machine, w), expected)
        tiles = tiles_of(machine, w)
        assert np.array_equal(tiles[:rows, :columns], expected)
        assert not tiles[rows:].any() and not tiles[:, columns:].any()


@pytest.mark.parametrize("name", ["F32", "MXFP4", "NVFP4"])
def test_what_a_half_cannot_hold_is_the_largest_or_rounded(machine, name):
    """Every scale of the 4-bit floats. MXFP4: 2^-127 to 2^127; the largest NVFP4 weight fits."""
    format = by_name(name)
    if name == "F32":
        values = np.array([1e5, -3e38, 65519.0, 65521.0, 1e-7, -1e-9, 1 / 3, 0.0], np.float32)
        blocks = values.view(np.uint8)[None]
    else:
        scale, *_ = format.dtype.names
        raw = np.zeros(256, format.dtype)
        raw[scale] = np.arange(256).reshape(-1, *[1] * (raw[scale].ndim - 1))
        raw["qs"] = np.arange(256 * raw["qs"].shape[1]).reshape(256, -1)
        blocks = raw.view(np.uint8).reshape(1, -1)
    values = format.dequantize(blocks)
    w = BlockMatrix(format, 1, values.shape[1], upload(machine, blocks))
    found, tiles = rows_of(machine, w), tiles_of(machine, w)
    assert np.array_equal(found, halved(values)) and np.array_equal(tiles[:1, : w.columns], found)
    assert np.isfinite(found).all()
    assert (np.abs(values).max() > 65504) == (name != "NVFP4")


def test_what_does_not_fit(emulator):
    format, memory = by_name("IQ4_NL"), emulator.alloc(2 * 64 * 17, "blocks")
    w = BlockMatrix(format, 17, 64, memory)
    with pytest.raises(ValueError, match="4096 bytes are needed"):
        blocks_to_f16_tiles(emulator, w, emulator.alloc(4095, "out"))
    with pytest.raises(ValueError, match="2176 bytes are needed"):
        blocks_to_f16_rows(emulator, w, emulator.alloc(2175, "out"))
    odd = BlockMatrix(by_name("F32"), 1, 12, memory)
    with pytest.raises(ValueError, match="rows of 12 columns: f16 weights need a multiple of 8"):
        blocks_to_f16_rows(emulator, odd, memory)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a", "sm_120"])
def test_it_compiles_without_spilling(arch):
    formats = [by_name(name) for name in NAMES]
    names = [expression("blocks_to_f16", f, "true") for f in formats]
    options = compile_options(*formats)
    found = compile_cubin("layout/blocks_to_f16.cu", arch, expressions=names, **options).resources
    assert set(found) == set(names)
    assert all(r.spill_loads == r.spill_stores == 0 and r.registers <= 64 for r in found.values())
