"""The steps after the model in a folder for sentence-transformers: how hidden states are pooled to
one vector, and the matrices that multiply this vector.

modules.json lists the steps; each has a folder of its own. A step that a GGUF file cannot express
is refused. The prompts of tasks (config_sentence_transformers.json) are left out: GGUF has no key
for them. Knows no architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...util.messages import shown
from ..checkpoint import Checkpoint
from ..experts import Gathered
from ..folder import ConvertError, Folder

Metadata = dict[str, tuple[str, Any]]

MODULES, CONFIG = "modules.json", "config.json"
POOLING = {  # what 1_Pooling/config.json says -> gguf.PoolingType
    **{"mean_tokens": 1, "cls_token": 2, "lasttoken": 3},
    **{"mean": 1, "cls": 2},  # newer files: one setting, pooling_mode
}
MODE = "pooling_mode"
IDENTITY = "torch.nn.modules.linear.Identity"
FIRST_DENSE, MAX_DENSE = 2, 2  # files have dense_2 and dense_3


@dataclass(frozen=True)
class SentenceModules:
    """The steps after the model: settings below the architecture's name, and matrices."""

    metadata: Metadata
    dense: dict[str, Gathered]  # by the names in the GGUF file, each [rows, columns]

    @property
    def is_embedder(self) -> bool:
        """Whether the folder is for embeddings, and needs no output matrix."""
        return bool(self.metadata)


def read_modules(folder: Folder, checkpoint: Checkpoint) -> SentenceModules:
    """The steps of modules.json, or none without this file; ConvertError for an unknown step.

    The files of the matrices are closed with the checkpoint.
    """
    metadata: Metadata = {}
    dense: dict[str, Gathered] = {}
    seen: list[str] = []
    for entry in folder.objects(MODULES) or []:
        kind = str(entry.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            metadata["pooling_type"] = ("u32", _pooling(_step_folder(folder, entry)))
        elif kind == "Dense" and "Pooling" in seen and len(dense) < MAX_DENSE:
            name = f"dense_{FIRST_DENSE + len(dense)}"
            weights = _dense(_step_folder(folder, entry), checkpoint)
            dense[f"{name}.weight"] = weights
            rows, columns = weights.shape
            metadata |= {f"{name}_feat_in": ("u32", columns), f"{name}_feat_out": ("u32", rows)}
        elif (kind, bool(seen)) != ("Transformer", False) and kind != "Normalize":
            at = f"{folder.path / MODULES}: {shown(entry.get('type'))}"
            raise ConvertError(
                f"{at} as step {len(seen) + 1} is not supported: Transformer, Pooling, {MAX_DENSE}"
                " times Dense, Normalize are, in this order"
            )
        seen.append(kind)
    return SentenceModules(metadata, dense)


def _step_folder(folder: Folder, entry: dict[str, Any]) -> Folder:
    path = entry.get("path")
    found = folder.inner(path) if isinstance(path, str) else None
    if found is None:
        raise ConvertError(
            f"{folder.path}: has no folder {shown(path)}, which {MODULES} names: download it"
        )
    return found


def _pooling(folder: Folder) -> int:
    """gguf.PoolingType; ConvertError unless exactly one mode is chosen and GGUF has it."""
    config = folder.required(CONFIG)
    mode = config.get(MODE)
    modes = [mode] if mode is not None else [
        key.removeprefix(f"{MODE}_")
        for key, value in config.items()
        if key.startswith(f"{MODE}_") and value is True
    ]  # fmt: skip
    if len(modes) != 1 or modes[0] not in POOLING:
        raise ConvertError(
            f"{folder.path / CONFIG}: pooling {shown(modes)} is not supported: one of"
            f" {', '.join(POOLING)} is"
        )
    return POOLING[modes[0]]


def _dense(folder: Folder, checkpoint: Checkpoint) -> Gathered:
    """linear.weight of a step that multiplies and does nothing else."""
    config = folder.required(CONFIG)
    for key, wanted in (("bias", False), ("activation_function", IDENTITY)):
        if config.get(key, not wanted) != wanted:
            raise ConvertError(
                f"{folder.path / CONFIG}: {key} = {shown(config.get(key))} is not supported:"
                f" only {shown(wanted)} is"
            )
    tensors = checkpoint.beside(folder).tensors
    weights = tensors.get("linear.weight")
    if weights is None or len(tensors) != 1 or len(weights.shape) != 2:
        raise ConvertError(
            f"{folder.path}: has {shown(sorted(tensors))}, not one matrix linear.weight"
        )
    said = tuple(config.get(f"{x}_features") for x in ("out", "in"))
    if weights.shape != said:
        raise ConvertError(
            f"{folder.path}: linear.weight has the shape {weights.shape}, {CONFIG} says {said}"
        )
    return weights
