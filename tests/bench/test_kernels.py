"""Measuring single kernels, on a device whose kernels take known times; operands and verdicts."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import Case, emulator_cases
from devices import open_device
from timed_device import START, TimedDevice

from ggpy.bench import compile_ahead as c
from ggpy.bench.kernels import operands as o
from ggpy.bench.kernels import table as t
from ggpy.bench.kernels.block_cases import BLOCK_KERNELS, block_case
from ggpy.bench.kernels.case import KernelCase, by_format
from ggpy.bench.kernels.cases import model_cases
from ggpy.bench.kernels.ceilings import Ceilings
from ggpy.bench.kernels.operands import Operands
from ggpy.bench.kernels.runs import FIELDS, measure
from ggpy.bench.timing import Clock, Timing
from ggpy.formats import by_name
from ggpy.kernels.blocks.block_kernel import supported_formats

CEILINGS = Ceilings(1e12, 1e14, "A GPU")  # a megabyte takes a microsecond, 100 Mflop too
MACHINE = {
    "kind": t.KIND, "gpu": "A GPU", "driver": "13.0", "compiler": "13.0", "build": "abc",
    "command": "ggpy bench_kernels", "time": "2026-11-21T10:00:00Z",
    "bandwidth": 1e12, "matrix_rate": 1e14,
}  # fmt: skip


def measured(cases: list[KernelCase], us: float = 10.0) -> list[dict[str, Any]]:
    device = TimedDevice(lambda name: 130.0 if name == "matrix_rate" else us)
    return list(measure(cases, device, CEILINGS, lambda message: None, 5))


def case(**changes: Any) -> KernelCase:
    """A matrix of 2^20 bytes, times one token."""
    wanted = {"kernel": "mul_mat_vec_q", "format": "Q8_0", "rows": 964, "columns": 1024}
    return block_case(Case(**(wanted | changes)), "here")


@pytest.mark.parametrize("us", [0.5, 10.0, 2000.0])
def test_what_is_measured_is_the_kernel_and_not_the_start_of_a_graph(us: float) -> None:
    (row,) = measured([case()], us)
    assert row["us"] == pytest.approx(us, abs=1e-3) and row["spread"] == pytest.approx(0, abs=1e-6)
    assert row["name"] == "mul_mat_vec_q here Q8_0 964x1024 x1"
    assert row["kernels"] == "mul_mat_vec_q" and row["launches"] == 1
    nbytes = 964 * 1024 * 34 // 32 + 1024 * 36 // 32 + 4 * 964
    assert row["nbytes"] == nbytes and row["flops"] == 2 * 964 * 1024
    assert row["gb_s"] == pytest.approx(nbytes / us / 1e3, abs=0.01)
    assert row["tflop_s"] == pytest.approx(row["flops"] / us / 1e6, abs=1e-3)
    assert row["limit_us"] == pytest.approx(nbytes / 1e6, abs=1e-3) and row["bound"] == "memory"
    assert row["percent_of_limit"] == pytest.approx(nbytes / 1e4 / us, abs=0.01)
    assert (row["registers"], row["shared"], row["spills"]) == (40, 1000, 0)


def test_several_launches_are_one_piece_of_work() -> None:
    (row,) = measured([case(tokens=11)])
    assert row["launches"] == 2 and row["us"] == pytest.approx(20.0)


def test_every_case_of_the_models_can_be_prepared_and_launched() -> None:
    cases = by_format(model_cases())
    rows = measured(cases, 10.0)
    assert not [row["error"] for row in rows if row["error"]]
    assert len({row["name"] for row in rows}) == len(rows) == len(cases) > 300
    check_schema(rows)
    kinds = {(row["what"], row["format"]) for row in rows}
    tiled = [f.name for f in supported_formats() if f.tile is not None]
    assert {("product", name) for name in tiled} <= kinds
    assert {("dequantize_tile", name) for name in tiled} <= kinds
    untiled = {f.name for f in supported_formats()} - set(tiled)
    assert {("blocks_to_f16", name) for name in untiled} <= kinds
    assert {("quantize", "Q4_K"), ("quantize", "Q8_0")} <= kinds
    assert {("prompt product", name) for name in (*tiled, *untiled)} <= kinds
    assert {("prompt attend", "Q8_0"), ("halve pages", "Q8_0")} <= kinds
    assert {"attend", "prompt attend", "rope_kv", "rms_norm", "argmax"} <= {
        what for what, _ in kinds
    }
    decode = next(r for r in rows if r["name"].startswith("product Llama-3.1-8B ffn_down Q8_0"))
    assert decode["nbytes"] == pytest.approx(4096 * 14336 * 34 / 32, rel=0.01)
    bounds = {row["bound"] for row in rows if row["what"] == "prompt product"}
    assert bounds == {"matrix"} or "matrix" in bounds


def test_what_fails_is_a_row_and_the_rest_goes_on() -> None:
    def prepare(operands: Operands) -> Any:
        raise ValueError("rows of 7 columns\ndetails")

    bad = KernelCase("bad", "", "F16", "7", 1, 1, 1, prepare)
    one, two = measured([bad, case()])
    assert one["error"] == "ValueError: rows of 7 columns" and one["us"] is None
    assert two["us"] == pytest.approx(10.0)
    check_schema([one, two])


def check_schema(rows: list[dict[str, Any]]) -> None:
    """Names and types of what `-o json` prints."""
    for row in rows:
        assert [*row] == [*FIELDS]
        for name, kind in FIELDS.items():
            assert type(row[name]) is kind or (row[name] is None and row["error"]), name


# Operands


@pytest.fixture
def emulated() -> Iterator[Any]:
    with open_device("emulator") as device:
        yield device


@pytest.fixture
def operands(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> Operands:
    """With pools of some hundred kilobytes."""
    monkeypatch.setattr(o, "POOL_BYTES", 1 << 19)
    monkeypatch.setattr(o, "UNIQUE_ROWS", 16)
    monkeypatch.setattr(o, "WEIGHTS", 1 << 14)
    return Operands(emulated)


def test_what_stays_is_random_and_repeated(operands: Operands, emulated: Any) -> None:
    x = operands.floats("x", 3, 1 << 14)
    values = emulated.download(x.data, np.float32, (3, 1 << 14))
    assert np.isfinite(values).all() and 0.9 < values.std() < 1.1
    assert np.array_equal(values[0], values[2])
    assert operands.floats("x", 2, 5).data is x.data


def test_every_launch_has_other_operands(operands: Operands, emulated: Any) -> None:
    """Each window of a pool is used before one comes back, and every one is valid."""
    next_matrix, nbytes = operands.blocks(by_name("Q4_K"), 50, 512), 50 * 2 * 144
    found = [next_matrix() for _ in range(100)]
    starts = [m.data.ptr for m in found]  # type: ignore[union-attr]
    n = len(set(starts))
    assert 10 < n < 30 and starts[:n] == starts[n : 2 * n]
    gaps = np.diff(sorted(set(starts)))
    assert gaps.min() >= nbytes and all((s - starts[0]) % 144 == 0 for s in starts)
    for m in found[:n]:
        blocks = emulated.download(m.data, np.uint8, (100, 144))
        weights = by_name("Q4_K").dequantize(blocks)
        assert np.isfinite(weights).all() and len(np.unique(weights)) > 100
    numbers = operands.numbers(np.float16, 1000)
    one, two = (emulated.download(numbers(), np.float16, 1000) for _ in range(2))
    assert np.isfinite(one).all() and not np.array_equal(one, two)


@pytest.mark.parametrize(("name", "columns"), [("Q8_0", 128), ("Q4_0", 96), ("F16", 192)])
def test_tiles_in_a_pool_are_valid(
    operands: Operands, emulated: Any, name: str, columns: int
) -> None:
    """A window multiplies by what its chunks hold, wherever it begins."""
    from tile_cases import f16_activations, limits

    from ggpy.kernels.gemm.gemm_decode import GemmDecode

    format = by_name(name)
    next_matrix = operands.matrix(format, 40, columns)
    x, y = emulated.upload_array(f16_activations(1, columns)), operands.scratch("y", 160)
    found = []
    for _ in range(3):
        tiles = next_matrix().tiles
        assert tiles is not None
        GemmDecode(emulated, limits(emulated)).launch([tiles], x, [y], 1)
        found.append(emulated.download(y, np.float32, 40))
    n = sum(x.size for x in found)
    assert np.isfinite(found).all() and len(np.unique(found)) > n // 4, "not zeros, not repeated"
    blocks = operands._blocks.reshape(-1, format.nbytes)
    rms = np.sqrt(np.mean(np.square(format.dequantize(blocks))))
    size = float(np.sqrt(np.sum(f16_activations(1, columns).astype(np.float64) ** 2)) * rms)
    assert 0.7 * size < np.std(found) < 1.4 * size


@pytest.mark.parametrize("kernel", [*BLOCK_KERNELS])
def test_declared_cases_run(operands: Operands, kernel: str) -> None:
    block_case(emulator_cases(kernel)[-1]).prepare(operands)()


# Times


def test_timing() -> None:
    timing = Timing([10.0, 11.0, 10.0, 10.5, 90.0])
    assert timing.median == 10.5 and timing.spread == pytest.approx(80 / 10.5)
    assert timing.noise == pytest.approx(1.4826 * 0.5)


def test_a_clock_runs_only_after_a_lead() -> None:
    """What the host takes to enqueue is hidden behind work that was enqueued before."""
    device = TimedDevice(lambda name: 130.0)
    clock = Clock(device)
    assert clock.start_us == pytest.approx(START)
    before = device.now
    assert clock.whole([lambda: device.spend(7.0)], 1).median == pytest.approx(START + 7.0)
    assert device.now - before == pytest.approx(2 * (130 + START + 7)), "once to be warm"


# Comparison


def row(name: str, us: float, noise: float = 0.01, error: str = "") -> dict[str, Any]:
    (found,) = measured([case(rows=int(us) + 1)])
    return found | {"name": name, "us": us, "noise_us": noise, "error": error}


def verdict(new: dict[str, Any], old: dict[str, Any]) -> str:
    (found,) = t.compare(t.document(MACHINE, [new]), t.document(MACHINE, [old]))
    return str(found["verdict"])


def test_verdicts_know_the_noise() -> None:
    assert verdict(row("a", 110), row("a", 100)) == "slower"
    assert verdict(row("a", 90), row("a", 100)) == "faster"
    assert verdict(row("a", 102), row("a", 100)) == "same"
    assert verdict(row("a", 110, noise=2.5), row("a", 100, noise=2.5)) == "same"
    assert verdict(row("a", 130, noise=2.5), row("a", 100, noise=2.5)) == "slower"
    assert verdict(row("a", 4.3), row("a", 4.0)) == "same", "0.3 us are what memory makes"
    assert verdict(row("a", 4.5), row("a", 4.0)) == "slower"
    assert verdict(row("a", 110), row("b", 100)) == "new"
    assert verdict(row("a", 110, error="x"), row("a", 100)) == "failed"
    (found,) = t.compare(t.document(MACHINE, [row("a", 110)]), t.document(MACHINE, [row("a", 100)]))
    assert found["old_us"] == 100 and found["change"] == pytest.approx(0.1)
    assert t.verdicts([{"verdict": v} for v in ("same", "slower", "same")]) == "2 same, 1 slower"


# Text


def test_text(tmp_path: Path) -> None:
    rows = measured([case(), case(kernel="dequantize", number="float")])
    rows.append(rows[0] | {"error": "ValueError: no", "us": None})
    found = t.document(MACHINE, rows)
    path = tmp_path / "x.json"
    path.write_text("\n".join(t.lines("json", found, rows)))
    assert t.read(path) == found and len(path.read_text().splitlines()) == len(rows) + 2
    parsed = list(csv.DictReader(t.lines("csv", found, rows)))
    assert [*parsed[0]] == [*FIELDS] and parsed[0]["us"] == "10.0" and parsed[2]["us"] == ""
    lines = list(t.lines("md", found, rows))
    assert lines[2].startswith("| mul_mat_vec_q | here | Q8_0 | 964x1024 | 1 | 10.00 | 0.0% |")
    assert lines[3].split(" | ")[8] == "", "no operations, no rate"
    assert " failed " in lines[4] and "ValueError: no" in lines[6]
    compared = t.compare(found, found)
    assert next(t.lines("md", found, compared)).endswith("| before | change | verdict |")


def test_a_busy_machine_is_flagged() -> None:
    base = row("a", 100)
    assert not t.busy(base)
    assert t.busy(base | {"spread": 0.06})
    assert not t.busy(base | {"us": 5.0, "spread": 0.15}), "less than launches differ by themselves"


@pytest.mark.parametrize("content", ["", "[]", "{}", f'{{"kind": "{t.KIND}", "rows": []}}'])
def test_what_is_no_result_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"x\.json"):
        t.read(path)


# Compiling ahead


def test_kernels_are_known_before_they_run() -> None:
    """What is compiled ahead is what the device is asked for afterwards."""
    wishes = c.Wishes(TimedDevice(lambda name: 1.0))
    cases = [case(), case(tokens=11), case(), *by_format(model_cases())[:20]]
    operands = Operands(wishes)
    for one in cases:
        one.prepare(operands)()
    asked: list[dict[str, Any]] = []

    class Asked(TimedDevice):
        def kernels(self, source: str, names: Any, **options: Any) -> list[Any]:
            names = [name for name in names]
            expressions = [name for name in names if not name.isidentifier()]
            asked.append({"source_name": source, "expressions": expressions, **options})
            return super().kernels(source, names, **options)

    operands = Operands(Asked(lambda name: 1.0))
    for one in cases:
        one.prepare(operands)()
    assert {json.dumps(w) for w in wishes.wishes} == {json.dumps(w) for w in asked}
    tokens = [
        w["expressions"] for w in wishes.wishes if w["source_name"] == "blocks/mul_mat_vec_q.cu"
    ]
    assert len(tokens) == 3, "an instance for 1, 8 and 3 tokens each"


@pytest.mark.parametrize(
    ("arch", "shared", "some"),
    [
        ("sm_75", 64, "gemm/gemm_decode.cu"),
        ("sm_86", 99, "gemm/gemm_prefill.cu"),
        ("sm_90a", 227, "attention/prefill_attention_wgmma.cu"),
    ],
)
def test_every_case_is_known_before_it_runs(arch: str, shared: int, some: str) -> None:
    """On each kind of GPU, also what only it takes."""
    gpu = SimpleNamespace(arch=arch, sm_count=132, shared_bytes=shared << 10)
    wishes = c.Wishes(gpu)
    operands = Operands(wishes)
    for one in model_cases():
        one.prepare(operands)()
    assert some in {wish["source_name"] for wish in wishes.wishes}


def test_compiling_ahead_fills_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from ggpy.device import NvrtcMissing, toolkit

    try:
        toolkit.nvrtc_version()
    except NvrtcMissing as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wishes = c.Wishes(TimedDevice(lambda name: 1.0))
    case(kernel="get_rows").prepare(Operands(wishes))()
    said: list[str] = []
    c.compile_ahead(wishes.wishes, "sm_80", 2, said.append)
    assert len(list((tmp_path / "ggpy" / "cubins").glob("*.cubin"))) == len(wishes.wishes) == 1
    assert said == ["compiling 1 sources for sm_80 in 1 processes, where the cache has none"]


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from ggpy.bench.kernels.plot import draw

    rows = measured([case(), case(kernel="dequantize", number="float"), case(tokens=8)])
    path = tmp_path / "out.png"
    assert draw(t.document(MACHINE, rows), str(path)) == 2
    assert path.read_bytes().startswith(b"\x89PNG")
    assert draw(t.document(MACHINE, rows[1:2]), str(path)) == 1
