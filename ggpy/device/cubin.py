"""A compiled CUDA source: machine code for one architecture, the symbols of its kernels, and the
resources of each kernel.

Plain data and a parser of the report of ptxas. This module knows neither the compiler nor the cache
nor a GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Resources:
    """Resources of one kernel, as ptxas reports them."""

    registers: int  # per thread
    stack: int  # bytes per thread
    spill_stores: int  # bytes per thread
    spill_loads: int  # bytes per thread
    shared: int  # bytes of static shared memory per CTA


@dataclass(frozen=True)
class Cubin:
    """Machine code of one source for one architecture."""

    code: bytes
    mangled: dict[str, str]  # name expression -> symbol; extern "C" kernels are not listed
    resources: dict[str, Resources]  # by name expression, or by symbol for extern "C" kernels
    log: str  # warnings and the report of ptxas

    def symbol(self, kernel: str) -> str:
        """The symbol of a kernel, from its name expression or its extern "C" name."""
        return self.mangled.get(kernel, kernel)


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_resources(log: str, mangled: dict[str, str]) -> dict[str, Resources]:
    """The resources of each kernel, from the output of `ptxas -v`."""
    names = {symbol: expression for expression, symbol in mangled.items()}
    found: dict[str, Resources] = {}
    entry, function, frames = "", "", {"": (0, 0, 0)}
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry = match[1]
        elif match := _PROPERTIES.search(line):
            function = match[1]
        elif match := _SPILLS.search(line):
            frames[function] = (int(match[1]), int(match[2]), int(match[3]))
        elif match := _USED.search(line):
            shared = _SHARED.search(line)
            stack, stores, loads = frames.get(entry, (0, 0, 0))
            resources = Resources(
                int(match[1]), stack, stores, loads, int(shared[1]) if shared else 0
            )
            found[names.get(entry, entry)] = resources
    return found
