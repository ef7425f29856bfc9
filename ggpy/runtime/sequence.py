"""One text that the model continues: its ids, its pieces, and where it must stop.

This module holds what belongs to a single sequence; the engine decides when sequences are evaluated
and which are evaluated together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from itertools import islice
from operator import index
from time import perf_counter
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..backends.interface import PAGE_SIZE
from ..sampling import Sampler, Split
from .kv_cache import SequencePages
from .logprobs import TokenBytes, TokenLogprob, drawn_scores, scores
from .prefix import PrefixHashes

Finish = Literal["stop", "length", "context", "cancelled", "error"]

MAX_STOPS = 64
MAX_STOP_CHARS = 1024


class TextStream(Protocol):
    """A streaming decoder of ids; returns "" while a character is incomplete."""

    def add(self, id: int) -> str: ...

    def finish(self) -> str: ...


class TokenizerLike(TokenBytes, Protocol):
    """The part of a tokenizer that the engine needs."""

    @property
    def end_ids(self) -> frozenset[int]: ...

    @property
    def end_of_turn_id(self) -> int | None: ...

    @property
    def suppressed_ids(self) -> frozenset[int]: ...

    def stream(self, special: bool = False) -> TextStream: ...


class ContextOverflow(ValueError):
    """A prompt of n_prompt tokens does not fit in a context of n_ctx."""

    def __init__(self, message: str, n_ctx: int = 0, n_prompt: int = 0) -> None:
        super().__init__(message)
        self.n_ctx, self.n_prompt = n_ctx, n_prompt


@dataclass(slots=True, repr=False)
class Piece:
    """What one sampled token adds to a text; `str(piece)` is `piece.text`.

    The texts of all pieces make up the answer. A text is empty while a character or a possible stop
    string is incomplete; the last piece has the text that was held back. In a chat whose answer has
    a form, what the model thinks before it is `reasoning`, and not text.

    finish_reason: None for all but the last piece of a text. "stop": an end token or a stop string;
    "length": max_tokens; "context": the context is full. Errors are raised instead.

    >>> import ggpy
    >>> with ggpy.load("models/tiny/llama.gguf", device="cpu") as model:
    ...     pieces = list(model.generate("hello", max_tokens=3, temperature=0))
    >>> pieces[0]
    Piece(text='h', id=109)
    >>> pieces[-1].finish_reason
    'length'
    """

    text: str
    id: int
    logprob: float | None = None  # ln of the model's probability, before the sampler chain
    top_logprobs: tuple[TokenLogprob, ...] = ()  # the most probable tokens, the best first
    finish_reason: Finish | None = None
    index: int = 0  # of the prompt in a list of prompts
    reasoning: str = ""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        values = ((f, getattr(self, f.name)) for f in fields(self))
        return f"Piece({', '.join(f'{f.name}={v!r}' for f, v in values if v != f.default)})"


class StopStrings:
    """Cuts a stream of text at the first stop string, which may span several parts.

    stops: one text, or at most MAX_STOPS, of at most MAX_STOP_CHARS each; else ValueError.
    """

    def __init__(self, stops: str | Iterable[str]) -> None:
        self._stops = [s for s in checked_stops(stops) if s]
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text

    def add(self, text: str) -> tuple[str, bool]:
        """Returns (text that may be shown, whether a stop string was found). Text that may be the
        beginning of a stop string is held back.
        """
        if not self._stops:
            return text, False
        self._held += text
        found = [(at, s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            at, self.found = min(found)
            shown, self._held = self._held[:at], ""
            return shown, True
        cut = len(self._held) - self._beginning()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self) -> str:
        """Returns the text that was held back; call this when no more text follows."""
        held, self._held = self._held, ""
        return held

    def _beginning(self) -> int:
        """The length of the longest end of the text that is the beginning of a stop string."""
        longest = min(len(self._held), max((len(s) - 1 for s in self._stops), default=0))
        ends = range(longest, 0, -1)
        return next((n for n in ends if any(s.startswith(self._held[-n:]) for s in self._stops)), 0)


def checked_stops(stops: object) -> list[str]:
    """The stop strings as a list; ValueError for too many, too long, or no text."""
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


@dataclass(eq=False, slots=True)
class Sequence:
    """One text that the model continues. Callers take `pieces` from the left and look at `finish`.

    `finish` is set last: once it is set, all pieces are there, and `error` if it is "error".
    """

    ids: list[int]  # the context: prompt and accepted tokens
    sampler: Sampler
    pages: SequencePages
    stream: TextStream
    stops: StopStrings
    max_tokens: int | None
    logprobs: bool
    top_logprobs: int  # entries of each piece's top_logprobs, at most
    context_shift: bool
    n_keep: int  # first tokens that a context shift keeps
    keep: bool  # pages outlive the end, for a sequence that continues this one
    n_prompt: int
    client: str = ""  # clients take turns: see WaitingQueue
    cache: bool = True  # the sequence shares pages with others
    hashes: PrefixHashes = field(default_factory=PrefixHashes)  # of its ids
    n_evaluated: int = 0  # leading ids with keys and values, counting steps that are under way
    n_finite: int = 0  # leading ids up to the last whose logits were seen and are finite
    n_shared: int = 0  # leading ids in pages that were published when it was admitted
    n_published: int = 0  # leading pages that others may find
    n_trusted: int = 0  # leading pages that are known to be finite
    n_reused: int = 0  # tokens of the prompt that were taken from another sequence
    interrupted: bool = False  # a step was: pages may hold values after n_evaluated, too
    n_generated: int = 0
    pieces: deque[Piece] = field(default_factory=deque)
    finish: Finish | None = None
    error: BaseException | None = None  # why the sequence failed, if `finish` is "error"
    post_sampling: bool = False  # pieces have log probabilities after the sampler chain
    notify: Callable[[], None] | None = None  # called after each piece, and at the end
    index: int = 0  # of the prompt in a list of prompts; its pieces have it, too
    split: Split | None = None  # tells reasoning from the text of the pieces
    # time.perf_counter() at `begin`, at the first admission and at the first token; 0 before.
    t_begun: float = 0.0
    t_admitted: float = 0.0
    t_first: float = 0.0

    def accept(
        self,
        token: int,
        end_ids: frozenset[int],
        n_ctx: int,
        logprob: float | None = None,
        top_logprobs: tuple[TokenLogprob, ...] = (),
    ) -> Finish | None:
        """Append a sampled token and its piece. Returns why the sequence ends with it, or None."""
        self.sampler.accept(token)
        self.ids.append(token)
        if not self.n_generated:
            self.t_first = perf_counter()
        self.n_generated += 1
        end = token in end_ids
        text, stopped = self.stops.add("" if end else self.stream.add(token))
        finish = self._why_finished(end or stopped, n_ctx)
        if finish and not stopped:
            rest, stopped = self.stops.add(self.stream.finish())
            text += rest if stopped else rest + self.stops.finish()
        thought, text = self.split(text, finish is not None) if self.split else ("", text)
        self.pieces.append(Piece(text, token, logprob, top_logprobs, finish, self.index, thought))
        return finish

    def scores(
        self, logits: NDArray[np.float32], token: int, tokenizer: TokenBytes
    ) -> tuple[float, tuple[TokenLogprob, ...]]:
        """The log probability of a token, and those of the most probable tokens. The token was
        drawn from logits[V] and is not accepted yet.
        """
        if self.post_sampling:
            return drawn_scores(logits, token, self.top_logprobs, tokenizer, self.sampler)
        return scores(logits, token, self.top_logprobs, tokenizer)

    def _why_finished(self, stopped: bool, n_ctx: int) -> Finish | None:
        if stopped:
            return "stop"
        if self.n_generated == self.max_tokens:
            return "length"
        return "context" if len(self.ids) > n_ctx and not self.context_shift else None

    def shift(self) -> None:
        """A context shift: drop the older half of the tokens after the first n_keep. The remaining
        tokens get new positions and are evaluated again.
        """
        dropped = max(1, (len(self.ids) - self.n_keep) // 2)
        del self.ids[self.n_keep : self.n_keep + dropped]
        kept = self.pages.truncate(min(self.n_keep, self.n_evaluated))
        self.n_evaluated = self.n_finite = kept
        self.hashes.cut(self.n_keep)
        self.n_published = min(self.n_published, kept // PAGE_SIZE)
        self.n_trusted = min(self.n_trusted, kept // PAGE_SIZE)

    @property
    def has_unseen(self) -> bool:
        """Whether the pages may hold values that are not known to be finite."""
        return self.interrupted or self.n_evaluated > self.n_finite

    def forget(self) -> None:
        """Give back all pages. If the sequence goes on, all tokens are evaluated again."""
        if self.error is not None or self.has_unseen:
            self.pages.suspect(self.n_finite)
        self.pages.release()
        self.interrupted = False
        self.n_evaluated = self.n_finite = self.n_shared = self.n_published = self.n_trusted = 0
        if not self.n_generated:
            self.n_reused = 0

    def follow(self, advance: Callable[[], object]) -> Iterator[Piece]:
        """Yields all pieces as they come, and raises `error` if there is one; see `follow`."""
        return follow([self], advance)

    def tell(self) -> None:
        """Call `notify`, which must not use the engine; if it fails, it is not called again."""
        if self.notify is not None:
            try:
                self.notify()
            except Exception:
                self.notify = None


def follow(sequences: Seq[Sequence], advance: Callable[[], object]) -> Iterator[Piece]:
    """Yields the pieces of all sequences as they come; raises the first error after all have ended.

    advance() is called while there are no pieces; it computes the next ones, or waits for them.
    """
    running = list(sequences)
    while running:
        ended = [s for s in running if s.finish is not None]  # before their last pieces are taken
        for s in running:
            while s.pieces:
                yield s.pieces.popleft()
        if not ended:
            advance()
        running = [s for s in running if s not in ended]
    for s in sequences:
        if s.error is not None:
            raise s.error


def checked_prompt(ids: Seq[int], n_ctx: int, n_vocab: int) -> list[int]:
    """The ids as a list; ValueError if there are none, too many, or some outside the vocabulary."""
    try:
        if isinstance(ids, (str, bytes)):
            raise TypeError
        prompt = list(map(index, ids))
    except TypeError:
        raise ValueError(
            f"the prompt is {ids!r:.60}: give ids of tokens; tokenizer.encode makes them of text"
        ) from None
    if not prompt:
        raise ValueError("the prompt has no tokens: give it at least one")
    if len(prompt) > n_ctx:
        told = f"context is {n_ctx} tokens, the prompt has {len(prompt)}"
        raise ContextOverflow(f"{told}: raise n_ctx (-c) or shorten it", n_ctx, len(prompt))
    if min(prompt) < 0 or max(prompt) >= n_vocab:
        outside = next(i for i in prompt if not 0 <= i < n_vocab)
        raise ValueError(
            f"token id {outside} is not in the vocabulary: ids go from 0 to {n_vocab - 1}"
        )
    return prompt


def checked_length(max_tokens: int | None) -> int | None:
    """The number of tokens at most, if there is one; ValueError."""
    return None if max_tokens is None else whole("max_tokens", max_tokens, least=0)


def whole(name: str, value: object, least: int | None = None) -> int:
    """The value of a parameter as a whole number, `least` or more; ValueError."""
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} is {value!r:.60}: it must be a whole number") from None
    if least is not None and number < least:
        raise ValueError(f"{name} is {number}: it must be {least} or more")
    return number
