"""One thread at a time works on something; what all others ask of it waits for that thread.

A request is posted from any thread, a finalizer too, and never blocks for long: it is done at once
if nobody is at work, else by the thread that is, before its next piece of work. Nothing here knows
what the work is.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock
from typing import TypeVar, cast

Result = TypeVar("Result")


class Occupied(RuntimeError):
    """Another thread is at work on what only one may work on at a time."""


class Mailbox:
    """Requests, in the order in which they are posted, and `inside`, the lock of who is at work.

    Who works does so in `with mailbox.inside`, calls `apply` first, and `settle` after it.
    """

    def __init__(self) -> None:
        self.inside = Lock()
        self._requests: SimpleQueue[Callable[[], None]] = SimpleQueue()  # finalizers may put, too

    @property
    def pending(self) -> bool:
        """Whether there are requests that nobody has done."""
        return not self._requests.empty()

    def post(self, request: Callable[[], None]) -> None:
        """Have a request done, which must not raise, by whoever is at work, or here and now."""
        self._requests.put(request)
        self.settle()

    def apply(self) -> None:
        """Do all requests; the caller holds `inside`."""
        while not self._requests.empty():
            self._requests.get()()

    def settle(self) -> None:
        """Do all requests unless somebody is at work, who will; the caller is not."""
        while not self._requests.empty() and not self.inside.locked():
            with self.inside:
                self.apply()

    def call(self, work: Callable[[], Result], first: Callable[[], None] = lambda: None) -> Result:
        """What work() returns or raises, once first() and it were done; who is at work must not
        call this.
        """
        done: SimpleQueue[tuple[Result | None, BaseException | None]] = SimpleQueue()

        def request() -> None:
            try:
                first()
                done.put((work(), None))
            except BaseException as error:
                done.put((None, error))
                if not isinstance(error, Exception):
                    raise  # an interrupt is for this thread, whoever asked for the work

        self.post(request)
        result, error = done.get()
        if error is not None:
            raise error
        return cast(Result, result)
