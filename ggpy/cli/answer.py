"""One answer: a sequence run to its end, its text handed out as it comes, its progress and figures.

This module knows the engine and stderr. What becomes of the text is the caller's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..chat_formats import ReasoningLimit
    from ..generate_options import Compile, Form
    from ..model import Model
    from ..runtime.engine import Engine
    from ..runtime.sequence import Sequence as Answer
    from ..sampling import SamplingParams


@dataclass
class Figures:
    """Counts of tokens and seconds, of one answer or of several together."""

    n_prompt: int = 0
    n_reused: int = 0  # of the prompt: already evaluated for an earlier answer
    n_generated: int = 0
    prompt_seconds: float = 0.0  # until the first token
    answer_seconds: float = 0.0  # from the first token to the last
    n_answers: int = 0

    def add(self, other: Figures) -> None:
        """Count another answer in."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def lines(self) -> list[str]:
        """What the user reads at the end."""
        return [*self._prompt_lines(), *self._answer_lines()]

    def _prompt_lines(self) -> list[str]:
        if not self.n_answers:
            return []
        n = self.n_prompt - self.n_reused
        reused = f" ({self.n_reused} more reused)" if self.n_reused else ""
        first = f"first token after {self.prompt_seconds / self.n_answers:.2f} s"
        return [f"prompt: {n} tokens{reused}, {_rate(n, self.prompt_seconds)}; {first}"]

    def _answer_lines(self) -> list[str]:
        n = self.n_generated - self.n_answers  # each first one belongs to the prompt
        rate = f", {_rate(n, self.answer_seconds)}" if n > 0 else ""
        return [f"answer: {self.n_generated} tokens{rate}"] if self.n_generated else []


def _rate(n: int, seconds: float) -> str:
    return f"{n / seconds:.1f} tok/s" if seconds > 0 else "at once"


def memory_lines(model: Model) -> list[str]:
    """The memory that this process took, and what it holds on a device with its own; without one,
    how much is neither the file nor the KV cache.
    """
    from ..cache_types import IN_NUMPY

    peak, on_device = peak_memory(), model.ops.device_bytes()
    parts = [f"{peak / 1e6:.0f} MB at most"] if peak else []
    parts += [f"{on_device / 1e6:.0f} MB on {model.ops.name}"] if on_device else []
    lines = [f"memory: {', '.join(parts)}"] if parts else []
    file, cache = model.file.nbytes, model.engine.cache.nbytes(IN_NUMPY)
    if peak and not on_device and peak > file + cache:
        sizes = [f"{n / 1e6:.0f} MB" for n in (file, cache, peak - file - cache)]
        lines.append("of it: file {}, KV cache {}, all else {}".format(*sizes))
    return lines


def peak_memory() -> int | None:
    """The most bytes of memory that this process held at once; None where that is unknown."""
    try:  # getrusage would count what the process was before it ran Python
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class AnswerSettings:
    """How every answer of this run is made; ValueError for stops that are too many or too long."""

    params: SamplingParams
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    context_shift: bool = False
    keep: int = 0  # first tokens that a context shift keeps; -1 is the whole prompt
    form: Form | None = None  # what an answer must match
    compile: Compile | None = None  # makes the mask of a form
    reasoning: ReasoningLimit | None = None  # of the answers of a chat

    def __post_init__(self) -> None:
        from ..runtime.sequence import checked_stops

        checked_stops(self.stop)  # so that it is told before the model is loaded

    def add(
        self,
        engine: Engine,
        ids: list[int],
        *,
        previous: Answer | None = None,
        keep: bool = False,
    ) -> Answer:
        """A sequence of the engine that answers ids; ContextOverflow where they do not fit."""
        from ..chat_formats import mask_and_split
        from ..runtime.engine import ContextOverflow

        mask, split = None, None
        if self.compile is not None:
            mask, split = mask_and_split(ids, self.form, self.reasoning, self.compile)
        n_keep = len(ids) if self.keep < 0 else min(self.keep, len(ids))
        try:
            sequence = engine.add(
                ids,
                self.params,
                max_tokens=self.max_tokens,
                stop=self.stop,
                context_shift=self.context_shift,
                n_keep=min(n_keep, engine.n_ctx - 1),
                keep=keep,
                previous=previous,
                grammar=mask,
                special=split is not None,
            )
            sequence.split = split
            return sequence
        except ContextOverflow as error:
            told = f"context is {error.n_ctx} tokens, the prompt has {error.n_prompt}"
            error.args = (f"{told}: raise -c or shorten it",)
            raise


def stream(
    engine: Engine,
    sequence: Answer,
    write: Callable[[str], None],
    cancelled: Callable[[], bool] = lambda: False,
) -> Figures:
    """Run a sequence to its end and write its text as it comes; it ends early when cancelled.
    What is told apart as reasoning goes to stderr.

    Raises the sequence's error, if it ends with one.
    """
    from ..util.progress import Bar

    clock, thoughts = AnswerClock(sequence), Thoughts()
    with Bar("prompt", sequence.n_prompt, "tokens") as bar:
        while not sequence.pieces and sequence.finish is None and not cancelled():
            engine.step()
            bar.update(sequence.n_evaluated)
    while True:
        clock.tick()
        while sequence.pieces:
            piece = sequence.pieces.popleft()
            thoughts.show(piece.reasoning, done=bool(piece.text))
            write(piece.text)
        if sequence.finish is not None or cancelled():
            break
        engine.step()
    thoughts.show("", done=True)
    engine.cancel(sequence)
    if sequence.error is not None:
        raise sequence.error
    return clock.figures()


class Thoughts:
    """What the model thinks before an answer of a form: on stderr, so that stdout has the form."""

    def __init__(self) -> None:
        self.open = False

    def show(self, text: str, done: bool) -> None:
        """Write more of it; an empty line stands between it and the answer."""
        self.open = self.open or bool(text)
        if self.open:
            sys.stderr.write(text + "\n\n" * done)
            sys.stderr.flush()
            self.open = not done


class AnswerClock:
    """When the first and the last token of a sequence came."""

    def __init__(self, sequence: Answer):
        self.sequence = sequence
        self.started = time.perf_counter()
        self.first = self.last = self.started

    def tick(self) -> None:
        """To be called when tokens have come, before they are taken."""
        if self.sequence.pieces:
            self.last = time.perf_counter()
            if self.first == self.started:
                self.first = self.last

    def figures(self) -> Figures:
        """The sequence so far in figures."""
        s = self.sequence
        return Figures(
            n_prompt=s.n_prompt,
            n_reused=s.n_reused,
            n_generated=s.n_generated,
            prompt_seconds=self.first - self.started,
            answer_seconds=self.last - self.first,
            n_answers=1 if s.n_generated else 0,
        )
