"""Sequences in flight -> ragged batches -> tokens.

The engine decides what is evaluated together: one token of each sequence that is answering and, in
the room that is left, chunks of prompts. It owns the pages, finds prefixes that are already
evaluated, and ends sequences. With a backend that works asynchronously the next step is handed over
before the last tokens are read. Nothing here knows how a step is computed, where prompts come from,
or who reads the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from .arch.decoder import Decoder
from .batch import Batch, TableStack, ragged
from .kv_cache import PagePool, PageTable, pages_for
from .ops.interface import PAGE_SIZE, Array, Ops
from .sampling import Sampler, SamplingParams
from .sequence import Finish, Piece, Sequence, StopStrings, Tokens, logprob

__all__ = ["ContextOverflow", "Engine", "Piece", "Sequence", "StopStrings"]


class ContextOverflow(ValueError):
    """A prompt that does not fit into the context."""


@dataclass(frozen=True)
class _Flight:
    """A step that was handed over and whose tokens nobody has read."""

    owners: list[Sequence]  # of each row
    ids: Array | None
    logits: Array | None  # kept only where a logprob is wanted


class Engine:
    """Runs up to n_seq sequences of up to n_ctx tokens; more wait.

    n_batch: tokens in one step at most. run_ahead: hand over a step before the last one's tokens
    are read; by default what the backend is good for.
    """

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        tokenizer: Tokens,
        n_ctx: int,
        n_batch: int = 512,
        n_seq: int = 1,
        run_ahead: bool | None = None,
    ) -> None:
        if min(n_ctx, n_batch, n_seq) < 1:
            raise ValueError(
                f"n_ctx {n_ctx}, n_batch {n_batch} and n_seq {n_seq} must be 1 or more"
            )
        self.decoder, self.ops, self.tokenizer = decoder, ops, tokenizer
        self._end_ids = tokenizer.end_ids
        self.n_ctx, self.n_seq = n_ctx, n_seq
        self.n_batch = max(n_batch, n_seq)
        self.run_ahead = ops.asynchronous if run_ahead is None else run_ahead
        self.pool = PagePool(n_seq * pages_for(n_ctx))
        ops.allocate_cache(decoder.cache_shape(self.pool.n_pages))
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._kept: deque[Sequence] = deque()  # ended, oldest first
        self._tables = TableStack()
        self._flight: _Flight | None = None
        self._ahead: _Flight | None = None  # the step after it

    # Sequences

    def add(
        self,
        ids: Seq[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop: Iterable[str] = (),
        logprobs: bool = False,
        context_shift: bool = False,
        n_keep: int = 0,
        keep: bool = False,
        previous: Sequence | None = None,
    ) -> Sequence:
        """A sequence that continues ids; ContextOverflow when they do not fit.

        max_tokens: None is until the model or the context ends. context_shift: drop the older half
        of what follows the first n_keep tokens when the context is full. previous: an ended
        sequence, added with keep, whose pages are taken over as far as its tokens are the same.
        """
        prompt = self.check(ids)
        if not 0 <= n_keep < self.n_ctx:
            raise ValueError(f"n_keep is {n_keep}: it must be 0 to {self.n_ctx - 1}")
        sequence = Sequence(
            ids=prompt,
            sampler=Sampler(params or SamplingParams(), self.decoder.sizes.n_vocab, prompt),
            table=PageTable(self.pool),
            stream=self.tokenizer.stream(),
            stops=StopStrings([stop] if isinstance(stop, str) else stop),
            max_tokens=max_tokens,
            logprobs=logprobs,
            context_shift=context_shift,
            n_keep=n_keep,
            keep=keep,
            n_prompt=len(prompt),
        )
        if previous is not None:
            self._take_over(sequence, previous)
        if max_tokens is not None and max_tokens <= 0:
            self._end(sequence, "length")
        else:
            self._waiting.append(sequence)
        return sequence

    def check(self, ids: Seq[int]) -> list[int]:
        """The ids as a list; ValueError if none, too many, or one outside the vocabulary."""
        prompt, n_vocab = [int(i) for i in ids], self.decoder.sizes.n_vocab
        if not prompt:
            raise ValueError("the prompt has no tokens: give it at least one")
        if len(prompt) > self.n_ctx:
            raise ContextOverflow(
                f"context is {self.n_ctx} tokens, the prompt has {len(prompt)}: "
                "raise -c or shorten it"
            )
        outside = [i for i in prompt if not 0 <= i < n_vocab]
        if outside:
            raise ValueError(
                f"token id {outside[0]} is not in the vocabulary: ids go from 0 to {n_vocab - 1}"
            )
        return prompt

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence now; of one that ended already, nothing changes."""
        if sequence.finish is None:
            self._end(sequence, "cancelled")

    def release(self, sequence: Sequence) -> None:
        """End a sequence and give back the pages it kept."""
        self.cancel(sequence)
        if sequence in self._kept:
            self._kept.remove(sequence)
        self._forget(sequence)

    def pieces(self, sequence: Sequence) -> Iterator[Piece]:
        """The pieces of one sequence until it ends; the others advance too."""
        while True:
            while sequence.pieces:
                yield sequence.pieces.popleft()
            if sequence.finish is not None:
                return
            self.step()

    @property
    def busy(self) -> bool:
        """Whether some sequence has not ended."""
        return bool(self._waiting or self._running)

    # Steps

    def step(self) -> list[Sequence]:
        """Evaluate one batch; the sequences that have a piece more, or ended."""
        self._admit()
        self._flight = self._flight or self._submit()
        if self._flight is None:
            return []
        if self._ahead is None and self._may_run_ahead(self._flight):
            self._ahead = self._submit()
        changed = self._collect(self._flight)
        self._flight, self._ahead = self._ahead, None
        return changed

    def logits(self, ids: Seq[int]) -> NDArray[np.float32]:
        """l[T, V] of every token of a text, apart from all sequences."""
        prompt = self.check(ids)
        self._drain()
        table = self._room_for(len(prompt))
        out = np.empty((len(prompt), self.decoder.sizes.n_vocab), np.float32)
        try:
            for start in range(0, len(prompt), self.n_batch):
                part = slice(start, min(start + self.n_batch, len(prompt)))
                n = part.stop - start
                step = ragged([(table, prompt[part], start)], np.arange(n, dtype=np.int32))
                out[part] = self.ops.read(self.decoder.run(step))
        finally:
            table.release()
        return out

    def _submit(self) -> _Flight | None:
        """Hand over the next step, if there is anything to evaluate."""
        batch = self._schedule()
        if not batch.sequences:
            return None
        for s, length in zip(batch.sequences, batch.lengths, strict=True):
            if length > 1 or s.n_evaluated % PAGE_SIZE == 0:  # else it goes to a page that is there
                s.table.grow(s.n_evaluated + length)
        for s, id in zip(batch.sequences, batch.ids, strict=False):  # those of one token are first
            if id < 0:
                s.sampler.expect(~id)
        logits = self.decoder.run(batch.step(self._tables))
        flight = self._sample(logits, batch.owners)
        for s, length in zip(batch.sequences, batch.lengths, strict=True):
            s.n_evaluated += length  # only now: an interrupted step is not evaluated
        return flight

    def _sample(self, logits: Array, owners: list[Sequence]) -> _Flight:
        if not owners:
            return _Flight([], None, None)
        ids = self.ops.sample(logits, [s.sampler for s in owners])
        return _Flight(owners, ids, logits if any([s.logprobs for s in owners]) else None)

    def _schedule(self) -> Batch:
        """One token of each sequence that has but one, then prompts as far as there is room.

        The token that the step under way still samples at its row r is ~r.
        """
        late = dict(zip(self._flight.owners, count(), strict=False)) if self._flight else {}
        ones: list[Sequence] = []
        ids: list[int] = []
        prompts = []
        for s in self._running:
            if s in late:
                if s.n_generated + 1 == s.max_tokens or len(s.ids) == self.n_ctx:
                    continue
                id = ~late[s]
            elif len(s.ids) == s.n_evaluated + 1:
                id = s.ids[-1]
            else:
                prompts.append(s)
                continue
            ones.append(s)
            ids.append(id)
        batch = Batch()
        batch.add_ones(ones, ids)
        for s in prompts:
            batch.add_prompt(s, self.n_batch - len(batch.ids))
        return batch

    def _may_run_ahead(self, flight: _Flight) -> bool:
        """Whether the next step depends on the tokens under way only through their ids."""
        return self.run_ahead and not any(
            [s.logprobs or (s.context_shift and len(s.ids) == self.n_ctx) for s in flight.owners]
        )

    def _collect(self, flight: _Flight) -> list[Sequence]:
        """Read a step's tokens; those of sequences that ended meanwhile are forgotten."""
        if flight.ids is None:
            return []
        ids = self.ops.read(flight.ids).tolist()
        logits = None if flight.logits is None else self.ops.read(flight.logits)
        changed = []
        for row, (s, token) in enumerate(zip(flight.owners, ids, strict=True)):
            if s.finish is not None:
                s.sampler.n_drawn -= 1
                continue
            probability = None
            if logits is not None and s.logprobs:
                probability = logprob(logits[row], token)
            self._accept(s, token, probability)
            changed.append(s)
        return changed

    def _drain(self) -> None:
        """Read what is under way, without handing over more."""
        if self._flight is not None:
            self._collect(self._flight)
            self._flight = None

    # Tokens

    def _accept(self, s: Sequence, token: int, logprob: float | None) -> None:
        """Append a sampled token; end the sequence if it is the last."""
        s.sampler.accept(token)
        s.ids.append(token)
        s.n_generated += 1
        end = token in self._end_ids
        text, stopped = s.stops.add("" if end else s.stream.add(token))
        finish = self._why_finished(s, end or stopped)
        if finish and not stopped:
            rest, stopped = s.stops.add(s.stream.finish())
            text += rest if stopped else rest + s.stops.finish()
        s.pieces.append(Piece(text, token, logprob))
        if finish:
            self._end(s, finish)
        elif len(s.ids) > self.n_ctx:
            self._shift(s)

    def _why_finished(self, s: Sequence, stopped: bool) -> Finish | None:
        if stopped:
            return "stop"
        if s.n_generated == s.max_tokens:
            return "length"
        return "context" if len(s.ids) > self.n_ctx and not s.context_shift else None

    def _shift(self, s: Sequence) -> None:
        """Drop the older half after the first n_keep tokens; the rest moves and is evaluated."""
        dropped = max(1, (len(s.ids) - s.n_keep) // 2)
        del s.ids[s.n_keep : s.n_keep + dropped]
        s.n_evaluated = s.table.truncate(min(s.n_keep, s.n_evaluated))

    def _end(self, s: Sequence, finish: Finish) -> None:
        s.finish = finish
        if s in self._running:
            self._running.remove(s)
        if s in self._waiting:
            self._waiting.remove(s)
        if s.keep:
            self._kept.append(s)
        else:
            self._forget(s)

    # Pages

    def _admit(self) -> None:
        """Let waiting sequences run, the oldest first; kept pages make room."""
        while self._waiting and len(self._running) < self.n_seq:
            sequence = self._waiting.popleft()
            self._share(sequence)
            self._running.append(sequence)
        holding = [s for s in self._waiting if s.table.pages]
        while len(self._running) + len(self._kept) + len(holding) > self.n_seq:
            self._forget(self._kept.popleft() if self._kept else holding.pop())

    def _share(self, s: Sequence) -> None:
        """Begin with the full pages of the sequence that has most of the same tokens evaluated."""
        others = [(self._common(s, other), other) for other in [*self._running, *self._kept]]
        n, other = max(others, key=lambda x: x[0], default=(0, None))
        shared = other.table.fork(n) if other else None
        if shared and shared.capacity > s.n_evaluated:
            s.table.release()
            s.table = shared
            s.n_evaluated = s.n_reused = shared.capacity

    def _take_over(self, s: Sequence, previous: Sequence) -> None:
        """Continue in the pages of an ended sequence."""
        if previous.finish is None:
            raise ValueError(
                "the previous sequence is still running: cancel it or wait for its end"
            )
        n = self._common(s, previous)
        s.table, previous.table = previous.table, s.table
        s.n_evaluated = s.n_reused = s.table.truncate(n)
        if previous in self._kept:
            self._kept.remove(previous)
        self._forget(previous)

    @staticmethod
    def _common(s: Sequence, other: Sequence) -> int:
        """Leading tokens that `other` has evaluated and `s` shares, except the last of `s`."""
        n = min(other.n_evaluated, len(other.ids), len(s.ids) - 1)
        pairs = zip(s.ids[:n], other.ids, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), n)

    @staticmethod
    def _forget(s: Sequence) -> None:
        s.table.release()
        s.n_evaluated = 0
        if not s.n_generated:
            s.n_reused = 0

    def _room_for(self, n_positions: int) -> PageTable:
        """A new table; kept sequences give way, then running ones, to be evaluated again."""
        others = iter([*self._waiting, *self._running])
        while self.pool.n_free < pages_for(n_positions):
            self._forget(self._kept.popleft() if self._kept else next(others))
        table = PageTable(self.pool)
        table.grow(n_positions)
        return table
