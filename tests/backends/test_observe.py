"""Observed ops: every product's input is shown, by the name of its tensor, and nothing changes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tiny_gemma4 import EXPERTS, write_tiny_gemma4

from ggpy.backends.numpy.backend import Reference
from ggpy.backends.observe import ObservedOps
from ggpy.gguf import File
from ggpy.model import Model
from ggpy.tokenizer import Tokenizer
from tools.make_tiny import MODELS

IDS = list(range(10, 20))


class Watched(Reference):
    """Keeps what its matrices are multiplied with: [T, K], by name."""

    def __init__(self) -> None:
        super().__init__(1)
        self.inputs: list[tuple[str, np.ndarray]] = []

    def weight(self, tensor, role, scale=None, activations="f16"):
        weight = super().weight(tensor, role)
        if len(tensor.shape) == 2:
            multiply = weight.multiply

            def watched(x):
                self.inputs.append((tensor.name, x))
                return multiply(x)

            weight.multiply = watched
        return weight


def open_model(path, ops) -> Model:
    file = File(path)
    return Model(file, Tokenizer.from_gguf(file), ops, n_ctx=64)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if not model.experts])
def test_what_is_shown_is_what_is_multiplied(name: str, tiny_path) -> None:
    seen: list[tuple[str, np.ndarray]] = []
    watched = Watched()
    ops = ObservedOps(watched, lambda name, x: seen.append((name, x)))
    logits = open_model(tiny_path(name), ops).logits(IDS)
    assert np.array_equal(logits, open_model(tiny_path(name), Reference(1)).logits(IDS))
    real = dict(watched.inputs)
    assert dict(seen).keys() == real.keys()
    assert set(Counter(n for n, _ in seen).values()) == {1}, "fused parts are shown once"
    for tensor, x in seen:
        np.testing.assert_allclose(x, real[tensor], rtol=1e-6, err_msg=tensor)
        assert x.dtype == np.float32


def test_a_feed_forward_beside_experts_is_shown(tmp_path, monkeypatch) -> None:
    """And what the router takes, which has a norm of its own."""
    path = write_tiny_gemma4(tmp_path, monkeypatch, EXPERTS, together=True)
    seen: dict[str, np.ndarray] = {}
    experts: set[str] = set()
    watched = Watched()
    see = (lambda name, x: seen.update({name: x}), lambda name, n, x, ids: experts.add(name))
    logits = open_model(path, ObservedOps(watched, *see)).logits(IDS)
    assert np.array_equal(logits, open_model(path, Reference(1)).logits(IDS))
    real = dict(watched.inputs)
    names = {f"blk.0.ffn_{x}.weight" for x in ("gate", "up", "down", "gate_inp")}
    assert seen.keys() == real.keys() > names
    for tensor, x in seen.items():
        np.testing.assert_allclose(x, real[tensor], rtol=1e-5, atol=1e-6, err_msg=tensor)
    assert {"blk.0.ffn_gate_up_exps.weight", "blk.0.ffn_down_exps.weight"} <= experts


def test_the_output_is_shown_all_tokens(tiny_path) -> None:
    """Though a generated text needs the logits of its last token alone."""
    seen: dict[str, int] = {}
    ops = ObservedOps(Reference(1), lambda name, x: seen.update({name: len(x)}))
    for _ in open_model(tiny_path("llama"), ops).generate("Once upon", max_tokens=1):
        pass
    assert seen["output.weight"] == seen["blk.0.attn_q.weight"] > 1


class WatchedExperts(Reference):
    """Keeps what meets each expert, in the order in which it is multiplied."""

    def __init__(self) -> None:
        super().__init__(1)
        self.inputs: dict[tuple[str, int], np.ndarray] = {}

    def weight(self, tensor, role, scale=None, activations="f16"):
        weight = super().weight(tensor, role)
        if len(tensor.shape) == 3:
            expert_of = weight.expert

            def watched(index):
                matrix = expert_of(index)
                multiply = matrix.multiply

                def multiply_watched(x):
                    self.inputs[tensor.name, index] = x
                    return multiply(x)

                matrix.multiply = multiply_watched
                return matrix

            weight.expert = watched
        return weight


@pytest.mark.parametrize("name", ["qwen3moe", "qwen2moe", "gpt-oss"])
def test_what_meets_each_expert_is_shown(name: str, tiny_path) -> None:
    dense: dict[str, np.ndarray] = {}
    shown: dict[tuple[str, int], np.ndarray] = {}

    def see_experts(tensor: str, n: int, x: np.ndarray, ids: np.ndarray) -> None:
        assert n == 8 and x.shape[:2] == ids.shape == (len(IDS), 2)
        shown.update({(tensor, int(e)): x[ids == e] for e in np.unique(ids)})

    watched = WatchedExperts()
    ops = ObservedOps(watched, lambda name, x: dense.update({name: x}), see_experts)
    logits = open_model(tiny_path(name), ops).logits(IDS)
    assert np.array_equal(logits, open_model(tiny_path(name), Reference(1)).logits(IDS))
    assert shown.keys() == watched.inputs.keys()
    for key, x in shown.items():
        np.testing.assert_allclose(x, watched.inputs[key], rtol=1e-6, err_msg=str(key))
    assert ("blk.1.ffn_down_shexp.weight" in dense) == (name == "qwen2moe")
    assert "blk.1.ffn_gate_inp.weight" in dense and not any("_exps" in x for x in dense)


def test_without_a_word_for_experts_all_that_meets_a_tensor_is_shown(tiny_path) -> None:
    seen: dict[str, tuple[int, ...]] = {}
    ops = ObservedOps(Reference(1), lambda name, x: seen.update({name: x.shape}))
    open_model(tiny_path("qwen3moe"), ops).logits(IDS)
    assert seen["blk.0.ffn_gate_exps.weight"] == (20, 64)
    assert seen["blk.0.ffn_down_exps.weight"] == (20, 32)
