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
    """Puts a value into what one call of an op returns, in steps op by op and in others alike."""

    def __init__(self, op: str, call: int, value: float = np.nan, row: int = 0) -> None:
        super().__init__(1)
        self.op, self.call, self.value, self.row = op, call, value, row
        self.spoils = False
        self.n_calls = 0
        self.repeats: list[bool] = []

    def run(self, step: Any, forward: Callable[[Any], Any], repeat: bool = True) -> Any:
        self.n_calls = 0
        self.repeats.append(repeat)
        return super().run(step, forward, repeat)

    def _spoil(self, op: str, output: Any) -> Any:
        if op == self.op and self.spoils:
            if self.n_calls == self.call:
                output = output.copy()
                output[self.row].flat[1] = self.value
            self.n_calls += 1
        return output

    def embed(self, step, table, scale=1.0):
        return self._spoil("embed", super().embed(step, table, scale))

    def attend(self, q, attention, step):
        return self._spoil("attend", super().attend(q, attention, step))

    def linear_add(self, h, w, x, post_norm=None, then=None):
        return self._spoil("linear_add", super().linear_add(h, w, x, post_norm, then))

    def logits(self, x, head, step):
        return self._spoil("logits", super().logits(x, head, step))


@pytest.fixture
def model_on(tiny_path) -> Any:
    def load(ops: Reference) -> Model:
        file = File(tiny_path("llama"))
        return Model(file, Tokenizer.from_gguf(file), Checked(ops), n_ctx=64)

    return load


def test_nothing_happens_to_a_sound_model(tiny_path, model_on) -> None:
    checked = model_on(Spoiled("", 0))
    file = File(tiny_path("llama"))
    plain = Model(file, Tokenizer.from_gguf(file), Reference(1), n_ctx=64)
    options = {"max_tokens": 8, "temperature": 0}
    texts = [[p.id for p in m.generate("hello", **options)] for m in (checked, plain)]
    assert texts[0] == texts[1]
    assert checked.ops.records == []
    assert all(checked.ops._ops.repeats), "the fast way is what is checked"


@pytest.mark.parametrize(
    ("op", "call", "words"),
    [
        ("embed", 0, "first are in embed, 1 of 64 values at position 0 (nan)"),
        ("attend", 1, "first are in layer 1, attend, 1 of 64 values at position 0 (nan)"),
        ("linear_add", 0, "first are in layer 0, linear_add after attend, 1 of 64"),
        ("linear_add", 3, "first are in layer 1, linear_add after ffn, 1 of 64"),
        ("logits", 0, "1 logits are NaN or infinite; the first are in logits, 1 of 453"),
    ],
)
def test_the_first_op_with_nan_is_named(model_on, op: str, call: int, words: str) -> None:
    ops = Spoiled(op, call)
    model = model_on(ops)
    ops.spoils = True
    with pytest.raises(NotFinite) as error:
        list(model.generate([5], max_tokens=3))
    assert words in str(error.value)
    assert ops.repeats == [True, False]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_token_is_named_by_its_position(model_on) -> None:
    ops = Spoiled("attend", 0, np.inf, row=2)
    model = model_on(ops)
    ops.spoils = True
    with pytest.raises(NotFinite, match=r"layer 0, attend, 1 of 64 values at position 2 \(inf\)"):
        list(model.generate([5, 6, 7, 8], max_tokens=3))


def test_nan_in_the_middle_of_an_answer_stops_it(model_on) -> None:
    ops = Spoiled("attend", 0)
    pieces = []
    model = model_on(ops)
    with pytest.raises(NotFinite, match="position 3 "):
        for piece in model.generate([5, 6], max_tokens=30, logit_bias={i: 0 for i in range(3)}):
            pieces.append(piece)
            ops.spoils = len(pieces) >= 2
    assert len(pieces) == 2


def test_a_fault_of_the_repeated_form_alone_is_told_apart(model_on) -> None:
    class Fused(Spoiled):
        def run(self, step, forward, repeat=True):
            self.spoils = repeat
            return super().run(step, forward, repeat)

    model = model_on(Fused("logits", 0))
    with pytest.raises(NotFinite, match="run op by op it has none"):
        model.logits([1, 2])


def test_the_ops_of_a_gpu_are_taken_apart_where_numbers_end(machine, tiny_path) -> None:
    class SpoiledCuda(Cuda):
        spoils = False

        def attend(self, q, attention, step):
            o = super().attend(q, attention, step)
            if self.spoils and attention.layer == 1:
                self.device.upload(o.data, np.full(2, np.nan, np.float16))
            return o

    ops = SpoiledCuda(machine)
    with File(tiny_path("llama")) as file:
        model = Model(file, Tokenizer.from_gguf(file), Checked(ops), n_ctx=64)
    assert len(list(model.generate([5, 6], max_tokens=5, temperature=0))) == 5  # some are graphs
    ops.spoils = True
    with pytest.raises(
        NotFinite, match=r"in layer 1, attend, 2 of 64 values at position 0 \(nan\)"
    ):
        model.logits([5, 6])
