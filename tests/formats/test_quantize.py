"""Quantisation: bytes equal to those of ggml and of the gguf package, committed hashes, and what is
refused.
"""

import hashlib
import json
import os
from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import pytest
from format_cases import hashed_weights, kinds_of_weights

import ggpy.formats
from ggpy.formats import all_formats, by_name

GOLDEN = Path(__file__).with_name("quantize.json")

QUANTIZABLE = [format for format in all_formats() if format.quantize_blocks is not None]
each_quantizable = pytest.mark.parametrize("format", QUANTIZABLE, ids=lambda format: format.name)


def importances(columns: int) -> dict[str, np.ndarray]:
    """What an importance matrix may say of the columns: a typical one, and hard ones."""
    rng = np.random.default_rng(11)
    typical = rng.chisquare(1, columns)
    return {
        "typical": typical,
        "many zeros": np.where(rng.random(columns) < 0.5, 0, typical),
        "wide": 10.0 ** rng.uniform(-12, 6, columns),
    }


def weights_for(format, rows: int, columns: int, seed: int) -> dict[str, np.ndarray]:
    """All kinds of weights, brought below the largest that the format can hold."""
    limit = np.float32(2000)  # any f16 scale, and any sum of 32 weights, stays below 65504
    kinds = kinds_of_weights(rows, columns, seed)
    return {kind: np.clip(weights, -limit, limit) for kind, weights in kinds.items()}


IN_GGML = [f for f in QUANTIZABLE if not f.is_private and f.name not in ("Q8_1", "Q8_K")]


def bytes_of_ggml(ggml, format, weights, importance):
    """ggml's blocks, but for scales that may be NaN, which it gives zeros of MXFP4 that were below
    2^-125, and we avoid.
    """
    found = ggml.quantize(format, weights, importance)
    if format.name == "MXFP4":
        scales = found.reshape(len(weights), -1, format.nbytes)[:, :, 0]
        scales[scales == 255] = 254
    return found


@pytest.mark.parametrize("importance", [None, *importances(512)])
@pytest.mark.parametrize("format", IN_GGML, ids=lambda format: format.name)
def test_bytes_equal_ggml(format, importance, ggml):
    columns = importances(512).get(importance)
    for kind, weights in weights_for(format, 16, 512, 1).items():
        expected = bytes_of_ggml(ggml, format, weights, columns)
        if format.name == "IQ3_S" and kind == "every magnitude":
            continue  # of squares that underflow another sum comes out; d is 0
        same = format.quantize(weights, columns) == expected
        assert same.all(), f"{kind}: {np.count_nonzero(~same)} bytes differ"


@pytest.mark.skipif("GGPY_TEST_SLOW" not in os.environ, reason="set GGPY_TEST_SLOW: two minutes")
@pytest.mark.parametrize("importance", [None, "typical"])
@pytest.mark.parametrize("format", IN_GGML, ids=lambda format: format.name)
def test_a_million_weights_of_every_kind_equal_ggml(format, importance, ggml):
    columns = importances(1024).get(importance)
    for kind, weights in weights_for(format, 1024, 1024, 7).items():
        expected = bytes_of_ggml(ggml, format, weights, columns)
        assert (format.quantize(weights, columns) == expected).all(), kind


@pytest.mark.parametrize("name", ["Q8_1", "Q8_K"])
def test_activation_bytes_equal_ggml(name, ggml):
    format = by_name(name)
    function = ggml.row_function(f"quantize_row_{format.struct.removeprefix('block_')}_ref")
    for kind, weights in weights_for(format, 64, 1024, 2).items():
        # ggml leaves bsums of a block of zeros as they were
        expected = np.zeros((64, format.row_bytes(1024)), np.uint8)
        function(weights.ctypes.data, expected.ctypes.data, weights.size)
        assert (format.quantize(weights) == expected).all(), kind


GGUF_QUANTISES = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 TQ1_0 TQ2_0 MXFP4"


@pytest.mark.parametrize("name", GGUF_QUANTISES.split())
def test_bytes_equal_the_gguf_package(name):
    format, type = by_name(name), gguf.GGMLQuantizationType[name]
    kinds = weights_for(format, 16, 1024, 3)
    for kind in ("normal", "heavy-tailed", "uniform", "positive", "one outlier"):
        weights = kinds[kind]  # the package differs for negative zeros and scales that underflow
        expected = gguf.quants.quantize(weights, type).view(np.uint8)
        assert (format.quantize(weights) == expected).all(), kind


@each_quantizable
def test_golden(format):
    weights = hashed_weights(format.name, 8, 2048)
    importance = np.square(hashed_weights("importance", 1, 2048)[0])
    plain, weighted = format.quantize(weights), format.quantize(weights, importance)
    hashes = [hashlib.sha256(data.tobytes()).hexdigest() for data in (plain, weighted)]
    assert hashes == json.loads(GOLDEN.read_text())[format.name]
    assert (hashes[0] == hashes[1]) == (format.quantize_weighted is None)


@each_quantizable
def test_a_block_alone_is_the_same(format):
    weights = hashed_weights("alone", 4, 1024).reshape(4, -1, format.block_size)
    data = format.quantize(weights)
    assert (format.quantize(weights[2, 1]) == data[2, 1]).all()
    importance = np.square(hashed_weights("importance", 1, format.block_size)[0])
    data = format.quantize(weights, importance)
    assert (format.quantize(weights[2, 1], importance) == data[2, 1]).all()


