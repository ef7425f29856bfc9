"""Steps before the first request: the memory, kernels and CUDA graphs that requests need are there
when they come.
"""

from __future__ import annotations

from math import inf

from ...runtime.engine import Engine
from ...sampling import SamplingParams

STEPS = 3  # of each size: the first allocates, the next two are recorded as graphs


def warm_up(engine: Engine) -> None:
    """Evaluate a prompt of n_batch tokens, then let n_seq sequences answer together, and half of
    them, down to one. No sequence may be there yet, and none is afterwards: totals begin anew.

    RuntimeError, MemoryError: what the device raises.
    """
    if not engine.decoder.causal:
        return
    prompt = [0] * max(1, min(engine.n_batch, engine.n_ctx - 1))
    engine.add(prompt, max_tokens=1, cache=False)
    _finish(engine)
    sizes = [engine.n_seq >> i for i in range(engine.n_seq.bit_length())]
    endless = SamplingParams(logit_bias=dict.fromkeys(engine.tokenizer.end_ids, -inf))
    for i in range(engine.n_seq):
        n_steps = STEPS * sum(size > i for size in sizes)
        engine.add([0], endless, max_tokens=n_steps, cache=False)
    _finish(engine)
    engine.count_anew()


def _finish(engine: Engine) -> None:
    while engine.busy:
        engine.step(wait=True)
