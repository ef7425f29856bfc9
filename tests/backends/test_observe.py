"""Observed ops: every product's input is shown, by the name of its tensor, and nothing changes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

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


@pytest.mark.parametrize("name", MODELS)
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


def test_the_output_is_shown_all_tokens(tiny_path) -> None:
    """Though a generated text needs the logits of its last token alone."""
    seen: dict[str, int] = {}
    ops = ObservedOps(Reference(1), lambda name, x: seen.update({name: len(x)}))
    for _ in open_model(tiny_path("llama"), ops).generate("Once upon", max_tokens=1):
        pass
    assert seen["output.weight"] == seen["blk.0.attn_q.weight"] > 1
