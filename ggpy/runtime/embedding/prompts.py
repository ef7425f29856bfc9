"""Evaluates prompts for their hidden states or logits, apart from sequences that generate text.

Several short prompts form one ragged step; a long prompt takes several steps. Prompts have pages of
their own, which are given back. A group of prompts is evaluated between two steps of the engine, so
that its sequences wait for one group at a time. Nothing here knows what the outputs are used for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...backends.interface import Step
from ..batch import ragged
from ..evaluator import check_step
from ..kv_cache import SequencePages
from ..sequence import checked_prompt

if TYPE_CHECKING:
    from ..engine import Engine

F32 = NDArray[np.float32]
Ids = list[int]
Wanted = Callable[[int], range]  # the positions of a prompt of n tokens whose outputs are wanted
Run = Callable[[Step], F32]  # returns the outputs y[R, ...] of step.rows
Take = Callable[[int, F32], None]  # gets i and y[k, ...], the outputs of a step for prompt i
MakeRoom = Callable[[int], SequencePages]


def checked_prompts(engine: Engine, prompts: Sequence[Any], name: str = "prompt") -> list[Ids]:
    """The ids of each prompt as a list. ValueError, with `name` and the index, for the first prompt
    that is empty, is longer than the context or than the one step that has to hold it, or has an id
    outside the vocabulary.
    """
    checked = []
    for i, ids in enumerate(prompts):
        try:
            checked.append(checked_prompt(ids, engine.n_ctx, engine.decoder.sizes.n_vocab))
            check_step(engine.decoder, len(checked[-1]), engine.n_batch)
        except ValueError as error:
            error.args = (f"{name} {i} of the list: {error}",)
            raise
    return checked


def last_token(n: int) -> range:
    """The last position, which sees the whole prompt."""
    return range(n - 1, n)


def evaluate(engine: Engine, prompts: Sequence[Ids], wanted: Wanted, run: Run, take: Take) -> None:
    """Calls take(i, y) for each step and each prompt i in it, in the order of positions, until all
    wanted outputs were taken.

    prompts: from `checked_prompts`. RuntimeError after `close` of the engine; errors of the device.
    """
    first = 0
    while first < len(prompts):
        group = PromptGroup(engine, prompts, first, wanted, run)
        engine.apart(partial(group.evaluate, take))
        first += len(group.pages)


class PromptGroup:
    """The prompts from `first` on, as many as fit in a step and in the free pages, at least one."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Ids], first: int, wanted: Wanted, run: Run
    ) -> None:
        self._engine, self._wanted, self._run = engine, wanted, run
        self._first, self._prompts = first, prompts[first:]
        self.pages: list[SequencePages] = []
        self._finite: set[int] = set()  # prompts whose pages hold nothing but finite numbers

    def evaluate(self, take: Take, make_room: MakeRoom) -> None:
        """Calls take(i, y) for the prompts of the group; there are len(self.pages) of them."""
        n_batch = self._engine.n_batch
        try:
            self._take_pages(make_room)
            for start in range(0, len(self._prompts[0]), n_batch):  # a long prompt is alone
                self._step(start, start + n_batch, take)
        finally:
            for i, pages in enumerate(self.pages):
                if i not in self._finite:
                    pages.suspect(0)
                pages.release()

    def _take_pages(self, make_room: MakeRoom) -> None:
        engine, n_tokens = self._engine, 0
        for ids in self._prompts:
            n_tokens += len(ids)
            if not self.pages:
                self.pages.append(make_room(len(ids)))
            elif n_tokens <= engine.n_batch and engine.cache.fits(len(ids)):
                self.pages.append(SequencePages(engine.cache))
            else:
                break
            self.pages[-1].grow(0, min(len(ids), engine.n_batch), 0)

    def _step(self, start: int, stop: int, take: Take) -> None:
        """Evaluate the tokens start:stop of each prompt."""
        engine = self._engine
        prompts = self._prompts[: len(self.pages)]
        chunks = [(p, ids[start:stop], start) for p, ids in zip(self.pages, prompts, strict=True)]
        spans = [(pages, start, start + len(ids)) for pages, ids, _ in chunks]
        for pages, _, end in spans:
            pages.grow(start, end, 0)
        rows = [self._rows(len(ids), start, stop) for ids in prompts]
        offsets = np.cumsum([0, *(len(ids) for _, ids, _ in chunks)], dtype=np.int32)
        step = ragged(chunks, np.concatenate([r + n for r, n in zip(rows, offsets, strict=False)]))
        with engine.cache.cleared(engine.ops.clear_pages, spans):
            y = self._run(step)
        ends = np.cumsum([len(r) for r in rows])
        for i, part in enumerate(np.split(y, ends[:-1])):
            self._judge(i, stop, part)
            take(self._first + i, part)

    def _rows(self, n: int, start: int, stop: int) -> NDArray[np.int32]:
        """The wanted tokens of a prompt of n tokens in its chunk start:stop, as indices from
        start.
        """
        wanted = self._wanted(n)
        first = max(wanted.start, start)
        return np.arange(first, max(first, min(wanted.stop, stop)), dtype=np.int32) - start

    def _judge(self, i: int, stop: int, y: F32) -> None:
        """Note a prompt as finite if its last token is, because that token sees all others."""
        n = len(self._prompts[i])
        if stop >= n == self._wanted(n).stop and np.isfinite(y[-1]).all():
            self._finite.add(i)
