"""Mixtures of experts on a GPU against the reference: forms of a layer, steps of whole models."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import kl_divergence, nmse
from prepared import Prepared
from random_moe import FORMS, FORMS_WITH_SCALES, Form, random_moe, random_x
from scaled_experts import write_scaled

from ggpy import arch
from ggpy.arch import llama4
from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.cuda.steps import upload
from ggpy.backends.cuda.steps.upload import PLACES
from ggpy.backends.interface import AttentionTemperature, Layer
from ggpy.backends.numpy import moe as reference
from ggpy.backends.numpy.backend import Reference
from ggpy.gguf import File, GGUFError
from ggpy.kernels.moe.route import RouterChoice
from tools import make_tiny

from ..test_backend import KL, PAGES, Model, ids_of, step_of

MODELS = [name for name, model in make_tiny.MODELS.items() if model.experts]
ALL_FORMS = {**FORMS, **FORMS_WITH_SCALES}
BATCHED = ("qwen3moe", "qwen2moe", "gpt-oss")  # of each way to combine the kernels of experts
# A GPU rounds activations to halves: where two experts are liked nearly alike, it may choose the
# other one. Tokens are compared whose last choice is by so much better than the next best.
MARGIN = 0.02
OF_A_ROW, OF_ALL = 1.5e-4, 2e-5
# Norms of small heads that begin near 0 enlarge what was rounded before them: test_backend.SLACK.
SLACK = dict.fromkeys(("qwen35moe", "qwen3next"), 10)


def lead(likes: np.ndarray, n_used: int) -> np.ndarray:
    """By how much, of the range of all, the worst of the n_used best beats the next."""
    likes = np.sort(likes, axis=-1)
    k = likes.shape[1] - n_used
    return (likes[:, k] - likes[:, k - 1]) / (likes[:, -1] - likes[:, 0] + 1e-9)


class Margins:
    """By how much each token's worst choice, of groups or of experts, beats what it left; the least
    of all layers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.least = np.zeros(0)
        route = reference.route

        def watched(n: np.ndarray, router: Any) -> Any:
            likes = router.weight.affine(n, router.bias)
            if router.choice_bias is not None:
                likes = reference.SCORES[router.score](likes) + router.choice_bias
            (n_groups, used), size = router.groups, likes.shape[1] // router.groups[0]
            gap = np.ones(len(likes))
            if used < n_groups:
                inside = likes.reshape(-1, n_groups, size)
                groups = np.sort(inside, axis=-1)[..., -2:].sum(axis=-1)
                gap = lead(groups, used)
                best = np.argsort(-groups, axis=-1)[:, :used, None]
                likes = np.take_along_axis(inside, best, axis=1).reshape(len(likes), -1)
            gap = np.minimum(gap, lead(likes, router.n_used))
            same = len(self.least) == len(gap)
            self.least = np.minimum(self.least, gap) if same else gap
            return route(n, router)

        monkeypatch.setattr(reference, "route", watched)

    def take(self) -> np.ndarray:
        """Those of the last step."""
        found, self.least = self.least, np.zeros(0)
        return found


class MoEPair:
    """A model on both backends."""

    def __init__(self, device: Any, path: Any, monkeypatch: pytest.MonkeyPatch, **options: Any):
        self.gpu, self.cpu = Model(Cuda(device, **options), path), Model(Reference(1), path)
        self.margins, self.slack = Margins(monkeypatch), SLACK.get(path.stem, 1)

    def step(self, chunks: list, rows: list[int] | None = None) -> np.ndarray:
        step = step_of(chunks, rows)
        got, expected = self.gpu.logits(step), self.cpu.logits(step)
        clear = self.margins.take()[step.rows] > MARGIN
        assert clear.mean() > 0.6 or len(clear) < 4
        for a, b in zip(got[clear], expected[clear], strict=True):
            assert nmse(a, b) <= self.slack * OF_A_ROW
        if clear.any():
            most = OF_ALL if len(clear) > 20 else OF_A_ROW
            assert nmse(got[clear], expected[clear]) <= self.slack * most
            assert kl_divergence(got[clear], expected[clear]) <= self.slack * KL
        return got


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_every_kind(machine, tiny_path, monkeypatch, name) -> None:
    """Prefill by sorted pairs, decode of one to three tokens in graphs, and a mix."""
    counted, capture = [], machine.capture
    monkeypatch.setattr(machine, "capture", lambda: (counted.append(1), capture())[1])
    monkeypatch.setattr(upload, "OFTEN", 1)  # decode steps are recorded for each place
    pair = MoEPair(machine, tiny_path(name), monkeypatch)
    lengths = [5, 66, 1]
    pair.step([(ids_of(n, n), 0, t) for n, t in zip(lengths, PAGES, strict=False)], list(range(72)))
    for _ in range(5):  # decode: directly, recorded for each place, replayed
        pair.step([([40 + n], n, t) for n, t in zip(lengths, PAGES, strict=False)])
        lengths = [n + 1 for n in lengths]
    assert len(counted) == PLACES
    mixed = [([9], lengths[0], PAGES[0]), (ids_of(3), 0, PAGES[3]), ([8], lengths[2], PAGES[2])]
    pair.step(mixed)


