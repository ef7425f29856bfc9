"""One thread that steps an engine, for sequences of any thread.

Callers add sequences to the engine, and follow them here: they wait for their own pieces while the
owner thread evaluates all sequences together. Nothing here knows what a step is, or who the callers
are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from weakref import WeakSet

from .engine import Engine
from .sequence import Piece, Sequence


class Runner:
    """Steps an engine in a thread of its own while it has sequences; `close` ends that thread.

    An error of a step becomes the error of all sequences that the engine has; the thread goes on.
    If they cannot be ended either, it ends, and who waits for them gets a RuntimeError.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._closed = False
        self._process = os.getpid()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._lock = Lock()  # of the two below
        self._waiting: WeakSet[SimpleQueue[None]] = WeakSet()
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._run, name="ggpy engine", daemon=True)
        self._thread.start()

    def pieces(self, sequence: Sequence) -> Iterator[Piece]:
        """Yields the pieces of one sequence until it ends, or raises its error."""
        return sequence.follow(self.waiter(sequence))

    def waiter(self, *sequences: Sequence) -> Callable[[], None]:
        """Returns a function that waits for the next piece, or the end, of any of the sequences.

        From now on the owner thread steps them. The function raises RuntimeError if that thread has
        ended by an error. RuntimeError in a fork of its process.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "several threads used this model before this process was forked, and a fork has"
                " none of them: load the model in this process"
            )
        news: SimpleQueue[None] = SimpleQueue()
        for sequence in sequences:
            sequence.notify = partial(news.put, None)
        news.put(None)  # a piece may have come before `notify` was set
        with self._lock:
            self._waiting.add(news)
        self._wake.put(None)

        def wait() -> None:
            if self._failure is None:
                news.get()
            if self._failure is not None:
                raise RuntimeError(
                    "a step failed, and the sequences could not be ended: load the model again"
                ) from self._failure

        return wait

    def close(self) -> None:
        """End the thread, after the step that is under way; the engine is left as it is."""
        self._closed = True
        self._wake.put(None)
        if current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            self._wake.get()
            while self._engine.busy and not self._closed:
                try:
                    self._engine.step(wait=True)
                except BaseException as error:
                    try:
                        self._engine.abort(error)
                    except BaseException as failure:
                        self._give_up(failure)
                        return

    def _give_up(self, failure: BaseException) -> None:
        with self._lock:
            self._failure = failure
            for news in self._waiting:
                news.put(None)
