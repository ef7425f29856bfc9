"""An output file that appears under its name when it is complete, and not before.

Until then it is NAME.xxxxxxxx.part in the same folder, with eight random digits: a new file, never
one or a link that was there. It is synced to the disk before it gets its name, which replaces a
file of that name in one step: a link is replaced itself, and the file that it led to stays. Any
error removes the part; only a process that is killed (SIGKILL) leaves it, and it does no harm.

When two programs write one NAME, the part of each is locked while it grows (flock); the second
finds the lock of the first and is refused before it begins. A lock ends with its process, so the
part of a killed process does not count. Where there are no such locks (Windows, some network file
systems), both files are completed, and the last one stays. A device or a pipe, as /dev/stdout, is
written to directly. This module knows nothing about what is written.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from errno import EBUSY, EISDIR
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

PATIENCE = 2.0  # seconds to wait for the lock of a folder, which others hold for milliseconds
LONGEST_STEM = 200  # bytes of a file's name that a part's name begins with; most systems allow 255
PART = re.compile(r"\.[0-9a-f]{8}\.part")  # the rest of a part's name


class OutputFile:
    """A file being written; use it in a `with`, which ends with all of it or without a file.

    alone: refuse a file that another process is writing. False is for files of a cache, which are
    the same whoever writes them. OSError with the file's name if it cannot be written or, with
    EBUSY, if another process is writing it.
    """

    def __init__(self, path: str | os.PathLike[str], alone: bool = True) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise IsADirectoryError(EISDIR, "is a directory: name a file in it", os.fspath(path))
        self.part: Path | None = None  # the file until it is complete; None for a device or a pipe
        with _naming(self.path):
            if is_stream(self.path):
                self.stream: BinaryIO = self.path.open("wb")
                return
            if not alone:
                self._create()
                return
            with _turn(self.path.parent):
                _refuse_second(self.path)
                self._create()

    def write(self, data: Any) -> int:
        """Append bytes."""
        with _naming(self.path):
            return self.stream.write(data)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.commit()
        finally:
            self.discard()

    def commit(self) -> None:
        """Syncs the file to the disk and gives it its name. OSError."""
        with _naming(self.path):
            self.stream.flush()
            if self.part is None:
                self.stream.close()
                return
            os.fsync(self.stream.fileno())
            self.stream.close()
            os.replace(self.part, self.path)
            self._remove.detach()

    def discard(self) -> None:
        """Removes the part; does nothing if the file has its name already."""
        with suppress(OSError):  # flushing the buffer may find the disk full
            self.stream.close()
        if self.part is not None:
            self._remove()

    def _create(self) -> None:
        """Creates and locks a part under a new name; umask limits its mode."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        while True:
            self.part = self.path.with_name(f"{_stem(self.path)}.{secrets.token_hex(4)}.part")
            # Registered before the file is made, so that the part is removed even if a signal ends
            # the process between two lines of this module.
            self._remove = weakref.finalize(self, _unlink, self.part)
            try:
                handle = os.open(self.part, flags, 0o666)
            except FileExistsError:
                self._remove.detach()
                continue
            except BaseException:
                self._remove()
                raise
            _lock(handle)
            self.stream = os.fdopen(handle, "wb")
            return


def write_whole(path: str | os.PathLike[str], data: bytes | str, alone: bool = True) -> None:
    """Writes a file that others see complete or not at all; text in UTF-8. OSError."""
    with OutputFile(path, alone) as out:
        out.write(data.encode() if isinstance(data, str) else data)


def is_stream(path: Path) -> bool:
    """Whether `path` is to be written to and not replaced: a device, a pipe, /dev/stdout."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    folder = path.parent.resolve()
    # /dev/stdout is a link into /proc, perhaps to a file that a shell opened.
    is_device = folder == Path("/dev") or folder.is_relative_to("/proc")
    return is_device or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def lines_aside(path: Path) -> AbstractContextManager[object]:
    """Inside, printed lines go to stderr if `path` is stdout: they are no part of the file."""
    return redirect_stdout(sys.stderr) if _is_stdout(path) else nullcontext()


def _is_stdout(path: Path) -> bool:
    """Whether `path` is what stdout leads to, as /dev/stdout, and can hold a file."""
    try:
        found = path.stat()
        is_same = os.path.samestat(found, os.fstat(1))
    except OSError:
        return False
    return is_same and is_stream(path) and not stat.S_ISCHR(found.st_mode)


def _stem(path: Path) -> str:
    """The beginning of the names of a file's parts: its name; a long one is cut, with a hash."""
    raw = os.fsencode(path.name)
    if len(raw) <= LONGEST_STEM:
        return path.name
    return f"{raw[:LONGEST_STEM].decode(errors='ignore')}-{sha256(raw).hexdigest()[:8]}"


def _refuse_second(path: Path) -> None:
    """OSError if a process is writing this file."""
    stem = _stem(path)
    try:
        names = os.listdir(path.parent)
    except OSError:  # a folder that cannot be listed, or is not there
        return
    for name in names:
        is_part = name.startswith(stem) and PART.fullmatch(name[len(stem) :])
        if is_part and _is_locked(path.with_name(name)):
            raise OSError(EBUSY, f"another process is writing it, to {name}", os.fspath(path))


def _is_locked(part: Path) -> bool:
    """Whether a living process has locked the part."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        handle = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks in this file system
        return False
    finally:
        os.close(handle)
    return False


def _lock(handle: int) -> None:
    """Locks a file until it is closed, where the system has such locks."""
    with suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Locks a folder, so that one process at a time looks for parts in it and creates one.

    After PATIENCE it goes on without the lock.
    """
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(handle)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Makes errors of the system name `path` instead of its part."""
    try:
        yield
    except OSError as error:
        if error.strerror and not isinstance(error, IsADirectoryError):
            error.filename, error.filename2 = os.fspath(path), None
        raise


def _unlink(part: Path) -> None:
    with suppress(OSError):
        part.unlink(missing_ok=True)
