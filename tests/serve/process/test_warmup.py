"""Steps before the first request."""

from __future__ import annotations

import pytest

import ggpy
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
    options = {"n_ctx": 128, "n_batch": 50, "n_seq": 5, "prefix_cache": True}
    with ggpy.load(tiny_path(architecture), device="numpy", **options) as model:
        free = model.engine.stats().n_pages_free
        sizes = sizes_of_steps(model, monkeypatch)
        assert sizes[0] == (50, 1)
        assert [sizes.count((n, n)) for n in (5, 2, 1)] == [STEPS] * 3, sizes
        now = model.engine.stats()
        assert not model.engine.busy and (now.n_pages_free, now.n_pages_cached) == (free, 0)
        totals = [n for name, n in vars(now).items() if name.endswith("_total")]
        assert totals == [0] * 6


def test_a_context_smaller_than_a_step(tiny_path, monkeypatch):
    with ggpy.load(tiny_path("llama"), device="numpy", n_ctx=8, n_batch=50) as model:
        assert sizes_of_steps(model, monkeypatch)[0] == (7, 1)
