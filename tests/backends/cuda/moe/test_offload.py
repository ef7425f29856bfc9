"""Experts in host memory: the same bits as on the device, read where they lie or copied before."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from counting_device import CountingDevice
from scaled_experts import write_scaled

from ggpy.backends.cuda import memory
from ggpy.backends.cuda.backend import SPLIT_TOKENS, Cuda
from ggpy.backends.cuda.moe.staging import SLOTS, ExpertStaging
from ggpy.backends.cuda.plan import StepClass, copies_experts
from ggpy.backends.cuda.steps import upload
from ggpy.backends.cuda.steps.upload import PLACES
from ggpy.backends.interface import CacheGroup, CacheShape, Demand, PagedKV, Role, pages_for
from ggpy.formats import by_name
from ggpy.kernels.moe.route import RouterChoice

from ..test_backend import Model, ids_of, step_of

GB = 10**9
N_LAYERS = 2  # of the tiny models
MATRICES = 3 * N_LAYERS  # of experts: more than SLOTS, so that buffers are used again
SCALED = "qwen2moe with scales"
# Model -> layers whose experts are in host memory. Gate and up in one launch, and biases; in two,
# beside a shared expert.
MODELS = {"gpt-oss": N_LAYERS, "qwen2moe": 1, SCALED: 1}


class Copies:
    """Counts copies on the device, and graphs that are recorded."""

    def __init__(self, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = self.n_graphs = 0
        copy, capture = device.copy, device.capture

        def copied(*args: Any, **options: Any) -> None:
            self.n += 1
            copy(*args, **options)

        def captured() -> Any:
            self.n_graphs += 1
            return capture()

        monkeypatch.setattr(device, "copy", copied)
        monkeypatch.setattr(device, "capture", captured)
        monkeypatch.setattr(upload, "OFTEN", 1)  # decode steps are recorded for each place

    def take(self) -> int:
        """Those since the last call."""
        found, self.n = self.n, 0
        return found


def steps() -> list[Any]:
    """Prefill twice, decode of one token until it is a graph that is replayed, and a mix."""
    prompts = [step_of([(ids_of(33, i), 0, [3])]) for i in range(2)]
    single = [step_of([([40 + i], 33 + i, [3])]) for i in range(PLACES + 2)]
    return [*prompts, *single, step_of([([9], 38, [3]), (ids_of(20), 0, [5])])]


@pytest.mark.parametrize(("name", "n_layers"), MODELS.items())
def test_bits_are_those_of_experts_on_the_device(
    machine, tiny_path, tmp_path, monkeypatch, name, n_layers
) -> None:
    path = tiny_path(name.split()[0])
    if name == SCALED:
        path = write_scaled(path, tmp_path / "scaled.gguf")
    whole = Model(Cuda(machine), path)
    expected = [whole.logits(step) for step in steps()]
    model = Model(Cuda(machine), path, n_cpu_moe=n_layers)
    counted = Copies(machine, monkeypatch)
    for step, logits in zip(steps(), expected, strict=True):
        assert np.array_equal(model.logits(step), logits)
        assert counted.take() == (3 * n_layers if len(step.ids) > 1 else 0)
    assert counted.n_graphs == PLACES, "decode steps are recorded"


class Ordered:
    """A device that records what of its streams must precede what."""

    def __init__(self) -> None:
        self.stream = Queue(self)
        self.before: list[set[int]] = []  # of each operation, by its number
        self.copies: list[tuple[Any, Any, int]] = []  # destination, source, number
        self.new_stream, self.event = lambda: Queue(self), lambda: Mark(self)

    def add(self, queue: Queue) -> int:
        known = set(queue.waits)
        self.before.append(known.union(*(self.before[i] for i in known)))
        queue.waits = {len(self.before) - 1}
        return len(self.before) - 1

    def copy(self, to: Any, source: Any, nbytes: int, stream: Any) -> None:
        self.copies.append((to, source, self.add(stream)))


class Queue:
    """A stream: numbers of operations that the next one waits for."""

    def __init__(self, device: Ordered) -> None:
        self.device, self.waits = device, set[int]()

    def wait(self, mark: Mark) -> None:
        self.waits |= mark.after


class Mark:
    """An event."""

    def __init__(self, device: Ordered) -> None:
        self.device, self.after = device, set[int]()

    def record(self, stream: Any = None) -> Mark:
        self.after = set((stream or self.device.stream).waits)
        return self


def test_no_copy_and_no_product_comes_too_early(emulator, tiny_path) -> None:
    """A product waits for its copies, and a copy for the product that has its buffer."""
    layers = Model(Cuda(emulator), tiny_path("qwen2moe"), n_cpu_moe=N_LAYERS).decoder.layers
    device = Ordered()
    staging = ExpertStaging(device, lambda name, nbytes: name)  # type: ignore[arg-type, return-value]
    device.add(device.stream)  # the step before
    used: dict[Any, int] = {}  # buffer -> the last product that has it
    n_seen = 0

    def check_copies() -> None:
        nonlocal n_seen
        for slot, _, number in device.copies[n_seen:]:
            assert used.get(slot, 0) in device.before[number]
        n_seen = len(device.copies)

    for _ in range(2):  # steps
        staging.begin()
        first = len(device.copies)
        for layer in layers:
            e = layer.ffn.experts
            staging.enter(layer)
            check_copies()
            for weights in ([e.w_gate, e.w_up], [e.w_down]):
                slots = [w.data for w in staging.take(weights)]
                product = device.add(device.stream)
                for slot, w in zip(slots, weights, strict=True):
                    *_, (source, last) = [(s, n) for to, s, n in device.copies if to == slot]
                    assert source is w.tiles.data and last in device.before[product]
                    used[slot] = product
                staging.done()
                check_copies()
        assert len(device.copies) - first == MATRICES > SLOTS


def test_prompts_of_batch_invariant_bits_copy_too(machine, tiny_path, monkeypatch) -> None:
    """Their pairs are not sorted, and read an expert each."""
    step = step_of([(ids_of(20), 0, [0])])
    expected = Model(Cuda(machine, batch_invariant=True), tiny_path("gpt-oss")).logits(step)
    model = Model(Cuda(machine, batch_invariant=True), tiny_path("gpt-oss"), n_cpu_moe=N_LAYERS)
    counted = Copies(machine, monkeypatch)
    assert np.array_equal(model.logits(step), expected)
    assert counted.take() == MATRICES


class Foreseeing(Cuda):
    """Keeps what was asked of the memory."""

    def plan_memory(self, demand: Demand) -> int:
        self.demand = demand
        return super().plan_memory(demand)


def test_memory_is_foreseen(tiny_path) -> None:
    """Of the host to the byte, of the device as much at least."""
    device, notes = CountingDevice(), []
    ops = Foreseeing(device, note=notes.append)
    model = Model(ops, tiny_path("gpt-oss"), n_cpu_moe=1)
    experts = model.decoder.layers[0].ffn.experts
    nbytes = [w.nbytes for w in (experts.w_gate, experts.w_up, experts.w_down)]
    assert device.host_bytes == sum(nbytes)
    assert notes == [
        f"the experts of 1 layer, {sum(nbytes) / 1e9:.2f} GB, stay in host memory, and are read "
        "through the bus"
    ]
    model.logits(step_of([(ids_of(66), 0, [0, 1])]))
    need = memory.needed(ops.demand, SPLIT_TOKENS)
    assert device.most_bytes <= need.total
    copies = [memory.allocated(device.allocated[f"experts {i}"]) for i in range(SLOTS)]
    assert copies == [memory.allocated(max(nbytes))] * SLOTS
    assert memory.copied_bytes(ops.demand) == sum(copies)
    assert memory.copied_bytes(replace(ops.demand, n_batch=1)) == 0, "too few pairs"


def large(n_layers: int = 0) -> tuple[Foreseeing, Demand]:
    """48 layers of 128 experts, 1.4 GB each, of which the first have none; and what they ask."""
    ops = Foreseeing(CountingDevice())
    q8 = by_name("Q8_0")

    def tensor(*shape: int) -> Any:
        nbytes = prod(shape[:-1]) * q8.row_bytes(shape[-1])
        return SimpleNamespace(shape=shape, format=q8, nbytes=nbytes)

    weights = [(tensor(150000, 2048), Role("V D", lookup)) for lookup in (True, False)]
    for layer in range(2, 50):
        weights += [(tensor(8192, 2048), Role("F D", layer=layer))]
        role = Role("X Fx D", on_host=layer < n_layers, layer=layer)
        weights += [(tensor(128, 1536, 2048), role)] * 2 + [(tensor(128, 2048, 1536), role)]
    group = CacheGroup(PagedKV(32, 4, 128, 128), tuple(range(48)), pages_for(32768))
    sizes = {"n_embd": 2048, "n_ff": 6144, "n_vocab": 150000, "n_seq": 1}
    sizes |= {"n_batch": 2048, "least_batch": 512}
    sizes |= {"n_used": 8, "n_ff_expert": 1536, "n_expert": 128}
    return ops, Demand(weights, **sizes, cache=lambda n_batch: CacheShape((group,)))


@pytest.fixture
def plan_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Plans the memory of a device, and of a host, that have so many bytes free: tokens of a
    step.
    """

    def plan(on_device: int, n_layers: int = 0, on_host: int | None = None) -> int:
        monkeypatch.setattr("ggpy.backends.host.available_memory", lambda: on_host)
        ops, demand = large(n_layers)
        ops.device.total = ops.device.used_bytes + on_device
        return ops.plan_memory(demand)

    return plan


