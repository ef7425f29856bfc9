"""Sequences in flight -> ragged batches -> tokens.

The engine decides what is evaluated together: one token of each sequence that is answering and, in
the room that is left, chunks of prompts. What a sequence raises ends that one alone. With a backend
that works asynchronously the next step is handed over before the last tokens are read. Sequences
come and go from any thread; one at a time may step. Nothing here knows how a step is computed,
where prompts come from, or who reads the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arch.decoder import Decoder
from ..backends.interface import PAGE_SIZE, Array, Ops
from ..sampling import NO_TOKEN, Sampler, SamplingParams
from .batch import Batch, TableStack, ragged
from .kv_cache import KVCache, SequencePages
from .logprobs import scores
from .mailbox import Mailbox, Occupied, Result
from .scheduler import Scheduler
from .sequence import (
    ContextOverflow,
    Piece,
    Sequence,
    StopStrings,
    TokenizerLike,
    checked_prompt,
    whole,
)

__all__ = ["ContextOverflow", "Engine", "Occupied", "Piece", "Sequence", "StopStrings"]


NOT_FINITE = (
    "the highest logit is NaN or infinite: no token can be chosen; "
    "`ggpy run --check` finds the op where that begins"
)


@dataclass
class _Flight:
    """A step that was handed over and whose tokens nobody has read."""

    owners: list[Sequence]  # of each row
    ids: Array | None
    logits: Array | None  # kept only where a logprob is wanted
    n_collected: int = 0  # rows whose tokens were accepted, or refused


class Engine:
    """Runs up to n_seq sequences of up to n_ctx tokens; more wait.

    n_batch: tokens in one step at most. run_ahead: hand over a step before the last one's tokens
    are read; by default what the backend is good for. n_rewind: positions beyond n_batch by which a
    sequence with windows may be taken back without being evaluated again. `add`, `cancel` and
    `release` may be called from any thread: while another one is in `step` they take effect before
    its next step.
    """

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        tokenizer: TokenizerLike,
        n_ctx: int,
        n_batch: int = 512,
        n_seq: int = 1,
        run_ahead: bool | None = None,
        n_rewind: int = 0,
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
        shape = decoder.cache_shape(n_seq, n_ctx, self.n_batch + n_rewind)
        ops.allocate_cache(shape)
        self.cache = KVCache(shape, n_seq)
        self._scheduler = Scheduler(self.cache, n_seq)
        self._tables = TableStack()
        self._flight: _Flight | None = None
        self._ahead: _Flight | None = None  # the step after it
        self._lost = False  # whether the step after it was interrupted
        self._mailbox = Mailbox()
        self._closed = False

    # Sequences

    def add(
        self,
        ids: Seq[int],
        params: SamplingParams | None = None,
        *,
        previous: Sequence | None = None,
        **options: Any,
    ) -> Sequence:
        """A sequence that continues ids, begun; options, errors: see `prepare` and `begin`."""
        sequence = self.prepare(ids, params, **options)
        self.begin(sequence, previous)
        return sequence

    def prepare(
        self,
        ids: Seq[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop: str | Iterable[str] = (),
        logprobs: bool = False,
        top_logprobs: int = 0,
        context_shift: bool = False,
        n_keep: int = 0,
        keep: bool = False,
    ) -> Sequence:
        """A checked sequence that continues ids, for `begin`; it holds nothing of the engine.

        max_tokens: None is until the model or the context ends. context_shift: drop the older half
        of what follows the first n_keep tokens when the context is full. keep: its pages outlive
        its end. ContextOverflow when the ids do not fit; ValueError; RuntimeError after `close`.
        """
        self._check_open()
        n_vocab = self.decoder.sizes.n_vocab
        prompt = checked_prompt(ids, self.n_ctx, n_vocab)
        if not 0 <= whole("n_keep", n_keep) < self.n_ctx:
            raise ValueError(f"n_keep is {n_keep}: it must be 0 to {self.n_ctx - 1}")
        return Sequence(
            ids=prompt,
            sampler=Sampler(params or SamplingParams(), n_vocab, prompt),
            pages=SequencePages(self.cache),
            stream=self.tokenizer.stream(),
            stops=StopStrings(stop),
            max_tokens=None if max_tokens is None else whole("max_tokens", max_tokens),
            logprobs=bool(logprobs or top_logprobs),
            top_logprobs=whole("top_logprobs", top_logprobs, least=0),
            context_shift=context_shift,
            n_keep=n_keep,
            keep=keep,
            n_prompt=len(prompt),
        )

    def begin(self, sequence: Sequence, previous: Sequence | None = None) -> None:
        """Let a prepared sequence wait for its turn; RuntimeError after `close`, ValueError.

        previous: an ended sequence, prepared with keep, whose pages are taken over as far as its
        tokens are the same.
        """
        self._check_own(sequence)
        if previous is not None:
            self._check_own(previous)
            if previous.finish is None:
                raise ValueError(
                    "the previous sequence is still running: cancel it or wait for its end"
                )
        self._check_open()
        self._mailbox.post(partial(self._begin, sequence, previous))

    def _begin(self, s: Sequence, previous: Sequence | None) -> None:
        try:
            self._check_open()
            if previous is not None and previous.n_evaluated > previous.n_finite:
                self._collect_all()  # so that it is known how much of it may be taken over
            self._scheduler.begin(s, previous)
        except Exception as error:
            self._scheduler.fail(s, error)

    def _check_own(self, sequence: Sequence) -> None:
        if sequence.pages.cache is not self.cache:
            raise ValueError("the sequence is another engine's")

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the model is closed")

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence now; of one that ended already, nothing changes."""
        self._check_own(sequence)
        self._mailbox.post(partial(self._scheduler.cancel, sequence))

    def release(self, sequence: Sequence) -> None:
        """End a sequence and give back the pages it kept."""
        self._check_own(sequence)
        self._mailbox.post(partial(self._scheduler.release, sequence))

    def close(self) -> None:
        """End all sequences, which say so, and take no more; waits for a step that is under way."""
        self._closed = True
        self.abort(RuntimeError("the model was closed before the answer was complete"))

    def abort(self, error: BaseException) -> None:
        """End all sequences with the error, and forget the steps that are under way."""
        self._mailbox.call(partial(self._abort, error))

    def _abort(self, error: BaseException) -> None:
        self._flight, self._ahead, self._lost = None, None, False
        self._scheduler.fail_all(error)

    def pieces(self, sequence: Sequence) -> Iterator[Piece]:
        """The pieces of one sequence until it ends, or its error; the others advance too."""
        return sequence.follow(self.step)

    @property
    def busy(self) -> bool:
        """Whether some sequence has not ended."""
        return bool(self._scheduler.waiting or self._scheduler.running or self._mailbox.pending)

    # Steps

    def step(self, wait: bool = False) -> list[Sequence]:
        """Evaluate one batch; the sequences that have a piece more, or ended with it.

        Occupied while another thread is in a step, for which `wait` waits instead. What a sequence
        raises is its `error`; what the device raises is everybody's, and the step can be repeated.
        """
        if not wait and self._mailbox.inside.locked():
            raise Occupied(
                "another thread is at work with this engine: one at a time may step it; "
                "Model.generate and a Runner take sequences of all threads"
            )
        try:
            with self._mailbox.inside:
                self._mailbox.apply()
                return self._step()
        finally:
            self._mailbox.settle()  # what was posted meanwhile

    def _step(self) -> list[Sequence]:
        self._scheduler.admit()
        self._flight = self._flight or self._submit()
        if self._flight is None:
            return []
        if self._ahead is None and not self._lost and self._may_run_ahead(self._flight):
            self._ahead = self._submit()
        return self._collect_first()

    def logits(self, ids: Seq[int]) -> NDArray[np.float32]:
        """l[T, V] of every token of a text, apart from all sequences, between their steps."""
        self._check_open()
        prompt = checked_prompt(ids, self.n_ctx, self.decoder.sizes.n_vocab)
        return self._mailbox.call(partial(self._logits, prompt))

    def apart(self, work: Callable[[Callable[[int], SequencePages]], Result]) -> Result:
        """What work(Scheduler.make_room) returns, between two steps; RuntimeError after `close`."""
        self._check_open()
        return self._mailbox.call(partial(work, self._scheduler.make_room), self._collect_all)

    def _logits(self, prompt: list[int]) -> NDArray[np.float32]:
        self._collect_all()
        pages, n_finite = self._scheduler.make_room(len(prompt)), 0
        out = np.empty((len(prompt), self.decoder.sizes.n_vocab), np.float32)
        try:
            for start in range(0, len(prompt), self.n_batch):
                part = slice(start, min(start + self.n_batch, len(prompt)))
                pages.grow(start, part.stop, n_finite)
                rows = np.arange(part.stop - start, dtype=np.int32)
                step = ragged([(pages, prompt[part], start)], rows)
                with self.cache.cleared(self.ops.clear_pages, [(pages, start, part.stop)]):
                    out[part] = self.ops.read(self.decoder.run(step))
                if n_finite == start and np.isfinite(out[part].max(axis=1)).all():
                    n_finite = part.stop
        finally:
            if n_finite < len(prompt):  # NaN, or not evaluated
                pages.suspect(n_finite)
            pages.release()
        return out

    def _submit(self) -> _Flight | None:
        """Hand over the next step, if there is anything to evaluate."""
        batch = self._schedule()
        if not batch.sequences:
            return None
        for s, length in zip(batch.sequences, batch.lengths, strict=True):
            fits = length == 1 and s.n_evaluated % PAGE_SIZE  # it goes to a page that is there
            if not fits and not self._scheduler.grow(s, length):
                return self._submit()  # of the others
        try:
            for s, id in zip(batch.sequences, batch.ids, strict=False):  # of one token are first
                if id < 0:
                    s.sampler.expect(~id)
            with self.cache.cleared(self.ops.clear_pages, batch.spans()):
                logits = self.decoder.run(batch.step(self._tables))
            flight = self._sample(logits, batch.owners)
        except BaseException:
            self._take_back(batch)
            raise
        for s, length in zip(batch.sequences, batch.lengths, strict=True):
            s.n_evaluated += length  # only now: an interrupted step is not evaluated
        return flight

    def _take_back(self, batch: Batch) -> None:
        """An interrupted step has drawn nothing, and is handed over again.

        If it was to be ahead, then once the ids before it are read: it may have overwritten them.
        """
        late = self._flight.owners if self._flight else []
        self._lost = self._flight is not None
        for s in batch.owners:
            s.sampler.n_drawn = s.n_generated + (s in late)

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
        for s in self._scheduler.running:
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

    def _collect_all(self) -> None:
        """Read the steps that are under way, without handing over more."""
        while self._flight is not None:
            self._collect_first()

    def _collect_first(self) -> list[Sequence]:
        """Read the step that was handed over first; the sequences that have a token of it."""
        flight = self._flight
        changed = self._collect(flight) if flight and flight.ids is not None else []
        self._flight, self._ahead, self._lost = self._ahead, None, False
        return changed

    def _collect(self, flight: _Flight) -> list[Sequence]:
        """Accept a step's tokens, each once; those of sequences that ended meanwhile are forgotten.

        What goes wrong with one ends its sequence. An interrupted step is collected further.
        """
        ids = self.ops.read(flight.ids).tolist()
        logits = None if flight.logits is None else self.ops.read(flight.logits)
        changed = []
        for row in range(flight.n_collected, len(ids)):
            s = flight.owners[row]
            try:
                flight.n_collected = row + 1
                if ids[row] != NO_TOKEN and s.n_evaluated:
                    s.n_finite = len(s.ids)
                if s.finish is not None:
                    s.sampler.n_drawn -= 1
                    continue
                self._accept(s, ids[row], None if logits is None else logits[row])
            except Exception as error:
                self._scheduler.fail(s, error)
            except BaseException:  # in the middle of a token: nobody knows how much of it is there
                self._scheduler.fail(s, RuntimeError("interrupted while a token was accepted"))
                raise
            changed.append(s)
        return changed

    # TokenizerLike

    def _accept(self, s: Sequence, token: int, logits: NDArray[np.float32] | None) -> None:
        """Append a sampled token; end the sequence if it is the last."""
        if token == NO_TOKEN:
            raise s.sampler.error or ValueError(NOT_FINITE)
        logprobs: tuple[Any, ...] = ()
        if s.logprobs and logits is not None:
            logprobs = scores(logits, token, s.top_logprobs, self.tokenizer)
        finish = s.accept(token, self._end_ids, self.n_ctx, *logprobs)
        if finish:
            self._scheduler.end(s, finish)
            return
        if len(s.ids) > self.n_ctx:
            s.shift()
        s.tell()
