"""One text being continued: its ids, its pieces, and where it must stop.

Only what belongs to a single sequence; which of them are evaluated together, and when, is the
engine's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import index
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..sampling import Sampler
from .kv_cache import PageTable

Finish = Literal["stop", "length", "context", "cancelled", "error"]

MAX_STOPS = 64
MAX_STOP_CHARS = 1024


class Stream(Protocol):
    """A streaming decoder of ids: "" while a character is incomplete."""

    def add(self, id: int) -> str: ...

    def finish(self) -> str: ...


class Tokens(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def end_ids(self) -> frozenset[int]: ...

    def stream(self) -> Stream: ...


class Piece(NamedTuple):
    """What one sampled token adds: the texts of all pieces are the answer.

    `text` is empty while a character or a possible stop string is incomplete; an end token's has
    what was held back.
    """

    text: str
    id: int
    logprob: float | None = None  # ln of the model's own probability, where it was asked for


class StopStrings:
    """Cuts a stream of text at the first stop string, wherever its parts fall.

    One text, or at most MAX_STOPS, of at most MAX_STOP_CHARS; else ValueError.
    """

    def __init__(self, stops: str | Iterable[str]) -> None:
        self._stops = [s for s in _checked_stops(stops) if s]
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """(what may be shown, whether a stop string was found); its beginnings are held back."""
        if not self._stops:
            return text, False
        self._held += text
        found = [at for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        cut = len(self._held) - self._beginning()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _beginning(self) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        longest = min(len(self._held), max((len(s) - 1 for s in self._stops), default=0))
        ends = range(longest, 0, -1)
        return next((n for n in ends if any(s.startswith(self._held[-n:]) for s in self._stops)), 0)


def _checked_stops(stops: object) -> list[str]:
    if isinstance(stops, str):
        stops = [stops]
    if not isinstance(stops, Iterable):
        raise ValueError(f"stop is {stops!r:.60}: give a text, or several")
    given = list(islice(stops, MAX_STOPS + 1))
    if len(given) > MAX_STOPS:
        raise ValueError(f"stop has more than {MAX_STOPS} texts: give at most {MAX_STOPS}")
    for text in given:
        if not isinstance(text, str):
            raise ValueError(f"stop holds {text!r:.60}: give a text, or several")
        if len(text) > MAX_STOP_CHARS:
            raise ValueError(
                f"stop holds a text of {len(text)} characters: give at most {MAX_STOP_CHARS}"
            )
    return given


@dataclass(eq=False)
class Sequence:
    """One text being continued. Callers take `pieces` from the left and look at `finish`.

    `finish` is set last: who reads it first has all pieces, and `error` if it is "error".
    """

    ids: list[int]  # the context: prompt and accepted tokens
    sampler: Sampler
    table: PageTable
    stream: Stream
    stops: StopStrings
    max_tokens: int | None
    logprobs: bool
    context_shift: bool
    n_keep: int  # first tokens that a context shift keeps
    keep: bool  # pages outlive the end, for a sequence that continues this one
    n_prompt: int
    n_evaluated: int = 0  # leading ids with keys and values, counting steps that are under way
    n_finite: int = 0  # of these: up to the last whose logits were seen, and were finite
    n_reused: int = 0  # of the prompt: taken from another sequence
    n_generated: int = 0
    pieces: deque[Piece] = field(default_factory=deque)
    finish: Finish | None = None
    error: BaseException | None = None  # why it could not go on, where `finish` is "error"
    notify: Callable[[], None] | None = None  # called after each piece, and at the end

    def accept(
        self, token: int, logprob: float | None, end_ids: frozenset[int], n_ctx: int
    ) -> Finish | None:
        """Append a sampled token and its piece; why the sequence ends with it, if it does."""
        self.sampler.accept(token)
        self.ids.append(token)
        self.n_generated += 1
        end = token in end_ids
        text, stopped = self.stops.add("" if end else self.stream.add(token))
        finish = self._why_finished(end or stopped, n_ctx)
        if finish and not stopped:
            rest, stopped = self.stops.add(self.stream.finish())
            text += rest if stopped else rest + self.stops.finish()
        self.pieces.append(Piece(text, token, logprob))
        return finish

    def _why_finished(self, stopped: bool, n_ctx: int) -> Finish | None:
        if stopped:
            return "stop"
        if self.n_generated == self.max_tokens:
            return "length"
        return "context" if len(self.ids) > n_ctx and not self.context_shift else None

    def follow(self, advance: Callable[[], object]) -> Iterator[Piece]:
        """Take all pieces as they come, and raise `error` if it ends so.

        advance(): called while there is none; it makes, or waits for, what comes next.
        """
        while True:
            ended = self.finish is not None
            while self.pieces:
                yield self.pieces.popleft()
            if ended:
                break
            advance()
        if self.error is not None:
            raise self.error

    def tell(self) -> None:
        """Call `notify`, which must not use the engine; one that fails is not called again."""
        if self.notify is not None:
            try:
                self.notify()
            except Exception:
                self.notify = None


def logprob(logits: NDArray[np.float32], token: int) -> float:
    """log softmax(logits[V])[token]."""
    x = logits.astype(np.float64)
    top = x.max()
    return float(x[token] - top - np.log(np.exp(x - top).sum()))


def whole(name: str, value: object) -> int:
    """The value of a parameter as a whole number; ValueError."""
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} is {value!r:.60}: it must be a whole number") from None
