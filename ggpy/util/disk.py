"""Whether a disk has room for what is about to be written."""

from __future__ import annotations

import shutil
from pathlib import Path


class NoRoom(OSError):
    """A disk has less room than a file needs."""


def check_room(path: Path, nbytes: int) -> None:
    """NoRoom if the disk of a file's folder has less than nbytes free; the folder must exist."""
    free = shutil.disk_usage(path.parent).free
    if nbytes > free:
        raise NoRoom(f"{path}: needs {size(nbytes)}, {size(free)} are free there")


def size(nbytes: int) -> str:
    """A number of bytes for a message, as "2.34 GB", "57 MB" or "0.31 MB"."""
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.2f} GB"
    return f"{nbytes / 1e6:.0f} MB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2g} MB"
