"""The facts about a measurement that results record: processor, build, time."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

from ..util.paths import data_dir, version


def cpu_name() -> str:
    """The name of the processor, from the operating system."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2] for line in text.splitlines() if line.startswith("model name")]
    return names[0].strip() if names else platform.machine()


def now() -> str:
    """The current time in UTC, in RFC 3339 format."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def commit() -> str:
    """The commit of the checkout, with "+" if files have changed; else the installed version."""
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
