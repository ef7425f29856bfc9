"""The weights of a checkpoint: safetensors files, one or many, as rows in a format of GGUF.

Weights that are quantised already are put together with their scales, so that there is one tensor
for each matrix (`assemble`). This module knows nothing of architectures: names are those of the
files, and a matrix is called X.weight however it is stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from ..util.messages import escaped, shown
from .assemble import assemble
from .folder import ConvertError, Folder, Limit
from .quantization import read_quantization
from .safetensors import DAMAGED, Shard
from .weights import Weights

MAX_TENSORS = 4 << 16  # of all files: a quantised matrix usually consists of up to four tensors
INDEX_LIMIT = Limit(16 << 20, 64, MAX_TENSORS + 64)
INDEX = "model.safetensors.index.json"
PART = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


class Checkpoint:
    """All tensors of a folder by name; close it, or use it in a `with`.

    quantization: the value of quantization_config in config.json, unchecked. ConvertError if a file
    is missing, damaged or not supported.
    """

    def __init__(self, folder: Folder, quantization: Any = None) -> None:
        self.folder = folder
        self.quantization = read_quantization(folder, quantization)
        with ExitStack() as stack:
            self.tensors = assemble(self._open(stack), self.quantization)
            self._open_files = stack.pop_all()

    def beside(self, folder: Folder) -> Checkpoint:
        """The unquantised weights of another folder; `close` closes its files, too."""
        return self._open_files.enter_context(Checkpoint(folder))

    def close(self) -> None:
        self._open_files.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, stack: ExitStack) -> dict[str, Weights]:
        """The tensors of all files; ConvertError unless each is in the one file the index names."""
        index = _index(self.folder)
        files = sorted(set(index.values())) if index else _files(self.folder)
        found: dict[str, Weights] = {}
        for file in files:
            shard = stack.enter_context(_shard(self.folder, file))
            for name, place in shard.tensors.items():
                if name in found or (index and index.get(name) != file):
                    where = (
                        f"the index says {escaped(index.get(name))}"
                        if index
                        else "is in another too"
                    )
                    raise ConvertError(f"{shard.path}: tensor {shown(name)}: {where}; {DAMAGED}")
                found[name] = Weights(name, place.shape, place.dtype, shard)
            if len(found) > MAX_TENSORS:
                raise ConvertError(f"{self.folder.path}: has more than {MAX_TENSORS} tensors")
        missing = [name for name in index if name not in found]
        if missing:
            raise ConvertError(
                f"{self.folder.path}: {escaped(index[missing[0]])} lacks tensor"
                f" {shown(missing[0])}, which the index promises{_more(missing)}; {DAMAGED}"
            )
        return found


def _index(folder: Folder) -> dict[str, str]:
    """Tensor -> file, from the index of a checkpoint in several files; {} without an index."""
    found = folder.json(INDEX, INDEX_LIMIT)
    if found is None:
        return {}
    weights = found.get("weight_map")
    if not isinstance(weights, dict) or not weights or set(map(type, weights.values())) != {str}:
        raise ConvertError(f"{folder.path / INDEX}: has no weight_map from tensors to files")
    return weights


def _files(folder: Folder) -> list[str]:
    """The files of a checkpoint without an index."""
    names = folder.names()
    if "model.safetensors" in names:
        return ["model.safetensors"]
    parts = [name for name in names if PART.fullmatch(name)]
    if not parts:
        pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in names)
        what = "only pickles, which are never opened: save it as safetensors" if pickled else ""
        raise ConvertError(f"{folder.path}: has no model.safetensors{what and ', ' + what}")
    count = int(PART.fullmatch(parts[0])[2])  # type: ignore[index]
    _check_all_there(folder, parts, count)
    return parts


def _check_all_there(folder: Folder, parts: Iterable[str], count: int) -> None:
    numbers = {int(PART.fullmatch(part)[1]) for part in parts}  # type: ignore[index]
    missing = sorted(set(range(1, min(count, 100000) + 1)) - numbers)
    if missing:
        raise ConvertError(
            f"{folder.path}: part {missing[0]} of {count} is missing{_more(missing)}: download it"
        )


def _shard(folder: Folder, name: str) -> Shard:
    path = folder.find(name)
    if path is None:
        raise ConvertError(
            f"{folder.path}: {escaped(name)}, which the index names, is missing: download it"
        )
    return Shard(path)


def _more(missing: list[Any]) -> str:
    return f", and {len(missing) - 1} more" if len(missing) > 1 else ""