def test_a_scale_of_each_expert(machine, tiny_path, tmp_path, monkeypatch) -> None:
    """As files in NVFP4 have them, and one for the router and each matrix of a shared expert."""
    pair = MoEPair(machine, write_scaled(tiny_path("qwen2moe"), tmp_path / "s.gguf"), monkeypatch)
    pair.step([(ids_of(66, 66), 0, PAGES[1])], list(range(66)))
    for i in range(3):
        pair.step([([40 + i], 66 + i, PAGES[1])])


def test_llama4_beyond_a_chunk(machine, tmp_path, monkeypatch) -> None:
    """Chunks of 24 positions, and queries that grow from there on."""
    monkeypatch.setattr(llama4, "CHUNK", 24)
    monkeypatch.setattr(llama4, "TEMPERATURE", AttentionTemperature(0.5, 24, offset=1))
    path = make_tiny.write(tmp_path / "llama4.gguf", "llama4")
    pair = MoEPair(machine, path, monkeypatch)
    pair.step([(ids_of(60), 0, PAGES[1]), (ids_of(23, 1), 0, PAGES[0])], list(range(83)))
    pair.step([(ids_of(20, 2), 60, PAGES[1]), ([9], 23, PAGES[0])], list(range(21)))
    for i in range(4):
        pair.step([([40 + i], 80 + i, PAGES[1]), ([50 + i], 24 + i, PAGES[0])])


@pytest.mark.parametrize("name", BATCHED)
def test_decode_has_the_same_bits_alone_and_in_a_batch(machine, tiny_path, name) -> None:
    found = []
    for n in (1, 2, 5):
        model = Model(Cuda(machine, batch_invariant=True), tiny_path(name))
        model.logits(step_of([(ids_of(3, 7 + i), 0, [i]) for i in range(n)]))
        steps = [
            model.logits(step_of([([20 + j + i], 3 + j, [i]) for i in range(n)]))[0]
            for j in range(3)
        ]
        found.append(steps)
    for steps in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(steps, found[0], strict=True))


class OneLayer:
    """One mixture of experts on a backend."""

    def __init__(self, ops: Any, form: Form) -> None:
        self.ops, self.form = ops, form
        layer = SimpleNamespace(index=0, mixer=None, ffn=random_moe(ops, form), next=None)
        self.layer: Layer = layer  # type: ignore[assignment]

    def run(self, x: np.ndarray, decode: bool, probe: Any = None) -> np.ndarray:
        """x with its output, on a GPU."""
        n, ops = len(x), self.ops
        batch = SimpleNamespace(n_tokens=n)
        c = ops.context
        from ggpy.backends.cuda.plan import StepClass

        c._batch, c.probe, c.s = batch, probe, StepClass(n, n, decode, True, probe is None)
        c.norms.begin()
        memory = c.f32("x", n, self.form.D)
        ops.device.upload(memory.data, x)
        return ops.read(ops.moe.feed_forward(memory, self.layer))


@pytest.mark.parametrize(("n_tokens", "decode"), [(1, True), (9, True), (40, False)])
@pytest.mark.parametrize("name", ALL_FORMS)
def test_every_form_of_a_layer(emulator, name, n_tokens, decode) -> None:
    """By pairs, and sorted in decode and in prefill."""
    form, x = ALL_FORMS[name], random_x(ALL_FORMS[name], n_tokens)
    expected = reference.feed_forward(x, random_moe(Reference(1), form), lambda *_: None)
    y = OneLayer(Cuda(emulator), form).run(x, decode)
    assert nmse(y - x, (expected - x).astype(np.float64)) <= 3e-6


def test_a_layer_norm_before_experts(emulator) -> None:
    """It is a kernel of its own, and the router is told of no norm."""
    form, found = FORMS["gated shared"], []
    x = random_x(form, 9) + np.float32(2)
    ops = Cuda(emulator)
    for layer in (OneLayer(ops, form), OneLayer(Reference(1), form)):
        ffn = layer.layer.ffn
        layer.layer.ffn = replace(ffn, norm=replace(ffn.norm, centred=True, bias=ffn.shared.gate))
        found.append(layer)
    expected = reference.feed_forward(x, found[1].layer.ffn, lambda *_: None)
    y = found[0].run(x, True)
    assert nmse(y - x, (expected - x).astype(np.float64)) <= 3e-6


def test_pairs_are_sorted_if_that_saves_reading(emulator) -> None:
    """On Hopper, Qwen3-30B-A3B from 9 tokens on, small experts from two pairs an expert on;
    elsewhere from one pair an expert on.
    """
    from ggpy.backends.cuda.plan import StepClass, sorted_tile

    def tile(n: int, nbytes: int, hopper: bool = True, fused: bool = True, **options: Any) -> int:
        planner = Cuda(emulator, **options).context.planner
        planner.has_wgmma = hopper
        choice, step = RouterChoice(128, 8), StepClass(n, n, True, True, fused)
        return sorted_tile(planner, choice, step, nbytes)

    qwen3, small = 2_900_000, 50_000
    assert [tile(n, qwen3) for n in (1, 8, 9, 64, 2048)] == [0, 0, 16, 16, 64]
    assert [tile(n, small) for n in (1, 31, 32, 2048)] == [0, 0, 16, 64]
    assert [tile(n, qwen3, hopper=False) for n in (1, 15, 16, 64)] == [0, 0, 16, 16]
    assert [tile(n, 100 * qwen3) for n in (2, 3)] == [0, 16]  # two keep their bits
    assert tile(64, qwen3, fused=False) == tile(64, qwen3, batch_invariant=True) == 0


