"""Steps before the first request: the memory, kernels and CUDA graphs that requests need are there
when they come.
"""

from __future__ import annotations

from math import inf
from time import perf_counter

from ...runtime.engine import Engine
from ...sampling import SamplingParams

STEPS = 3  # of each size: the first launches kernel by kernel, the next two are recorded as graphs
LEAST_PROMPT = 32  # tokens of the shortest prompt
PROMPT_SECONDS = 1.0  # after which no further prompt begins
FEW = 8  # sequences that answer beside a long one, at most
LONG = 600  # tokens of the prompt of that one


def warm_up(engine: Engine) -> None:
    """Evaluate prompts of several lengths; then let n_seq sequences answer together, half of them,
    down to one; and few of them of which one is long. No sequence may be there yet, and none is
    afterwards: totals begin anew.

    RuntimeError, MemoryError: what the device raises.
    """
    if not engine.decoder.causal:
        return
    sizes = [engine.n_seq >> i for i in range(engine.n_seq.bit_length())]
    long = max(1, min(LONG, engine.n_ctx // 2))
    # What takes most memory is first: where memory moves, all graphs are dropped.
    _read_prompts(engine)
    _answer(engine, sizes[:1], long, n_steps=1)
    with engine.ops.rehearsal():
        _answer(engine, sizes, 1)
        _answer(engine, [n for n in sizes if n <= FEW], long)
    engine.count_anew()


def _read_prompts(engine: Engine) -> None:
    """Evaluate a prompt of n_batch tokens, and of nearly half of them, down to a few: between these
    lengths kernels change.
    """
    started, greedy = perf_counter(), SamplingParams(temperature=0)
    largest = max(1, min(engine.n_batch, engine.n_ctx - 1))
    nearly_half = largest * 15 // 32  # the largest padded step below half of a power of two
    for n_tokens in (largest, *(nearly_half >> i for i in range(nearly_half.bit_length()))):
        engine.add([0] * n_tokens, greedy, max_tokens=1, cache=False)
        _finish(engine)
        if n_tokens < LEAST_PROMPT or perf_counter() - started > PROMPT_SECONDS:
            return


def _answer(engine: Engine, sizes: list[int], n_first: int, n_steps: int = STEPS) -> None:
    """Steps of so many sequences, n_steps for each of the sizes, which fall. n_first: tokens of the
    prompt of the first sequence; those of the others have one.
    """
    endless = SamplingParams(logit_bias=dict.fromkeys(engine.tokenizer.end_ids, -inf))
    for i in range(sizes[0]):
        n_tokens = n_steps * sum(size > i for size in sizes)
        engine.add([0] * (1 if i else n_first), endless, max_tokens=n_tokens, cache=False)
    _finish(engine)


def _finish(engine: Engine) -> None:
    while engine.busy:
        engine.step(wait=True)
