"""Tiles: every weight is read back exactly, and padding is 0."""

import numpy as np
import pytest
from kernel_buffers import Output, upload
from tile_cases import TILED, Weights, layouts

from ggpy.formats import by_name
from ggpy.kernels.layout.embed_tile import EmbedTile
from ggpy.kernels.layout.tile import ROWS, Layout, TiledMatrix, layout_of, repack, values_type

# For each (row half, lane, group, step, element): the first bit in the main plane, the first bit in
# the extra plane, and the column. Then the sizes of the parts of a chunk.
OFFSETS = """
template <class T>
__global__ void offsets(int* out, int* sizes) {
    using P = TileOffset<T>;
    for (int i = threadIdx.x; i < 16 * T::CHUNK_K; i += blockDim.x) {
        const int e = i & 3, s = i >> 2 & 1, lane = i >> 3 & 31, h = i >> 8 & 1, j = i >> 9;
        out[4 * i] = P::byte(h, lane, j, s, e) * 8 + P::shift(h, j, e);
        const int extra = P::extra_word(lane, j) * 32 + P::extra_bit(h, j, s, e);
        out[4 * i + 1] = T::EXTRA_BYTES ? extra : 0;
        out[4 * i + 2] = lane / 4 + 8 * h;
        out[4 * i + 3] = 32 * j + tile_column<T>(lane % 4, s, e);
    }
    sizes[0] = T::USED, sizes[1] = T::SCALE_BYTES, sizes[2] = T::BASE_BYTES;
    sizes[3] = T::BASE_BITS, sizes[4] = T::BYTES;
}
"""


# Bytes that 256 weights of a row need in tiles beyond their size in quant blocks.
MORE = {"Q3_K": 4, "IQ4_XS": 2, "IQ3_S": 28}
MORE |= {"NVFP4": 16, "TQ2_0": 14, "TQ1_0": 26, "IQ3_XXS": 40, "IQ2_XXS": 40, "IQ2_XS": 40}
MORE |= {"IQ2_S": 32, "IQ1_S": 56, "IQ1_M": 58, "Q1_0": 44, "Q2_0": 40}
# Bytes per row of padding to the next 128-byte line.
UNREAD = {"Q2_K": 4, "Q3_K": 6, "Q6_K": 6, "IQ4_XS": 6, "IQ3_S": 6, "IQ3_XXS": 6}
UNREAD |= {"IQ2_S": 6, "IQ2_XS": 6, "IQ2_XXS": 6, "IQ1_S": 6, "IQ1_M": 6}


def lookup(device, w: TiledMatrix, ids: np.ndarray) -> np.ndarray:
    """float32 w[ids], from the tiles."""
    out = Output(device, 4 * len(ids) * w.k)
    ids_on_device = upload(device, ids.astype(np.int32))
    EmbedTile(device).launch(w, ids_on_device, ids_on_device, out.buffer, len(ids), 1.0)
    return out.read(np.float32, (len(ids), w.k))


def matrices(many_rows: tuple[int, ...]) -> list[Weights]:
    """Matrices of every format: ragged rows; row lengths of 1, 3 and 33 blocks and whole chunks."""
    found = []
    for name in TILED:
        unit = max(8, by_name(name).block_size)
        columns = (unit, 3 * unit, (33 if unit <= 32 else 5) * unit, 768)
        found += [Weights(name, r, k) for r, k in zip((1, 7, 16, 37), columns, strict=True)]
        found += [Weights(name, r, 33 * unit) for r in many_rows]
    return found


