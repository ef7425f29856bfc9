"""Tensors of a GGUF file: their rows, and their scales."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from gguf_files import gguf, tensor

from ggpy.formats import Format, all_formats, by_name
from ggpy.formats.base import Blocks
from ggpy.formats.random_blocks import random_blocks
from ggpy.gguf import File, GGUFError, Tensor


@pytest.fixture
def matrix() -> Tensor:
    weights = np.arange(5 * 64, dtype=np.float32).reshape(5, 64)
    return Tensor("m", (5, 64), by_name("Q8_0"), by_name("Q8_0").quantize(weights), "f", 1000)


def test_rows_of_a_matrix(matrix: Tensor) -> None:
    part = matrix.rows(1, 3)
    assert part.shape == (2, 64)
    assert part.data.shape == (2, 68)
    assert part.offset == 1068
    np.testing.assert_array_equal(part.dequantize(), matrix.dequantize()[1:3])
    assert np.shares_memory(part.data, matrix.data)


def test_rows_of_a_stack_of_matrices(matrix: Tensor) -> None:
    format = matrix.format
    stack = Tensor("s", (3, 5, 64), format, np.stack([matrix.data] * 3), "f", 0)
    part = stack.rows(1, 2)
    assert part.shape == (1, 5, 64)
    assert part.offset == 5 * 68
    np.testing.assert_array_equal(part.dequantize()[0], matrix.dequantize())


def test_rows_of_a_vector_are_weights() -> None:
    format = by_name("Q8_0")
    vector = Tensor("v", (96,), format, format.quantize(np.arange(96, dtype=np.float32)), "f", 0)
    part = vector.rows(32, 96)
    assert (part.shape, part.nbytes, part.offset) == ((64,), 68, 34)
    np.testing.assert_array_equal(part.dequantize(), vector.dequantize()[32:])
    with pytest.raises(ValueError, match="multiples of 32"):
        vector.rows(16, 96)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 6), (3, 2), (6, 6)])
def test_rows_outside(start: int, stop: int, matrix: Tensor) -> None:
    with pytest.raises(ValueError, match=f"m has 5 rows, not {start}:{stop}"):
        matrix.rows(start, stop)


# Scales.


def broken(format: Format, scale: float) -> Blocks | None:
    """Blocks of which the eighth has a scale of NaN or infinity; None where none can have it."""
    blocks = random_blocks(format, 12, np.random.default_rng(5))
    scales = format.scales(blocks)
    scales[7] = scale
    with np.errstate(all="ignore"):
        format.set_scales(blocks, scales)
        if np.isfinite(format.scales(blocks)).all() and math.isnan(scale):
            blocks[7:8].view(np.uint8)[:] = 255  # formats whose scales are 8 bits: NaN
        return None if np.isfinite(format.scales(blocks)).all() else blocks


BROKEN = {
    f"{format.name} {scale}": (format, blocks)
    for format in all_formats()
    if format.dtype.kind != "i" and not format.is_private
    for scale in (math.nan, math.inf, -math.inf)
    if (blocks := broken(format, scale)) is not None
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_scale_is_found_and_named(name: str, tmp_path: Path) -> None:
    format, blocks = BROKEN[name]
    description = tensor("w", (3 * format.block_size, 4), format.type_id)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf([], [description], blocks.tobytes()))
    with File(path) as file:
        w = file.tensors["w"]
        with pytest.raises(GGUFError) as caught:
            w.check_scales()
    assert str(caught.value).startswith(f"{path}: tensor 'w': row 2: ")
    assert str(caught.value).endswith(f"(at byte {w.offset + 7 * format.nbytes})")


def test_every_format_with_float_scales_can_be_broken() -> None:
    # To ggml every 8-bit scale of NVFP4 is a number.
    floats = {f.name for f in all_formats() if f.dtype.kind != "i" and not f.is_private}
    floats -= {"NVFP4"}
    assert {name.split()[0] for name in BROKEN} == floats


def test_bad_scale_in_a_later_chunk() -> None:
    format = by_name("F32")
    weights = np.zeros((3, 400_000), np.float32)
    weights[2, 12345] = math.nan
    w = Tensor("w", weights.shape, format, weights.view(np.uint8), "f", 100)
    with pytest.raises(GGUFError, match=f"row 2: .* weight 12345 .* {100 + 4 * 812_345}"):
        w.check_scales()
