"""One answer: a sequence run to its end, its text handed out as it comes, its progress and figures.

This module knows the engine and stderr. What becomes of the text is the caller's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from . import options as command_line
from .prompts import spoken

if TYPE_CHECKING:
    from ..backends.interface import Ops
    from ..runtime.engine import Engine, Sequence
    from ..sampling import SamplingParams
    from ..tokenizer import Tokenizer


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


def memory_lines(ops: Ops) -> list[str]:
    """The memory that this process took, and what it holds on a device with its own."""
    peak, on_device = peak_memory(), ops.device_bytes()
    parts = [f"{peak / 1e6:.0f} MB at most"] if peak else []
    parts += [f"{on_device / 1e6:.0f} MB on {ops.name}"] if on_device else []
    return [f"memory: {', '.join(parts)}"] if parts else []


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
class Settings:
    """How every answer of this run is made."""

    params: SamplingParams
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    context_shift: bool = False
    keep: int = 0  # first tokens that a context shift keeps; -1 is the whole prompt

    def add(
        self,
        engine: Engine,
        ids: list[int],
        *,
        previous: Sequence | None = None,
        keep: bool = False,
    ) -> Sequence:
        """A sequence of the engine that answers ids; ValueError where they do not fit."""
        n_keep = len(ids) if self.keep < 0 else min(self.keep, len(ids))
        return engine.add(
            ids,
            self.params,
            max_tokens=self.max_tokens,
            stop=self.stop,
            context_shift=self.context_shift,
            n_keep=min(n_keep, engine.n_ctx - 1),
            keep=keep,
            previous=previous,
        )


def settings(options: argparse.Namespace, tokenizer: Tokenizer) -> Settings:
    """What the command line says about answers; ValueError for a parameter out of range."""
    from ..runtime.sequence import StopStrings
    from ..sampling import SamplingParams

    given = command_line.sampling(options)
    bias = dict.fromkeys(tokenizer.end_ids, float("-inf")) if options.ignore_eos else {}
    bias.update(options.logit_bias)
    params = SamplingParams(**given, logit_bias=bias)
    if params.uses_dry:
        breakers = dry_breakers(options, tokenizer)
        params = SamplingParams(**given, logit_bias=bias, dry_breakers=breakers)
    stop = [spoken(options, text, "-r") for text in options.reverse_prompt]
    StopStrings(stop)  # what it refuses is told before the model is loaded
    return Settings(
        params=params,
        max_tokens=options.predict if options.predict >= 0 else None,
        stop=stop,
        context_shift=options.context_shift,
        keep=options.keep,
    )


def dry_breakers(options: argparse.Namespace, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of the sequence breakers that were given, or else of llama.cpp's."""
    from ..sampling import DRY_SEQUENCE_BREAKERS
    from ..sampling.links import breaker_sequences

    given = options.dry_sequence_breaker or DRY_SEQUENCE_BREAKERS
    texts = [] if "none" in given else [spoken(options, text, "a breaker") for text in given]
    pieces = [tokenizer.piece(id, special=True) for id in range(tokenizer.n_vocab)]
    return breaker_sequences(texts, pieces, lambda text: tokenizer.encode(text, add_special=False))


def stream(
    engine: Engine,
    sequence: Sequence,
    write: Callable[[str], None],
    cancelled: Callable[[], bool] = lambda: False,
) -> Figures:
    """Run a sequence to its end and write its text as it comes; it ends early when cancelled.

    Raises the sequence's error, if it ends with one.
    """
    from ..util.progress import Bar

    clock = Clock(sequence)
    with Bar("prompt", sequence.n_prompt, "tokens") as bar:
        while not sequence.pieces and sequence.finish is None and not cancelled():
            engine.step()
            bar.update(sequence.n_evaluated)
    while True:
        clock.tick()
        while sequence.pieces:
            write(sequence.pieces.popleft().text)
        if sequence.finish is not None or cancelled():
            break
        engine.step()
    engine.cancel(sequence)
    if sequence.error is not None:
        raise sequence.error
    return clock.figures()


class Clock:
    """When the first and the last token of a sequence came."""

    def __init__(self, sequence: Sequence):
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
