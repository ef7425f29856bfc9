"""Which kernels a step takes: golden tables, and that a step decides nothing twice."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from counting_device import LaunchesOnHopper
from random_decoder import LAYERS, V, decode_step, random_decoder

from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.cuda.plan import CANDIDATES
from ggpy.backends.interface import Layer, Norm
from ggpy.bench import plan_table, planned
from ggpy.gguf import GGUFError
from ggpy.sampling import Sampler, SamplingParams

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
REMAKE = "if that is meant, run `python tests/golden/make_plans.py` and say why in the commit"
MOST_CALLS = 300  # of Python functions, in a backend's part of a decode step


def maker() -> Any:
    """tests/golden/make_plans.py."""
    spec = importlib.util.spec_from_file_location("make_plans", GOLDEN / "make_plans.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = maker()


@pytest.mark.parametrize("architecture", MAKER.ARCHITECTURES)
def test_golden_tables(architecture: str) -> None:
    found = MAKER.plans(architecture).splitlines()
    wanted = (GOLDEN / "plans" / f"{architecture}.md").read_text(encoding="utf-8").splitlines()
    for a, b in zip(found, wanted, strict=True):
        assert a == b, f"another kernel is taken on {architecture}; {REMAKE}"


def test_every_candidate_is_taken_somewhere() -> None:
    """By a golden table, but for those that the user asks for, or that weights ask for."""
    asked = {"cublas", "w8a8", "mul_mat_vec_q"}
    text = "".join(path.read_text() for path in (GOLDEN / "plans").glob("*.md"))
    assert {c.name for c in CANDIDATES if c.name not in text} == asked


@contextmanager
def counted(folders: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """Calls of Python functions in these folders of the package."""
    calls = dict.fromkeys(folders, 0)

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            for folder in folders:
                calls[folder] += folder in frame.f_code.co_filename.replace("\\", "/")

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("n", [1, 2, 4, 16])
def test_a_decode_step_decides_nothing_twice(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers: plans are looked up, one for each op that has one."""
    device = LaunchesOnHopper()
    ops = Cuda(device)
    decoder = random_decoder(ops)
    step = decode_step(n)
    ops.run(step, decoder.forward)
    monkeypatch.setattr(ops._graphs, "run", lambda *args: args[-1]())
    folders = ("ggpy/backends/cuda/plan/", "ggpy/backends/cuda/")
    with counted(folders) as calls:
        ops.run(step, decoder.forward)
    assert calls[folders[0]] == 2 * LAYERS + 1
    assert calls[folders[1]] < MOST_CALLS


@pytest.mark.parametrize("post_norms", [False, True])
@pytest.mark.parametrize("n", [1, 4, 16])
def test_hidden_states_take_the_same_kernels_but_the_heads(n: int, post_norms: bool) -> None:
    """Nothing is left to the head: the last layer adds to the residual stream itself. Nor is a
    token chosen, though the last step's were the best ones.
    """
    device = LaunchesOnHopper()
    ops = Cuda(device)
    decoder = random_decoder(ops, post_norms=post_norms)
    greedy = [Sampler(SamplingParams(temperature=0), V) for _ in range(n)]
    ops.sample(decoder.run(decode_step(n)), greedy)
    device.launched.clear()
    with ops.rehearsal():
        decoder.run(decode_step(n))
    with_head = [x for x in device.launched if "argmax" not in x[0]]
    assert len(with_head) < len(device.launched)
    device.launched.clear()
    x = decoder.hidden(decode_step(n))
    assert x.sum is None and x.dtype is np.float32
    assert device.launched and device.launched == with_head[: len(device.launched)]
    assert 1 <= len(with_head) - len(device.launched) <= 2, "a norm and a product"


def test_the_table_has_a_row_for_each_product() -> None:
    with plan_table_model("SmolLM2-135M:Q8_0") as rows:
        tensors = [row.tensor for row in rows if row.tokens == "1"]
    assert tensors == [
        "attn_q, attn_k, attn_v", "attention", "attn_output", "ffn_gate, ffn_up", "ffn_down",
        "output",
    ]  # fmt: skip
    assert {row.layers for row in rows} == {"0-29", ""}


@contextmanager
def plan_table_model(name: str) -> Iterator[list[plan_table.PlanRow]]:
    from ggpy.evaluate.synthetic import Synthetic

    with Synthetic(name, empty=True) as file:
        device = planned.device_of("sm_89")
        yield plan_table.table(file, device, plan_table.steps_of((1, 4), (64,)))


def test_an_unknown_architecture() -> None:
    with pytest.raises(ValueError, match="sm_61 is not known: take one of sm_75"):
        planned.device_of("sm_61")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"norm_whole": True, "norm_after_rope": True}, "norms of all heads after RoPE"),
        ({"k_norm": Norm(None, 1e-5, bias=1)}, "norms of heads with a bias"),
    ],
)
def test_what_no_kernel_computes_is_refused_by_name(change: Any, what: str) -> None:
    ops = Cuda(LaunchesOnHopper())
    decoder = random_decoder(ops)
    changed = Layer(0, replace(decoder.layers[0].mixer, **change), None)
    with pytest.raises(GGUFError, match=f"no kernel for {what}.*--device cpu"):
        ops.run(decode_step(1), lambda s: ops.mix(ops.embed(s, decoder.table), changed, s))


def test_plans_of_many_classes_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = Cuda(LaunchesOnHopper())
    decoder = random_decoder(ops)
    decoder.run(decode_step(1))
    most = 3 * len(ops.context.planner._plans)
    monkeypatch.setattr("ggpy.backends.cuda.plan.layers.MOST_PLANS", most)
    for n in range(2, 12):
        decoder.run(decode_step(n))
        assert len(ops.context.planner._plans) <= most + most // 3


def test_steps_of_one_class_share_plans() -> None:
    ops = Cuda(LaunchesOnHopper())
    decoder = random_decoder(ops)
    for position in range(3):
        decoder.run(decode_step(2, position))
    kept = len(ops.context.planner._plans)
    decoder.run(decode_step(2, 9))
    assert len(ops.context.planner._plans) == kept
