"""Where the microseconds of one decode step go, launches and gaps included.

A step's operations (launches and small copies) are noted while the engine runs as usual. Then
graphs of the first operation, of the first two, and so on are recorded and timed. The difference of
two consecutive graphs is the time from the end of an operation's predecessor to its own end: its
launch and its waits count, and the part that overlaps with the predecessor does not. So the parts
add up to the step on the device. The rest of the engine's own step is a separate line.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ...backends.cuda.arrays import Matrix
from ...backends.interface import CacheShape
from ..kernels.ceilings import Ceilings
from ..runs import Bench, Facts, Loaded, Run
from ..timing import Clock, Timing
from ..workload import Test
from .observed import ObservedDevice, Operation

METHODS = ("run", "embed", "logits", "sample", "find_best")  # parts: methods of a backend
ATTENTION = ("qkv", "attention", "attn_out")  # of its attention layers
DELTA = ("delta_in", "delta_net", "delta_out")  # of its gated delta nets
DENSE = ("ffn_act", "ffn_out")  # of its feed-forward layers
MOE = ("route", "shared_expert", "expert_act", "expert_out")  # of those with experts
# The weights that a part reads, from the arguments of its method.
READS: dict[str, Callable[..., Sequence[Any]]] = {
    "qkv": lambda x, layer, *_: layer.mixer.projections,
    "attn_out": lambda o, x, layer, *_: (layer.mixer.wo,),
    "delta_in": lambda x, mixer, *_: mixer.projections,
    "delta_out": lambda o, x, mixer, *_: (mixer.wo,),
    "ffn_act": lambda x, layer, *_: layer.ffn.projections,
    "ffn_out": lambda h, x, layer, *_: (layer.ffn.w_down,),
    "route": lambda x, ffn, *_: (ffn.router.weight,),
    "shared_expert": lambda routes, e, *_: (e.w_gate, e.w_up, e.w_down),
    "expert_act": lambda pairs, f: _of_chosen(pairs, f.experts.w_gate, f.experts.w_up),
    "expert_out": lambda x, h, pairs, f, *_: _of_chosen(pairs, f.experts.w_down),
    "logits": lambda x, head, step: (head.weight,),
}
STEP_RUNS = 5  # runs of the engine
PART_RUNS = (7, 51)  # runs of each graph, at least and at most
ALL_RUNS = 1500  # runs of all graphs together, about
MANY = 400  # with more operations, neighbours of one kernel and op are timed together
START = "start of the graph"


@dataclass(frozen=True)
class Part:
    """Operations of one kind in one op: launches of a kernel, or copies."""

    op: str
    name: str
    count: int  # in a step
    us: float  # of all of them together, in a step
    registers: int | None = None
    shared: int | None = None


@dataclass(frozen=True)
class Profile:
    """One decode step."""

    facts: Facts
    test: Test
    step_us: float  # from token to token in the engine
    spread: float  # of step_us: (slowest - fastest) / median
    parts: Sequence[Part]
    nbytes: Mapping[str, int]  # bytes of weights or KV cache that an op reads
    limit_us: float | None

    @property
    def device_us(self) -> float:
        """The time of all parts on the device."""
        return sum(part.us for part in self.parts)


class Watcher:
    """Wraps a backend's methods, so that each operation is noted with its op, and counts the bytes
    of weights that each op reads.
    """

    def __init__(self, ops: Any, observed: ObservedDevice) -> None:
        self.nbytes: dict[str, int] = {}  # of the weights of one step, by op
        self._observed = observed
        self._counted: dict[str, int] = {}
        self._wrap(ops, METHODS)
        self._wrap(ops.dense, DENSE)
        self._wrap(ops.moe, MOE)
        allocate = ops.allocate_cache

        def allocate_cache(shape: CacheShape) -> None:
            allocate(shape)
            self._wrap(ops.attention, ATTENTION)
            self._wrap(ops.delta, DELTA)

        ops.allocate_cache = allocate_cache

    def _wrap(self, owner: Any, methods: Sequence[str]) -> None:
        for method in methods:
            part = "sample" if method == "find_best" else method
            setattr(owner, method, self._wrapped(part, getattr(owner, method)))

    def _wrapped(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if name == "run":
                self._counted = {}
            elif name in READS:
                found = sum(map(weight_bytes, READS[name](*args, **options)))
                self._counted[name] = self._counted.get(name, 0) + found
            with self._observed.part_of(name):
                result = method(*args, **options)
            if name == "run" and self._counted:  # else it was a recorded graph
                self.nbytes = self._counted
            return result

        return call


def _of_chosen(pairs: Any, *matrices: Matrix) -> Sequence[Matrix]:
    """The matrices of as many experts as a step can choose."""
    return matrices * min(pairs.n, matrices[0].n_experts)


def weight_bytes(matrix: Matrix) -> int:
    """Bytes of a matrix on the device that a product reads."""
    tiles = matrix.tiles
    if tiles is None:
        return matrix.in_blocks.nbytes
    return tiles.layout.read_bytes(tiles.n_rows, tiles.k)  # of one expert, where there are several


def profiles(
    bench: Bench, tests: Sequence[Test], ops: Any, ceilings: Ceilings
) -> Iterator[Profile]:
    """A profile of the last decode step of each test; `ops` is a CUDA backend.

    RuntimeError, ValueError or MemoryError if a model cannot be loaded or a test cannot run.
    """
    observed = ObservedDevice(ops.device)
    wrapped = type(ops)(observed, ops.name, ops.reason)
    watcher = Watcher(wrapped, observed)
    bench.say(f"{bench.name}: loading")
    loaded = Loaded(Bench(bench.open, lambda: wrapped, bench.name), tests, ceilings)
    clock = Clock(ops.device)
    for test in tests:
        bench.say(f"{bench.name}: a step of {test.name}")
        run = Run(loaded, test)
        step_us, spread = _engine_step(run)
        operations = _last_step(loaded, run, observed)
        yield Profile(
            loaded.facts,
            test,
            step_us,
            spread,
            parts_of(operations, ends(operations, clock)),
            watcher.nbytes | {"attention": _kv_bytes(loaded, test)},
            _limit_us(loaded, test),
        )
        gc.collect()


def _engine_step(run: Run) -> tuple[float, float]:
    """(microseconds from token to token in the engine, their spread)."""
    for _ in range(2):
        run.once()  # the second records graphs
    timing = Timing([run.once()[0] / 1e3 / run.test.n_gen for _ in range(STEP_RUNS)])
    return timing.median, timing.spread


def _last_step(loaded: Loaded, run: Run, observed: ObservedDevice) -> list[Operation]:
    """The operations that the last step of a repetition enqueues until its tokens are read."""
    decoder, left, observed.operations = loaded.decoder, run.test.n_gen, []
    real = decoder.run

    def counted(step: Any) -> Any:
        nonlocal left
        left -= 1
        observed.observing = left == 0
        return real(step)

    decoder.run = counted  # type: ignore[method-assign]
    try:
        run.once()
    finally:
        observed.observing = False
        decoder.run = real  # type: ignore[method-assign]
    return observed.operations


def ends(operations: Sequence[Operation], clock: Clock) -> list[float]:
    """Microseconds from the start of a graph to the end of each operation in it.

    The first number is the start time of a graph. With more than MANY operations, neighbours of one
    kernel and op share their time evenly.
    """
    calls = [operation.enqueue for operation in operations]
    groups = [len(list(g)) for _, g in groupby(operations, lambda x: (x.op, x.name))]
    sizes = groups if len(operations) > MANY else [1] * len(operations)
    least, most = PART_RUNS
    runs = max(least, min(most, ALL_RUNS // max(1, len(sizes))))
    found, done = [clock.start_us], 0
    for size in sizes:
        before, done = found[-1], done + size
        end = clock.whole(calls[:done], runs).median
        found += [before + (end - before) * (i + 1) / size for i in range(size)]
    return found


def parts_of(operations: Sequence[Operation], ends: Sequence[float]) -> list[Part]:
    """Sums by op and name, in order of first appearance, after the start time of a graph.

    ends: of the function `ends`.
    """
    found = {("", START): Part("", START, 1, ends[0])}
    for i, x in enumerate(operations):
        before = found.get((x.op, x.name))
        count, us = (before.count, before.us) if before else (0, 0.0)
        resources = getattr(x.kernel, "resources", None)
        registers = resources.registers if resources else None
        shared = resources.shared + x.shared if resources else None
        us += ends[i + 1] - ends[i]
        found[x.op, x.name] = Part(x.op, x.name, count + 1, us, registers, shared)
    return list(found.values())


def _kv_bytes(loaded: Loaded, test: Test) -> int:
    """Bytes of the KV cache that the step reads."""
    n = _position(test) + 1
    return test.n_seq * sum(layer.seen(n) * layer.kv_bytes for layer in loaded.work.layers)


def _limit_us(loaded: Loaded, test: Test) -> float | None:
    if not loaded.knows_limit(test):
        return None
    position = np.array([_position(test)])
    return 1e6 * loaded.work.step_seconds(position, test.n_seq, test.n_seq, loaded.ceilings)


def _position(test: Test) -> int:
    """The position of the last step's tokens."""
    return test.n_depth + test.n_gen - 1
