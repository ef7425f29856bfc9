"""Sequences that wait to run: preempted sequences come first, then clients take turns.

Nothing here knows pages, or how many sequences may run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import chain

from .sequence import Sequence


class WaitingQueue:
    """A queue of preempted sequences, and after it a queue for each client."""

    def __init__(self) -> None:
        self._first: deque[Sequence] = deque()  # preempted sequences, the oldest first
        self._queues: dict[str, deque[tuple[int, Sequence]]] = {}  # (order of arrival, sequence)
        self._n_came = self._n = 0

    def __len__(self) -> int:
        return self._n  # a counter, because other threads ask while the queues change

    def __iter__(self) -> Iterator[Sequence]:
        """The preempted sequences, then all others in the order of arrival."""
        came = sorted(chain(*self._queues.values()), key=lambda entry: entry[0])
        return iter([*self._first, *(s for _, s in came)])

    def __contains__(self, s: Sequence) -> bool:
        queue = self._queues.get(s.client, ())
        return s in self._first or any(other is s for _, other in queue)

    def append(self, s: Sequence) -> None:
        """Add a new sequence, after the others of its client."""
        self._queues.setdefault(s.client, deque()).append((self._n_came, s))
        self._n_came += 1
        self._n += 1

    def put_first(self, s: Sequence) -> None:
        """Add a preempted sequence, before all others."""
        self._first.appendleft(s)
        self._n += 1

    def next(self, running: Iterable[Sequence]) -> Sequence | None:
        """The sequence whose turn it is: a preempted one, or else the oldest sequence of the client
        that has the fewest running.
        """
        if self._first:
            return self._first[0]
        if not self._queues:
            return None
        if len(self._queues) == 1:
            (queue,) = self._queues.values()
            return queue[0][1]
        counts = Counter(s.client for s in running)
        heads = [queue[0] for queue in self._queues.values()]
        return min(heads, key=lambda entry: (counts[entry[1].client], entry[0]))[1]

    def remove(self, s: Sequence) -> None:
        """Remove a sequence, which must be waiting."""
        if s in self._first:
            self._first.remove(s)
        else:
            queue = self._queues[s.client]
            if queue[0][1] is s:
                queue.popleft()
            else:
                queue.remove(next(entry for entry in queue if entry[1] is s))
            if not queue:
                del self._queues[s.client]
        self._n -= 1