def test_a_model_that_does_not_fit_is_told_how_many_layers_to_offload(plan_with) -> None:
    """So many that steps are large, which copies are worth; with one fewer they are smaller."""
    free = memory.needed(replace(large(20)[1], n_batch=512), SPLIT_TOKENS).total
    words = "experts of the first 21 layers in the memory of the host make room "
    with pytest.raises(MemoryError, match=words + r"\(--n-cpu-moe 21; --cpu-moe: of all layers\)"):
        plan_with(free)
    assert (plan_with(free, 21), plan_with(free, 20)) == (2048, 512)
    with pytest.raises(MemoryError, match=words):
        plan_with(free - 1, 20)


def test_a_smaller_context_is_the_other_remedy(plan_with) -> None:
    """A layer has 1.28 GB, and copies as much again."""
    everything = memory.needed(large()[1], SPLIT_TOKENS).total
    with pytest.raises(MemoryError, match=r"would fit \(-c \d+\), or the experts of the first 4 l"):
        plan_with(everything - GB)
    with pytest.raises(MemoryError, match=r"context of \d+ tokens would fit \(-c \d+\) with --cpu"):
        plan_with(5 * GB)
    with pytest.raises(MemoryError, match="no context would fit: take a smaller model or --device"):
        plan_with(GB)


