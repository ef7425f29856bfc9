"""The scheduler: which sequences wait, run, or have ended and keep pages.

A waiting sequence is admitted when there is a row for it and pages for its prompt. When the pages
run out, the youngest sequence is preempted: its pages are taken, and it is evaluated again later.
Every sequence begins and ends here, so that every held page belongs to a known sequence. Nothing
here evaluates tokens or knows threads: one thread at a time may call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import count
from time import perf_counter

from ..backends.interface import PAGE_SIZE
from .batch import Batch
from .kv_cache import KVCache, SequencePages
from .page_pool import OutOfPages
from .prefix import longest
from .sequence import Finish, Sequence
from .stats import EngineStats, Totals
from .waiting import WaitingQueue

LEAST_SHARE = 4


class Scheduler:
    """Up to n_seq sequences of up to n_ctx tokens run, n_batch tokens in a step; more wait.

    prefill_tokens: the most tokens of a step that has prompts while some sequence decodes, the
    decoded tokens included; None: n_batch. Prompts get at least 1 / LEAST_SHARE of it, however many
    sequences decode.
    """

    def __init__(
        self,
        cache: KVCache,
        n_seq: int,
        n_ctx: int,
        n_batch: int,
        prefill_tokens: int | None = None,
    ) -> None:
        self.cache, self.n_seq, self.n_ctx, self.n_batch = cache, n_seq, n_ctx, n_batch
        self.prefill_tokens = prefill_tokens or n_batch
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in the order of admission
        self.kept: deque[Sequence] = deque()  # ended sequences that keep pages, oldest first
        self.totals = Totals()
        self._holding: list[Sequence] = []  # waiting sequences with pages that they took over
        self._reserved = all(pool.n_pages >= n_seq * pool.limit for pool in cache.pools)
        # The sequence that last found too few pages, and the free pages of each pool then.
        self._refused: tuple[Sequence | None, list[int]] = (None, [])

    # Beginnings and ends

    def begin(self, s: Sequence, previous: Sequence | None) -> None:
        """Queue a new sequence, unless it has ended; it takes over the pages of `previous`, if that
        is given.
        """
        if s.finish is not None:
            return
        if previous is not None:
            self._take_over(s, previous)
        self.waiting.append(s)
        if s.pages.n_held:
            self._holding.append(s)

    def cancel(self, s: Sequence) -> None:
        """End a sequence, if it has not ended."""
        if s.finish is None:
            self.end(s, "cancelled")

    def release(self, s: Sequence) -> None:
        """End a sequence and give back the pages that it kept."""
        self.cancel(s)
        if s in self.kept:
            self.kept.remove(s)
        s.forget()

    def fail(self, s: Sequence, error: BaseException) -> None:
        """End a sequence with an error. Its pages are not kept, because they may be wrong."""
        if s.finish is None:
            s.error, s.keep = error, False
            self.end(s, "error")

    def fail_all(self, error: BaseException) -> None:
        """End all sequences with an error, and keep no pages."""
        for s in [*self.running, *self.waiting]:
            self.fail(s, error)
        while self.kept:
            self.kept.popleft().forget()

    def end(self, s: Sequence, finish: Finish) -> None:
        """Remove a sequence from the schedule, and notify its caller last."""
        if s in self.running:
            self.running.remove(s)
        elif s in self.waiting:
            self._take_out(s)
        if s.keep:
            self.kept.append(s)
        else:
            s.forget()
        self._refused = None, []
        s.finish = finish
        s.tell()

    def _take_out(self, s: Sequence) -> None:
        """Remove a sequence from those that wait."""
        self.waiting.remove(s)
        if s in self._holding:
            self._holding.remove(s)

    # Admission and preemption

    def admit(self) -> None:
        """Admit waiting sequences while there are rows and pages; kept pages are given up."""
        while len(self.running) < self.n_seq:
            s = self.waiting.next(self.running)
            if s is None or not self._fits(s):
                break
            self._take_out(s)
            self.running.append(s)
            s.t_admitted = s.t_admitted or perf_counter()
        while len(self.running) + len(self.kept) + len(self._holding) > self.n_seq:
            self._reclaim()

    def _fits(self, s: Sequence) -> bool:
        """Whether there are pages for the prompt of a waiting sequence and one page more, besides
        those that running sequences still need for their ids. Takes published pages first.
        """
        free = [pool.n_free for pool in self.cache.pools]
        refused, before = self._refused
        if refused is s and all(now <= then for now, then in zip(free, before, strict=True)):
            return False
        self._share(s)
        while not self._has_room(s):
            if not self._reclaim(but=s):
                if s not in self._holding:
                    s.forget()
                self._refused = s, free
                return False
        self._refused = None, []
        return True

    def _has_room(self, s: Sequence) -> bool:
        if self._reserved or not self.running:
            return True
        for i, pool in enumerate(self.cache.pools):
            promised = sum(other.pages.tables[i].missing(len(other.ids)) for other in self.running)
            needed = s.pages.tables[i].missing(len(s.ids) + PAGE_SIZE)
            if needed + promised > pool.n_free:
                return False
        return True

    def _reclaim(self, but: Sequence | None = None) -> bool:
        """Free the pages of one sequence that does not run; False if none holds pages."""
        if self.kept:
            self.kept.popleft().forget()
            return True
        for s in reversed(self._holding):
            if s is not but:
                s.forget()
                self._holding.remove(s)
                return True
        return False

    def _grow(self, s: Sequence, n_tokens: int, settled: bool) -> bool:
        """Take pages for the next n_tokens of a running sequence; False if there are too few.

        With `settled` (no step is under way), False means that the youngest sequence was preempted,
        or that this sequence failed because it is alone; the batch has to be chosen again.
        """
        while True:
            try:
                s.pages.grow(s.n_evaluated, s.n_evaluated + n_tokens, s.n_finite)
                return True
            except OutOfPages as error:
                if self._reclaim():
                    continue
                if settled and len(self.running) == 1:
                    self.fail(s, error)
                elif settled:
                    self._preempt(self.running[-1])
                return False

    def _preempt(self, s: Sequence) -> None:
        """Free the pages of a running sequence, and let it wait before all others."""
        self.running.remove(s)
        s.forget()
        self.waiting.put_first(s)
        self.totals.preemptions += 1

    def stats(self) -> EngineStats:
        """Counts of sequences, pages and tokens; any thread may call this."""
        return EngineStats(
            n_running=len(self.running),
            n_waiting=len(self.waiting),
            n_pages=self.cache.n_pages,
            n_pages_free=self.cache.n_free,
            n_pages_cached=self.cache.n_cached,
            **{f"{name}_total": value for name, value in vars(self.totals).items()},
        )

    # Steps

    def next_batch(self, under_way: list[Sequence] | None) -> Batch | None:
        """Choose the next batch and take pages for it. under_way: the owners of the rows of a step
        whose tokens nobody has read; None: there is no such step.

        Returns None if there is nothing to do, or if pages are missing while a step is under way,
        because its sequences cannot be preempted.
        """
        late = dict(zip(under_way or (), count(), strict=False))
        while True:
            batch = self._chosen(late)
            if not batch.sequences:
                return None
            if self._has_pages(batch, settled=under_way is None):
                return batch
            if under_way is not None:
                return None

    def _has_pages(self, batch: Batch, settled: bool) -> bool:
        """Take pages for all tokens of a batch; False if some sequence got none; see `_grow`."""
        for s, length in zip(batch.sequences, batch.lengths, strict=True):
            fits = length == 1 and s.n_evaluated % PAGE_SIZE  # its page has room
            fits = fits and not self.cache.has_states  # each step takes a page of states
            if not fits and not self._grow(s, length, settled):
                return False
        return True

    def _chosen(self, late: Mapping[Sequence, int]) -> Batch:
        """A batch of one token for each sequence that has only one, then chunks of prompts.

        late: maps sequences whose token the step under way still samples to its row r there; the
        id of that token is ~r.
        """
        ones: list[Sequence] = []
        ids: list[int] = []
        prompts = []
        n_last = 0  # tokens of `ones` that end a prompt
        for s in self.running:
            if s in late:
                ends = s.max_tokens is not None and s.n_generated + 1 >= s.max_tokens
                if ends or len(s.ids) == self.n_ctx:
                    continue
                id = ~late[s]
            elif len(s.ids) == s.n_evaluated + 1:
                id = s.ids[-1]
                n_last += not s.n_generated
            else:
                prompts.append(s)
                continue
            ones.append(s)
            ids.append(id)
        batch = Batch()
        batch.add_ones(ones, ids, n_last)
        room = self.n_batch - len(ids)
        if len(ids) > n_last:
            least = max(1, self.prefill_tokens // LEAST_SHARE)
            room = min(room, max(self.prefill_tokens - len(ids), least))
        for s in prompts:
            if room and s.n_evaluated == s.n_shared:
                self._share(s)  # others may have got further since it was admitted
            room -= batch.add_prompt(s, self._piece(s, room))
        return batch

    def _piece(self, s: Sequence, room: int) -> int:
        """How many of `room` tokens of a prompt to evaluate now. If recurrent states are kept for
        other sequences or for the next turn of a chat, the chunk ends at the end of a page, at the
        latest at the end of the prompt's last full page.
        """
        if not self.cache.has_states or not s.cache or not (s.keep or self.cache.caches):
            return room
        first, last = s.n_evaluated, (len(s.ids) - 1) // PAGE_SIZE * PAGE_SIZE
        stop = min(last, (first + room) // PAGE_SIZE * PAGE_SIZE)
        return stop - first if stop > first else room

    def evaluated(self, batch: Batch) -> None:
        """Note that a batch was submitted: its prompts may be shared before the logits are seen."""
        for s, length in zip(batch.sequences, batch.lengths, strict=True):
            s.n_evaluated += length
        for s in batch.prompts():
            self._publish(s, s.n_evaluated // PAGE_SIZE, finite=False)
        self.totals.prompt_tokens += batch.n_prompt_tokens
        self.totals.steps += 1

    def interrupted(self, batch: Batch) -> None:
        """Note that a batch was not submitted completely: its pages may hold anything."""
        for s in batch.sequences:
            s.interrupted = True

    # Pages

    def trust(self, s: Sequence) -> None:
        """Note that all pages up to s.n_finite are known to be finite, so they may stay cached."""
        self._publish(s, s.n_finite // PAGE_SIZE, finite=True)

    def _publish(self, s: Sequence, n_pages: int, finite: bool) -> None:
        """Let others find the first n_pages pages of a sequence."""
        if s.cache:
            for page in range(s.n_trusted if finite else s.n_published, n_pages):
                s.pages.publish(page, s.hashes.of(page, s.ids), finite)
        s.n_published = n_pages
        if finite:
            s.n_trusted = n_pages

    def make_room(self, n_positions: int) -> SequencePages:
        """Returns an empty SequencePages after freeing pages for n_positions. Kept sequences give
        up their pages first, then waiting and running sequences, which are evaluated again.
        """
        others = iter([*self.waiting, *self.running])
        while not self.cache.fits(n_positions):
            (self.kept.popleft() if self.kept else next(others)).forget()
        self._holding = [s for s in self._holding if s.pages.n_held]
        return SequencePages(self.cache)

    def _share(self, s: Sequence) -> None:
        """Replace the pages of a sequence by published ones if these hold more of its tokens. The
        last token is always evaluated.
        """
        if not s.cache:
            return
        most = (len(s.ids) - 1) // PAGE_SIZE
        n = longest(self.cache.pools, (s.hashes.of(page, s.ids) for page in range(most)))
        if n * PAGE_SIZE <= s.n_evaluated:
            return
        pages = SequencePages(self.cache)
        pages.reuse([s.hashes.of(page, s.ids) for page in range(n)])  # before its own may go
        if s.has_unseen:
            s.pages.suspect(s.n_finite)
        s.pages.release()
        s.pages, s.n_published, s.n_trusted = pages, n, 0
        s.n_evaluated = s.n_shared = n * PAGE_SIZE
        if not s.n_generated:
            s.n_reused = s.n_shared

    def _take_over(self, s: Sequence, previous: Sequence) -> None:
        """Move the pages of an ended sequence to a new one, as far as the tokens are the same."""
        n = _common(s, previous)
        if previous.has_unseen:  # a page that may hold NaN is not shared
            finite = previous.n_finite // PAGE_SIZE * PAGE_SIZE
            n = min(n, finite)
            previous.pages.suspect(finite)
        s.pages, previous.pages = previous.pages, s.pages
        s.n_evaluated = s.n_reused = s.pages.truncate(n)
        previous.n_evaluated = 0
        if previous in self.kept:
            self.kept.remove(previous)
        previous.forget()


def _common(s: Sequence, other: Sequence) -> int:
    """The number of leading tokens that `other` has evaluated and that `s` has too, not counting
    the last token of `s`.
    """
    n = min(other.n_evaluated, len(other.ids), len(s.ids) - 1)
    pairs = zip(s.ids[:n], other.ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), n)
