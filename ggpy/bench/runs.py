"""Runs the tests of one model through the engine, as a user would: greedy, one step ahead.

Each test runs before it is timed. Its context is evaluated once, and every repetition
reuses it. The clock stops when the host has read the last token. A test that cannot run (no memory,
a broken file) gives a result with an error, and the other tests go on. Nothing here prints.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import arch
from ..backends.interface import CacheShape, pages_for
from ..cache_types import IN_NUMPY, ON_GPU, CacheTypes
from ..device import OutOfMemory
from ..quantization.mix import base_of, find_mix
from ..runtime.engine import Engine
from ..sampling import SamplingParams
from .kernels.ceilings import Ceilings
from .limits import Work, n_weights, work_of
from .workload import Test

if TYPE_CHECKING:
    from ..arch.decoder import Decoder
    from ..backends.interface import Ops
    from ..evaluate.synthetic import Synthetic
    from ..gguf import File
    from ..runtime.sequence import Sequence as Answer

GREEDY = SamplingParams(temperature=0)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Facts:
    """Facts about a model that do not depend on the test. Sizes are in bytes."""

    name: str
    type: str = ""  # "llama 8.03B Q4_K"
    size: int = 0
    n_params: int = 0
    load_s: float | None = None  # seconds from opening the file to the first step


@dataclass(frozen=True)
class Result:
    """A test with the time of each repetition, or the error that stopped the test."""

    facts: Facts
    test: Test
    samples_ns: list[int] = field(default_factory=list)
    first_ns: list[int] = field(default_factory=list)  # to the first token; tests with a prompt
    limit_s: float | None = None
    device_bytes: int | None = None
    error: str = ""


@dataclass(frozen=True)
class Bench:
    """The settings of a run: functions that open the file and create the ops, and repetitions."""

    open: Callable[[], File | Synthetic]
    ops: Callable[[], Ops]
    name: str
    repetitions: int = 5
    warm: bool = True
    delay: float = 0
    say: Say = lambda message: None


class NoText:
    """A tokenizer without end tokens and without text."""

    end_ids: frozenset[int] = frozenset()
    end_of_turn_id: int | None = None
    suppressed_ids: frozenset[int] = frozenset()

    def stream(self, special: bool = False) -> NoText:
        """Return self: there is no state."""
        return self

    def piece(self, id: int, special: bool = False) -> bytes:
        """Nothing."""
        return b""

    def add(self, id: int) -> str:
        """Return no text."""
        return ""

    def finish(self) -> str:
        """Return no text."""
        return ""


class Shared:
    """Ops that several engines use one after the other, with pages that are already allocated."""

    def __init__(self, ops: Ops, shape: CacheShape) -> None:
        self.asynchronous, self.sample, self.read = ops.asynchronous, ops.sample, ops.read
        self.clear_pages, self.rehearsal = ops.clear_pages, ops.rehearsal
        self._shape = shape

    def allocate_cache(self, shape: CacheShape) -> None:
        """Check that the allocated pages suffice. Raises MemoryError if not."""
        for needed, found in zip(shape.groups, self._shape.groups, strict=True):
            if needed.n_pages > found.n_pages:
                raise MemoryError(
                    f"{needed.n_pages} pages are needed, {found.n_pages} were allocated"
                )


class Loaded:
    """A loaded model with enough memory for each of the tests."""

    def __init__(self, bench: Bench, tests: Sequence[Test], ceilings: Ceilings) -> None:
        largest = max(tests, key=n_pages)
        n_batch = max(max(t.chunk, t.n_seq) for t in tests)
        self.file = bench.open()
        start = time.perf_counter()  # after `open`, which generates a synthetic model
        self.ops = bench.ops()
        try:
            file: Any = self.file  # a Synthetic has the interface of a File
            n_ctx, n_seq = largest.n_ctx, largest.n_seq
            types = CacheTypes(largest.type_k, largest.type_v)
            sizes: dict[str, Any] = {"n_batch": n_batch, "n_seq": n_seq, "cache_types": types}
            sizes["n_cpu_moe"] = largest.n_cpu_moe
            self.decoder: Decoder = arch.load(file, self.ops, n_ctx, **sizes)
            shape = _largest(cache_shape(self.decoder, test) for test in tests)
            self.ops.allocate_cache(shape)
            self.facts = _facts(bench.name, self.file, time.perf_counter() - start)
            kept = types.resolved(ON_GPU if self.ops.asynchronous else IN_NUMPY)
            self.work: Work = work_of(arch.tensors(file), self.decoder, kept)
        finally:
            self.file.close()
        self.shared: Any = Shared(self.ops, shape)
        self.ceilings = ceilings

    def knows_limit(self, test: Test) -> bool:
        """Whether the ceilings bound a test. A GPU reads experts in host memory through the bus,
        whose speed is not measured.
        """
        by_bus = self.ops.asynchronous and test.n_cpu_moe > 0 and self.work.expert_bytes > 0
        return self.ceilings.known and not by_bus


def n_pages(test: Test) -> int:
    """Pages of a layer without a window: the size of a test."""
    return test.n_seq * pages_for(test.n_ctx)


def n_rewind(test: Test) -> int:
    """Positions by which a repetition rewinds a sequence to its context."""
    return test.n_prompt + test.n_gen if test.n_depth else 0


def cache_shape(decoder: Decoder, test: Test) -> CacheShape:
    """The KV cache that the engine of a test allocates."""
    n_batch = max(test.chunk, test.n_seq)
    return decoder.cache_shape(test.n_seq, test.n_ctx, n_batch + n_rewind(test))


def _largest(shapes: Iterable[CacheShape]) -> CacheShape:
    """The smallest cache shape that contains all `shapes`."""
    groups = zip(*(shape.groups for shape in shapes), strict=True)
    return CacheShape(tuple(max(of_all, key=lambda g: g.n_pages) for of_all in groups))


def _facts(name: str, file: Any, load_s: float) -> Facts:
    tensors = list(file.tensors.values())
    n = n_weights(tensors)
    bytes_of: dict[str, int] = {}
    for t in tensors:
        bytes_of[t.format.name] = bytes_of.get(t.format.name, 0) + t.nbytes
    most = max(bytes_of, key=lambda format: bytes_of[format])
    size = f"{n / 1e9:.2f}B" if n >= 1e9 else f"{n / 1e6:.2f}M"
    label = f"{file.architecture} {size} {_mix(file.metadata, most)}"
    return Facts(name, label, sum(bytes_of.values()), n, load_s)


def _mix(metadata: Mapping[str, Any], most: str) -> str:
    """The mix that the file names (Q4_K_M) if its base format is `most`; otherwise `most`.

    most: the format with the most bytes.
    """
    try:
        found = find_mix(str(metadata["general.file_type"]))
    except (KeyError, ValueError):
        return most
    return found if base_of(found).name == most else most


def run_model(bench: Bench, tests: Sequence[Test], ceilings: Ceilings) -> Iterator[Result]:
    """Yields a result for each test. Tests that load a model alike share it."""
    for group in alike(tests):
        yield from _run_alike(bench, group, ceilings)
        gc.collect()  # the next group needs the memory


def alike(tests: Sequence[Test]) -> Iterator[list[Test]]:
    """Groups consecutive tests with the same KV cache types and experts in host memory: they can
    share a loaded model.
    """
    for _, group in groupby(tests, lambda test: (test.type_k, test.type_v, test.n_cpu_moe)):
        yield list(group)


def _run_alike(bench: Bench, waiting: list[Test], ceilings: Ceilings) -> Iterator[Result]:
    """Yields a result for each test. Fails the largest tests, size by size, until the rest fits."""
    while waiting:
        loaded, error, too_large = _try_to_load(bench, waiting, ceilings)
        if loaded is not None:
            for test in waiting:
                yield _guarded(loaded, test, bench)
            return
        gc.collect()  # frees the partly loaded model
        largest = max(map(n_pages, waiting))
        failed = [t for t in waiting if not too_large or n_pages(t) == largest]
        waiting = [t for t in waiting if t not in failed]
        yield from (Result(Facts(bench.name), t, error=error) for t in failed)


def _try_to_load(
    bench: Bench, tests: Sequence[Test], ceilings: Ceilings
) -> tuple[Loaded | None, str, bool]:
    """(loaded model or None, error, whether the error is a lack of memory)."""
    bench.say(f"{bench.name}: loading")
    try:
        return Loaded(bench, tests, ceilings), "", False
    except Exception as error:
        return None, _message(error), isinstance(error, (MemoryError, OutOfMemory))


def _guarded(loaded: Loaded, test: Test, bench: Bench) -> Result:
    """Run a test. Returns a result with an error if the test raises an exception."""
    bench.say(f"{bench.name}: {test.name}")
    if bench.delay:
        time.sleep(bench.delay)
    try:
        return _measure(loaded, test, bench)
    except Exception as error:
        return Result(loaded.facts, test, error=_message(error))


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _measure(loaded: Loaded, test: Test, bench: Bench) -> Result:
    run = Run(loaded, test)
    times = []
    with loaded.ops.rehearsal():
        for _ in range((3 if loaded.ops.asynchronous else 1) if bench.warm else 0):
            run.once()  # more on a GPU: the second or third run records graphs
    for _ in range(bench.repetitions):
        times.append(run.once())
    return Result(
        loaded.facts,
        test,
        samples_ns=[total for total, _ in times],
        first_ns=[first for _, first in times] if test.n_prompt else [],
        limit_s=_limit(loaded, test),
        device_bytes=loaded.ops.device_bytes() or None,
    )


def _limit(loaded: Loaded, test: Test) -> float | None:
    """Minimum seconds of one repetition at the ceilings; None if they are unknown."""
    work, ceilings = loaded.work, loaded.ceilings
    if not loaded.knows_limit(test):
        return None
    total = 0.0
    if test.n_prompt:
        one = work.prompt_seconds(test.n_depth, test.n_prompt, test.chunk, ceilings)
        total += test.n_seq * one
    if test.n_gen:
        depth = test.n_depth + test.n_prompt
        total += work.generation_seconds(depth, test.n_gen, test.n_seq, ceilings)
    return total


class Run:
    """Repeats one test. The constructor evaluates the context of the test."""

    def __init__(self, loaded: Loaded, test: Test) -> None:
        self.test = test
        self.n_vocab = loaded.decoder.sizes.n_vocab
        self.rng = np.random.default_rng(0)
        self.engine = Engine(
            loaded.decoder,
            loaded.shared,
            NoText(),
            test.n_ctx,
            test.chunk,
            test.n_seq,
            n_rewind=n_rewind(test),
        )
        self.context = [self._ids(test.n_depth) for _ in range(test.n_seq)]
        self.previous: list[Answer | None] = [None] * test.n_seq
        if test.n_depth:
            for i, ids in enumerate(self.context):
                self.previous[i] = self.engine.add(ids, GREEDY, max_tokens=1, keep=True)
            self._finish()

    def once(self) -> tuple[int, int]:
        """Run one repetition.

        Returns (ns from the first step until the last token is read, ns from adding the prompts
        until the first token).
        """
        test = self.test
        prompts = [ids + self._ids(test.n_prompt or 1) for ids in self.context]
        n = test.n_gen + (test.n_prompt > 0)  # prefill also samples one token
        added = time.perf_counter_ns()
        answers = [
            self.engine.add(
                ids, GREEDY, max_tokens=n, keep=test.n_depth > 0, previous=self.previous[i]
            )
            for i, ids in enumerate(prompts)
        ]
        start = time.perf_counter_ns()
        first = self._finish()
        end = time.perf_counter_ns()
        if test.n_depth:
            self.previous = list(answers)
        short = [a.n_generated for a in answers if a.n_generated != n]
        if short:
            raise RuntimeError(f"an answer of {n} tokens ended after {short[0]}")
        return end - start, first - added

    def _finish(self) -> int:
        """Step until all answers have ended. Returns the time (ns) of the first token."""
        first = 0
        while self.engine.busy:
            if self.engine.step() and not first:
                first = time.perf_counter_ns()
        return first

    def _ids(self, n: int) -> list[int]:
        return self.rng.integers(0, self.n_vocab, n).tolist()
