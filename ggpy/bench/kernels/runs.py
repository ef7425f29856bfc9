"""Measures kernels one by one, beside the limits of this GPU.

A row has the microseconds of one piece of work with its launches, measured in a series with
operands that are in no cache, and the limit that reading its bytes or doing its operations sets.
`table` prints and compares rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..compile_ahead import Wishes, compile_ahead
from ..profiling.observed import ObservedDevice, Operation
from ..timing import RUNS, Clock
from .case import KernelCase
from .ceilings import Ceilings
from .operands import Operands

Row = dict[str, Any]
FIELDS: dict[str, type] = {
    **dict.fromkeys(("name", "what", "where", "format", "shape"), str),
    "tokens": int,
    "kernels": str,  # kernels launched
    "launches": int,
    "us": float,  # median
    "spread": float,  # (slowest - fastest) / median
    "noise_us": float,  # robust standard deviation
    "nbytes": int,
    "flops": int,
    "gb_s": float,
    "tflop_s": float,
    "limit_us": float,
    "percent_of_limit": float,
    "bound": str,  # "memory" or "matrix"
    "registers": int,  # per thread, of the kernel with the most
    "spills": int,  # bytes per thread
    "shared": int,  # bytes per CTA
    "error": str,
}


def measure(
    cases: Sequence[KernelCase],
    device: Any,
    ceilings: Ceilings,
    say: Callable[[str], None],
    runs: int = RUNS,
) -> Iterator[Row]:
    """A row per case. A case that fails has an error, and the others go on."""
    observed = ObservedDevice(device)
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
    """Compile the kernels of the cases in several processes, for the properties of `device`."""
    wishes = Wishes(device)
    operands = Operands(wishes)
    for case in cases:
        case.prepare(operands)()
    compile_ahead(wishes.wishes, device.target, processes, say)


def _measured(
    case: KernelCase,
    observed: ObservedDevice,
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


def _observe(observed: ObservedDevice, enqueue: Callable[[], None]) -> list[Operation]:
    """The operations that `enqueue` launches."""
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
    """The limit in microseconds."""
    if not ceilings.known:
        return None
    return 1e6 * max(case.nbytes / ceilings.bandwidth, case.flops / ceilings.matrix_rate)


def _bound(case: KernelCase, ceilings: Ceilings) -> str:
    memory = case.nbytes * ceilings.matrix_rate >= case.flops * ceilings.bandwidth
    return "memory" if memory else "matrix"


def short(kernel: str) -> str:
    """A kernel's name without template arguments."""
    return kernel.partition("<")[0]
