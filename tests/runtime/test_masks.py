"""Sequences under a mask: the next step is handed over before their tokens are read, and its draws
after that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import ggpy
from ggpy.sampling import SamplingParams, n_words

N_VOCAB = 453


class Alternating:
    """Allows even tokens after odd ones, and odd tokens after even ones."""

    finished = False

    def __init__(self) -> None:
        self.odd = True
        self.accepted: list[int] = []

    def fill(self, row: NDArray[np.int32]) -> None:
        bits = np.zeros(32 * n_words(N_VOCAB), np.uint8)
        bits[int(self.odd) : N_VOCAB : 2] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        assert token % 2 == self.odd
        self.accepted.append(token)
        self.odd = not self.odd


def texts(run_ahead: bool, params: SamplingParams, n: int = 3) -> tuple[list[list[int]], list[str]]:
    """The tokens of n masked answers and of one that is not, and what was called in which order."""
    calls: list[str] = []
    with ggpy.load("models/tiny/llama.gguf", device="cpu", n_ctx=128, n_seq=n + 1) as model:
        engine: Any = model.engine
        engine.run_ahead = run_ahead
        run, sample, read = engine.decoder.run, engine.ops.sample, engine.ops.read

        def told(name: str, work: Any) -> Any:
            def call(*args: Any) -> Any:
                calls.append(name)
                return work(*args)

            return call

        engine.decoder.run = told("run", run)
        engine.ops.sample = told("sample", sample)
        engine.ops.read = told("read", read)
        found = [
            engine.add([1, 30 + i], params, max_tokens=6 + 3 * i, grammar=Alternating())
            for i in range(n)
        ]
        found.append(engine.add([1, 40], params, max_tokens=20))
        while engine.busy:
            engine.step()
        for s in found[:n]:
            assert s.error is None
            assert s.sampler.mask.accepted == s.ids[2:]
        return [s.ids[2:] for s in found], calls


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(seed=3, repeat_penalty=1.3)]
)
def test_running_ahead_changes_no_text(params: SamplingParams) -> None:
    alone, _ = texts(False, params)
    ahead, _ = texts(True, params)
    assert alone == ahead
    assert all(ahead)


def test_the_next_step_is_there_before_tokens_are_read_and_its_draws_after() -> None:
    _, calls = texts(True, SamplingParams(temperature=0))
    assert calls[:8] == ["run", "sample", "run", "read", "sample", "run", "read", "sample"]


@pytest.mark.parametrize("drawn", [False, True])
def test_an_interrupted_draw_is_made_later(drawn: bool) -> None:
    """With the same numbers, though some tokens of the step were drawn before the interrupt."""
    params = SamplingParams(seed=3, temperature=1.5)
    whole, _ = texts(True, params, n=1)
    with ggpy.load("models/tiny/llama.gguf", device="cpu", n_ctx=128, n_seq=2) as model:
        engine: Any = model.engine
        engine.run_ahead = True
        sample, n = engine.ops.sample, 0

        def interrupted(*args: Any) -> Any:
            nonlocal n
            n += 1
            if n == 3:
                if drawn:
                    sample(*args)
                raise KeyboardInterrupt
            return sample(*args)

        engine.ops.sample = interrupted
        s = engine.add([1, 30], params, max_tokens=6, grammar=Alternating())
        with pytest.raises(KeyboardInterrupt):
            while engine.busy:
                engine.step()
        while engine.busy:
            engine.step()
        assert s.ids[2:] == whole[0] and s.sampler.n_drawn == 6
