"""Compiling CUDA sources without a GPU: every architecture, the cache, and what errors say."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ggpy.device import cache, toolkit
from ggpy.device.compile import CompileError, cache_key, compile_cubin, included_files

ARCHITECTURES = (
    "sm_75",
    "sm_80",
    "sm_86",
    "sm_89",
    "sm_90",
    "sm_90a",
    "sm_100",
    "sm_103",
    "sm_120",
    "sm_121",
)

SOURCE = """
#include "part.cuh"
extern "C" __global__ void scale(float* x) {
    __shared__ float s[32];
    s[threadIdx.x] = x[threadIdx.x] * FACTOR;
    __syncthreads();
    x[threadIdx.x] = s[31 - threadIdx.x];
}
template <int N> __global__ void add(half* x) { x[threadIdx.x] = x[threadIdx.x] + half(float(N)); }
"""


pytestmark = pytest.mark.usefixtures("nvrtc")


@pytest.fixture
def cuda(tmp_path, monkeypatch):
    """A small `cuda` folder and an empty cache."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / "part.cuh").write_text("#include <cuda_fp16.h>\n#define FACTOR 3.0f\n")
    (folder / "sample.cu").write_text(SOURCE)
    monkeypatch.setattr("ggpy.device.compile.cuda_dir", lambda: folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def compilations(monkeypatch):
    """Counts the calls of the compiler proper."""
    import ggpy.device.compile as module

    calls, real = [], module._compile
    monkeypatch.setattr(module, "_compile", lambda *args: calls.append(args) or real(*args))
    return calls


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_compiles(cuda, arch):
    cubin = compile_cubin("sample.cu", arch, expressions=["add<2>", "add<(3)>"])
    assert cubin.code.startswith(b"\x7fELF")
    assert cubin.symbol("add<2>").encode() in cubin.code and cubin.symbol("scale") == "scale"
    assert cubin.symbol("add<2>") != cubin.symbol("add<(3)>")
    assert set(cubin.resources) == {"add<2>", "add<(3)>", "scale"}
    scale = cubin.resources["scale"]
    assert 4 <= scale.registers <= 64 and scale.shared in (128, 1024 + 128)
    assert scale.spill_loads == scale.spill_stores == 0


def test_spills_are_reported(cuda):
    (cuda / "spill.cu").write_text(
        """extern "C" __global__ __launch_bounds__(1024) void k(float* x) {
            float v[200];
            #pragma unroll
            for (int i = 0; i < 200; ++i) v[i] = x[i];
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < 200; ++i) x[199 - i + threadIdx.x] = v[i] + v[(i * 7) % 200];
        }"""
    )
    resources = compile_cubin("spill.cu", "sm_80").resources["k"]
    assert resources.registers == 64 and resources.spill_stores > 0 and resources.spill_loads > 0


def test_error_has_file_and_line(cuda):
    (cuda / "broken.cu").write_text(
        '\n\nextern "C" __global__ void k(float* x) {\n    x[0] = nothing;\n}\n'
    )
    with pytest.raises(CompileError, match=r"broken\.cu\(4\): error.*nothing"):
        compile_cubin("broken.cu", "sm_80")


def test_error_in_a_header_has_the_headers_name_and_line(cuda):
    (cuda / "part.cuh").write_text("\n#define FACTOR 1\nint f() { return missing; }\n")
    with pytest.raises(CompileError, match=r"part\.cuh\(3\): error.*missing"):
        compile_cubin("sample.cu", "sm_80")


def test_unknown_name_expression_is_an_error(cuda):
    with pytest.raises(CompileError, match="absent"):
        compile_cubin("sample.cu", "sm_80", expressions=["absent<1>"])


def test_extra_source_and_defines_take_part(cuda):
    with pytest.raises(
        CompileError, match=r"sample\.cu \(extra source\)\(1\): error.*sizes differ"
    ):
        compile_cubin(
            "sample.cu",
            "sm_80",
            extra_source='static_assert(sizeof(half) == 3, "sizes differ");',
        )
    (cuda / "define.cu").write_text("static_assert(WIDTH == 8);\n")
    compile_cubin("define.cu", "sm_80", defines={"WIDTH": 8})
    with pytest.raises(CompileError):
        compile_cubin("define.cu", "sm_80", defines={"WIDTH": 9})


def test_work_that_the_cache_does_not_save_is_announced(cuda):
    announced = []
    for arch in ("sm_80", "sm_80", "sm_86"):
        compile_cubin("sample.cu", arch, on_compile=lambda arch=arch: announced.append(arch))
    assert announced == ["sm_80", "sm_86"]


def test_second_compilation_is_read_from_the_cache(cuda, compilations):
    first = compile_cubin("sample.cu", "sm_80", expressions=["add<2>"])
    second = compile_cubin("sample.cu", "sm_80", expressions=["add<2>"])
    assert len(compilations) == 1 and first == second
    compile_cubin("sample.cu", "sm_86", expressions=["add<2>"])
    compile_cubin("sample.cu", "sm_80", expressions=["add<3>"])
    compile_cubin("sample.cu", "sm_80", expressions=["add<2>"], defines={"OTHER": 1})
    assert len(compilations) == 4


def test_cache_hit_is_quick(cuda):
    compile_cubin("sample.cu", "sm_80")
    times = []
    for _ in range(20):
        start = time.perf_counter()
        compile_cubin("sample.cu", "sm_80")
        times.append(time.perf_counter() - start)
    assert min(times) < 2e-3


@pytest.mark.parametrize("suffix", [".json", ".cubin"])
@pytest.mark.parametrize("damage", ["truncate", "garbage", "remove", "list"])
def test_broken_entries_are_compiled_again(cuda, compilations, suffix, damage):
    expected = compile_cubin("sample.cu", "sm_80")
    (entry,) = cache.folder().glob(f"*{suffix}")
    content = entry.read_bytes()
    if damage == "remove":
        entry.unlink()
    else:
        entry.write_bytes(
            {"truncate": content[:-7], "garbage": b"\xff" * 40, "list": b"[1]"}[damage]
        )
    again = compile_cubin("sample.cu", "sm_80")
    assert len(compilations) == 2 and again.resources == expected.resources
    compile_cubin("sample.cu", "sm_80")
    assert len(compilations) == 2


@pytest.mark.parametrize("name", ["sample.cu", "part.cuh", "deep/er.cuh"])
def test_an_edit_is_used(cuda, compilations, name):
    (cuda / "deep").mkdir()
    (cuda / "deep" / "er.cuh").write_text('#pragma once\n#include "sibling.cuh"\n')
    (cuda / "deep" / "sibling.cuh").write_text("#pragma once\n")
    with (cuda / "part.cuh").open("a") as file:
        file.write('  #  include "deep/er.cuh"\n')
    assert set(included_files(cuda, "sample.cu", SOURCE.encode())) == {
        "part.cuh",
        "deep/er.cuh",
        "deep/sibling.cuh",
    }
    compile_cubin("sample.cu", "sm_80")
    with (cuda / name).open("a") as file:
        file.write("\n// edited\n")
    compile_cubin("sample.cu", "sm_80")
    assert len(compilations) == 2


def test_cache_may_be_moved(cuda, tmp_path, monkeypatch, compilations):
    compile_cubin("sample.cu", "sm_80")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(cuda, elsewhere / "cuda")
    shutil.move(tmp_path / "cache", elsewhere / "cache")
    monkeypatch.setattr("ggpy.device.compile.cuda_dir", lambda: elsewhere / "cuda")
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere / "cache"))
    compile_cubin("sample.cu", "sm_80")
    assert len(compilations) == 1


