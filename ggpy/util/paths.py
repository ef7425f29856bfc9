"""Where the folders `cuda`, `models` and `tools` of an installation are.

In a checkout (and in an editable install of it) they are next to the package, in a wheel inside it.
No other module may guess where. This module knows nothing about what the folders hold.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .version import __version__

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_PACKAGE = Path(__file__).resolve().parent.parent


def data_dir(name: str) -> Path:
    """The folder `name` of this installation; FileNotFoundError when it was not installed."""
    for folder in (_PACKAGE / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"this installation has no folder {name!r} in or beside {_PACKAGE}: reinstall ggpy"
    )


def cuda_dir() -> Path:
    """The folder of the CUDA C++ sources."""
    return data_dir("cuda")


def cache_dir(name: str) -> Path:
    """The user's cache folder for `name` (not created): $XDG_CACHE_HOME/ggpy/<name>."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ggpy" / name


def make_cache_dir(folder: Path) -> None:
    """Makes a folder of `cache_dir` and missing folders above it, for the user alone (0700).

    If others can write to an existing one, because it was made with a umask of 002, they lose this
    right. OSError.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
    for path in (folder, folder.parent):
        mode = path.stat().st_mode
        if mode & _OTHERS_WRITE and hasattr(os, "getuid") and path.stat().st_uid == os.getuid():
            path.chmod(stat.S_IMODE(mode) & ~_OTHERS_WRITE)


def is_private(folder: Path) -> bool:
    """Whether nobody but the user can put files into a folder of `cache_dir`, or replace it."""
    if not hasattr(os, "getuid"):  # Windows: a user's folders are the user's own
        return folder.is_dir()
    try:
        found = [path.stat() for path in (folder, folder.parent)]
    except OSError:
        return False
    return all(s.st_uid == os.getuid() and not s.st_mode & _OTHERS_WRITE for s in found)


def version() -> str:
    """The version of ggpy."""
    return __version__
