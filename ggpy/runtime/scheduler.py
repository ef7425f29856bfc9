"""Which sequences wait, run, or have ended and keep pages; and whose pages those are.

Every sequence begins and ends here, so that no page is held by one that nobody knows. Nothing here
evaluates tokens or knows threads: one at a time may call.
"""

from __future__ import annotations

from collections import deque

from ..backends.interface import PAGE_SIZE
from .kv_cache import KVCache, OutOfPages, SequencePages
from .sequence import Finish, Sequence


class Scheduler:
    """Up to n_seq sequences run and keep pages of the cache; more wait."""

    def __init__(self, cache: KVCache, n_seq: int) -> None:
        self.cache, self.n_seq = cache, n_seq
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.kept: deque[Sequence] = deque()  # ended, oldest first

    # Beginnings and ends

    def begin(self, s: Sequence, previous: Sequence | None) -> None:
        """Let a new sequence wait for its turn, in the pages of an ended one if there is one."""
        if previous is not None:
            self._take_over(s, previous)
        if s.max_tokens is not None and s.max_tokens <= 0:
            self.end(s, "length")
        else:
            self.waiting.append(s)

    def cancel(self, s: Sequence) -> None:
        """End a sequence, if it has not ended."""
        if s.finish is None:
            self.end(s, "cancelled")

    def release(self, s: Sequence) -> None:
        """End a sequence, and give back what it kept."""
        self.cancel(s)
        if s in self.kept:
            self.kept.remove(s)
        _forget(s)

    def fail(self, s: Sequence, error: BaseException) -> None:
        """End a sequence that cannot go on; what it evaluated may be wrong, and is not kept."""
        if s.finish is None:
            s.error, s.keep = error, False
            self.end(s, "error")

    def fail_all(self, error: BaseException) -> None:
        """End all sequences so, and keep no pages."""
        for s in [*self.running, *self.waiting]:
            self.fail(s, error)
        while self.kept:
            _forget(self.kept.popleft())

    def end(self, s: Sequence, finish: Finish) -> None:
        """Take a sequence out, and say so last."""
        if s in self.running:
            self.running.remove(s)
        if s in self.waiting:
            self.waiting.remove(s)
        if s.keep:
            self.kept.append(s)
        else:
            _forget(s)
        s.finish = finish
        s.tell()

    # Pages

    def admit(self) -> None:
        """Let waiting sequences run, the oldest first; kept pages make room."""
        while self.waiting and len(self.running) < self.n_seq:
            sequence = self.waiting.popleft()
            self._share(sequence)
            self.running.append(sequence)
        holding = [s for s in self.waiting if s.pages.n_held]
        while len(self.running) + len(self.kept) + len(holding) > self.n_seq:
            _forget(self.kept.popleft() if self.kept else holding.pop())

    def grow(self, s: Sequence, n_tokens: int) -> bool:
        """Pages for the tokens that a sequence has in the next step; it fails if there are none."""
        try:
            s.pages.grow(s.n_evaluated, s.n_evaluated + n_tokens, s.n_finite)
        except OutOfPages as error:
            self.fail(s, error)
            return False
        return True

    def make_room(self, n_positions: int) -> SequencePages:
        """Pages for so many positions, none of which is taken yet; kept sequences give theirs up,
        then running ones, which are evaluated again.
        """
        others = iter([*self.waiting, *self.running])
        while not self.cache.fits(n_positions):
            _forget(self.kept.popleft() if self.kept else next(others))
        return SequencePages(self.cache)

    def _share(self, s: Sequence) -> None:
        """Begin with the full pages of the sequence that has most of the same tokens evaluated."""
        found = [*self.running, *self.kept]
        others = [(other.pages.forkable(_common(s, other)), other) for other in found]
        n, other = max(others, key=lambda x: x[0], default=(0, None))
        if other and n > s.n_evaluated:
            s.pages.release()
            s.pages = other.pages.fork(n)  # only what is used is forked: nobody releases it else
            s.n_evaluated = s.n_reused = n

    def _take_over(self, s: Sequence, previous: Sequence) -> None:
        """Continue in the pages of an ended sequence."""
        n = _common(s, previous)
        if previous.n_evaluated > previous.n_finite:  # a page in which NaN may be is not shared
            n = min(n, previous.n_finite // PAGE_SIZE * PAGE_SIZE)
            previous.pages.suspect(n)
        s.pages, previous.pages = previous.pages, s.pages
        s.n_evaluated = s.n_reused = s.pages.truncate(n)
        previous.n_evaluated = 0
        if previous in self.kept:
            self.kept.remove(previous)
        _forget(previous)


def _common(s: Sequence, other: Sequence) -> int:
    """Leading tokens that `other` has evaluated and `s` shares, except the last of `s`."""
    n = min(other.n_evaluated, len(other.ids), len(s.ids) - 1)
    pairs = zip(s.ids[:n], other.ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), n)


def _forget(s: Sequence) -> None:
    if s.error is not None or s.n_evaluated > s.n_finite:
        s.pages.suspect(s.n_finite)
    s.pages.release()
    s.n_evaluated = s.n_finite = 0
    if not s.n_generated:
        s.n_reused = 0
