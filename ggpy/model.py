"""A model that is loaded and ready: file, tokenizer, ops, decoder and engine in one object.

What a program that uses ggpy as a library sees, from as many threads as it likes: the thread that
takes pieces steps the engine, until a second one wants to at the same time; from then on an owner
thread does it for all. Nothing here computes: it puts the parts together.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import arch, hub
from .backends import choose
from .backends.interface import Ops
from .cache_types import AUTO, USUAL, CacheTypes
from .gguf import File
from .runtime.engine import Engine, Occupied, Piece
from .runtime.runner import Runner
from .runtime.sequence import Sequence as Answer
from .sampling import SamplingParams
from .tokenizer import Tokenizer

DEFAULT_CONTEXT = 4096  # tokens, where neither the caller nor the model asks for fewer


class Model:
    """An open model; use `load` to get one."""

    def __init__(
        self,
        file: File,
        tokenizer: Tokenizer,
        ops: Ops,
        *,
        n_ctx: int | None = None,
        n_batch: int | None = None,
        n_seq: int = 1,
        progress: Callable[[int, int], None] | None = None,
        cache_types: CacheTypes = USUAL,
    ) -> None:
        self.file, self.tokenizer, self.ops = file, tokenizer, ops
        self.n_ctx_train = arch.context_length(file)
        self.n_ctx = n_ctx or min(self.n_ctx_train or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
        sizes: dict[str, Any] = {"n_batch": n_batch, "n_seq": n_seq, "cache_types": cache_types}
        self.decoder = arch.load(file, ops, self.n_ctx, progress, **sizes)
        n_batch = self.decoder.n_batch
        self.engine = Engine(self.decoder, ops, tokenizer, self.n_ctx, n_batch, n_seq)
        self._runner: Runner | None = None
        self._starting = threading.Lock()

    def __repr__(self) -> str:
        kind, where = self.metadata["general.architecture"], self.ops.name
        return f"<Model {self.file.path.name}: {kind}, {self.n_ctx} tokens of context, {where}>"

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's metadata."""
        return self.file.metadata

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """l[T, V] after each of ids[T]; ValueError for none, or more than the context holds."""
        return self.engine.logits(ids)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Iterable[str] = (),
        logprobs: bool = False,
        context_shift: bool = False,
        n_keep: int = 0,
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> Iterator[Piece]:
        """Pieces of a continuation, one for each token, until something ends it; in any thread.

        A text gets the model's beginning token and its special tokens are parsed; ids are taken as
        they are. Sampling parameters are given as `params` or by name (temperature=0, seed=1,
        top_k=...). `logprob` is None unless logprobs is set. ValueError for a prompt that does not
        fit, a parameter out of range, and logits of which no token can be chosen; RuntimeError when
        the model is closed.
        """
        ids = (
            self.tokenizer.encode(prompt, parse_special=True) if isinstance(prompt, str) else prompt
        )
        sequence = self.engine.add(
            ids,
            replace(params or SamplingParams(), **sampling),
            max_tokens=max_tokens,
            stop=stop,
            logprobs=logprobs,
            context_shift=context_shift,
            n_keep=n_keep,
        )
        try:
            yield from sequence.follow(self._advance(sequence))
        finally:
            self.engine.release(sequence)

    def _advance(self, sequence: Answer) -> Callable[[], None]:
        """What makes the next piece of a sequence, or waits for the thread that does."""
        wait: Callable[[], None] | None = None

        def advance() -> None:
            nonlocal wait
            if wait is None and self._runner is None:
                try:
                    self.engine.step()
                    return
                except Occupied:
                    pass
            wait = wait or self._start_runner().waiter(sequence)
            wait()

        return advance

    def _start_runner(self) -> Runner:
        """The owner thread, from now on the only one that steps."""
        with self._starting:
            if self._runner is None:
                self._runner = Runner(self.engine)
                weakref.finalize(self, self._runner.close)  # a model is forgotten, or Python ends
            return self._runner

    def close(self) -> None:
        """End all answers, with a RuntimeError for who waits for one, and let go of the file."""
        self.engine.close()
        if self._runner is not None:
            self._runner.close()
        self.file.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _file_of(path: str | os.PathLike[str]) -> Path:
    """The file of a path, or of a known model's name where no file is called so."""
    if isinstance(path, str) and hub.known(path) and not Path(path).exists():
        return hub.resolve(path)
    return Path(path)


def load(
    path: str | os.PathLike[str],
    device: str = "auto",
    *,
    n_ctx: int | None = None,
    n_batch: int | None = None,
    n_seq: int = 1,
    n_threads: int | None = None,
    cache_type_k: str = AUTO,
    cache_type_v: str = AUTO,
    progress: Callable[[int, int], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Model:
    """Open a GGUF model on "auto", "cpu", "cuda" or "cuda:N".

    path: of a file, or the name of a known model ("smollm2"), which is fetched once; HubError.
    n_ctx: tokens of context for each of n_seq sequences; None is the model's, at most 4096.
    n_batch: tokens evaluated together at most; None is 2048 on a GPU with room for that, else 512.
    progress(done, total): bytes of weights.
    cache_type_k, cache_type_v: of keys and values, "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0",
    "q4_1" or "q4_0"; "auto" is f16 on a GPU and f32 on the CPU.
    note(message): remarks for the user. GGUFError for a bad or unsupported file, MemoryError when
    the context does not fit, ValueError for a device that is not there.
    """
    if n_ctx is not None and n_ctx < 1:
        raise ValueError(f"n_ctx is {n_ctx}: it must be 1 or more")
    cache_types = CacheTypes(cache_type_k, cache_type_v)
    file = File(_file_of(path))
    try:
        arch.find(file)  # first of all: another architecture's tokenizer may be unknown as well
        tokenizer = Tokenizer.from_gguf(file)
        ops = choose(device, n_threads, note)
        sizes: dict[str, Any] = {"n_ctx": n_ctx, "n_batch": n_batch, "n_seq": n_seq}
        return Model(file, tokenizer, ops, **sizes, progress=progress, cache_types=cache_types)
    except BaseException:
        file.close()
        raise
