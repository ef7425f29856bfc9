"""Sequences that wait for their turn: those that were taken out first, then clients in turns.

Nothing here knows pages, or how many may run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import chain

from .sequence import Sequence


class WaitingQueue:
    """A queue for each client, and one before all of them."""

    def __init__(self) -> None:
        self._first: deque[Sequence] = deque()  # preempted: the next one is the oldest
        self._queues: dict[str, deque[tuple[int, Sequence]]] = {}  # with the number of its coming
        self._n_came = self._n = 0

    def __len__(self) -> int:
        return self._n  # other threads ask: nothing is iterated

    def __iter__(self) -> Iterator[Sequence]:
        """The preempted ones, then all others in the order of their coming."""
        came = sorted(chain(*self._queues.values()), key=lambda entry: entry[0])
        return iter([*self._first, *(s for _, s in came)])

    def __contains__(self, s: Sequence) -> bool:
        queue = self._queues.get(s.client, ())
        return s in self._first or any(other is s for _, other in queue)

    def append(self, s: Sequence) -> None:
        """A new sequence, behind the others of its client."""
        self._queues.setdefault(s.client, deque()).append((self._n_came, s))
        self._n_came += 1
        self._n += 1

    def put_first(self, s: Sequence) -> None:
        """A preempted sequence, before all others."""
        self._first.appendleft(s)
        self._n += 1

    def next(self, running: Iterable[Sequence]) -> Sequence | None:
        """Whose turn it is: the oldest of the client that has the fewest running."""
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
        """Take out a sequence that is here."""
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
