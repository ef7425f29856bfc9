"""What results say about where and when they were measured: processor, build, time."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

from ..util.paths import data_dir, version


def cpu_name() -> str:
    """As the system tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2] for line in text.splitlines() if line.startswith("model name")]
    return names[0].strip() if names else platform.machine()


def now() -> str:
    """The time, RFC 3339."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def commit() -> str:
    """The checkout's commit, "+" if files were changed after it; else the version installed."""
    root = data_dir("tools").parent
    if not (root / ".git").exists():
        return version()
    git = ["git", "-C", os.fspath(root)]
    try:
        found = subprocess.run(
            [*git, "describe", "--always", "--dirty=+", "--match", ""],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return version()
    return found.stdout.strip()
