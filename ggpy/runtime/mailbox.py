"""A mailbox: one thread at a time works on something, and other threads post requests to it.

Any thread, even a finalizer, may post a request, which never blocks for long. If no thread is at
work, the request is done at once; otherwise the working thread does it before its next piece of
work. Nothing here knows what the work is.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock
from typing import TypeVar, cast

Result = TypeVar("Result")


class Occupied(RuntimeError):
    """Another thread is at work, and only one thread at a time may be."""


class Mailbox:
    """Requests in the order of posting, and `inside`, the lock of the thread that is at work.

    A thread works in `with mailbox.inside`: it calls `apply` first, and `settle` after the block.
    """

    def __init__(self) -> None:
        self.inside = Lock()
        self._requests: SimpleQueue[Callable[[], None]] = SimpleQueue()  # finalizers may put, too

    @property
    def pending(self) -> bool:
        """Whether some requests are not done yet."""
        return not self._requests.empty()

    def post(self, request: Callable[[], None]) -> None:
        """Post a request, which must not raise. The working thread does it, or this one now."""
        self._requests.put(request)
        self.settle()

    def apply(self) -> None:
        """Do all requests; the caller holds `inside`."""
        while not self._requests.empty():
            self._requests.get()()

    def settle(self) -> None:
        """Do all requests, unless another thread is at work, which will. The caller must not be."""
        while not self._requests.empty() and not self.inside.locked():
            with self.inside:
                self.apply()

    def call(self, work: Callable[[], Result], first: Callable[[], None] = lambda: None) -> Result:
        """Have first() and work() done as a request; returns or raises what work() does. The
        thread that is at work must not call this.
        """
        done: SimpleQueue[tuple[Result | None, BaseException | None]] = SimpleQueue()

        def request() -> None:
            try:
                first()
                done.put((work(), None))
            except BaseException as error:
                done.put((None, error))
                if not isinstance(error, Exception):
                    raise  # an interrupt is for this thread, whichever thread asked for the work

        self.post(request)
        result, error = done.get()
        if error is not None:
            raise error
        return cast(Result, result)