def test_key_holds_no_path(cuda, monkeypatch):
    recorded = []
    real = json.dumps
    monkeypatch.setattr(
        "ggpy.device.compile.json.dumps", lambda value: recorded.append(real(value)) or real(value)
    )
    cache_key(cuda, "sample.cu", SOURCE.encode(), ["--gpu-architecture=sm_80"], [])
    (text,) = (text for text in recorded if "nvrtc" in text and "part.cuh" in text)
    assert str(cuda.parent) not in text and not any(
        str(path) in text for path in toolkit.header_folders()
    )


def test_cache_folder_that_cannot_be_written_is_no_error(cuda, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_cubin("sample.cu", "sm_80").code


def test_cache_is_trimmed_oldest_first(cuda, monkeypatch):
    cubins = [compile_cubin("sample.cu", "sm_80", defines={"SEED": n}) for n in range(3)]
    entries = sorted(cache.folder().glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    for age, path in enumerate(reversed(entries)):
        for suffix in (".json", ".cubin"):
            os.utime(path.with_suffix(suffix), (1e9 - age, 1e9 - age))
    kept = sum(entries[2].with_suffix(s).stat().st_size for s in (".json", ".cubin"))
    monkeypatch.setattr(cache, "MAX_BYTES", int(2.5 * kept))
    cache.store("f" * 40, cubins[0])
    left = {path.stem for path in cache.folder().glob("*.json")}
    assert left == {entries[2].stem, "f" * 40}


RACE = """
import sys
from pathlib import Path
import ggpy.device.compile as module
module.cuda_dir = lambda: Path(sys.argv[1])
for n in range(6):
    cubin = module.compile_cubin("sample.cu", "sm_80", defines={"SEED": n}, expressions=["add<2>"])
    assert cubin.code.startswith(b"\\x7fELF") and cubin.symbol("add<2>").encode() in cubin.code
"""


def test_two_processes_at_once(cuda):
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", RACE, str(cuda)]
    processes = [
        subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
        for _ in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert len(list(cache.folder().iterdir())) == 12


VERSION = """
import sys
from ggpy.device import toolkit
print(toolkit.nvrtc_version(), toolkit.load_nvrtc.cache_info().currsize)
"""


def test_version_is_known_without_loading_nvrtc(cuda):
    root = str(Path(__file__).parents[2])
    answers = [
        subprocess.run(
            [sys.executable, "-c", VERSION], cwd=root, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    version = answers[0].split()[0]
    if toolkit._nvrtc_files():
        assert [text.split() for text in answers] == [[version, "1"], [version, "0"]]
    assert version == toolkit.nvrtc_version()