@each_quantizable
def test_round_trip_is_near(format):
    weights = hashed_weights("round trip", 8, 2048)
    back = format.dequantize(format.quantize(weights))
    error = np.sqrt(np.mean((back - weights) ** 2) / np.mean(weights**2))
    bits = 8 * format.nbytes / format.block_size
    floats = {"F16": 2**-8, "BF16": 2**-8, "F8_E4M3": 2**-4}
    assert error < floats.get(format.name, 2.0 ** (2 - bits))


def test_q8_0_by_hand():
    weights = np.zeros(32, np.float32)
    weights[:5] = 127, -63.5, 0.5, -0.49999997, 2.5
    block = by_name("Q8_0").quantize(weights).view(by_name("Q8_0").dtype)[0]
    assert block["d"] == 1
    assert block["qs"][:5].tolist() == [127, -64, 1, 0, 3]  # half away from zero


def test_q8_1_by_hand():
    weights = np.zeros(32, np.float32)
    weights[:3] = 254, -100, 10
    block = by_name("Q8_1").quantize(weights).view(by_name("Q8_1").dtype)[0]
    assert (block["d"], block["s"]) == (2, 2 * (127 - 50 + 5))
    assert block["qs"][:3].tolist() == [127, -50, 5]


def test_f8_e4m3_equals_ml_dtypes():
    import ml_dtypes

    format, rng = by_name("F8_E4M3"), np.random.default_rng(0)
    every = np.arange(256, dtype=np.uint8)
    values = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ours = format.dequantize(every)
    assert np.array_equal(ours, values, equal_nan=True)
    assert np.array_equal(np.signbit(ours), np.signbit(values))
    finite = values[np.isfinite(values)]
    ties = (finite[:-1] + finite[1:]) / 2
    spread = rng.standard_normal(100_000) * 2 ** rng.uniform(-14, 10, 100_000)
    hard = [0, -0.0, 448, 449, 464, 465, 1e30, 1e-45, 2**-10, 2**-10 * 1.0001, 2**-6 * 0.999]
    weights = np.concatenate([spread, finite, ties, hard]).astype(np.float32)
    expected = np.clip(weights, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert (format.quantize(weights) == expected).all()


def test_bf16_rounds_to_even():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x80000001], np.uint32)
    data = ggpy.formats.quantize(bits.view(np.float32), "bf16")
    assert data.view("<u2").tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x8000]


@each_quantizable
def test_shapes_and_types_of_input(format):
    weights = hashed_weights("shapes", 6, 512)
    data = format.quantize(weights)
    assert data.dtype == np.uint8
    assert data.shape == (6, format.row_bytes(512))
    assert (format.quantize(weights.reshape(2, 3, 512)) == data.reshape(2, 3, -1)).all()
    assert (format.quantize(weights.astype(np.float64)) == data).all()
    assert (format.quantize(weights.T.copy().T) == data).all()
    assert (format.quantize(weights[0]) == data[0]).all()
    assert format.quantize(weights[:0]).shape == (0, format.row_bytes(512))
    assert (ggpy.formats.quantize(weights.tolist(), format.name.lower()) == data).all()


@each_quantizable
def test_chunks_do_not_show(format):
    weights = hashed_weights("chunks", 3 * ggpy.formats.base.CHUNK // 2 // 512, 512)
    assert (format.quantize(weights)[-1] == format.quantize(weights[-1])).all()


@each_quantizable
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_a_number_is_refused_with_its_row(format, value):
    weights = np.ones((200, 1024), np.float32)
    weights[150, 700] = value
    with pytest.raises(ValueError, match="row 150 holds NaN or infinity"):
        format.quantize(weights)


@pytest.mark.parametrize(
    ("name", "largest"), [("Q8_0", 127 * 65504), ("Q8_1", 65504 * 0.9), ("F16", 65504)]
)
def test_a_scale_beyond_f16_is_refused_with_its_row(name, largest):
    format = by_name(name)
    weights = np.zeros((300, 512), np.float32)
    weights[299, 33] = largest
    assert np.isfinite(format.dequantize(format.quantize(weights))).all()
    weights[299, 33] = 2 * 127 * 65504
    with pytest.raises(ValueError, match=f"row 299 .* scale beyond 65504, the largest of {name}"):
        format.quantize(weights)


def test_bf16_overflow_is_refused():
    with pytest.raises(ValueError, match="row 0 holds a weight"):
        ggpy.formats.quantize(np.full(4, 3.4028e38, np.float32), "BF16")


def test_what_cannot_be_quantised():
    with pytest.raises(ValueError, match="a scalar has no blocks"):
        ggpy.formats.quantize(np.float32(1), "Q8_0")
    with pytest.raises(ValueError, match="Q8_0 rows are multiples of 32 weights, not 33"):
        ggpy.formats.quantize(np.zeros((2, 33)), "Q8_0")
    with pytest.raises(ValueError, match="IQ1_S cannot be quantised to; these can: F32, F16"):
        ggpy.formats.quantize(np.zeros((2, 256)), "iq1_s")


@each_quantizable
def test_importance_is_checked(format):
    weights = np.ones((2, 256), np.float32)
    with pytest.raises(ValueError, match=r"importance has shape \(255,\); rows have 256 columns"):
        format.quantize(weights, np.ones(255))
    for bad in (np.nan, np.inf, -1):
        with pytest.raises(ValueError, match="importance holds"):
            format.quantize(weights, np.full(256, bad))
