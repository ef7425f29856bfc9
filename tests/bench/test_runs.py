"""What a test evaluates, on the CPU and through the GPU's ops on the emulator; and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting_device import CountingDevice
from devices import open_device

from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.numpy import moe
from ggpy.backends.numpy.backend import Reference
from ggpy.bench.kernels.ceilings import Ceilings
from ggpy.bench.runs import Bench, Loaded, Result, Run, n_pages, run_model
from ggpy.bench.workload import Test
from ggpy.evaluate import synthetic
from ggpy.evaluate.synthetic import Synthetic
from ggpy.gguf import File

CEILINGS = Ceilings(1e12, 1e14, "a machine")
VOCABULARY = 50_000  # so many that the blocks of its matrices repeat


def bench(ops: Any = None, model: Any = None, **options: Any) -> Bench:
    make = ops or (lambda: Reference(1))
    options = {"name": "tiny:Q8_0", "repetitions": 2, **options}
    return Bench(open=lambda: model or Synthetic("tiny:Q8_0"), ops=make, **options)


def steps_of(test: Test) -> list[tuple[list[int], list[int]]]:
    """(positions, rows) of each step of the second repetition."""
    loaded = Loaded(bench(), [test], CEILINGS)
    run = Run(loaded, test)
    run.once()
    steps: list[tuple[list[int], list[int]]] = []
    real = loaded.decoder.run
    loaded.decoder.run = lambda s: (steps.append((s.positions.tolist(), s.rows.tolist())), real(s))[
        1
    ]  # type: ignore[method-assign]
    run.once()
    return steps


def test_a_prompt_is_evaluated_in_chunks() -> None:
    assert steps_of(Test(70, 0, n_ubatch=32)) == [
        (list(range(32)), []),
        (list(range(32, 64)), []),
        (list(range(64, 70)), [5]),
    ]


def test_the_context_is_evaluated_before_the_clock_starts() -> None:
    assert steps_of(Test(10, 0, n_depth=100)) == [(list(range(100, 110)), [9])]
    assert steps_of(Test(0, 3, n_depth=100)) == [([p], [0]) for p in (100, 101, 102)]


@pytest.mark.parametrize("name", ["gpt-oss-20b", "Qwen3-30B-A3B", "GLM-4.5-Air", "Gemma-4-26B-A4B"])
def test_tokens_choose_experts_as_evenly_as_the_limit_supposes(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In a narrow model of three layers: 32 sequences, and a prompt."""
    known = synthetic.shapes()[name]
    sizes = {"block_count": 3, "embedding_length": 256}
    sizes |= {"attention.head_count": 8, "attention.head_count_kv": 4}
    sizes |= {"feed_forward_length": 256, "expert_feed_forward_length": 256}
    of_layers = {key: v[:3] for key, v in known.settings.items() if isinstance(v, list)}
    settings = {**known.settings, **of_layers, **sizes}
    small = replace(known, n_vocab=VOCABULARY, settings=settings)
    monkeypatch.setitem(synthetic.shapes(), name, small)
    chosen: list[Any] = []
    real = moe.route

    def route(n: Any, router: Any) -> Any:
        found = real(n, router)
        chosen.append(found[0])
        return found

    monkeypatch.setattr(moe, "route", route)
    tests = [Test(0, 24, n_seq=32), Test(32, 0)]
    loaded = Loaded(bench(model=Synthetic(f"{name}:Q8_0")), tests, CEILINGS)
    for test in tests:
        chosen.clear()
        Run(loaded, test).once()
        counts = [len(np.unique(ids)) for ids in chosen[-3:]]
        expected = (1 - (1 - loaded.work.share) ** 32) * known.settings["expert_count"]
        assert np.mean(counts) == pytest.approx(expected, rel=0.06)


def test_sequences_generate_together() -> None:
    assert steps_of(Test(0, 3, n_seq=4)) == [([p] * 4, [0, 1, 2, 3]) for p in range(3)]
    deep = steps_of(Test(0, 2, n_depth=70, n_seq=3))
    assert deep == [([p] * 3, [0, 1, 2]) for p in (70, 71)]


def test_a_prompt_and_generation() -> None:
    steps = steps_of(Test(20, 3))
    assert [p for p, _ in steps] == [list(range(20)), [20], [21], [22]]


def check(result: Result, repetitions: int) -> None:
    assert not result.error
    assert len(result.samples_ns) == repetitions and min(result.samples_ns) > 0
    assert len(result.first_ns) == (repetitions if result.test.n_prompt else 0)
    assert result.limit_s is not None and result.limit_s > 0
    assert result.facts.n_params == 1_443_072 and result.facts.type == "llama 1.44M Q8_0"