PACKED = [("softmax", 130, 64), ("gpt-oss", 140, 64), ("two types", 129, 64)]
PACKED += [
    ("NVFP4 with biases", 130, 64),
    ("normalised", 210, 256),
    ("gpt-oss", 300, 256),
    ("all experts", 80, 256),
    ("all experts", 202, 288),
    ("softmax", 60, 64),
]


@pytest.mark.parametrize(("name", "n_tokens", "tile"), PACKED)
def test_packed_rows(machine, monkeypatch, name, n_tokens, tile) -> None:
    """More than eight pairs an expert, on a GPU with wgmma; in the emulator as if it had it."""
    form, x = ALL_FORMS[name], random_x(ALL_FORMS[name], n_tokens)
    expected = reference.feed_forward(x, random_moe(Reference(1), form), lambda *_: None)
    layer = OneLayer(Cuda(machine), form)
    context = layer.ops.context
    if isinstance(machine, Prepared):
        monkeypatch.setattr(context.planner, "has_wgmma", True)
    elif not context.planner.has_wgmma:
        pytest.skip(f"{machine.arch} has no wgmma")
    y = layer.run(x, False)
    plan = context.planner.moe(layer.layer, context.s)
    assert plan.packed and plan.tile_rows == tile
    assert nmse(y - x, (expected - x).astype(np.float64)) <= 3e-6


@pytest.mark.parametrize("name", ["normalised", "gated shared", "gpt-oss"])
def test_a_probe_is_told_what_is_inside(emulator, name) -> None:
    form, x = FORMS[name], random_x(FORMS[name], 40)
    told: dict[str, np.ndarray] = {}
    ours: dict[str, np.ndarray] = {}
    ffn = random_moe(Reference(1), form)
    reference.feed_forward(x, ffn, lambda what, array: told.update({what: array.copy()}))
    ops = Cuda(emulator)
    OneLayer(ops, form).run(
        x, False, lambda layer, what, array: ours.update({what: ops.read(array)})
    )
    assert list(ours) == list(told)
    assert np.array_equal(ours["experts"], told["experts"])
    for what in told.keys() - {"experts"}:
        assert ours[what].shape == told[what].shape
        assert nmse(ours[what], told[what].astype(np.float64)) <= 3e-6


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (Form(type="F32"), "has experts in F32 with 64 columns, which no kernel multiplies"),
        (Form(D=72, type="F16", F=36), "has experts in F16 with 36 columns"),
    ],
)
def test_experts_that_no_kernel_multiplies(emulator, form, message) -> None:
    with pytest.raises(GGUFError, match=message):
        random_moe(Cuda(emulator), form)


@pytest.mark.parametrize(
    ("form", "lacks"),
    [
        (Form(X=40, J=33), "33 experts of a token, 32 are the most"),
        (Form(score="squares"), "routers with the score 'squares'"),
    ],
)
def test_routers_beyond_the_kernel_are_refused_by_name(emulator, form, lacks) -> None:
    layer = OneLayer(Cuda(emulator), form)
    with pytest.raises(GGUFError, match=f"no kernel for {lacks}"):
        layer.run(random_x(form, 1), True)


def test_memory_is_counted(tiny_path) -> None:
    """What a step allocates for experts is not more than what is planned for it."""
    from ggpy.backends.cuda.memory import _expert_bytes

    demands: list[Any] = []

    class Counting(Reference):
        def plan_memory(self, demand: Any) -> int:
            demands.append(demand)
            return super().plan_memory(demand)

    with File(tiny_path("gpt-oss")) as file:
        arch.load(file, Counting(1), 64)
    (demand,) = demands
    assert (demand.n_used, demand.n_ff_expert, demand.n_ff) == (2, 32, 96)
    each = (4 + 4 + 2) * 32 + 4 * 64 + 16 + 2 * (128 + 128)
    assert _expert_bytes(demand) == 2 * each + 4 * demand.n_expert + 4 * 64 + 4


def test_greedy_ids(machine, tiny_path) -> None:
    """A whole model answers as the reference does: greedy ids."""
    ids = ids_of(6, 3)
    found = []
    for ops in (Cuda(machine), Reference(1)):
        model, at = Model(ops, tiny_path("qwen3moe")), list(ids)
        step = step_of([(at, 0, [0])])
        for _ in range(6):
            logits = model.logits(step)
            at.append(int(np.argmax(logits[-1])))
            step = step_of([([at[-1]], len(at) - 1, [0])])
        found.append(at)
    assert found[0] == found[1]
