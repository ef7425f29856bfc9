"""Dequantisation, against the gguf package, against plain loops over the formula, and against
committed hashes.
"""

import hashlib
import json
import math
import tracemalloc
from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import pytest
from format_cases import hashed_blocks

import ggpy.formats
from ggpy.formats import Format, by_name
from ggpy.formats.random_blocks import random_blocks

GOLDEN = Path(__file__).with_name("dequantize.json")


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and (a.view(np.uint32) == b.view(np.uint32)).all()


def gguf_dequantize(format: Format, data: np.ndarray) -> np.ndarray:
    """What the gguf package says."""
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[format.name])


def is_in_gguf(format: Format) -> bool:
    try:
        gguf_dequantize(format, np.zeros((1, format.nbytes), np.uint8))
    except (KeyError, NotImplementedError):
        return False
    return True


in_gguf = pytest.mark.parametrize(
    "format", [f for f in ggpy.formats.all_formats() if is_in_gguf(f)], ids=lambda f: f.name
)


def test_the_gguf_package_covers_all_but_a_few():
    lacking = {f.name for f in ggpy.formats.all_formats() if not is_in_gguf(f)}
    numbers = {"I8", "I16", "I32", "I64", "F64", "F8_E4M3"}
    assert lacking <= numbers | {"Q8_1", "Q8_K", "NVFP4", "Q1_0", "Q2_0"}


def rows_of(blocks: np.ndarray, count: int) -> np.ndarray:
    """blocks[n] -> bytes[count, n / count * nbytes]."""
    return blocks.view(np.uint8).reshape(count, -1)


@in_gguf
def test_random_blocks_equal_the_gguf_package(format):
    data = rows_of(random_blocks(format, 8192, np.random.default_rng(1)), 16)
    expected = gguf_dequantize(format, data)
    assert same_bits(format.dequantize(data), expected)


@in_gguf
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x80, 0x7F])
def test_extreme_quants_equal_the_gguf_package(format, byte):
    blocks = np.full(64 * format.nbytes, byte, np.uint8).view(format.dtype)
    count = format.scales(np.zeros(1, format.dtype)).shape[1]
    format.set_scales(blocks, np.linspace(-0.5, 0.5, 64 * count, dtype=np.float32).reshape(64, -1))
    data = rows_of(blocks, 2)
    assert same_bits(format.dequantize(data), gguf_dequantize(format, data))


@pytest.mark.parametrize(
    "format",
    [f for f in ggpy.formats.all_formats() if f.block_size > 1 and f.name != "Q8_1"],
    ids=lambda f: f.name,
)
def test_random_blocks_equal_ggml(format, ggml):
    function = ggml.row_function("dequantize_row_" + format.struct.removeprefix("block_"))
    blocks = random_blocks(format, 1024, np.random.default_rng(2))
    expected = np.empty(1024 * format.block_size, np.float32)
    function(blocks.ctypes.data, expected.ctypes.data, expected.size)
    assert same_bits(format.dequantize(blocks.view(np.uint8)), expected)


def test_golden(format):
    weights = format.dequantize(hashed_blocks(format, 300).view(np.uint8))
    digest = hashlib.sha256(weights.astype("<f4").tobytes()).hexdigest()
    assert digest == json.loads(GOLDEN.read_text())[format.name]


@pytest.mark.parametrize("name", ["Q8_1", "Q8_K"])
def test_eight_bit_formula(name):
    format = by_name(name)
    blocks = random_blocks(format, 50, np.random.default_rng(3))
    weights = format.dequantize(blocks.view(np.uint8)).reshape(50, -1)
    for block, row in zip(blocks, weights, strict=True):
        d = float(block["d"])
        assert [float(w) for w in row] == [float(np.float32(d * int(q))) for q in block["qs"]]


def ue4m3(code: int) -> float:
    """The unsigned 8-bit float with 4 exponent and 3 mantissa bits, as a scale of doubled E2M1
    values.
    """
    exponent, mantissa = code >> 3 & 15, code & 7
    if code == 127:
        return 0.0
    value = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return value / 2


def e2m1(code: int) -> float:
    """The 4-bit float with 2 exponent bits and 1 mantissa bit."""
    exponent, mantissa = code >> 1 & 3, code & 1
    value = mantissa / 2 if exponent == 0 else math.ldexp(2 + mantissa, exponent - 2)
    return -value if code & 8 else value


def test_nvfp4_formula():
    format = by_name("NVFP4")
    codes = np.random.default_rng(4).integers(0, 256, (64, 36), np.uint8)
    codes[:, :4] = np.arange(256, dtype=np.uint8).reshape(64, 4)  # every scale
    weights = format.dequantize(codes)
    for block, row in zip(codes.tolist(), weights, strict=True):
        for i, weight in enumerate(row):
            group, place = divmod(i, 16)
            byte = block[4 + 8 * group + place % 8]
            code = byte >> 4 if place >= 8 else byte & 15
            assert weight == ue4m3(block[group]) * 2 * e2m1(code)


def test_mxfp4_formula():
    codes = np.random.default_rng(5).integers(0, 256, (255, 17), np.uint8)
    codes[:, 0] = np.arange(255)  # every scale but NaN
    weights = by_name("MXFP4").dequantize(codes).astype(np.float64)
    for block, row in zip(codes.tolist(), weights, strict=True):
        for i, weight in enumerate(row):
            byte = block[1 + i % 16]
            code = byte >> 4 if i >= 16 else byte & 15
            exact = math.ldexp(e2m1(code), block[0] - 127)
            assert weight == exact or (abs(exact) >= 2.0**128 and np.isinf(weight))


def test_any_shape_and_any_slice(format):
    data = random_blocks(format, 24, np.random.default_rng(6)).view(np.uint8)
    flat = format.dequantize(data)
    shaped = format.dequantize(data.reshape(2, 3, -1))
    assert shaped.shape == (2, 3, 4 * format.block_size)
    assert same_bits(shaped.reshape(-1), flat)
    every_second = format.dequantize(data.reshape(8, -1)[::2])
    assert same_bits(every_second, flat.reshape(8, -1)[::2].copy())
    assert format.dequantize(data[:0]).shape == (0,)


def test_chunks_do_not_show(format):
    n = ggpy.formats.base.CHUNK // format.block_size + 3
    data = random_blocks(format, n, np.random.default_rng(7)).view(np.uint8)
    tail = 5 * format.nbytes
    assert same_bits(
        format.dequantize(data)[-5 * format.block_size :], format.dequantize(data[-tail:])
    )


def test_temporaries_are_small(format):
    data = np.zeros((1 << 22) // format.block_size * format.nbytes, np.uint8)
    format.dequantize(data[: format.nbytes])  # tables are made once
    tracemalloc.start()
    weights = format.dequantize(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - weights.nbytes < 4 << 20


def test_read_only_bytes_are_accepted(format):
    data = random_blocks(format, 4, np.random.default_rng(8)).view(np.uint8)
    data.setflags(write=False)
    assert np.isfinite(format.dequantize(data)).all()
