"""The table of schedules: its cells, and that what is compiled after the source works."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from cases import nmse
from kernel_buffers import Output, upload
from tile_cases import Weights, exact, f16_activations

from ggpy.bench.compile_ahead import Wishes
from ggpy.bench.kernels import tile_schedules as schedules
from ggpy.bench.timing import Timing
from ggpy.device.compile import compile_cubin
from ggpy.formats import by_name
from ggpy.kernels.gemm.gemm_wgmma import TILE_COSTS, instance, k_stages
from ggpy.kernels.gemm.tile_scheduler import Tiling, fastest
from ggpy.kernels.layout.pack import Pack, order_of, packed_bytes
from ggpy.kernels.layout.tile import layout_of

Q8_0 = by_name("Q8_0")
LAYOUT = layout_of(Q8_0, 4096)
GPU = SimpleNamespace(arch="sm_90a", sm_count=132, shared_bytes=227 << 10)


class Numbers:
    """A clock that says 1, 2, 3, ... microseconds."""

    def __init__(self) -> None:
        self._next = count(1)

    def each(self, enqueue, runs):
        enqueue()
        return Timing([float(next(self._next))])


def cells(lines: list[str]) -> dict[str, list[str]]:
    """The rows of a table in Markdown by their first cell."""
    lines = [line for line in lines if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def test_the_tables():
    lines = list(schedules.report(Wishes(GPU), Q8_0, Numbers(), lambda _: None))
    starts = [i for i, line in enumerate(lines) if line.startswith("| schedule")]
    assert len(starts) == 4
    rows = cells(lines[starts[0] : starts[1] - 2])
    assert rows["schedule"] == [
        "1",
        "16",
        "64",
        "512 (128)",
        "512 (256)",
        "2048 (128)",
        "2048 (256)",
    ]
    assert all(rows["data-parallel"])
    assert rows["data-parallel + stream-K"][:3] == [""] * 3  # it is stream-K there
    assert all(rows["data-parallel, pairs"][column].startswith("**") for column in (4, 6))
    assert [cell.startswith("**") for cell in rows["stream-K"][:3]] == [True, True, False]
    assert rows["split-K 2"][2].startswith("**")
    assert rows["split-K 4"][0] == ""  # 112 tiles in four are more blocks than run
    assert rows["rows first"][:3] == [""] * 3 and all(rows["rows first"][3:])
    pairs = [bool(cell) for cell in rows["data-parallel, pairs"]]
    assert pairs == [tokens.endswith("(256)") for tokens in rows["schedule"]]
    for column in range(7):
        bold = [name for name, row in rows.items() if row[column].startswith("**")]
        assert len(bold) == (column not in (3, 5)), column  # tiles of 128 are not chosen
    few = cells(lines[starts[2] : starts[3] - 2])
    assert few["16 warps, 3 stages"][0].startswith("**") and len(few) == 2 + 9


def test_every_variant_is_compiled_once():
    wishes = Wishes(GPU)
    list(schedules.report(wishes, Q8_0, Numbers(), lambda _: None))
    wished = [w for w in wishes.wishes if w["source_name"] == "gemm/gemm_wgmma.cu"]
    assert sum("ROWS_FIRST" in w["defines"] for w in wished) == 2  # tiles of 128 and of 256 tokens
    plain = [w for w in wished if not ("SHARED" in w["extra_source"] or w["defines"])]
    assert len(plain) == 6  # a tile size each, and one of pairs
    assert 6 <= sum("SHARED" in w["extra_source"] for w in wished) <= 16


def test_rings_hold_as_many_stages_as_they_say():
    """The kernel finds room for that many, and for as many columns of activations."""
    weights = 8 * LAYOUT.chunk_bytes
    for variant in schedules.variants(LAYOUT, 512, 128, Tiling(128, False)):
        if depth := variant.tiling.depth:
            assert variant.tiling.shared == 1024 + depth * (weights + 2 * 128 * 128)
            assert variant.tiling.shared <= Tiling(128, False).shared
            assert variant.name == f"{depth} stages"


def test_another_gpu_is_refused():
    other = SimpleNamespace(arch="sm_80", sm_count=4, shared_bytes=1 << 17)
    with pytest.raises(ValueError, match="sm_80 has no wgmma"):
        list(schedules.report(Wishes(other), Q8_0, Numbers(), lambda _: None))
    with pytest.raises(ValueError, match="F32 has no tiles of 4096 columns"):
        list(schedules.report(Wishes(GPU), by_name("F32"), Numbers(), lambda _: None))


@pytest.mark.usefixtures("nvrtc")
def test_specialisations_change_the_code():
    best = fastest(TILE_COSTS, 112, 512, k_stages(LAYOUT, 4096), 132)
    found = schedules.variants(LAYOUT, 512, 128, best)
    tried = [v for v in found if v.rows_first or v.tiling.depth == 2 or v.name == "data-parallel"]
    name = instance(LAYOUT, 128, "STORE")
    codes = set()
    for variant in tried:
        options = variant.options
        cubin = compile_cubin("gemm/gemm_wgmma.cu", "sm_90a", expressions=[name], **options)
        assert "serialized" not in cubin.log
        codes.add(bytes(cubin.code))
    assert len(tried) == len(codes) == 3


# On a GPU


@pytest.fixture
def hopper(gpu):
    """A GPU that has wgmma."""
    if gpu.arch != "sm_90a":
        pytest.skip(f"{gpu.arch} has no wgmma")
    return gpu


@pytest.mark.parametrize(("n", "tokens"), [(64, 64), (512, 128), (512, 256)])
def test_every_variant_multiplies(hopper, n, tokens):
    """The same product, up to the order of its sums."""
    w = Weights("Q8_0", 4096, 4096)
    x, tiles = f16_activations(n, w.columns), w.tiled(hopper)
    x = np.resize(x, (n, w.columns))
    packed = hopper.zeros(packed_bytes(n, w.columns))
    layout = w.layout
    Pack(hopper).launch(upload(hopper, x), packed, n, w.columns, order_of(layout))
    expected, tried = exact(w, x), 0
    best = fastest(TILE_COSTS, 32, n, k_stages(layout, 4096), hopper.sm_count)
    for variant in schedules.variants(layout, n, tokens, best):
        if schedules.scheduled(variant.tiling, layout, 4096, 4096, n, hopper.sm_count) is None:
            continue
        out = Output(hopper, 4 * n * w.rows)
        product = schedules.Varied(hopper, variant.options)
        product.launch([tiles], packed, [out.buffer], n, tiling=variant.tiling)
        assert nmse(out.read(np.float32, (n, w.rows)), expected) <= 1e-6, variant.name
        tried += 1
    assert tried >= 6
