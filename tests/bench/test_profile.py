"""Where a step goes: on a device whose kernels take known times, and through the emulator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from devices import open_device
from timed_device import COPY, START, TimedDevice

from ggpy.backends.cuda.backend import Cuda
from ggpy.bench.kernels.ceilings import Ceilings
from ggpy.bench.profiling import profile as p
from ggpy.bench.profiling.observed import ObservedDevice
from ggpy.bench.profiling.table import (
    FIELDS,
    KIND,
    MACHINE,
    OP_FIELDS,
    PART_FIELDS,
    checked,
    lines,
    row_of,
)
from ggpy.bench.runs import Bench
from ggpy.bench.table import ABOVE_NOTE
from ggpy.bench.workload import Test
from ggpy.evaluate.synthetic import Synthetic

CEILINGS = Ceilings(1e9, 1e30, "A GPU")
MACHINE_FACTS = {
    "kind": KIND, "gpu": "A GPU", "driver": "13.0", "build": "abc", "command": "ggpy bench",
    "time": "2026-11-21T10:00:00Z", "bandwidth": 1e9, "matrix_rate": 1e30,
}  # fmt: skip


def cost(name: str) -> float:
    """Microseconds of a kernel, different for most of them."""
    return 1.0 + len(name) % 13


def profiled(tests: list[Test], model: str = "tiny:Q8_0", device: Any = None) -> list[p.Profile]:
    device = device or TimedDevice(cost)
    bench = Bench(open=lambda: Synthetic(model), ops=lambda: None, name=model)  # type: ignore[arg-type,return-value]
    return list(p.profiles(bench, tests, Cuda(device), CEILINGS))


def by_name(found: p.Profile) -> dict[tuple[str, str], tuple[int, float]]:
    return {(part.op, part.name): (part.count, round(part.us, 6)) for part in found.parts}


def count_of(found: p.Profile, op: str) -> int:
    return sum(part.count for part in found.parts if part.op == op)


@pytest.mark.parametrize("n_seq", [1, 2])
def test_each_kernel_has_its_time_and_all_add_up(n_seq: int) -> None:
    (found,) = profiled([Test(0, 3, n_seq=n_seq)])
    for (op, name), (count, us) in by_name(found).items():
        one = START if not op else COPY if name == "upload" else cost(name)
        assert us == pytest.approx(count * one), name
    assert by_name(found)["", p.START][0] == 1
    assert count_of(found, "run") == 0, "the integers of the step come meanwhile"
    assert found.device_us == pytest.approx(sum(part.us for part in found.parts))
    assert found.step_us > 0 and found.facts.type == "llama 1.44M Q8_0"


def test_kernels_are_found_in_their_ops() -> None:
    """Of two layers, of which each token sequence takes part in every launch."""
    two, four = profiled([Test(0, 3, n_seq=2), Test(0, 3, 100, n_seq=4)])
    for found in (two, four):
        assert (count_of(found, "embed"), count_of(found, "attention")) == (1, 2)
        assert count_of(found, "ffn_act") >= 2
        assert count_of(found, "attn_out") >= 2 <= count_of(found, "ffn_out")
        assert count_of(found, "logits") >= 1 and count_of(found, "sample") == 1
    launch = next(part for part in two.parts if part.op == "attention")
    assert launch.registers == 40 and launch.shared is not None and launch.shared > 1000
    assert four.test.n_depth == 100


def test_bytes_are_those_that_the_ops_read() -> None:
    (found,) = profiled([Test(0, 3, 10, n_seq=2)])
    d, f, v, layers = 256, 512, 512, 2
    square, narrow = d * d, 128 * d  # q and o; k and v, which have 2 heads of 64
    weights = {"qkv": layers * (square + 2 * narrow), "attn_out": layers * square}
    weights |= {"ffn_act": layers * 2 * d * f, "ffn_out": layers * d * f, "logits": d * v}
    for op, n in weights.items():
        assert found.nbytes[op] == n * 34 // 32, op
    assert found.nbytes["attention"] == 2 * layers * 13 * 2 * 128 * 2  # 13 positions, K and V
    assert found.limit_us == pytest.approx(
        (sum(weights.values()) * 34 / 32 + 5 * d * 4 + found.nbytes["attention"]) / 1e3
    )


def test_a_step_of_one_launch_is_one_line() -> None:
    """Whatever a backend enqueues in its step is found, though no op was called."""

    class OneLaunch(Cuda):
        def run(self, step: Any, forward: Any, probe: Any = None) -> Any:
            super().run(step, lambda s: None, lambda *_: None)  # uploads the step
            self.device.kernel("step.cu", "whole_step").launch(1, 32, ())
            return self.context.f32("logits", len(step.rows), 512)

    device = TimedDevice(lambda name: 100.0 if name == "whole_step" else cost(name))
    bench = Bench(open=lambda: Synthetic("tiny:Q8_0"), ops=lambda: None, name="t")  # type: ignore[arg-type,return-value]
    (found,) = p.profiles(bench, [Test(0, 3)], OneLaunch(device), CEILINGS)
    parts = by_name(found)
    assert parts.pop(("run", "whole_step")) == (1, 100.0)
    assert {op for op, _ in parts} == {"", "sample"}


def test_of_many_operations_neighbours_are_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    (apart,) = profiled([Test(0, 3, n_seq=2)])
    monkeypatch.setattr(p, "MANY", 3)
    (together,) = profiled([Test(0, 3, n_seq=2)])
    assert by_name(together) == by_name(apart)


def check_schema(row: dict[str, Any]) -> None:
    """Names and types of what `-o json` prints of a profile."""

    def check(found: dict[str, Any], wanted: dict[str, type], optional: set[str]) -> None:
        assert [*found] == [*wanted]
        for name, kind in wanted.items():
            assert type(found[name]) is kind or (found[name] is None and name in optional), name

    check(row, FIELDS, {"limit_us"})
    for part in row["parts"]:
        check(part, PART_FIELDS, {"registers", "shared"})
    for op in row["ops"]:
        check(op, OP_FIELDS, {"limit_us"})


def test_json_has_its_schema_and_is_read_again(tmp_path: Path) -> None:
    rows = [row_of(found, CEILINGS.bandwidth) for found in profiled([Test(0, 3), Test(0, 2)])]
    for row in rows:
        check_schema(row)
    document = json.loads("\n".join(lines("json", MACHINE_FACTS, iter(rows))))
    assert document == MACHINE_FACTS | {"profiles": rows} and [*MACHINE_FACTS] == [*MACHINE]
    assert checked(document, tmp_path) is document
    for bad in ([], {}, {"kind": KIND}, MACHINE_FACTS | {"profiles": [{}]}):
        with pytest.raises(ValueError, match=str(tmp_path)):
            checked(bad, tmp_path)


def test_markdown_adds_up_to_the_step() -> None:
    (found,) = profiled([Test(0, 3, n_seq=2)])
    text = "\n".join(lines("md", MACHINE_FACTS, iter([row_of(found, CEILINGS.bandwidth)])))
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    assert {len(line) for line in table} == {7}
    rows = {line[0]: line for line in table[2:]}
    assert rows["attention"][1] == "2" and float(rows["attention"][3]) > 1
    assert any(name.startswith("· decode_attention") and "40 registers" in name for name in rows)
    top = [line for name, line in rows.items() if not name.startswith("·") and name != "sum"]
    assert sum(float(line[2]) for line in top) == pytest.approx(found.step_us, abs=0.5)
    assert float(rows["sum"][2]) == pytest.approx(found.device_us, abs=0.06)


@pytest.mark.parametrize(("of_limit", "remarked"), [(1.05, False), (1.2, True)])
def test_a_step_above_the_limit_is_remarked(of_limit: float, remarked: bool) -> None:
    (found,) = profiled([Test(0, 3, n_seq=2)])
    row = row_of(found, CEILINGS.bandwidth) | {"limit_us": of_limit * found.step_us}
    text = "\n".join(lines("md", MACHINE_FACTS, iter([row])))
    assert (ABOVE_NOTE in text) is remarked


# What is observed


@pytest.fixture
def emulated() -> Iterator[Any]:
    with open_device("emulator") as device:
        yield device


def test_what_was_observed_can_be_enqueued_again(emulated: Any) -> None:
    """Through a structure that the wrapper fills anew for each launch, in a graph and outside."""
    import numpy as np
    from cases import nmse
    from tile_cases import FIXED_POINT, Weights, exact, f16_activations, limits

    from ggpy.kernels.gemm.gemm_decode import GemmDecode

    device = ObservedDevice(emulated)
    w, x = Weights("Q8_0", 37, 96), f16_activations(9, 96)  # two launches
    tiles, y = w.tiled(device), device.zeros(4 * 9 * 37, "y")
    activations = device.upload_array(x)
    product = GemmDecode(device, limits(device))
    with device.capture() as graph:
        product.launch([tiles], activations, [y], 9)
    device.observing = True
    with device.part_of("here"):
        graph.launch()
        product.launch([tiles], activations, [y], 9)
    device.observing = False
    product.launch([tiles], activations, [y], 9)
    assert [(o.op, o.name.partition("<")[0]) for o in device.operations] == [
        *[("", "gemm_decode")] * 2,
        *[("here", "gemm_decode")] * 2,
    ]
    for some in (device.operations[:2], device.operations[2:]):
        emulated.fill(y, 0xFF)
        for operation in some:
            operation.enqueue()
        assert nmse(emulated.download(y, np.float32, (9, 37)), exact(w, x)) <= FIXED_POINT


def test_copies_are_observed(emulated: Any) -> None:
    import numpy as np

    device, values = ObservedDevice(emulated), np.arange(4, dtype=np.int32)
    a, b, back = device.alloc(16, "a"), device.alloc(16, "b"), np.zeros(4, np.int32)
    device.observing = True
    device.upload(a, values)
    device.copy(b, a, 16)
    device.download_into(back, b)
    device.fill(a, 0)
    device.observing = False
    assert [o.name for o in device.operations] == ["upload", "copy", "download", "fill"]
    assert back.tolist() == [0, 1, 2, 3]
    emulated.fill(b, 0xFF)
    for operation in device.operations[:3]:
        operation.enqueue()
    assert back.tolist() == [0, 1, 2, 3]