def test_host_memory_is_foreseen_too(plan_with) -> None:
    plan_with(999 * GB, 20, 30 * GB)
    words = r"the experts of 48 layers, 61\.61 GB, do not fit into host memory, of which 30\.00 GB "
    with pytest.raises(MemoryError, match=words) as refusal:
        plan_with(999 * GB, 50, 30 * GB)
    (n,) = map(int, re.findall(r"keep fewer there \(--n-cpu-moe (\d+)\)", str(refusal.value)))
    plan_with(999 * GB, n, 30 * GB)
    with pytest.raises(MemoryError):
        plan_with(999 * GB, n + 1, 30 * GB)
    with pytest.raises(MemoryError, match="take a smaller model"):
        plan_with(999 * GB, 50, GB)


@pytest.mark.parametrize(
    ("n_tokens", "options", "copied"),
    [
        *((1, {}, False), (32, {}, False), (63, {}, False), (64, {}, True), (2048, {}, True)),
        *((31, {"batch_invariant": True}, False), (32, {"batch_invariant": True}, True)),
    ],
)
def test_experts_are_copied_where_most_are_needed(emulator, n_tokens, options, copied) -> None:
    """gpt-oss-120b: from 64 tokens on 87 % of its experts."""
    planner = Cuda(emulator, **options).context.planner
    step = StepClass(n_tokens, n_tokens, False, True, True)
    assert copies_experts(planner, RouterChoice(128, 4), step) == copied


def test_experts_that_are_read_where_they_lie_are_not_packed(emulator, tiny_path) -> None:
    """With a pair an expert, and, on the device, with more than another kernel takes."""
    model = Model(Cuda(emulator), tiny_path("gpt-oss"), n_cpu_moe=1)
    planner = model.ops.context.planner
    planner.has_wgmma = True
    first, second = model.decoder.layers[:2]
    router = first.ffn.router
    one = -(-first.ffn.experts.w_up.n_experts // router.n_used)  # tokens of a pair an expert
    steps = [StepClass(n, n, True, True, True) for n in (one, 14 * one)]
    plans = [planner.moe(*given) for given in zip((first, second), steps, strict=True)]
    assert [(plan.packed, plan.few_rows, plan.copied) for plan in plans] == [
        (False, True, False),
        (True, False, False),
    ]
