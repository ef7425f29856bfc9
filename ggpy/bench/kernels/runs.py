"""Measures kernels one by one, beside what this GPU can do at most.

A row has the microseconds of one piece of work with its launches, as many follow each other with
operands that are in no cache, and the limit that reading its bytes or doing its operations sets.
Printing and comparing is kernel_table's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..compile_ahead import Wishes, compile_ahead
from ..profiling.observed import Observed, Operation
from ..timing import RUNS, Clock
from .case import KernelCase
from .ceilings import Ceilings
from .operands import Operands

Row = dict[str, Any]
FIELDS: dict[str, type] = {
    **dict.fromkeys(("name", "what", "where", "format", "shape"), str),
    "tokens": int,
    "kernels": str,  # those that were launched
    "launches": int,
    "us": float,  # median
    "spread": float,  # (slowest - fastest) / median
    "noise_us": float,  # a standard deviation that outliers do not move
    "nbytes": int,
    "flops": int,
    "gb_s": float,
    "tflop_s": float,
    "limit_us": float,
    "percent_of_limit": float,
    "bound": str,  # by "memory" or "matrix"
    "registers": int,  # of a thread; of the kernel that has most
    "spills": int,  # bytes of a thread
    "shared": int,  # bytes of a block
    "error": str,
}


def measure(
    cases: Sequence[KernelCase],
    device: Any,
    ceilings: Ceilings,
    say: Callable[[str], None],
    runs: int = RUNS,
) -> Iterator[Row]:
    """A row for each case; what fails has an error and the rest goes on."""
    observed = Observed(device)
    operands, clock = Operands(observed), Clock(device)
    for i, case in enumerate(cases):
        if i % 100 == 0:
            say(f"{i} of {len(cases)} measured")
        try:
            yield _measured(case, observed, operands, clock, ceilings, runs)
        except (ValueError, RuntimeError, MemoryError) as error:
            yield _row(case) | {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def compile_all(
    cases: Sequence[KernelCase], device: Any, processes: int | None, say: Callable[[str], None]
) -> None:
    """Compile what the cases need in several processes; `device` is asked for its properties."""
    wishes = Wishes(device)
    operands = Operands(wishes)
    for case in cases:
        case.prepare(operands)()
    compile_ahead(wishes.wishes, device.target, processes, say)


def _measured(
    case: KernelCase,
    observed: Observed,
    operands: Operands,
    clock: Clock,
    ceilings: Ceilings,
    runs: int,
) -> Row:
    enqueue = case.prepare(operands)
    launches = _observe(observed, enqueue)
    timing = clock.each(enqueue, runs)
    us, limit = timing.median, _limit(case, ceilings)
    return _row(case) | {
        "kernels": "+".join(dict.fromkeys(short(launch.name) for launch in launches)),
        "launches": len(launches),
        "us": round(us, 3),
        "spread": round(timing.spread, 4),
        "noise_us": round(timing.noise, 4),
        "gb_s": round(case.nbytes / us / 1e3, 2),
        "tflop_s": round(case.flops / us / 1e6, 3),
        "limit_us": limit and round(limit, 3),
        "percent_of_limit": limit and round(100 * limit / us, 2),
        "bound": _bound(case, ceilings),
        "registers": max(launch.kernel.resources.registers for launch in launches),
        "spills": max(launch.kernel.resources.spill_stores for launch in launches),
        "shared": max(x.kernel.resources.shared + x.shared for x in launches),
    }


def _observe(observed: Observed, enqueue: Callable[[], None]) -> list[Operation]:
    """What it launches."""
    observed.operations, observed.observing = [], True
    try:
        enqueue()
    finally:
        observed.observing = False
    return [operation for operation in observed.operations if operation.kernel is not None]


def _row(case: KernelCase) -> Row:
    row: Row = dict.fromkeys(FIELDS)
    for name in ("name", "what", "where", "format", "shape", "tokens", "nbytes", "flops"):
        row[name] = getattr(case, name)
    return row | {"error": ""}


def _limit(case: KernelCase, ceilings: Ceilings) -> float | None:
    """Microseconds."""
    if not ceilings.known:
        return None
    return 1e6 * max(case.nbytes / ceilings.bandwidth, case.flops / ceilings.matrix_rate)


def _bound(case: KernelCase, ceilings: Ceilings) -> str:
    memory = case.nbytes * ceilings.matrix_rate >= case.flops * ceilings.bandwidth
    return "memory" if memory else "matrix"


def short(kernel: str) -> str:
    """A kernel's name without the arguments of its template."""
    return kernel.partition("<")[0]
