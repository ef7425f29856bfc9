"""embed_tile.cu: rows of a tiled table, by ids from the host and by sampled ids."""

import numpy as np
import pytest
from kernel_buffers import Output, upload
from tile_cases import Weights

from ggpy.kernels.layout.embed_tile import EmbedTile


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K", "F16"])
@pytest.mark.parametrize("scale", [1.0, 25.298221])
def test_ids_and_sampled_ids(machine, name, scale):
    w = Weights(name, 37, 512)
    ids = np.array([3, -1, 36, -3, 0, 3, -2, 16], np.int32)  # -1 is sampled[0]
    sampled = np.array([15, 20, 36, 99999], np.int32)
    out = Output(machine, 4 * len(ids) * 512)
    args = upload(machine, ids), upload(machine, sampled), out.buffer, len(ids), scale
    EmbedTile(machine).launch(w.tiled(machine), *args)
    rows = np.where(ids < 0, sampled[np.where(ids < 0, ~ids, 0)], ids)
    expected = w.values[rows] * np.float32(scale)
    assert np.array_equal(out.read(np.float32, (len(ids), 512)), expected)


@pytest.mark.parametrize("name", ["I8", "F8_E4M3", "Q4_0"])
def test_scales_of_rows(machine, name):
    w = Weights(name, 37, 512)
    ids = np.array([3, 36, 0, 16], np.int32)
    out, on_device = Output(machine, 4 * len(ids) * 512), upload(machine, ids)
    EmbedTile(machine).launch(w.scaled(machine), on_device, on_device, out.buffer, len(ids), 0.5)
    expected = w.values[ids] * w.row_scales[ids, None] * np.float32(0.5)
    assert np.array_equal(out.read(np.float32, (len(ids), 512)), expected)


def test_rows_shorter_than_a_block_of_threads(machine):
    w = Weights("Q8_0", 5, 32)
    out = Output(machine, 4 * 32)
    ids = upload(machine, np.array([4], np.int32))
    EmbedTile(machine).launch(w.tiled(machine), ids, ids, out.buffer, 1, 1.0)
    assert np.array_equal(out.read(np.float32, (1, 32)), w.values[4:])