@pytest.mark.parametrize(
    ("spec", "metadata", "type"),
    [
        ("tiny:Q4_K", {}, "Q4_K"),
        ("tiny:Q4_K_M", {}, "Q4_K_M"),
        ("tiny:Q8_0", {"general.file_type": 7}, "Q8_0"),
        ("tiny:Q8_0", {"general.file_type": 15}, "Q8_0"),  # which it is not
        ("tiny:Q8_0", {"general.file_type": 4711}, "Q8_0"),
    ],
)
def test_what_a_model_is_called(spec: str, metadata: dict[str, int], type: str) -> None:
    """By the mix that its file names, where most of its bytes agree."""
    model = Synthetic(spec)
    model.metadata |= metadata
    loaded = Loaded(bench(model=model), [Test(1, 0)], CEILINGS)
    assert loaded.facts.type == f"llama 1.44M {type}"


def test_results() -> None:
    tests = [Test(16, 0), Test(0, 4), Test(0, 4, 20, n_seq=2), Test(8, 2)]
    results = list(run_model(bench(repetitions=3), tests, CEILINGS))
    assert [r.test for r in results] == tests
    for result in results:
        check(result, 3)
        assert result.device_bytes is None


@pytest.fixture(params=["emulator", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    found = open_device(request.param)
    yield found
    if hasattr(found, "close"):
        found.close()


def test_on_a_gpu(device: Any) -> None:
    """Graphs are recorded and replayed, pages are shared between the tests' engines."""
    tests = [Test(5, 0), Test(0, 3), Test(0, 2, n_seq=2)]
    for result in run_model(bench(lambda: Cuda(device), repetitions=1), tests, CEILINGS):
        check(result, 1)
        assert result.device_bytes


def test_experts_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random weights too; the speed of the bus is not known, and so no limit."""
    sizes = {"block_count": 2, "embedding_length": 128, "feed_forward_length": 128}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1, "context_length": 64}
    sizes |= {"attention.key_length": 32, "attention.value_length": 32}
    sizes |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 128}
    sizes |= {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0}
    shape = synthetic.ModelShape("few", "qwen3moe", 256, False, sizes)
    monkeypatch.setattr(synthetic, "shapes", lambda: {"few": shape})
    device = CountingDevice()
    case = Bench(lambda: Synthetic("few:Q8_0"), lambda: Cuda(device), "few", repetitions=1)
    tests = [Test(0, 2), Test(20, 0, n_cpu_moe=1), Test(0, 2, n_cpu_moe=2)]
    on_host = []
    for result in run_model(case, tests, CEILINGS):
        assert not result.error
        assert (result.limit_s is None) == (result.test.n_cpu_moe > 0)
        on_host.append(device.host_bytes)
    each = 3 * 4 * 128 * 136  # gate, up and down of 4 experts, of 128 rows of 4 blocks
    assert on_host == [0, each, 2 * each]


class Small(Reference):
    """Has room for a few pages."""

    def allocate_cache(self, shape: Any) -> None:
        (group,) = shape.groups
        if group.n_pages > 4:
            raise MemoryError(f"{group.n_pages} pages do not fit")
        super().allocate_cache(shape)


def test_what_does_not_fit_is_a_result_and_the_rest_goes_on() -> None:
    tests = [Test(0, 2, 1000), Test(0, 2), Test(0, 2, 500), Test(0, 2, 500, n_seq=2), Test(4, 0)]
    results = list(run_model(bench(lambda: Small(1)), tests, CEILINGS))
    failed = {r.test: r.error for r in results if r.error}
    assert set(failed) == {tests[0], tests[2], tests[3]}
    assert failed[tests[0]] == f"MemoryError: {n_pages(tests[0])} pages do not fit"
    assert {r.test for r in results} == set(tests)


def test_a_model_that_cannot_be_opened_is_a_result() -> None:
    def broken() -> Any:
        raise ValueError("no such file")

    tests = [Test(4, 0), Test(0, 2)]
    case = Bench(open=broken, ops=lambda: Reference(1), name="x")
    results = list(run_model(case, tests, CEILINGS))
    assert [(r.test, r.error) for r in results] == [(t, "ValueError: no such file") for t in tests]


def test_a_test_that_fails_is_a_result() -> None:
    class Failing(Reference):
        def sample(self, logits: Any, samplers: Any) -> Any:
            if len(samplers) == 2:
                raise RuntimeError("kernel k\ndetails")
            return super().sample(logits, samplers)

    tests = [Test(0, 2), Test(0, 2, n_seq=2), Test(4, 0)]
    results = list(run_model(bench(lambda: Failing(1)), tests, CEILINGS))
    assert [r.error for r in results] == ["", "RuntimeError: kernel k", ""]


def test_a_window_s_context_is_evaluated_once(tiny_path: Callable[[str], Path]) -> None:
    """Repetitions go back further than the window alone would allow."""
    test = Test(200, 5, 300, n_ubatch=16)
    case = Bench(open=lambda: File(tiny_path("gemma3")), ops=lambda: Reference(1), name="x")
    run = Run(Loaded(case, [Test(0, 2), test], CEILINGS), test)
    assert sorted(pool.n_pages for pool in run.engine.cache.pools) == [5, 8]
    for _ in range(3):
        run.once()
        (answer,) = run.previous
        assert answer is not None and answer.n_reused == 300
