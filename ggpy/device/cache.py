"""Compiled kernels on disk: one `<key>.cubin` and one `<key>.json` per compilation, in the user's
cache folder.

Several processes may use the folder at the same time: a file appears whole or not at all, and the
.json (which holds the digest of the cubin) is written last. `load` ignores a broken entry, an entry
of another user, and a folder that other users can write to, because the code in it would run on the
user's GPU. This module does not know what goes into a key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict
from errno import EPERM
from pathlib import Path

from ggpy.device.cubin import Cubin, Resources
from ggpy.util.output_file import write_whole
from ggpy.util.paths import cache_dir, is_private, make_cache_dir

MAX_BYTES = 512 << 20  # `store` trims the folder to this size, least recently used entries first


def folder() -> Path:
    """The folder of the cubins."""
    return cache_dir("cubins")


def refusal() -> str:
    """Why nothing in the folder is used, and the remedy; "" if the folder is usable or absent."""
    if not folder().exists() or is_private(folder()):
        return ""
    if all(path.stat().st_uid == os.getuid() for path in (folder(), folder().parent)):
        return ""  # `store` makes the folder private
    return f"{folder()} is another user's, so nothing in it is used: set XDG_CACHE_HOME"


def load(key: str) -> Cubin | None:
    """The entry `key`, or None when it is absent or broken."""
    path = folder() / f"{key}.json"
    if not is_private(folder()):
        return None
    try:
        entry = json.loads(_own_bytes(path))
        code = _own_bytes(path.with_suffix(".cubin"))
        if hashlib.sha256(code).hexdigest() != entry["sha256"]:
            return None
        resources = {name: Resources(**values) for name, values in entry["resources"].items()}
        cubin = Cubin(code, dict(entry["mangled"]), resources, str(entry["log"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return cubin


def store(key: str, cubin: Cubin) -> None:
    """Stores `cubin` under `key`. If the folder cannot be written, or `load` would not trust it,
    nothing is stored, and the next process compiles again.
    """
    entry = {
        "sha256": hashlib.sha256(cubin.code).hexdigest(),
        "mangled": cubin.mangled,
        "resources": {name: asdict(values) for name, values in cubin.resources.items()},
        "log": cubin.log,
    }
    with contextlib.suppress(OSError):
        make_cache_dir(folder())
        if is_private(folder()):
            write_whole(folder() / f"{key}.cubin", cubin.code, alone=False)
            write_whole(folder() / f"{key}.json", json.dumps(entry), alone=False)
            _trim()


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a cache file that other processes see whole or not at all; OSError if the file cannot
    be written.
    """
    make_cache_dir(path.parent)
    write_whole(path, data, alone=False)


def _own_bytes(path: Path) -> bytes:
    """Contents of a regular file that belongs to the user; OSError for another user's file and for
    a link.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if hasattr(os, "getuid") and status.st_uid != os.getuid():
            raise PermissionError(EPERM, "belongs to another user", os.fspath(path))
        return file.read()


def _trim() -> None:
    """Deletes the least recently used entries until the folder has at most MAX_BYTES bytes."""
    sizes: dict[str, int] = {}
    used: dict[str, float] = {}
    for item in os.scandir(folder()):
        stem, suffix = os.path.splitext(item.name)
        with contextlib.suppress(OSError):
            if suffix in (".cubin", ".json"):
                sizes[stem] = sizes.get(stem, 0) + item.stat().st_size
                used[stem] = max(used.get(stem, 0.0), item.stat().st_mtime)
    total = sum(sizes.values())
    for stem in sorted(used, key=used.__getitem__):
        if total <= MAX_BYTES:
            return
        total -= sizes[stem]
        for suffix in (".json", ".cubin"):
            with contextlib.suppress(OSError):
                os.unlink(folder() / (stem + suffix))
