"""dequantize_tile.cu: every weight of every tile layout becomes f16, rounded once."""

import numpy as np
import pytest
from kernel_buffers import Output
from tile_cases import MANY, Weights, layouts, tile_types

from ggpy.device.compile import compile_cubin
from ggpy.kernels.layout.dequantize_tile import DequantizeTile


def rows_of(device, w: Weights) -> np.ndarray:
    """float16[rows, columns]."""
    out = Output(device, 2 * w.rows * w.columns)
    DequantizeTile(device).launch(w.tiled(device), out.buffer)
    return out.read(np.float16, (w.rows, w.columns))


@pytest.mark.parametrize("w", layouts().values(), ids=str)
def test_every_layout(machine, w):
    expected = np.clip(w.values, -65504, 65504).astype(np.float16)
    assert np.array_equal(rows_of(machine, w), expected)


def test_large_weights_become_the_largest_half(machine):
    w = Weights("Q8_0", 3, 96)
    blocks = w.blocks.copy().view(w.format.dtype)
    blocks["d"] = 60000
    w.__dict__["blocks"] = blocks.view(np.uint8).reshape(3, -1)
    found = rows_of(machine, w)
    assert np.isfinite(found).all() and found.max() == 65504 and found.min() == -65504


def test_what_does_not_fit(emulator):
    w = Weights("Q8_0", 3, 96).tiled(emulator)
    with pytest.raises(ValueError, match="576 bytes are needed"):
        DequantizeTile(emulator).launch(w, emulator.alloc(575, "out"))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("arch", "types"),
    [("sm_75", tile_types(*MANY)), ("sm_90a", list(layouts())), ("sm_120", tile_types(*MANY))],
)
def test_it_compiles_without_spilling(arch, types):
    names = [f"dequantize_tile<{name}>" for name in types]
    found = compile_cubin("layout/dequantize_tile.cu", arch, expressions=names).resources
    assert set(found) == set(names)
    assert all(r.spill_loads == r.spill_stores == 0 and r.registers <= 128 for r in found.values())
