"""The cores that this process may use, which a container or an affinity may make fewer than the
machine has.
"""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Physical cores that this process may use: by affinity, siblings counted once, and quota."""
    if hasattr(os, "sched_getaffinity"):
        cpus = os.sched_getaffinity(0)
    else:
        cpus = set(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in cpus}
    return max(1, min(len(cores), _quota() or len(cores)))


def _siblings(cpu: int) -> str:
    try:
        with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
            return file.read().strip()
    except OSError:
        return str(cpu)


def _quota() -> int | None:
    """Cores' worth of time of a container (cgroup v2, then v1), rounded up; None without limit."""
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            limit, period = file.read().split()
    except (OSError, ValueError):
        try:
            with open("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") as first:
                limit = first.read().strip()
            with open("/sys/fs/cgroup/cpu/cpu.cfs_period_us") as second:
                period = second.read().strip()
        except OSError:
            return None
    if limit in ("max", "-1"):
        return None
    return max(1, -(-int(limit) // int(period)))
