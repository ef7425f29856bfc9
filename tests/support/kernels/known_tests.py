"""Tests that are known to pass, of which `pytest` repeats a part.

Those of kernels on the emulator, or with the compiler, take more than half of the time of all
tests, and depend on the code of a few folders. Where tests/gpu_record.json says that all of them
passed with this very code, `pytest` without arguments repeats one in ONE_IN functions of each file,
with one in ONE_IN of their parameters: others for each digest, at least one of each file. With
arguments it runs what it is asked for.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pytest

from tools import record_gpu

ONE_IN = 4
EMULATORS = {"emulator", "emulated", "sanitizer"}  # what tests call them


class Known(NamedTuple):
    """A run of the emulator that belongs to the code and was a success. compiles: with the NVRTC
    that is installed.
    """

    digest: str
    compiles: bool


def recorded() -> Known | None:
    """The run in the record, if there is one that still says something."""
    run = record_gpu.read(record_gpu.RECORD).get(record_gpu.EMULATOR)
    if run is None or record_gpu.bad(run["tests"]) or not run["tests"]["passed"]:
        return None
    if run["digest"] != record_gpu.digest(beside=record_gpu.OF_EMULATOR):
        return None
    return Known(run["digest"], run["cuda compiler"] == compiler())


def compiler() -> str:
    """The version of NVRTC; "" without one."""
    from ggpy.device import toolkit

    try:
        return toolkit.nvrtc_version()
    except toolkit.NvrtcMissing:
        return ""


def is_whole_suite(config: pytest.Config) -> bool:
    """Whether pytest was asked for nothing in particular."""
    options = ("keyword", "markexpr", "lf", "failedfirst", "repeat_all")
    chosen = any(getattr(config.option, name, False) for name in options)
    return not chosen and config.args_source is pytest.Config.ArgsSource.TESTPATHS


def is_known(item: pytest.Item, compiles: bool) -> bool:
    """Whether the record's run had this test, and its result depends on kernels. compiles: the run
    had the same compiler.
    """
    if not item.nodeid.startswith(record_gpu.EMULATED) or item.get_closest_marker("gpu"):
        return False
    call = getattr(item, "callspec", None)
    values = map(str, call.params.values()) if call else ()
    fixtures = {*getattr(item, "fixturenames", ()), *values}
    if "nvrtc" in fixtures and not compiles:
        return False
    return item.nodeid.startswith("tests/kernels") or not EMULATORS.isdisjoint(fixtures)


def left_out(items: Sequence[pytest.Item], run: Known) -> set[pytest.Item]:
    """The tests that are not repeated."""
    known = {item.nodeid: item for item in items if is_known(item, run.compiles)}
    tests = grouped(known, "[")  # of each function
    functions = grouped(tests, "::")  # of each file
    repeated = {
        test
        for names in functions.values()
        for function in chosen(names, run.digest)
        for test in chosen(tests[function], run.digest)
    }
    return {item for name, item in known.items() if name not in repeated}


def grouped(names: Iterable[str], end: str) -> dict[str, list[str]]:
    """Names by what is before `end` in them."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.partition(end)[0], []).append(name)
    return found


def chosen(names: Sequence[str], digest: str) -> list[str]:
    """One in ONE_IN, at least one."""
    by_chance = sorted(names, key=lambda name: zlib.crc32(f"{digest} {name}".encode()))
    return by_chance[: -(-len(names) // ONE_IN)]
