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

import pytest

from tools import record_gpu

ONE_IN = 4
EMULATORS = {"emulator", "emulated", "sanitizer"}  # what tests call them
OTHER_COMPILER = " with another NVRTC"


def recorded() -> str:
    """The digest of the emulator's run, if it belongs to the code and was a success; else "". Tests
    that compile are not known where it ends with OTHER_COMPILER.
    """
    run = record_gpu.read(record_gpu.RECORD).get(record_gpu.EMULATOR)
    if run is None or record_gpu.bad(run["tests"]) or not run["tests"]["passed"]:
        return ""
    now = record_gpu.digest(beside=record_gpu.OF_EMULATOR)
    if run["digest"] != now:
        return ""
    return now if run["cuda compiler"] == compiler() else now + OTHER_COMPILER


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


def is_known(item: pytest.Item, digest: str) -> bool:
    """Whether the record's run had this test, and its result depends on kernels."""
    if not item.nodeid.startswith(record_gpu.EMULATED) or item.get_closest_marker("gpu"):
        return False
    call = getattr(item, "callspec", None)
    values = map(str, call.params.values()) if call else ()
    fixtures = {*getattr(item, "fixturenames", ()), *values}
    if "nvrtc" in fixtures and digest.endswith(OTHER_COMPILER):
        return False
    return item.nodeid.startswith("tests/kernels") or not EMULATORS.isdisjoint(fixtures)


def left_out(items: Sequence[pytest.Item], digest: str) -> set[pytest.Item]:
    """The tests that are not repeated. digest: from `recorded`."""
    known = {item.nodeid: item for item in items if is_known(item, digest)}
    tests = grouped(known, "[")  # of each function
    functions = grouped(tests, "::")  # of each file
    repeated = {
        test
        for names in functions.values()
        for function in chosen(names, digest)
        for test in chosen(tests[function], digest)
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
