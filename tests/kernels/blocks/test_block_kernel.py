"""Kernels over quant blocks compile for every format and architecture without register spills."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from cases import KERNELS

from ggpy.device.compile import CompileError, compile_cubin
from ggpy.formats import all_formats, by_name
from ggpy.kernels.blocks.block_kernel import (
    compile_options,
    expression,
    grid_header,
    supported_formats,
)
from ggpy.util.paths import cuda_dir

INSTANCES = {
    "dequantize": [("float",)],
    "get_rows": [()],
    "dequantize_mul_mat_vec": [("half", 1), ("float", 8)],
    "mul_mat_vec_q": [(1,), (8,)],
}
EVERY_FORMAT = "sm_75"
SOME_FORMATS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")


pytestmark = pytest.mark.usefixtures("nvrtc")


def compile_for(arch, formats):
    """{name of an instance: its resources}."""

    def resources(kernel):
        names = [expression(kernel, f, *args) for f in formats for args in INSTANCES[kernel]]
        options = compile_options(*formats)
        cubin = compile_cubin(f"blocks/{kernel}.cu", arch, expressions=names, **options)
        assert set(cubin.resources) == set(names)
        return cubin.resources

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(resources, KERNELS))
    return {name: found for part in parts for name, found in part.items()}


def check(arch, formats):
    for name, found in compile_for(arch, formats).items():
        assert found.spill_stores == found.spill_loads == 0, f"{name} for {arch} spills: {found}"
        assert found.stack == 0, f"{name} for {arch} keeps {found.stack} bytes on the stack"
        assert found.registers <= 128, f"{name} for {arch} takes {found.registers} registers"


def test_every_format_compiles():
    check(EVERY_FORMAT, supported_formats())


@pytest.mark.parametrize("arch", SOME_FORMATS)
def test_every_architecture_compiles(arch):
    check(arch, [by_name(name) for name in ("F16", "Q8_0", "Q4_K", "IQ2_XS")])
    names = ["quantize_q8_1<float>", "quantize_q8_1<half>"]
    for found in compile_cubin(
        "blocks/quantize_q8_1.cu", arch, expressions=names
    ).resources.values():
        assert found.spill_loads == found.stack == 0


def test_a_format_alone_brings_only_its_own_tables():
    assert set(compile_options(by_name("Q4_0"))["headers"]) == {"formats/selected.cuh"}
    assert "grids/iq1_s.cuh" in compile_options(by_name("IQ1_M"))["headers"]
    text = compile_options(by_name("Q4_K"))["headers"]["formats/selected.cuh"]
    assert text.count("#include") == 1 and "__builtin_offsetof(block_q4_K, scales) == 4" in text


def test_every_format_of_weights_has_a_cuda_side():
    missing = {f.name for f in all_formats()} - {f.name for f in supported_formats()}
    assert missing == {"I16", "I32", "I64", "F64"}
    with pytest.raises(ValueError, match="I32 cannot be used on a GPU"):
        compile_options(by_name("I32"))


def test_a_struct_that_differs_does_not_compile():
    options, names = compile_options(by_name("Q4_0")), ["get_rows<block_q4_0>"]
    assert compile_cubin("blocks/get_rows.cu", "sm_90", expressions=names, **options).code
    header = options["headers"]["formats/selected.cuh"]
    options["headers"]["formats/selected.cuh"] = header.replace("== 18", "== 20")
    with pytest.raises(CompileError, match=r"sizeof\(block_q4_0\) == 20"):
        compile_cubin("blocks/get_rows.cu", "sm_90", expressions=names, **options)


def test_no_cuda_file_without_a_format():
    shared = {"format", "bits", "k_scales"}
    stems = {path.stem for path in (cuda_dir() / "formats").glob("*.cuh")} - shared
    declared = {f.dequantize_blocks.__module__.rpartition(".")[2] for f in supported_formats()}
    assert stems == declared


def test_grids():
    assert grid_header("iq2_xxs").count("{0x") == 256
    assert "uint32_t grid_iq3_s[512]" in grid_header("iq3_s")
    assert "uint2 grid_iq1_s[2048]" in grid_header("iq1_s")
