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
from threading import Thread, current_thread

from .engine import Engine
from .sequence import Piece, Sequence


class Runner:
    """Steps an engine in a thread of its own while it has sequences; `close` ends that thread.

    An error of a step becomes the error of all sequences that the engine has; the thread goes on.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._closed = False
        self._process = os.getpid()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="ggpy engine", daemon=True)
        self._thread.start()

    def pieces(self, sequence: Sequence) -> Iterator[Piece]:
        """Yields the pieces of one sequence until it ends, or raises its error."""
        return sequence.follow(self.waiter(sequence))

    def waiter(self, *sequences: Sequence) -> Callable[[], None]:
        """Returns a function that waits for the next piece, or the end, of any of the sequences.

        From now on the owner thread steps them. RuntimeError in a fork of its process.
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
        self._wake.put(None)
        return news.get

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
                    self._engine.abort(error)
