"""Compiled kernels on disk: one `<key>.cubin` and one `<key>.json` per compilation, in the user's
cache folder.

Several processes may use the folder at once: a file appears whole or not at all, and the .json
(which holds the cubin's digest) is written last. A broken entry counts as absent. This module does
not know what goes into a key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from ggpy.device.cubin import Cubin, Resources
from ggpy.paths import cache_dir

MAX_BYTES = 512 << 20  # the folder is trimmed to this, least recently used first


def folder() -> Path:
    """Where cubins are kept."""
    return cache_dir("cubins")


def load(key: str) -> Cubin | None:
    """The entry `key`, or None when it is absent or broken."""
    path = folder() / f"{key}.json"
    try:
        entry = json.loads(path.read_bytes())
        code = path.with_suffix(".cubin").read_bytes()
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
    """Keep `cubin` as `key`; a folder that cannot be written only costs the next process its
    compile time."""
    entry = {
        "sha256": hashlib.sha256(cubin.code).hexdigest(),
        "mangled": cubin.mangled,
        "resources": {name: asdict(values) for name, values in cubin.resources.items()},
        "log": cubin.log,
    }
    with contextlib.suppress(OSError):
        write_atomically(folder() / f"{key}.cubin", cubin.code)
        write_atomically(folder() / f"{key}.json", json.dumps(entry).encode())
        _trim()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that other processes see whole or not at all; OSError when it cannot be
    written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _trim() -> None:
    """Delete the least recently used entries until the folder is at most MAX_BYTES."""
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
