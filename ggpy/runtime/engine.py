"""Sequences in flight -> ragged batches -> tokens.

Each step evaluates one token of every sequence that decodes and, in the rest of the batch, chunks
of prompts. An error of a sequence ends that sequence alone. With an asynchronous backend, a step is
submitted before the last one's tokens are read. Sequences come from any thread; one at a time may
step. Nothing here knows how steps are computed, where prompts come from, or who reads the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arch.decoder import Decoder
from ..backends.interface import PAGE_SIZE, Ops
from ..sampling import NO_TOKEN, Sampler, SamplingParams
from ..sampling.mask import TokenMask
from .batch import Flight, TableStack
from .evaluator import logits_of
from .kv_cache import KVCache, SequencePages
from .mailbox import Mailbox, Occupied, Result
from .prefix import PrefixHashes
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
from .stats import EngineStats, Totals

__all__ = ["ContextOverflow", "Engine", "Occupied", "Piece", "Sequence", "StopStrings"]


class Engine:
    """Runs up to n_seq sequences of up to n_ctx tokens; more wait.

    | parameter | meaning |
    |---|---|
    | n_batch | most tokens of one step |
    | run_ahead | submit a step before the last one's tokens are read; None: if it pays |
    | n_rewind | positions beyond n_batch that a sequence with windows can be cut back by |
    | n_positions | of the KV cache that all sequences share, n_ctx or more; None: n_ctx for each |
    | prefill_tokens | chunked prefill: see Scheduler; None: n_batch |
    | prefix_cache | keep pages of ended sequences for prompts with the same beginning |

    When pages run out, the youngest sequence waits and is evaluated again. Any thread may call
    `add`, `cancel` and `release`; they take effect before the next step.
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
        n_positions: int | None = None,
        prefill_tokens: int | None = None,
        prefix_cache: bool = False,
    ) -> None:
        if min(n_ctx, n_batch, n_seq) < 1:
            found = f"n_ctx {n_ctx}, n_batch {n_batch} and n_seq {n_seq}"
            raise ValueError(f"{found} must be 1 or more")
        if prefill_tokens is not None:
            whole("prefill_tokens", prefill_tokens, least=1)
        self.decoder, self.ops, self.tokenizer = decoder, ops, tokenizer
        self._end_ids = tokenizer.end_ids
        self.n_ctx, self.n_seq = n_ctx, n_seq
        self.n_batch = max(n_batch, n_seq)
        self.run_ahead = ops.asynchronous if run_ahead is None else run_ahead
        shape = decoder.cache_shape(n_seq, n_ctx, self.n_batch + n_rewind, n_positions)
        ops.allocate_cache(shape)
        self.cache = KVCache(shape, prefix_cache)
        self._scheduler = Scheduler(self.cache, n_seq, n_ctx, self.n_batch, prefill_tokens)
        self._tables = TableStack()
        self._flight: Flight | None = None
        self._ahead: Flight | None = None  # the step after it
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
        """Prepare and begin a sequence that continues ids; see `prepare` and `begin`."""
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
        cache: bool = True,
        salt: bytes = b"",
        client: str = "",
        special: bool = False,
        grammar: TokenMask | None = None,
    ) -> Sequence:
        """Returns a checked sequence that continues ids, for `begin`. It holds no resources yet.

        max_tokens: None means until the model or the context ends; 0 only evaluates. context_shift:
        in a full context, drop the older half of the tokens after the first n_keep. keep: the pages
        outlive the sequence. cache: share pages with sequences of the same salt and beginning.
        client: the client with the fewest running sequences has the next turn. special: the text
        shows control tokens, except those that end it. grammar: a mask of the next token.

        ContextOverflow if the ids do not fit; ValueError, also for a context shift if layers have
        recurrent states, which cannot be dropped in part; RuntimeError after `close`.
        """
        self._check_open()
        if not self.decoder.causal:
            raise ValueError("this model makes embeddings, and continues no text: embed the text")
        if context_shift and self.cache.has_states:
            raise ValueError(
                "this model has recurrent states, of which the older half cannot be dropped: leave "
                "context_shift (--context-shift) away, or raise n_ctx (-c)"
            )
        n_vocab = self.decoder.sizes.n_vocab
        prompt = checked_prompt(ids, self.n_ctx, n_vocab)
        if not 0 <= whole("n_keep", n_keep) < self.n_ctx:
            raise ValueError(f"n_keep is {n_keep}: it must be 0 to {self.n_ctx - 1}")
        if not isinstance(salt, bytes):
            raise ValueError(f"salt is {salt!r:.60}: give bytes")
        return Sequence(
            ids=prompt,
            sampler=Sampler(params or SamplingParams(), n_vocab, prompt, grammar, self.tokenizer),
            pages=SequencePages(self.cache),
            stream=self.tokenizer.stream(special=True) if special else self.tokenizer.stream(),
            stops=StopStrings(stop),
            max_tokens=None if max_tokens is None else whole("max_tokens", max_tokens),
            logprobs=bool(logprobs or top_logprobs),
            top_logprobs=whole("top_logprobs", top_logprobs, least=0),
            context_shift=context_shift,
            n_keep=n_keep,
            keep=keep,
            n_prompt=len(prompt),
            client=client,
            cache=cache,
            hashes=PrefixHashes(salt),
        )

    def begin(self, sequence: Sequence, previous: Sequence | None = None) -> None:
        """Queue a prepared sequence, once. One that was cancelled before stays ended. ValueError;
        RuntimeError after `close`.

        previous: an ended sequence that was prepared with keep. The new sequence takes over its
        pages as far as the tokens of both are the same.
        """
        self._check_own(sequence)
        if previous is not None:
            self._check_own(previous)
            if previous.finish is None:
                raise ValueError(
                    "the previous sequence is still running: cancel it or wait for its end"
                )
        self._check_open()
        if sequence.t_begun:
            raise ValueError("the sequence has begun already: prepare another one")
        sequence.t_begun = perf_counter()
        self._mailbox.post(partial(self._begin, sequence, previous))

    def _begin(self, s: Sequence, previous: Sequence | None) -> None:
        try:
            self._check_open()
            if previous is not None and previous.n_evaluated > previous.n_finite:
                self._collect_all()  # to know how many of its tokens may be taken over
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
        """End a sequence now; a sequence that has ended already does not change."""
        self._check_own(sequence)
        self._mailbox.post(partial(self._scheduler.cancel, sequence))

    def release(self, sequence: Sequence) -> None:
        """End a sequence and give back the pages it kept."""
        self._check_own(sequence)
        self._mailbox.post(partial(self._scheduler.release, sequence))

    def close(self) -> None:
        """End all sequences with an error and accept no more; waits for a step under way."""
        self._closed = True
        self.abort(RuntimeError("the model was closed before the answer was complete"))

    def abort(self, error: BaseException) -> None:
        """End all sequences with the error, and forget the steps that are under way."""
        self._mailbox.call(partial(self._abort, error))

    def _abort(self, error: BaseException) -> None:
        self._flight, self._ahead, self._lost = None, None, False
        self._scheduler.fail_all(error)

    def pieces(self, sequence: Sequence) -> Iterator[Piece]:
        """Yields the pieces of one sequence, and raises its error; other sequences advance, too."""
        return sequence.follow(self.step)

    @property
    def busy(self) -> bool:
        """Whether some sequence has not ended."""
        return bool(self._scheduler.waiting or self._scheduler.running or self._mailbox.pending)

    def stats(self) -> EngineStats:
        """Counts of sequences, pages and tokens, as of now; cheap, and any thread may call it."""
        return self._scheduler.stats()

    def count_anew(self) -> None:
        """Set the totals to zero."""
        self._scheduler.totals = Totals()

    # Steps

    def step(self, wait: bool = False) -> list[Sequence]:
        """Evaluate one batch. Returns the sequences that got a piece, and those that ended.

        Raises Occupied while another thread is in a step, unless `wait` is set. An error of one
        sequence becomes its `error`; an error of the device is raised, and the step can be
        repeated.
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
        self._sample(self._flight)
        if self._ahead is None and not self._lost and self._may_run_ahead(self._flight):
            self._ahead = self._submit()
        changed = self._collect_first()
        if self._flight is not None:
            self._sample(self._flight)  # now, so that the device need not wait for the next call
        return changed

    def logits(self, ids: Seq[int]) -> NDArray[np.float32]:
        """Logits l[T, V] of every token of a text, computed between two steps, in its own pages."""
        self._check_open()
        prompt = checked_prompt(ids, self.n_ctx, self.decoder.sizes.n_vocab)
        return self.apart(
            lambda make_room: logits_of(
                self.decoder, self.ops, make_room(len(prompt)), prompt, self.n_batch
            )
        )

    def apart(self, work: Callable[[Callable[[int], SequencePages]], Result]) -> Result:
        """Returns work(Scheduler.make_room), called between two steps. RuntimeError if closed."""
        self._check_open()
        return self._mailbox.call(partial(work, self._scheduler.make_room), self._collect_all)

    def _submit(self) -> Flight | None:
        """Submit the next step to the backend, if there is anything to evaluate."""
        batch = self._scheduler.next_batch(self._flight.owners if self._flight else None)
        if batch is None:
            return None
        try:
            for s, id in zip(batch.sequences, batch.ids, strict=False):  # one-token ones are first
                if id < 0:
                    s.sampler.expect(~id)
            with self.cache.cleared(self.ops.clear_pages, batch.spans()):
                logits = self.decoder.run(batch.step(self._tables))
            flight = Flight(batch.owners, logits)
            if self._flight is None or not flight.waits:
                self._sample(flight)
        except BaseException:
            self._scheduler.interrupted(batch)
            self._lost = self._flight is not None  # read its ids first: they may be overwritten
            raise
        self._scheduler.evaluated(batch)  # only now: an interrupted step is not evaluated
        return flight

    def _sample(self, flight: Flight) -> None:
        """Draw the tokens of a step, all or none, if they are not drawn yet: masks may delay it."""
        if flight.ids is not None or not flight.owners:
            return
        try:
            flight.ids = self.ops.sample(flight.logits, [s.sampler for s in flight.owners])
        except BaseException:
            late = self._flight.owners if self._flight and self._flight is not flight else []
            for s in flight.owners:
                s.sampler.n_drawn = s.n_generated + (s in late)
            raise

    def _may_run_ahead(self, flight: Flight) -> bool:
        """Whether the next step can be submitted before this step's tokens are read: none is
        accepted yet, nobody wants their logits, and their ids suffice. Masks delay draws only.
        """
        if not self.run_ahead or flight.n_collected:
            return False
        return not any(
            [s.logprobs or (s.context_shift and len(s.ids) == self.n_ctx) for s in flight.owners]
        )

    def _collect_all(self) -> None:
        """Read the steps that are under way, without submitting more."""
        while self._flight is not None:
            self._collect_first()

    def _collect_first(self) -> list[Sequence]:
        """Read the oldest step under way. Returns the sequences that got a token from it."""
        flight = self._flight
        changed = self._collect(flight) if flight and flight.owners else []
        self._flight, self._ahead, self._lost = self._ahead, None, False
        return changed

    def _collect(self, flight: Flight) -> list[Sequence]:
        """Accept each token of a step once; tokens of sequences that ended meanwhile are dropped.

        An error ends its sequence alone. After an interrupt, the next call takes the other tokens.
        """
        self._sample(flight)
        ids = self.ops.read(flight.ids).tolist()
        wanted = [row for row, s in enumerate(flight.owners) if s.logprobs]
        logits = {row: self.ops.read(flight.logits, row) for row in wanted}
        changed = []
        for row in range(flight.n_collected, len(ids)):
            s = flight.owners[row]
            try:
                flight.n_collected = row + 1
                if ids[row] != NO_TOKEN and s.n_evaluated:
                    s.n_finite = len(s.ids)
                    if s.n_finite // PAGE_SIZE > s.n_trusted:
                        self._scheduler.trust(s)
                if s.finish is not None:
                    s.sampler.n_drawn -= 1
                    continue
                self._accept(s, ids[row], logits.get(row))
            except Exception as error:
                self._scheduler.fail(s, error)
            except BaseException:  # the token may be accepted in part
                self._scheduler.fail(s, RuntimeError("interrupted while a token was accepted"))
                raise
            changed.append(s)
        return changed

    def _accept(self, s: Sequence, token: int, logits: NDArray[np.float32] | None) -> None:
        """Append a sampled token; end the sequence if the token is its last."""
        if s.max_tokens == 0:
            s.t_first = perf_counter()
            self._scheduler.totals.add_prompt(s.n_prompt, s.n_reused)
            return self._scheduler.end(s, "length")
        if token == NO_TOKEN:
            raise s.sampler.why_none
        told = () if logits is None else s.scores(logits, token, self.tokenizer)
        finish = s.accept(token, self._end_ids, self.n_ctx, *told)
        self._scheduler.totals.generated_tokens += 1
        if s.n_generated == 1:
            self._scheduler.totals.add_prompt(s.n_prompt, s.n_reused)
        if finish:
            self._scheduler.end(s, finish)
            return
        if len(s.ids) > self.n_ctx:
            s.shift()
        s.tell()
