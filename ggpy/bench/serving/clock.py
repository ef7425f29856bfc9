"""The time at which bytes arrived: when the event loop found a socket readable.

When hundreds of sockets are readable at once, they are read one after the other. All of them get
the time at which the loop found them readable, so that the client's own work is not counted.
Nothing here knows what is read.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Any, TypeVar

T = TypeVar("T")
Clock = Callable[[], float]


class StampedSelector(selectors.DefaultSelector):
    """A selector that keeps the time of its last return, in seconds of perf_counter."""

    stamp = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(timeout)
        self.stamp = perf_counter()
        return found


def run(work: Callable[[Clock], Coroutine[Any, Any, T]]) -> T:
    """Runs work(clock) in a new event loop; clock() is the time of the last read."""
    selector = StampedSelector()
    loop = asyncio.SelectorEventLoop(selector)
    try:
        return loop.run_until_complete(work(lambda: selector.stamp))
    finally:
        loop.run_until_complete(_cancel_all())
        loop.close()


async def _cancel_all() -> None:
    """Cancels the tasks that an exception left running."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
