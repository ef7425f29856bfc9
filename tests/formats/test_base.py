"""The registry of block formats, their errors and scales, and the assertions for CUDA headers."""

import shutil
import subprocess
import sys

import gguf
import numpy as np
import pytest

import ggpy.formats
from ggpy.formats import Format, all_formats, by_id, by_name, cuda_asserts
from ggpy.formats.base import register
from ggpy.formats.random_blocks import random_blocks

# ggml_type, of those that a file can hold or that activations are quantised to.
NAMES = (
    "F32 F16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS "
    "IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 TQ1_0 TQ2_0 MXFP4 NVFP4 "
    "Q1_0 Q2_0 F8_E4M3"
)


def test_every_type_is_there_in_the_order_of_ids():
    assert [format.name for format in all_formats()] == NAMES.split()


def test_ids_and_sizes_are_those_of_the_gguf_package(format):
    try:
        type = gguf.GGMLQuantizationType[format.name]
    except KeyError:
        pytest.skip(f"the gguf package does not know {format.name}")
    assert format.type_id == type
    assert by_id(type) is format
    if format.name == "Q8_1":
        assert (format.block_size, format.nbytes) == (32, 36)  # the package counts d and s as f32
    else:
        assert (format.block_size, format.nbytes) == gguf.GGML_QUANT_SIZES[type]


@pytest.mark.parametrize("spelling", ["q4_K", "Q4_K", "q4_k", "Q4_k"])
def test_names_are_found_in_any_case(spelling):
    assert by_name(spelling).type_id == 12
    blocks = np.zeros((2, 144), np.uint8)
    assert ggpy.formats.dequantize(blocks, spelling).shape == (2, 256)


def test_unknown_names_and_ids():
    with pytest.raises(ValueError, match=r"unknown block format 'q9_9'; known: F32, F16, Q4_0"):
        by_name("q9_9")
    with pytest.raises(ValueError, match="unknown block format"):
        ggpy.formats.quantize(np.zeros(32), "")
    assert by_id(4) is None
    assert by_id(-1) is None
    assert by_id(by_name("F8_E4M3").type_id) is None  # a file cannot ask for it


@pytest.mark.parametrize(
    ("name", "type_id"), [("q8_0", 999), ("Q9_0", 8)], ids=["same name", "same id"]
)
def test_a_format_is_registered_once(name, type_id):
    dtype = np.dtype("u1")
    with pytest.raises(ValueError, match="two block formats"):
        register(Format(name, type_id, 1, dtype, lambda blocks: blocks.astype(np.float32)))
    assert by_name("Q8_0").type_id == 8


def test_struct_names_are_ggmls():
    names = ["Q4_0", "Q4_K", "IQ2_XXS", "IQ4_NL", "TQ1_0", "MXFP4", "Q8_K"]
    structs = [by_name(name).struct for name in names]
    assert structs == [
        "block_q4_0",
        "block_q4_K",
        "block_iq2_xxs",
        "block_iq4_nl",
        "block_tq1_0",
        "block_mxfp4",
        "block_q8_K",
    ]


def test_broken_rows_are_refused(format):
    with pytest.raises(ValueError, match="uint8"):
        format.dequantize(np.zeros(format.nbytes, np.complex64))
    with pytest.raises(ValueError, match=f"{format.nbytes} bytes"):
        format.dequantize(np.array(0, np.uint8))
    if format.nbytes > 1:
        with pytest.raises(ValueError, match=f"{format.nbytes} bytes"):
            format.dequantize(np.zeros((2, 2 * format.nbytes - 1), np.uint8))
    if format.block_size > 1:
        with pytest.raises(ValueError, match=f"multiples of {format.block_size} weights, not"):
            format.row_bytes(3 * format.block_size + 1)
    assert format.row_bytes(3 * format.block_size) == 3 * format.nbytes


