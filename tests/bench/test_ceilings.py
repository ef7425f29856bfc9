"""Measuring the CPU, and keeping what was measured on a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ggpy.bench.kernels import ceilings
from ggpy.bench.kernels.ceilings import Ceilings, ceilings_of, measure_cpu
from ggpy.device.probe import NoGpu, probe


def test_the_cpu_copies_and_multiplies() -> None:
    found = measure_cpu()
    assert 1e8 < found.bandwidth < 1e13 and 1e8 < found.matrix_rate < 1e14


def test_a_gpu_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[str] = []

    def measure(device) -> Ceilings:  # type: ignore[no-untyped-def]
        measured.append(device.gpu.name)
        return Ceilings(4.67e12, 7.9e14, device.gpu.name)

    def ops(name: str):  # type: ignore[no-untyped-def]
        gpu = SimpleNamespace(name=name, sm_count=132, driver="13.0")
        return SimpleNamespace(device=SimpleNamespace(gpu=gpu))

    monkeypatch.setattr(ceilings, "measure_gpu", measure)
    first = ceilings_of(ops("Some / GPU"))
    assert ceilings_of(ops("Some / GPU")) == first
    assert measured == ["Some / GPU"]
    ceilings_of(ops("Another GPU"))
    ceilings_of(ops("Some / GPU"), fresh=True)
    assert measured == ["Some / GPU", "Another GPU", "Some / GPU"]
    for path in (tmp_path / "ggpy" / "ceilings").iterdir():
        path.write_text('{"bandwidth": 0}')
    ceilings_of(ops("Some / GPU"))
    assert len(measured) == 4, "a broken file is measured again"


def test_a_real_gpu_is_measured_the_same_twice() -> None:
    found = probe()
    if isinstance(found, NoGpu):
        pytest.skip(found.reason)
    from ggpy.device.gpu import CudaDevice

    device = CudaDevice()
    one, two = ceilings.measure_gpu(device), ceilings.measure_gpu(device)
    assert one.bandwidth == pytest.approx(two.bandwidth, rel=0.05)
    assert one.matrix_rate == pytest.approx(two.matrix_rate, rel=0.1)