def check(device, w):
    tiles = w.tiled(device)
    assert np.array_equal(lookup(device, tiles, np.arange(w.rows)), w.values)
    k = w.layout.chunks(w.columns) * w.layout.chunk_k
    padded = TiledMatrix(w.layout, -(-w.rows // ROWS) * ROWS, k, tiles.data)
    all_of_it = lookup(device, padded, np.arange(padded.n_rows))
    assert np.array_equal(all_of_it[: w.rows, : w.columns], w.values)
    assert not all_of_it[w.rows :].any() and not all_of_it[:, w.columns :].any()


@pytest.mark.parametrize("w", matrices(()), ids=str)
def test_emulated(emulator, w):
    check(emulator, w)


@pytest.mark.parametrize("w", matrices((1, 7, 16, 37, 4097)), ids=str)
def test_gpu(gpu, w):
    check(gpu, w)


@pytest.mark.parametrize("w", layouts().values(), ids=str)
def test_offsets_are_a_permutation(machine, w):
    """No two weights share a bit, all bits are used, and each (row, column) occurs once."""
    layout, n = w.layout, ROWS * w.layout.chunk_k
    out, sizes = Output(machine, 16 * n), Output(machine, 20)
    names = [f"offsets<{name}>" for name in layouts()]
    kernels = machine.kernels("layout/embed_tile.cu", names, extra_source=OFFSETS)
    kernels[list(layouts()).index(layout.type_name)].launch(1, 128, (out.buffer, sizes.buffer))
    main, extra, row, column = out.read(np.int32, (n, 4)).T
    used, scale_bytes, base_bytes, base_bits, nbytes = sizes.read(np.int32, (5,))
    assert (used, nbytes) == (layout.used_bytes, layout.chunk_bytes)
    assert np.array_equal(np.sort(main), np.arange(0, 8 * base_bytes, base_bits))
    extra_bits = layout.bits - base_bits
    assert used - scale_bytes - base_bytes == n * extra_bits // 8
    if extra_bits:
        assert np.array_equal(np.sort(extra), np.arange(0, n * extra_bits, extra_bits))
    assert np.array_equal(np.sort(row * layout.chunk_k + column), np.arange(n))


@pytest.mark.parametrize("name", [n for n in TILED if by_name(n).block_size > 1])
def test_every_code_and_extreme_scales(machine, name):
    """All code bits, and scales that are zero, negative, minimal and maximal."""
    format = by_name(name)
    w = Weights(name, 8, 32 * format.block_size)
    blocks = w.blocks.copy().view(format.dtype).reshape(-1)
    scales = format.scales(blocks).copy()
    small = () if scales.size else format.dtype.names[:1]  # 8-bit float scales; 255 is NaN
    for field in small:
        blocks[field] = np.resize(np.arange(255), blocks[field].shape)
    kept = {field: blocks[field].copy() for field in small}
    for i, byte in enumerate((0, 255, 0x55, 0xAA)):  # sets all codes and all small scales
        blocks[8 * i : 8 * i + 4].view(np.uint8)[:] = byte
    for field in small:
        blocks[field] = kept[field]
    if scales.size:
        for i, value in enumerate((0.0, -0.0, 6e-8, -6e-8, 1e-5, -1.0, 300.0, -300.0)):
            scales[i::8, 0] = value
        scales[::3, 1:] = 0.0
        format.set_scales(blocks, scales)
    w.__dict__["blocks"] = blocks.view(np.uint8).reshape(8, -1)
    assert not np.isnan(w.values).any()
    assert np.array_equal(lookup(machine, w.tiled(machine), np.arange(8)), w.values)


@pytest.mark.parametrize("name", ["I8", "F8_E4M3"])
def test_every_byte(machine, name):
    """All codes, including subnormal ones; F8_E4M3 without its two NaN codes."""
    w = Weights(name, 2, 256)
    codes = np.arange(256, dtype=np.uint8)
    if name == "F8_E4M3":
        codes[codes & 127 == 127] = 0
    w.__dict__["blocks"] = np.stack([codes, codes[::-1]])
    assert len(np.unique(w.values[0])) >= 253
    assert np.array_equal(lookup(machine, w.tiled(machine), np.arange(2)), w.values)


def test_floats_that_a_half_cannot_hold(machine):
    """Large floats saturate at the largest f16; small floats are rounded, by 3e-8 at most."""
    values = np.array([1e5, -3e38, 65280.0, 1e-7, -1e-9, 6.1e-5, 1 / 3, 0.0], np.float32)
    w = Weights("BF16", 1, 8)
    w.__dict__["blocks"] = w.format.quantize(values[None])
    found = lookup(machine, w.tiled(machine), np.zeros(1, np.int32))[0]
    assert found[0] == 65504 and found[1] == -65504
    np.testing.assert_allclose(found[2:], w.values[0, 2:], rtol=0, atol=3e-8)
    assert np.array_equal(found[[2, 5, 6, 7]], w.values[0, [2, 5, 6, 7]])


def test_what_has_no_tiles():
    assert layout_of(by_name("F32"), 64) is None
    assert layout_of(by_name("F16"), 12) is None
    with pytest.raises(ValueError, match="F32 with 256 columns has no tile layout"):
        repack(None, by_name("F32"), None, 1, 256, None)


def test_tables_are_written_into_the_type():
    values = by_name("IQ4_NL").tile_values
    assert values_type(values).startswith("Table<0xbfad9881, ") and values[:3] == (-127, -104, -83)
    assert values_type("E4M3") == "E4M3" and values_type(()) == ""


def test_sizes():
    """Tiles have the size of the quant blocks, or a few bytes more; chunks are 128-byte aligned."""
    assert Layout(4, 32, "D", 256).nbytes(16, 256) == 16 * 256 * 9 // 16
    assert Layout(6, 16, "SUB", 256).read_bytes(17, 257) == 4 * 16 * 210
    assert Layout(6, 16, "SUB", 256).nbytes(17, 257) == 4 * 16 * 216
    for name in TILED:
        f = by_name(name)
        layout = layout_of(f, 256)
        read = f.row_bytes(256) + MORE.get(name, 0)
        assert layout.read_bytes(32, 256) == 32 * read
        assert layout.nbytes(32, 256) == 32 * (read + UNREAD.get(name, 0))
        assert layout.chunk_bytes % 128 == 0