def test_scales_are_what_makes_weights_infinite(format):
    blocks = random_blocks(format, 40, np.random.default_rng(1))
    scales = format.scales(blocks)
    assert len(scales) == 40
    assert scales.dtype == np.float32
    assert np.isfinite(scales).all()
    if scales.shape[1]:
        scales[:, 0] = 0.25
        format.set_scales(blocks, scales)
        assert (format.scales(blocks)[:, 0] == 0.25).all()
        assert (format.scales(blocks.view(np.uint8).reshape(4, -1)) == format.scales(blocks)).all()
    else:
        assert format.name in ("I8", "I16", "I32", "I64")


def has_float_scales(format: Format) -> bool:
    return format.name not in ("I8", "I16", "I32", "I64", "MXFP4", "NVFP4")


@pytest.mark.parametrize(
    "format", [f for f in all_formats() if has_float_scales(f)], ids=lambda format: format.name
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bad_scales_are_seen(format, value):
    blocks = random_blocks(format, 3, np.random.default_rng(2))
    scales = format.scales(blocks)
    scales[1, -1] = value
    if format.name == "Q8_1":
        blocks["s"][1] = value  # set_scales derives it
    else:
        format.set_scales(blocks, scales)
    seen = np.isfinite(format.scales(blocks)).all(axis=1)
    assert seen.tolist() == [True, False, True]


def test_mxfp4_nan_scale_is_seen():
    format = by_name("MXFP4")
    blocks = np.zeros(256, format.dtype)
    blocks["e"] = np.arange(256)
    assert np.isfinite(format.scales(blocks))[:, 0].tolist() == [True] * 255 + [False]


STRUCTS = """
#include <cstdint>
struct block_q8_0 { uint16_t d; int8_t qs[32]; };
struct block_q4_K {
    union { struct { uint16_t d, dmin; }; uint32_t dm; } __attribute__((packed, aligned(2)));
    uint8_t scales[12];
    uint8_t qs[128];
};
struct block_iq1_m { uint8_t qs[32]; uint8_t qh[16]; uint8_t scales[8]; };
struct block_q8_K { float d; int8_t qs[256]; int16_t bsums[16]; };
"""


def compile_asserts(structs: str, *names: str) -> subprocess.CompletedProcess:
    """Check the structs as C++17, with the assertions of the formats `names`."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    source = structs + "".join(cuda_asserts(by_name(name)) for name in names)
    command = [compiler, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, timeout=60)


def test_right_structs_pass_the_cuda_asserts():
    result = compile_asserts(STRUCTS, "Q8_0", "Q4_K", "IQ1_M", "Q8_K")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("uint16_t d; int8_t qs[32]", "float d; int8_t qs[32]", "sizeof(block_q8_0) == 34"),
        (
            "uint16_t d; int8_t qs[32]",
            "int8_t qs[32]; uint16_t d",
            "offsetof(block_q8_0, d) == 0",
        ),
        ("int8_t qs[32];", "int8_t qs[31]; int8_t more;", "sizeof(block_q8_0::qs) == 32"),
    ],
    ids=["size", "order", "length of a field"],
)
def test_wrong_structs_fail_the_cuda_asserts(right, wrong, message):
    assert right in STRUCTS
    result = compile_asserts(STRUCTS.replace(right, wrong), "Q8_0")
    assert result.returncode != 0
    assert message in result.stderr


def test_a_missing_field_fails_the_cuda_asserts():
    result = compile_asserts(STRUCTS.replace("bsums", "sums"), "Q8_K")
    assert result.returncode != 0
    assert "bsums" in result.stderr


def test_every_field_is_asserted(format):
    text = cuda_asserts(format)
    assert f"sizeof({format.struct}) == {format.nbytes}" in text
    for name in format.dtype.names or ():
        assert f"__builtin_offsetof({format.struct}, {name})" in text


def test_import_is_light():
    """The codebooks of the IQ types, and with them the gguf package, wait until they are needed."""
    code = "import sys, ggpy.formats; sys.exit('gguf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
