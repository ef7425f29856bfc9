"""The kernels of experts compile for every architecture, without spilling."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from tile_cases import Weights

from ggpy.device.compile import compile_cubin
from ggpy.kernels.gemm.gemm import STATIC_SHARED as PRODUCT_SHARED
from ggpy.kernels.layout.tile import Layout
from ggpy.kernels.moe import combine, expert_gemm, expert_gemv, expert_rows, route
from ggpy.kernels.moe.expert_rows import Shape
from ggpy.kernels.moe.route import STATIC_SHARED

pytestmark = pytest.mark.usefixtures("nvrtc")

LAYOUTS = [Weights(name, 1, 256).layout for name in ("Q8_0", "MXFP4", "Q4_K", "Q6_K", "F16")]
TYPES = [layout.type_name for layout in LAYOUTS]
NORM = {"WARPS": route.WARPS, "NORM_PIECES": 2}


def most_registers(shape: Shape) -> int:
    """The most registers that a thread can have."""
    return 65536 // (32 * shape.warps * shape.ctas)


def tight(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Shapes without those of as many tile rows or fewer and as many registers or more as others,
    which cannot spill where the others do not.
    """
    found: list[Shape] = []
    for shape in sorted(shapes, key=lambda s: (-s.tiles, most_registers(s))):
        if not found or most_registers(shape) < most_registers(found[-1]):
            found.append(shape)
    return tuple(found)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120"])
def test_they_compile(arch: str) -> None:
    few = TYPES if arch == "sm_90a" else TYPES[: 2 if arch == "sm_75" else 1]
    gemvs = []
    of_cta = (*expert_gemv.WARPS, expert_gemv.MOST_WARPS)
    instances = [(warps, n) for warps in of_cta for n in (0, 4)]
    for warps, per_lane in instances if arch == "sm_90a" else instances[:1]:
        names = [f"expert_gemv<{TYPES[3]}, {e}, true>" for e in ("GLU", "SUM")]  # many registers
        if (warps, per_lane) == instances[0]:
            names = [f"expert_gemv<{t}, {e}, true>" for t in few for e in ("STORE", "GLU", "SUM")]
            names += [f"expert_gemv<{t}, SUM, true, 1, 2>" for t in few]
            names.append(f"expert_gemv<{TYPES[0]}, SUM, false>")
        defines = {"WARPS": warps, "STAGES": 4, "EXPERTS_PER_LANE": per_lane}
        gemvs.append(compile_cubin("moe/expert_gemv.cu", arch, expressions=names, defines=defines,
                                   extra_source=expert_gemv.ASSERTS).resources)  # fmt: skip
    names = [f"expert_gemm<{t}, {e}>" for t in few[:2] for e in ("STORE", "GLU")]
    tiles = [n for n, _ in expert_gemm.TILES] if arch == "sm_90a" else [64]
    gemms = [compile_cubin("moe/expert_gemm.cu", arch, expressions=names,
                           defines={"TILE_TOKENS": n}, extra_source=expert_gemm.ASSERTS).resources
             for n in tiles]  # fmt: skip
    rows, registers_of = [], []
    defines = {"STAGES": expert_rows.STAGES, "NORM_PIECES": 1}
    layouts_of: dict[tuple, list[Layout]] = {}
    for tile, w in product(expert_rows.SHAPES if arch == "sm_90a" else (), LAYOUTS):
        if tile == 8 or w.is_table:
            shapes = tight(expert_rows.shapes(w, tile))
            layouts_of.setdefault((tile, shapes), []).append(w)
    for (tile, shapes), layouts in layouts_of.items():
        names = [f"expert_rows<{w.type_name}, {e}>" for w in layouts for e in ("STORE", "GLU")]
        rows += [compile_cubin("moe/expert_rows.cu", arch, expressions=names,
                               defines=defines | {"ROWS": tile, "TILES": shape.tiles,
                                                  "WARPS": shape.warps, "CTAS": shape.ctas},
                               extra_source=expert_rows.ASSERTS).resources
                 for shape in shapes]  # fmt: skip
        registers_of += [most_registers(shape) for shape in shapes]
    names = [f"route_late<{n}>" for n in (16, 23, route.MOST_PIECES)]
    names += [f"route<{n}, {rows}>" for n, rows in route.SHAPES]
    routes = compile_cubin("moe/route.cu", arch, expressions=names, defines=NORM,
                           extra_source=route.ASSERTS).resources  # fmt: skip
    routes |= compile_cubin("moe/route.cu", arch, expressions=names[-1:],
                            defines=NORM | {"SIGMOID_OF_CHOSEN": 1}).resources  # fmt: skip
    small = compile_cubin("moe/sort.cu", arch).resources
    names = ["combine<false>", "combine<true>"]
    sums = [compile_cubin("moe/combine.cu", arch, expressions=names, defines={"WEIGHS_INPUT": n},
                          extra_source=combine.ASSERTS).resources
            for n in (0, 1)]  # fmt: skip
    limits = [*((found, 128) for found in gemvs), *zip(rows, registers_of, strict=True)]
    limits += [*((gemm, 255) for gemm in gemms), (routes, 255), (small, 128)]
    limits += [(found, 65536 // (combine.THREADS * combine.RESIDENT_CTAS[True])) for found in sums]
    for found, registers in limits:
        for name, r in found.items():
            two_tile_rows = found in gemvs and name.endswith("2>")
            few_bytes = 16 if found in rows or two_tile_rows else 0  # not in the loop over chunks
            assert max(r.spill_loads, r.spill_stores) <= few_bytes, f"{name} spills: {r}"
            assert r.registers <= registers, f"{name} takes {r.registers} registers"
    for found in (*gemvs, *rows):
        assert all(r.shared <= PRODUCT_SHARED for r in found.values())
    assert all(r.shared <= STATIC_SHARED for r in routes.values())
    assert all(r.shared <= expert_gemm.STATIC_SHARED for gemm in gemms for r in gemm.values())
    assert small["sort_pairs"].shared <= 48 << 10
