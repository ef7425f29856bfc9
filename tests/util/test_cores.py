"""Cores that a process may use: by affinity, and by the quota of a container."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest

from ggpy.util import cores


def machine(monkeypatch: pytest.MonkeyPatch, cpus: set[int], files: dict[str, str]) -> None:
    """A machine with these CPUs, and these files of the system and no others."""

    def opened(path: str, *_: Any) -> io.StringIO:
        if path not in files:
            raise FileNotFoundError(path)
        return io.StringIO(files[path])

    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: cpus, raising=False)
    monkeypatch.setattr(cores, "open", opened, raising=False)


SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4),
        ({SIBLINGS.format(i): f"{i % 2},{i % 2 + 2}\n" for i in range(4)}, 2),
        ({"/sys/fs/cgroup/cpu.max": "max 100000\n"}, 4),
        ({"/sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"/sys/fs/cgroup/cpu.max": "900000 100000\n"}, 4),
        (
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
    ],
)
def test_usable_cores(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    machine(monkeypatch, {0, 1, 2, 3}, files)
    assert cores.usable_cores() == expected


def test_cores_of_this_machine() -> None:
    assert 1 <= cores.usable_cores() <= (os.cpu_count() or 1)
