"""Steps before the first request."""

from __future__ import annotations

from collections import Counter

import pytest
from counting_device import CountingDevice, LaunchesOnHopper

import ggpy
from ggpy import arch
from ggpy.bench.planned import NoUpload, PlannedCuda
from ggpy.bench.runs import NoText
from ggpy.evaluate.synthetic import Synthetic
from ggpy.runtime.engine import Engine
from ggpy.serve.answers.warmup import STEPS, warm_up


def sizes_of_steps(model, monkeypatch) -> list[tuple[int, int]]:
    """Tokens and sequences of each step of the warm-up."""
    run, found = model.ops.run, []

    def noted(step, *rest):
        found.append((len(step.ids), len(step.page_tables[0])))
        return run(step, *rest)

    monkeypatch.setattr(model.ops, "run", noted)
    warm_up(model.engine)
    return found


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
def test_steps_of_all_sizes(tiny_path, monkeypatch, architecture):
    options = {"n_ctx": 128, "n_batch": 70, "n_seq": 10, "prefix_cache": True}
    with ggpy.load(tiny_path(architecture), device="numpy", **options) as model:
        free = model.engine.stats().n_pages_free
        sizes = sizes_of_steps(model, monkeypatch)
        assert [n for n, n_seq in sizes if n_seq == 1][:3] == [70, 32, 16]
        # twice for few sequences, of which one begins with a prompt
        found = [sizes.count((n, n)) for n in (10, 5, 2, 1)]
        assert found == [STEPS, 2 * STEPS - 1, 2 * STEPS, 2 * STEPS], sizes
        now = model.engine.stats()
        assert not model.engine.busy and (now.n_pages_free, now.n_pages_cached) == (free, 0)
        totals = [n for name, n in vars(now).items() if name.endswith("_total")]
        assert totals == [0] * 6


def test_a_context_smaller_than_a_step(tiny_path, monkeypatch):
    with ggpy.load(tiny_path("llama"), device="numpy", n_ctx=8, n_batch=50) as model:
        assert sizes_of_steps(model, monkeypatch)[0] == (7, 1)


class Hopper(CountingDevice):
    """A Hopper device without memory, whose tokens are all 0."""

    arch, sm_count = LaunchesOnHopper.arch, LaunchesOnHopper.sm_count

    def tensor_map(self, *_):
        return b""

    def download_into(self, array, *_):
        array[...] = 0


@pytest.fixture(scope="module")
def warm() -> Engine:
    """A server's engine for a model of 1.2 billion weights, after the warm-up."""
    ops, n_ctx = PlannedCuda(Hopper(1 << 50)), 1 << 16
    ops._uploader = NoUpload(ops.device)
    decoder = arch.load(
        Synthetic("Llama-3.2-1B:Q4_0", empty=True), ops, n_ctx, n_batch=2048, n_seq=64
    )
    engine = Engine(decoder, ops, NoText(), n_ctx, 2048, 64, n_positions=n_ctx, prefill_tokens=512)
    warm_up(engine)
    return engine


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("n_seq", [1, 2, 4, 8, 16, 64])
def test_answers_find_graphs(warm, monkeypatch, n_seq, greedy):
    """Of 1000 tokens each, which begin one after the other."""
    run, found = warm.ops.run, Counter()

    def noted(step, forward, *rest):
        whole = n_seq == len(step.ids) == len(step.page_tables[0])

        def counted(given):
            found["launched or recorded"] += whole
            return forward(given)

        found["steps"] += whole
        return run(step, counted, *rest)

    monkeypatch.setattr(warm.ops, "run", noted)
    for _ in range(n_seq):
        params = ggpy.SamplingParams(temperature=0.0 if greedy else 1.0)
        warm.add([0] * 20, params, max_tokens=1000)
        warm.step()
    while warm.busy:
        warm.step()
    assert found["steps"] > 900 and not found["launched or recorded"], found
