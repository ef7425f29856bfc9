"""Weights to blocks on a device: the numpy quantisers' bytes, and no silence about NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from format_cases import hashed_weights, kinds_of_weights
from kernel_buffers import Output, upload

from ggpy.device.compile import compile_cubin
from ggpy.formats import Format, all_formats, by_name
from ggpy.kernels.block_kernel import BlockMatrix
from ggpy.kernels.quantize import Quantizer, has_kernel, names, options_for

TARGETS = [format for format in all_formats() if has_kernel(format)]
F32 = by_name("F32")
ROWS, COLUMNS = 3, 512

each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda f: f.name)


def blocks_of(
    device: Any, target: Format, data: np.ndarray, source: Format = F32, importance: Any = None
) -> tuple[np.ndarray, int]:
    """(uint8[rows, row_bytes], the flag) of data[rows, bytes] in the source's format."""
    quantizer = Quantizer(device, target, source, importance is not None)
    rows, columns = len(data), data.shape[1] // source.nbytes * source.block_size
    matrix = BlockMatrix(source, rows, columns, upload(device, data))
    row_bytes = target.row_bytes(columns)
    out, flag = Output(device, rows * row_bytes), upload(device, np.zeros(1, np.int32))
    by_column = None if importance is None else upload(device, importance.astype(np.float32))
    squares = device.alloc(4 * rows, "squares")
    quantizer.launch(matrix, out.buffer, flag, by_column, squares)
    return out.read(np.uint8, (rows, row_bytes)), int(device.download(flag, np.int32, 1)[0])


def importances(columns: int) -> dict[str, np.ndarray | None]:
    """None, what an importance matrix may say of the columns, and what is hard on a search."""
    rng = np.random.default_rng(11)
    typical = rng.chisquare(1, columns).astype(np.float32)
    half = np.where(rng.random(columns) < 0.5, np.float32(0), typical)
    wide = (10.0 ** rng.uniform(-12, 6, columns)).astype(np.float32)
    return {"none": None, "typical": typical, "many zeros": half, "wide": wide}


@pytest.mark.parametrize("importance", importances(COLUMNS))
@each_target
def test_equals_numpy(device: Any, target: Format, importance: str) -> None:
    weights = importances(COLUMNS)[importance]
    for kind, x in kinds_of_weights(ROWS, COLUMNS, seed=5).items():
        x = np.clip(x, -2000, 2000)  # below the largest scale that a half holds
        found, flag = blocks_of(device, target, x.view(np.uint8), importance=weights)
        same = found == target.quantize(x, weights)
        assert same.all(), f"{kind}: {np.count_nonzero(~same)} of {same.size} bytes differ"
        assert flag == 0


@pytest.mark.parametrize("source", ["F16", "BF16", "Q8_0", "Q4_0"])
@each_target
def test_sources(device: Any, target: Format, source: str) -> None:
    """Halves, and what is in blocks already."""
    format = by_name(source)
    data = format.quantize(hashed_weights("sources", 2, 768))
    found, flag = blocks_of(device, target, data, format)
    assert np.array_equal(found, target.quantize(format.dequantize(data))) and flag == 0


@pytest.mark.parametrize("shape", [(1, 256), (37, 256), (5, 2560)], ids=str)
@each_target
def test_shapes(device: Any, target: Format, shape: tuple[int, int]) -> None:
    x = hashed_weights("shapes", *shape)
    importance = np.square(hashed_weights("importance", 1, shape[1])[0])
    for weights in (None, importance):
        found, _ = blocks_of(device, target, x.view(np.uint8), importance=weights)
        assert np.array_equal(found, target.quantize(x, weights))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@each_target
def test_what_numpy_refuses_is_flagged(device: Any, target: Format, bad: float) -> None:
    x = hashed_weights("bad", 2, 512)
    x[1, 300] = bad
    with pytest.raises(ValueError, match=r"row 1 holds"):
        target.quantize(x)
    assert blocks_of(device, target, x.view(np.uint8))[1] == 1


@each_target
def test_a_million_weights_of_every_kind(gpu: Any, target: Format) -> None:
    importance = importances(1024)["typical"]
    for kind, x in kinds_of_weights(1024, 1024, seed=7).items():
        x = np.clip(x, -2000, 2000)
        for weights in (None, importance):
            found, _ = blocks_of(gpu, target, x.view(np.uint8), importance=weights)
            assert np.array_equal(found, target.quantize(x, weights)), kind


def test_sizes_are_checked(device: Any) -> None:
    target = by_name("Q4_K")
    weights = BlockMatrix(F32, 2, 256, device.alloc(2 * 256 * 4, "weights"))
    flag = device.alloc(4, "flag")
    with pytest.raises(ValueError, match="288 bytes are needed"):
        Quantizer(device, target, F32, False).launch(weights, device.alloc(287, "out"), flag)
    narrow = BlockMatrix(F32, 2, 128, weights.data)
    with pytest.raises(ValueError, match="multiples of 256"):
        Quantizer(device, target, F32, False).launch(narrow, weights.data, flag)
    with pytest.raises(ValueError, match="Q4_K by importance needs it"):
        Quantizer(device, target, F32, True).launch(weights, weights.data, flag)
    with pytest.raises(ValueError, match="F64 blocks cannot be made on a GPU"):
        Quantizer(device, by_name("F64"), F32, False)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ["75", "80", "86", "89", "90", "90a", "100", "120"])
@each_target
def test_compiles_without_spilling(target: Format, arch: str) -> None:
    source = by_name("BF16")
    expressions = [n for weighted in (False, True) for n in names(target, source, weighted)]
    options = options_for(target, source)
    cubin = compile_cubin(
        "quantize.cu", f"sm_{arch}", expressions=list(dict.fromkeys(expressions)), **options
    )
    for name, resources in cubin.resources.items():
        assert resources.spill_loads == 0, f"{name}: {resources}"
