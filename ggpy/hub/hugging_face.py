"""Files of the Hugging Face hub, in the hub's own cache; needs huggingface_hub (`ggpy[hub]`)."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ..util.messages import escaped
from .names import HubError, is_repository

DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")  # of a repository, as llama.cpp: the first that exists
CONNECT_TIMEOUT = 4.0  # seconds until a hub that does not answer counts as out of reach
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
NOT_MODELS = ("mmproj", "imatrix")
CHECKPOINT_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "README.md"]


class CachedFile(NamedTuple):
    """A .gguf file in the hub's cache."""

    repo: str
    path: Path
    nbytes: int


def fetch(spec: str) -> Path:
    """The file of USER/REPO[:QUANT] in the hub's own cache; HubError, soon when out of reach."""
    repo, _, quant = spec.partition(":")
    if not is_repository(spec):
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


def cached() -> list[CachedFile]:
    """The .gguf files in the hub's cache, by repository; none without huggingface_hub."""
    found = {
        CachedFile(repo.repo_id, file.file_path, file.size_on_disk)
        for repo in _cached_models()
        for revision in repo.revisions
        for file in revision.files
        if file.file_name.lower().endswith(".gguf")
    }
    return sorted(found)


def remove(repo: str) -> int:
    """Remove a repository that has .gguf files from the hub's cache; the bytes that were freed.

    HubError where the cache has none of this name.
    """
    if repo not in {file.repo for file in cached()}:
        raise HubError(
            f"the hub's cache has no .gguf file of {repo}: `ggpy list` shows what it has"
        )
    from huggingface_hub import scan_cache_dir

    revisions = [
        revision.commit_hash
        for model in _cached_models()
        if model.repo_id == repo
        for revision in model.revisions
    ]
    plan = scan_cache_dir().delete_revisions(*revisions)
    plan.execute()
    return int(plan.expected_freed_size)


def _cached_models() -> list[Any]:
    """What huggingface_hub says of each model in its cache."""
    if find_spec("huggingface_hub") is None:
        return []
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []


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

    That is Q4_K_M, else Q8_0, else the first. QUANT may be a file's name. HubError where none fits.
    """
    models = sorted(f for f in files if f.lower().endswith(".gguf") and not _is_other(f))
    if not models:
        raise HubError(f"{repo} has no .gguf file: ggpy runs GGUF models only")
    if quant in models:
        return _all_parts(quant, models)
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
