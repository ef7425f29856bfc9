"""Embeddings: a vector of length 1 for each text, made from the hidden states of its tokens.

The hidden states after the last layer go through the final norm and are pooled over the tokens. The
result is multiplied with the dense matrices that some models have, and divided by its length, so
that the dot product of two embeddings is the cosine of their angle.
Nothing here knows texts, or why embeddings are compared.

Letters: N prompts, T tokens of a step, R tokens of a step that are pooled, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ...backends.interface import Step
from ...backends.numpy.functions import normalised
from ...util.messages import shown
from .prompts import F32, Ids, Run, Wanted, checked_prompts, evaluate, last_token

if TYPE_CHECKING:
    from ..engine import Engine

F64 = NDArray[np.float64]
Pooling = Literal["mean", "last", "cls"]

# The positions that each kind of pooling takes the mean of, in a prompt of n tokens.
POOLED: dict[Pooling, Wanted] = {"mean": range, "last": last_token, "cls": lambda n: range(1)}

# gguf.PoolingType; a reranker's classifier looks at the last token.
POOLING_TYPES: dict[int, Pooling] = {0: "last", 1: "mean", 2: "cls", 3: "last", 4: "last"}
RANK = 4
EUCLIDEAN = 2  # the norm by which `scaled` makes vectors of length 1


def pooling_type(metadata: Mapping[str, Any]) -> int:
    """The file's <architecture>.pooling_type; 0 if the file does not say. ValueError for a value
    that is unknown.
    """
    key = f"{metadata.get('general.architecture')}.pooling_type"
    value = metadata.get(key, 0)
    if not isinstance(value, int) or value not in POOLING_TYPES:
        raise ValueError(f"{key} = {shown(value, 60)}: 0 to 4 are known, give a pooling")
    return value


def pooling_of(metadata: Mapping[str, Any]) -> Pooling:
    """The pooling that a file asks for, "last" if it asks for none.

    A token of a decoder sees only the tokens before it. Only the last token sees the whole text;
    most tokens in a mean have seen little of it.
    """
    return POOLING_TYPES[pooling_type(metadata)]


def embed(engine: Engine, prompts: Sequence[Sequence[int]], pooling: Pooling) -> F32:
    """The embeddings [N, D] of N prompts, in order, each of length 1.

    Errors: see `pooled`; also ValueError for a hidden state that is 0.
    """
    return _unit(pooled(engine, prompts, pooling))


def pooled(engine: Engine, prompts: Sequence[Sequence[int]], pooling: Pooling) -> F64:
    """The pooled hidden states [N, D] of N prompts, in order, times the model's dense matrices.

    The prompts are evaluated between the steps of the engine's sequences. Any thread may call this.
    pooling: the mean of all tokens ("mean"), the last token ("last"), or the first ("cls").

    | error | for |
    |---|---|
    | ValueError | another pooling |
    | ValueError | a prompt that is empty, or has a token outside the vocabulary |
    | ValueError | a hidden state that is NaN or infinite |
    | ContextOverflow, a ValueError | a prompt that is longer than the context |
    | RuntimeError | a call after `close` |
    """
    if pooling not in POOLED:
        known = ", ".join(get_args(Pooling))
        raise ValueError(f"pooling is {pooling!r:.60}: it must be one of {known}")
    checked, wanted = checked_prompts(engine, prompts), POOLED[pooling]
    counts = np.array([len(wanted(len(ids))) for ids in checked], np.float64)
    return _projected(engine, sums(engine, checked, wanted) / counts[:, None])


def token_states(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[F64]:
    """The normalised hidden states [T, D] of each prompt, one row for each token, times the model's
    dense matrices. Errors: see `pooled`.
    """
    checked, norm = checked_prompts(engine, prompts), engine.decoder.final_norm
    parts: list[list[F32]] = [[] for _ in checked]
    with np.errstate(all="ignore"):
        evaluate(engine, checked, range, _hidden(engine), lambda i, x: parts[i].append(x))
        states = [normalised(np.concatenate(x), norm).astype(np.float64) for x in parts]
    _check_finite(np.array([np.isfinite(x).all() for x in states], np.bool_))
    return [_projected(engine, x) for x in states]


def scaled(x: F64, norm: int) -> F32:
    """x[N, D], each row scaled as llama.cpp does; rows of 0 stay.

    | norm | a row is |
    |---|---|
    | -1 | left as it is |
    | 0 | scaled so that its largest absolute value is 32760, to fit in 16 bits |
    | p > 0 | divided by its p-norm |
    """
    if norm < 0:
        return x.astype(np.float32)
    size = np.abs(x)
    largest = size.max(axis=1, keepdims=True)
    if norm == 0:
        length = largest / 32760
    else:  # of x / largest, so that no power is too large
        powers = (size / np.where(largest > 0, largest, 1)) ** norm
        length = largest * powers.sum(axis=1, keepdims=True) ** (1 / norm)
    return (x / np.where(length > 0, length, 1)).astype(np.float32)


def sums(engine: Engine, prompts: Sequence[Ids], wanted: Wanted) -> F64:
    """The sums [N, D] of the normalised hidden states of the wanted tokens."""
    norm = engine.decoder.final_norm
    total = np.zeros((len(prompts), engine.decoder.sizes.n_embd))

    def take(i: int, x: F32) -> None:
        total[i] += normalised(x, norm).sum(axis=0, dtype=np.float64)

    with np.errstate(all="ignore"):  # _check_finite looks for NaN and infinity below
        evaluate(engine, prompts, wanted, _hidden(engine), take)
    _check_finite(np.isfinite(total).all(axis=1))
    return total


def _check_finite(good: Any) -> None:
    """ValueError for the first prompt that is not finite. good[N]: whether each prompt is."""
    for i in np.flatnonzero(~good):
        raise ValueError(
            f"prompt {i} of the list: its hidden state is NaN or infinite; "
            "`ggpy run --check` finds the op where that begins"
        )


def _projected(engine: Engine, x: F64) -> F64:
    """x[N, D] times the model's dense matrices, if it has any."""
    for matrix in engine.decoder.dense:
        x = x @ matrix.T.astype(np.float64)
    return x


def _hidden(engine: Engine) -> Run:
    """Returns a function that runs a step and returns the hidden states x[R, D] of step.rows."""

    def run(step: Step) -> F32:
        x: F32 = engine.ops.read(engine.decoder.hidden(step))
        return x[step.rows]

    return run


def _unit(x: F64) -> F32:
    """x[N, D] with rows of length 1; ValueError for a row of 0."""
    length = np.sqrt(np.square(x).sum(axis=1, keepdims=True))
    for i in np.flatnonzero(length == 0):
        raise ValueError(f"prompt {i} of the list: its hidden state is 0, which has no direction")
    unit: F32 = (x / length).astype(np.float32)
    return unit
