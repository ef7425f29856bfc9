"""Compiled kernels on disk: loaded by the next process, unless others could have made them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding

from ggpy.backends.cpu import compiled
from ggpy.backends.cpu.backend import Cpu

ROOT = Path(__file__).resolve().parents[3]
CODE = """
import numpy as np
from ggpy.backends.cpu import kernels, compiled
from ggpy.backends.cpu.pool import address_of, aligned
from ggpy.formats import by_name
import ctypes
made = []
plain = compiled._compiled
compiled._compiled = lambda *given: made.append(1) or plain(*given)
format = by_name("Q8_0")
call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(kernels.expand(format))
x = np.arange(64, dtype=np.float32)[None]
out = aligned(256).view(np.float32)
rows = format.quantize(x)
call(address_of(rows), 0, 64, address_of(out))
assert (out[:64] == format.dequantize(rows)[0]).all()
print(len(made))
"""


def compiled_in(cache: Path, **more: str) -> int:
    """Kernels that a new process compiles."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)} | more
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_kernels_are_kept_and_broken_files_are_not_used(tmp_path: Path) -> None:
    assert compiled_in(tmp_path) == 1
    assert compiled_in(tmp_path) == 0
    (file,) = [p for p in tmp_path.rglob("expand_Q8_0-*")]
    assert file.stat().st_mode & 0o022 == 0
    file.write_bytes(file.read_bytes()[:100])
    assert compiled_in(tmp_path) == 1
    file.chmod(0o666)
    assert compiled_in(tmp_path) == 1


def test_the_line_of_compiling_is_wiped_before_the_device_is_told(monkeypatch) -> None:
    """`ggpy run` prints the device as soon as there is one."""
    calls = []

    class Line:
        def __init__(self, *_: object) -> None:
            pass

        def update(self, done: float) -> None:
            calls.append("update")

        def close(self) -> None:
            calls.append("close")

    Cpu(1)
    known = dict(compiled._kernels)
    monkeypatch.setattr(compiled, "Bar", Line)
    monkeypatch.setattr(compiled, "_kernels", {})
    monkeypatch.setattr(compiled, "_compiled", lambda path, name, n_arguments: known[name])
    Cpu(1)
    assert calls == []  # kernels on disk are loaded without a line
    monkeypatch.setattr(compiled, "_kernels", {})
    monkeypatch.setattr(compiled, "_stored", lambda path: None)
    Cpu(1)
    assert "update" in calls
    assert calls.index("close") == len(calls) - 1


def test_a_note_says_why_code_cannot_be_kept(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiled, "folder", lambda: tmp_path / "file" / "numba")
    compiled._store(compiled.folder() / "kernel", compiled.ObjectCode("kernel", [], b""))
    notes: list[str] = []
    for _ in range(2):
        Cpu(1, note=notes.append).weights_ready()
    (note,) = notes
    assert note.startswith("compiled kernels cannot be kept") and "Not a directory" in note


def object_code(number: int) -> compiled.ObjectCode:
    """A function that calls another one, which returns the number; both have the same names in all
    such files, as those of numba have that two processes made.
    """
    module = binding.parse_assembly(f"""
        define linkonce_odr i64 @helper() noinline optnone {{ ret i64 {number} }}
        define i64 @entry() {{ %1 = call i64 @helper() ret i64 %1 }}""")
    compiled._target()
    machine = binding.Target.from_default_triple().create_target_machine(reloc="pic")
    return compiled.ObjectCode("entry", [], machine.emit_object(module))


def test_functions_of_one_name_in_two_files_are_not_taken_for_each_other() -> None:
    calls = [ctypes.CFUNCTYPE(ctypes.c_int64)(object_code(n).load()) for n in (1, 2)]
    assert [call() for call in calls] == [1, 2]


@pytest.mark.parametrize(
    "features",
    ["+avx2,+fma,+f16c,+avx,+sse4.1,+ssse3,+bmi,+bmi2,+popcnt", ""],
    ids=["AVX2", "generic"],
)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="these are features of x86")
def test_other_processors_give_the_same_sums(tmp_path: Path, features: str) -> None:
    """Dot products and tables, compiled as for an older processor, which is nearly as good on this
    one as if it were that.
    """
    from ggpy.backends.cpu.processor import features as present

    if not {f[1:] for f in features.split(",") if f} <= present():
        pytest.skip("this processor has no AVX2")
    code = Path(__file__).with_name("sums.py").read_text()
    more = {"NUMBA_CPU_NAME": "haswell" if features else "generic", "NUMBA_CPU_FEATURES": features}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)} | more
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.stdout == ("avx2" if features else "generic") + "\n", done.stderr


WITHOUT = """
import sys
from ggpy import load
model = load(sys.argv[1], device="cpu", n_threads=1)
print("".join(p.text for p in model.generate("Hello", max_tokens=5, temperature=0)))
print("numba" in sys.modules)
"""


def test_numba_is_imported_only_to_compile() -> None:
    """A process that finds all kernels on disk starts without it, and answers the same."""
    model = ROOT / "models" / "tiny" / "qwen3moe.gguf"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT, str(model)]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        for _ in range(2)
    )
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert second.stdout.endswith("False\n")
    assert first.stdout.split("\n")[:-2] == second.stdout.split("\n")[:-2]
