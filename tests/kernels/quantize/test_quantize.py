"""quantize.cu: the bytes of the numpy quantisers; NaN and infinity are flagged."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from format_cases import hashed_weights, kinds_of_weights
from kernel_buffers import Output, upload

from ggpy.device import toolkit
from ggpy.device.compile import compile_cubin
from ggpy.formats import Format, all_formats, by_name
from ggpy.kernels.blocks.block_kernel import BlockMatrix
from ggpy.kernels.quantize.quantize import Quantizer, has_kernel, names, options_for
from ggpy.util.paths import cuda_dir

TARGETS = [format for format in all_formats() if has_kernel(format)]
F32 = by_name("F32")
ROWS, COLUMNS = 3, 512

each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda f: f.name)


def blocks_of(
    device: Any, target: Format, data: np.ndarray, source: Format = F32, importance: Any = None
) -> tuple[np.ndarray, int]:
    """(uint8[rows, row_bytes], flag) for data[rows, bytes] in the source format."""
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
    """Importances by name: None, typical ones, and ones that are hard for a search."""
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
        x = np.clip(x, -2000, 2000)  # keeps scales below the largest f16
        found, flag = blocks_of(device, target, x.view(np.uint8), importance=weights)
        same = found == target.quantize(x, weights)
        assert same.all(), f"{kind}: {np.count_nonzero(~same)} of {same.size} bytes differ"
        assert flag == 0


@pytest.mark.parametrize(
    ("source", "target"),
    [("F16", "Q4_K"), ("BF16", "Q4_K"), ("BF16", "Q6_K"), ("Q8_0", "Q4_K"), ("Q4_K", "Q5_0")],
)
def test_sources(device: Any, target: Any, source: str) -> None:
    """Source formats: f16, and quant blocks."""
    format, target = by_name(source), by_name(target)
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
def test_many_weights_of_every_kind(gpu: Any, target: Format) -> None:
    importance = importances(1024)["typical"]
    for kind, x in kinds_of_weights(64, 1024, seed=7).items():
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
    with pytest.raises(ValueError, match="Q4_K with importance needs"):
        Quantizer(device, target, F32, True).launch(weights, weights.data, flag)
    with pytest.raises(ValueError, match="a GPU cannot quantise to F64"):
        Quantizer(device, by_name("F64"), F32, False)


ARCHITECTURES = ["75", "80", "89", "100", "120"]  # sm_90a is in COMPILED
COMPILED = [(f, "90a") for f in TARGETS] + [(by_name("Q4_K"), arch) for arch in ARCHITECTURES]


def kernels(target: Format) -> list[str]:
    """The kernels that quantise BF16 to a target."""
    both = [names(target, by_name("BF16"), weighted) for weighted in (False, True)]
    return list(dict.fromkeys(both[0] + both[1]))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("target", "arch"), COMPILED, ids=lambda x: getattr(x, "name", x))
def test_compiles_without_spilling(target: Format, arch: str) -> None:
    options = options_for(target, by_name("BF16"))
    cubin = compile_cubin(
        "quantize/quantize.cu", f"sm_{arch}", expressions=kernels(target), **options
    )
    assert cubin.resources
    for name, resources in cubin.resources.items():
        assert resources.spill_loads == 0 and resources.registers <= 128, f"{name}: {resources}"


@pytest.mark.usefixtures("nvrtc")
@each_target
def test_every_operation_is_rounded_as_it_stands(target: Format) -> None:
    """The PTX has no fused multiply-add, no approximation and no flush of subnormals to 0."""
    ptx = ptx_of(target)
    assert re.search(r"\bmul\.rn\.f32", ptx) and re.search(r"\bdiv\.rn\.f32", ptx)
    assert not re.search(r"\bfma\.|\b(mul|add|sub)\.f32|\.approx|\.ftz|\bdiv\.full", ptx)


def ptx_of(target: Format) -> str:
    """The PTX of the kernels of a target."""
    nvrtc = toolkit.load_nvrtc()
    options = options_for(target, by_name("BF16"))
    headers = options["headers"]
    texts = [text.encode() for text in headers.values()], [path.encode() for path in headers]
    source = (cuda_dir() / "quantize/quantize.cu").read_bytes()
    _, program = nvrtc.nvrtcCreateProgram(source, b"quantize/quantize.cu", len(headers), *texts)
    for name in kernels(target):
        nvrtc.nvrtcAddNameExpression(program, name.encode())
    flags = ["--gpu-architecture=compute_90", "--std=c++17", *options["options"]]
    flags += [f"-D{name}={value}" for name, value in options["defines"].items()]
    flags += [f"--include-path={path}" for path in (cuda_dir(), *toolkit.header_folders())]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    assert status == 0
    ptx = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return ptx.decode()
