"""The files of a checkpoint's folder: opens plain files in this folder and no others.

A folder comes from strangers. Nothing in it is executed, and no name and no link in it leads to a
file outside; only the hub's own cache links a snapshot to blobs in a folder beside it. A JSON file
is bounded in its bytes and, before it is parsed, in its number of values: {} takes 3 bytes in a
file and 90 in memory. This module knows no file by name.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

from ..util.messages import shown, utf8

SNAPSHOTS, BLOBS, REPOSITORY = "snapshots", "blobs", "models--"  # in the cache of the hub


class Limit(NamedTuple):
    """What a JSON file may have at most; any file within a limit takes less than 1 GB of memory."""

    nbytes: int
    nested: int  # objects and arrays
    values: int  # of all objects and arrays, estimated by counting commas


SMALL = Limit(4 << 20, 1 << 20, 1 << 20)  # settings, and lists of added tokens


class ConvertError(ValueError):
    """A checkpoint that cannot be converted: the file, what is wrong, and what to do."""


class Folder:
    """A folder with a checkpoint; ConvertError unless there is one."""

    _inside: list[Path]  # folders that names and links may lead to

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise ConvertError(f"{path}: is no folder: give the one that config.json is in")
        real = path.resolve()
        self.name = utf8(real.name)
        self._inside = [real]
        if real.parent.name == SNAPSHOTS and real.parent.parent.name.startswith(REPOSITORY):
            self._inside.append(real.parent.parent / BLOBS)
            self.name = real.parent.parent.name.rpartition("--")[2]

    def find(self, name: str) -> Path | None:
        """The file `name`, if it is there; ConvertError for a name or a link that leads outside."""
        path, status = self._place(name)
        if status is not None and not stat.S_ISREG(status.st_mode):
            raise ConvertError(f"{path}: is no plain file")
        return None if status is None else path

    def inner(self, name: str) -> Folder | None:
        """The folder `name` in this one, or None; its links may lead where this one's may.

        ConvertError for a name or a link that leads outside.
        """
        path, status = self._place(name)
        if status is None:
            return None
        found = Folder(path)
        found._inside = self._inside
        return found

    def _place(self, name: str) -> tuple[Path, os.stat_result | None]:
        """The path of `name` and its status, which is None if there is no such file or folder."""
        if not name or name in (".", "..") or any(c in name for c in '/\\:\0"'):
            raise ConvertError(
                f"{self.path}: {shown(name)} is not the name of a file in this folder: it is not"
                " opened"
            )
        path = self.path / name
        try:
            real = path.resolve(strict=True)
            status = real.stat()
        except FileNotFoundError:
            return path, None
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, no permission
            raise ConvertError(f"{path}: cannot be read: {error}") from None
        if not any(real.is_relative_to(folder) for folder in self._inside):
            raise ConvertError(f"{path}: is a link to {real}, outside the folder: it is not opened")
        return path, status

    def names(self) -> list[str]:
        """Names of all files, sorted."""
        return sorted(path.name for path in self.path.iterdir())

    def read(self, name: str, limit: int = SMALL.nbytes) -> bytes | None:
        """A file's bytes, if it is there; ConvertError if it has more than `limit`."""
        path = self.find(name)
        if path is None:
            return None
        with path.open("rb") as stream:
            data = stream.read(limit + 1)
        if len(data) > limit:
            raise ConvertError(f"{path}: has more than {limit / 1e6:.0f} MB, the most that is read")
        return data

    def text(self, name: str, limit: int = SMALL.nbytes) -> str | None:
        """A file's text, if it is there; ConvertError if it has more than `limit` bytes."""
        data = self.read(name, limit)
        try:
            return None if data is None else data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConvertError(f"{self.path / name}: is not UTF-8: {error}") from None

    def json(self, name: str, limit: Limit = SMALL) -> dict[str, Any] | None:
        """The JSON object in a file, or None without the file; ConvertError beyond the limit."""
        data = self.read(name, limit.nbytes)
        return None if data is None else parse_object(data, self.path / name, limit)

    def objects(self, name: str, limit: Limit = SMALL) -> list[dict[str, Any]] | None:
        """The objects of the JSON array in a file, or None without the file.

        ConvertError beyond the limit.
        """
        data = self.read(name, limit.nbytes)
        if data is None:
            return None
        found = _parse(data, self.path / name, limit)
        if not isinstance(found, list) or not all(isinstance(x, dict) for x in found):
            raise ConvertError(f"{self.path / name}: is not an array of objects")
        return found

    def required(self, name: str) -> dict[str, Any]:
        """The JSON object in a file; ConvertError without the file."""
        found = self.json(name)
        if found is None:
            raise ConvertError(f"{self.path}: has no {name}: is this the checkpoint's folder?")
        return found


def parse_object(data: bytes, path: object, limit: Limit = SMALL) -> dict[str, Any]:
    """The JSON object in `data`; ConvertError, which names `path`, if a key is there twice."""
    found = _parse(data, path, limit)
    if not isinstance(found, dict):
        raise ConvertError(f"{path}: is {type(found).__name__}, not an object")
    return found


def _parse(data: bytes, path: object, limit: Limit) -> Any:
    counts = data.count(b"{") + data.count(b"["), data.count(b",")
    for count, most, what in zip(counts, limit[1:], ("objects", "values"), strict=True):
        if count > most:
            raise ConvertError(f"{path}: has {count} {what}, {most} are the most that is read")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise ConvertError(f"{path}: is nested too deeply") from None
    except ValueError as error:
        raise ConvertError(f"{path}: is not the JSON it should be: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"key {shown(twice)} is there twice")
    return found
