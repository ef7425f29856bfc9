"""A kernel compiles only if its structs are laid out as the structures that launches copy."""

from __future__ import annotations

import ctypes
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from ggpy.device.compile import CompileError, compile_cubin
from ggpy.kernels.gemm.gemm_decode import GemmDecodePartRopeArgs
from ggpy.kernels.gemm.hopper import TileSchedulerArgs
from ggpy.kernels.sampling.sample import ROW
from ggpy.kernels.struct_asserts import record_asserts, struct_asserts

KERNELS = Path(__file__).resolve().parents[2] / "ggpy" / "kernels"
STEMS = [path.relative_to(KERNELS).with_suffix("").as_posix() for path in KERNELS.rglob("*.py")]
MODULES = {stem: import_module(f"ggpy.kernels.{stem.replace('/', '.')}") for stem in STEMS}
ASSERTS = {stem: m.ASSERTS for stem, m in MODULES.items() if hasattr(m, "ASSERTS")}
for stem in ("prefill_attention_wgmma", "prefill_attention_wgmma_wide"):
    ASSERTS[f"attention/{stem}"] = ASSERTS["attention/prefill_attention"]
TAKES = 'extern "C" __global__ void takes(TileSchedulerArgs args, int* n) { *n = args.n_tiles; }'


def structures() -> list[type[ctypes.Structure]]:
    """All that ggpy/kernels declares."""
    return [
        value
        for module in MODULES.values()
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, ctypes.Structure)
        and value.__module__ == module.__name__
    ]


@pytest.mark.parametrize("structure", structures(), ids=lambda s: s.__name__)
def test_every_structure_is_asserted(structure):
    text = "\n".join(ASSERTS.values())
    assert f"sizeof({structure.__name__}) == {ctypes.sizeof(structure)}" in text
    for name, *_ in vars(structure)["_fields_"]:
        offset = getattr(structure, name).offset
        assert f"__builtin_offsetof({structure.__name__}, {name}) == {offset}" in text


def test_no_two_structures_have_one_name():
    names = [s.__name__ for s in structures()]
    assert len(set(names)) == len(names) >= 15


def test_bases_and_parts_are_asserted_once():
    text = struct_asserts(GemmDecodePartRopeArgs)
    for name in ("Segment", "GemmArgs", "PostNormArgs", "GemmDecodeArgs", "RopeArgs"):
        assert text.count(f"sizeof({name}) ==") == 2, "the condition and its message"


@pytest.mark.parametrize("stem", ASSERTS)
def test_right_structures_compile(nvrtc, stem):
    arch = "sm_90a" if "wgmma" in stem else "sm_80"
    compile_cubin(f"{stem}.cu", arch, extra_source=ASSERTS[stem], defines={"PAGE_SIZE": 64})


def changed(**kinds: type | None) -> type[ctypes.Structure]:
    """TileSchedulerArgs with fields of another kind, or without them."""
    fields = [(n, kinds.get(n, kind)) for n, kind in TileSchedulerArgs._fields_]
    left = [(n, kind) for n, kind in fields if kind is not None]
    return type("TileSchedulerArgs", (ctypes.Structure,), {"_fields_": left})


def moved(first: str, second: str) -> type[ctypes.Structure]:
    """TileSchedulerArgs with two fields of one size in each other's place."""
    names = {first: second, second: first}
    fields = [(names.get(n, n), kind) for n, kind in TileSchedulerArgs._fields_]
    return type("TileSchedulerArgs", (ctypes.Structure,), {"_fields_": fields})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (moved("waves", "paired"), r"offsetof\(TileSchedulerArgs, paired\) == 8"),
        (changed(stages=ctypes.c_int64), r"sizeof\(TileSchedulerArgs::stages\) == 8"),
        (changed(paired=None), r"sizeof\(TileSchedulerArgs\) == 40"),
        (moved("waves", "rounds"), "rounds"),
    ],
    ids=["moved", "another size", "missing", "another name"],
)
def test_wrong_structures_do_not_compile(emulator, wrong, message):
    def compile(structure: type[ctypes.Structure]) -> None:
        extra = f"{TAKES}\n{struct_asserts(structure)}"
        emulator.kernels("gemm/tile_scheduler.cuh", ["takes"], extra_source=extra)

    compile(TileSchedulerArgs)
    with pytest.raises(CompileError, match=message):
        compile(wrong)


def test_a_moved_field_of_a_record_does_not_compile(emulator):
    names = ["sample_select", "sample_draw"]
    fields = [("n_drawn", "<u8"), ("seed", "<u8"), *ROW.descr[2:]]
    with pytest.raises(CompileError, match=r"offsetof\(SampleRow, n_drawn\) == 0"):
        wrong = record_asserts("SampleRow", np.dtype(fields))
        emulator.kernels("sampling/sample.cu", names, extra_source=wrong)
