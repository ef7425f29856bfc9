"""A device among the workers: the same files, errors with their row, and who does what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_cases import hashed_weights
from quantize_cases import WEIGHTS, digest_of_file, write_case

from ggpy.device import CudaError, NoGpu
from ggpy.formats import by_name
from ggpy.gguf import File
from ggpy.quantization import device_workers, workers
from ggpy.quantization.device_workers import DeviceWorkers, open_workers
from ggpy.quantization.requantize import mix_for, plan, write
from ggpy.quantization.workers import Task, Workers, slabs

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "quantize.json").read_text())
F32, Q4_K, Q8_0, IQ4_XS = (by_name(name) for name in ("F32", "Q4_K", "Q8_0", "IQ4_XS"))
COLUMNS = 512


@pytest.fixture(scope="module", params=["emulator", "gpu"])
def device(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def pool(device: Any) -> Iterator[DeviceWorkers]:
    with DeviceWorkers(device, 1) as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(WEIGHTS, tmp_path_factory.mktemp("case") / "weights.gguf")


@pytest.mark.parametrize("mix", ["Q2_K", "Q3_K_M", "Q4_K_M", "Q5_1"])
def test_files_are_those_of_llama_quantize(
    model: Path, tmp_path: Path, pool: DeviceWorkers, mix: str
) -> None:
    with File(model) as file:
        for _ in write(plan(file, mix_for(file, mix)), tmp_path / "out.gguf", pool):
            pass
    assert digest_of_file(tmp_path / "out.gguf") == GOLDEN["files"][mix]


@pytest.mark.parametrize("mix", ["q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "q8_0"])
def test_a_real_model_is_that_of_llama_quantize(
    gpu: Any, smollm2: Path, tmp_path: Path, mix: str
) -> None:
    with File(smollm2) as file, DeviceWorkers(gpu, 1) as pool:
        made = plan(file, mix_for(file, mix), allow_requantize=True)
        for _ in write(made, tmp_path / "out.gguf", pool):
            pass
    assert digest_of_file(tmp_path / "out.gguf") == GOLDEN["smollm2"][mix]


@pytest.mark.parametrize("name", ["Q4_K", "Q4_0", "Q8_0", "IQ4_XS"])
def test_importance_of_experts(pool: DeviceWorkers, name: str) -> None:
    """Also of formats that importance changes nothing about, or that have no kernel."""
    cube, format = hashed_weights("experts", 12, COLUMNS).reshape(3, 4, COLUMNS), by_name(name)
    importance = np.square(hashed_weights("importance", 3, COLUMNS))
    tasks = slabs(cube.view(np.uint8), COLUMNS, F32, format, importance)
    found = np.concatenate(list(pool.run(tasks)))
    expected = [format.quantize(x, i) for x, i in zip(cube, importance, strict=True)]
    assert np.array_equal(found, np.concatenate(expected))


def test_tasks_of_all_sizes_come_in_order(pool: DeviceWorkers) -> None:
    """Memory grows, and what was in it does not come back."""
    rows = [1, 40, 3, 200, 7, 1, 90, 2, 33, 5, 64, 8]
    parts = [hashed_weights(f"part {i}", n, COLUMNS) for i, n in enumerate(rows)]
    formats = [Q4_K, Q8_0, F32, IQ4_XS] * 3
    tasks = [Task(x.view(np.uint8), F32, f) for x, f in zip(parts, formats, strict=True)]
    for x, format, found in zip(parts, formats, pool.run(tasks), strict=True):
        assert np.array_equal(found, x.view(np.uint8) if format is F32 else format.quantize(x))


def test_who_does_what(pool: DeviceWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU gets what has no kernel, and else nothing."""
    done = []
    quantized = Workers._submit
    monkeypatch.setattr(Workers, "_submit", lambda *given: done.append(1) or quantized(*given))
    data = hashed_weights("who", 2, COLUMNS).view(np.uint8)
    for target, expected in ((Q4_K, 0), (Q8_0, 0), (IQ4_XS, 1), (F32, 1)):
        done.clear()
        list(pool.run([Task(data, F32, target)]))
        assert len(done) == expected, target.name


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("weighted", [False, True])
def test_tensor_and_row_of_a_bad_number_are_named(
    pool: DeviceWorkers, bad: float, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SEARCH_SLAB", 1 << 14)
    x = hashed_weights("bad", 100, COLUMNS)
    x[77, 300] = bad
    importance = np.ones(COLUMNS, np.float32) if weighted else None
    tasks = slabs(x.view(np.uint8), COLUMNS, F32, Q4_K, importance, "blk.0.attn_q.weight")
    what = "a weight that needs a scale" if bad == 3e38 else "NaN or infinity"
    with pytest.raises(ValueError, match=rf"tensor 'blk\.0\.attn_q\.weight': row 77 holds {what}"):
        list(pool.run(tasks))


def test_bad_importance_is_refused(pool: DeviceWorkers) -> None:
    importance = np.full(COLUMNS, -1, np.float32)
    data = hashed_weights("importance", 1, COLUMNS).view(np.uint8)
    with pytest.raises(ValueError, match="tensor 'x': importance holds NaN, infinity or a neg"):
        list(pool.run([Task(data, F32, Q4_K, importance, 0, "x")]))


def test_a_device_that_fails_leaves_no_file(
    model: Path, tmp_path: Path, pool: DeviceWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise CudaError("launching: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(device_workers.Quantizer, "launch", fail)
    with File(model) as file, pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        for _ in write(plan(file, mix_for(file, "q4_k_s")), tmp_path / "out.gguf", pool):
            pass
    assert not list(tmp_path.iterdir())


# Which device


@pytest.mark.parametrize(
    ("asked", "target", "said"),
    [
        ("auto", Q4_K, "device: cpu (no driver)"),
        ("cpu", Q4_K, "device: cpu (as asked)"),
        ("auto", IQ4_XS, "device: cpu (no kernel makes these types)"),
    ],
)
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, asked: str, target: Any, said: str) -> None:
    monkeypatch.setattr("ggpy.device.probe", lambda ordinal: NoGpu("no driver"))
    told: list[str] = []
    with open_workers(asked, 1, told.append, [target]) as found:
        assert type(found) is Workers and told == [said]


@pytest.mark.parametrize(
    ("asked", "words"), [("cuda", "no driver; device cpu needs none"), ("tpu", "unknown device")]
)
def test_a_device_that_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, asked: str, words: str
) -> None:
    monkeypatch.setattr("ggpy.device.probe", lambda ordinal: NoGpu("no driver"))
    with pytest.raises(ValueError, match=words):
        open_workers(asked, 1, print, [Q4_K])
