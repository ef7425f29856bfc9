"""Checked ops: silent as long as all is finite, and right about where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ggpy.backends.check import Checked, NotFinite
from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.numpy.backend import Reference
from ggpy.gguf import File
from ggpy.model import Model
from ggpy.tokenizer import Tokenizer


class Spoiled(Reference):
    """Puts a value into what an op returns, or a layer computes inside, with a probe and without.

    What is computed inside is spoiled where it lies, before the layer goes on with it.
    """

    def __init__(self, op: str, layer: int = -1, value: float = np.nan, row: int = 0) -> None:
        super().__init__(1)
        self.op, self.layer, self.value, self.row = op, layer, value, row
        self.spoils = False
        self.probed: list[bool] = []

    def run(self, step: Any, forward: Callable[[Any], Any], probe: Any = None) -> Any:
        def spoil(layer: int, name: str, array: np.ndarray) -> None:
            self._spoil(name, array, layer)
            if probe:
                probe(layer, name, array)

        self.probed.append(probe is not None)
        return super().run(step, forward, spoil)

    def _spoil(self, op: str, output: Any, layer: int = -1) -> Any:
        if self.spoils and (op, layer) == (self.op, self.layer):
            output[self.row].flat[1] = self.value
        return output

    def embed(self, step, table, scale=1.0, norm=None):
        return self._spoil("embed", super().embed(step, table, scale, norm))

    def logits(self, x, head, step):
        return self._spoil("logits", super().logits(x, head, step))


@pytest.fixture
def model_on(tiny_path) -> Any:
    def load(ops: Reference) -> Model:
        file = File(tiny_path("llama"))
        return Model(file, Tokenizer.from_gguf(file), Checked(ops), n_ctx=64)

    return load


def test_nothing_happens_to_a_sound_model(tiny_path, model_on) -> None:
    checked = model_on(Spoiled(""))
    file = File(tiny_path("llama"))
    plain = Model(file, Tokenizer.from_gguf(file), Reference(1), n_ctx=64)
    options = {"max_tokens": 8, "temperature": 0}
    texts = [[p.id for p in m.generate("hello", **options)] for m in (checked, plain)]
    assert texts[0] == texts[1]
    assert checked.ops.records == []
    assert not any(checked.ops._ops.probed), "the fast way is what is checked"


@pytest.mark.parametrize(
    ("op", "layer", "words"),
    [
        ("embed", -1, "first are in embed, 1 of 64 values at position 0 (nan)"),
        ("qkv", 0, "first are in layer 0, qkv, 1 of 64 values at position 0 (nan)"),
        ("attention", 1, "first are in layer 1, attention, 1 of 64 values at position 0 (nan)"),
        ("attn_out", 0, "first are in layer 0, attn_out, 1 of 64"),
        ("ffn_act", 1, "first are in layer 1, ffn_act, 1 of 96"),
        ("ffn_out", 1, "first are in layer 1, ffn_out, 1 of 64"),
        ("logits", -1, "1 logits are NaN or infinite; the first are in logits, 1 of 453"),
    ],
)
def test_the_first_op_with_nan_is_named(model_on, op: str, layer: int, words: str) -> None:
    ops = Spoiled(op, layer)
    model = model_on(ops)
    ops.spoils = True
    with pytest.raises(NotFinite) as error:
        list(model.generate([5], max_tokens=3))
    assert words in str(error.value)
    assert ops.probed == [False, True]


def test_hidden_states_are_looked_at(model_on) -> None:
    ops = Spoiled("ffn_out", 1)
    model = model_on(ops)
    assert model.embed([5, 6]).shape == (1, 64)
    ops.spoils = True
    words = "1 values of the hidden state are NaN or infinite; the first are in layer 1, ffn_out"
    with pytest.raises(NotFinite, match=words):
        model.embed([5, 6])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_token_is_named_by_its_position(model_on) -> None:
    ops = Spoiled("attention", 0, np.inf, row=2)
    model = model_on(ops)
    ops.spoils = True
    with pytest.raises(
        NotFinite, match=r"layer 0, attention, 1 of 64 values at position 2 \(inf\)"
    ):
        list(model.generate([5, 6, 7, 8], max_tokens=3))


def test_nan_in_the_middle_of_an_answer_stops_it(model_on) -> None:
    ops = Spoiled("attention", 0)
    pieces = []
    model = model_on(ops)
    with pytest.raises(NotFinite, match="position 3 "):
        for piece in model.generate([5, 6], max_tokens=30, temperature=0):
            pieces.append(piece)
            ops.spoils = len(pieces) >= 2
    assert len(pieces) == 2


def test_a_fault_of_the_repeated_form_alone_is_told_apart(model_on) -> None:
    class Fused(Spoiled):
        def run(self, step, forward, probe=None):
            self.spoils = probe is None
            return super().run(step, forward, probe)

    model = model_on(Fused("logits"))
    with pytest.raises(NotFinite, match="run op by op it has none"):
        model.logits([1, 2])


def test_the_ops_of_a_gpu_are_taken_apart_where_numbers_end(machine, tiny_path) -> None:
    class SpoiledCuda(Cuda):
        spoils = False

        def mix(self, x, layer, step):
            x = super().mix(x, layer, step)
            if self.spoils and layer.index == 0:
                self.device.upload(x.data, np.full(2, np.nan, np.float32))
            return x

    ops = SpoiledCuda(machine)
    with File(tiny_path("llama")) as file:
        model = Model(file, Tokenizer.from_gguf(file), Checked(ops), n_ctx=64)
    assert len(list(model.generate([5, 6], max_tokens=5, temperature=0))) == 5  # some are graphs
    ops.spoils = True
    with pytest.raises(
        NotFinite, match=r"in layer 0, ffn_act, 96 of 96 values at position 0 \(nan\)"
    ):
        model.logits([5, 6])
