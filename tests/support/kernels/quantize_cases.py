"""Models for tests of quantisation: names and shapes of many kinds, and weights of a few models.

llama-quantize reads them too (golden/make_quantize.py), so that its choices and bytes can be
compared with ours; it looks at names, row lengths and settings, and not at whether shapes fit.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from format_cases import hashed_weights

from ggpy.formats import by_name
from ggpy.gguf.writer import Slot, Writer
from ggpy.quantization.importance import Entry, ImportanceMatrix
from ggpy.quantization.mix import MIXES

# llama-quantize has no file type for these; its MXFP4_MOE quantises only experts to MXFP4.
OURS_ALONE = ("MXFP4", "NVFP4")
SHARED_MIXES = [mix for mix in MIXES if mix not in OURS_ALONE]

ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True)
class Case:
    """A model whose matrices have two rows, or `rows`."""

    architecture: str
    n_layer: int
    n_head: int
    n_head_kv: int
    tied: bool = False
    n_expert: int = 0
    columns: int = 256
    matrices: tuple[str, ...] = (*ATTENTION, *FEED_FORWARD)
    rows: int = 2

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{tensor name: shape}, in no particular order, as in a file."""
        size = self.rows, self.columns
        found: dict[str, tuple[int, ...]] = {"token_embd.weight": size}
        for i in range(self.n_layer):
            for name in self.matrices:
                experts = self.n_expert and name in FEED_FORWARD
                part = f"{name}_exps" if experts else name
                shape = (self.n_expert, *size) if experts else size
                found[f"blk.{i}.{part}.weight"] = shape
            for name in ("attn_norm", "ffn_norm"):
                found[f"blk.{i}.{name}.weight"] = (self.columns,)
            if self.n_expert:
                found[f"blk.{i}.ffn_gate_inp.weight"] = (self.n_expert, self.columns)
        found["output_norm.weight"] = (self.columns,)
        if not self.tied:
            found["output.weight"] = size
        return found

    def metadata(self) -> dict[str, tuple[str, Any]]:
        """The metadata that llama.cpp requires of every model."""
        settings: dict[str, tuple[str, Any]] = {
            "block_count": ("u32", self.n_layer),
            "context_length": ("u32", 256),
            "embedding_length": ("u32", self.columns),
            "feed_forward_length": ("u32", self.columns),
            "attention.head_count": ("u32", self.n_head),
            "attention.head_count_kv": ("u32", self.n_head_kv),
            "attention.layer_norm_rms_epsilon": ("f32", 1e-5),
            "attention.layer_norm_epsilon": ("f32", 1e-5),
            "attention.sliding_window": ("u32", 128),
        }
        if self.n_expert:
            settings |= {"expert_count": ("u32", self.n_expert), "expert_used_count": ("u32", 2)}
        named = {f"{self.architecture}.{key}": value for key, value in settings.items()}
        return {"general.architecture": ("str", self.architecture), **named}


FUSED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
CASES = {
    "llama": Case("llama", 12, 8, 8),
    "llama, grouped": Case("llama", 32, 32, 8),
    "llama, tied": Case("llama", 16, 9, 3, tied=True),
    "llama 70B": Case("llama", 80, 64, 8),
    "llama 65B": Case("llama", 80, 64, 64),
    "mixtral": Case("llama", 32, 32, 8, n_expert=8),
    "four experts": Case("llama", 18, 16, 16, n_expert=4),
    "qwen2 72B": Case("qwen2", 80, 64, 8),
    "falcon": Case("falcon", 32, 71, 1, matrices=FUSED),
    "phi3": Case("phi3", 32, 32, 32, matrices=FUSED),
    "gemma2": Case("gemma2", 26, 8, 4, tied=True),
    "rows of 288": Case("llama", 8, 9, 3, columns=288),
    "rows of 288, tied": Case("llama", 8, 9, 3, columns=288, tied=True),
    "rows of 112": Case("llama", 8, 4, 4, columns=112),
}

# A model with weights: all types of all mixes, in 0.8 million weights.
WEIGHTS = Case("llama", 8, 4, 1, rows=64)


def write_case(case: Case, path: Path) -> Path:
    """Write the model in F32. The weights depend only on the tensor names."""
    slots = [Slot(name, shape, by_name("F32")) for name, shape in case.shapes().items()]
    with Writer(path, case.metadata(), slots) as out:
        for slot in slots:
            count = int(np.prod(slot.shape))
            out.write(hashed_weights(slot.name, count // case.columns, case.columns) / 16)
    return path


def importance_of(case: Case) -> ImportanceMatrix:
    """An importance matrix for the layers of a case, with values that are exact in float32."""
    found = ImportanceMatrix(datasets=["text.txt"], n_chunks=8, chunk_size=512)
    for name, shape in case.shapes().items():
        if name.startswith("blk.") and len(shape) > 1:
            experts = shape[0] if len(shape) == 3 else 1
            sums = np.square(hashed_weights(f"{name} importance", experts, case.columns))
            found.entries[name] = Entry(sums * np.float32(4096), np.full(experts, 4096, np.int64))
    return found


def summary_of_types(types: Mapping[str, str]) -> str:
    """For each type: the number of its tensors and a digest of their names."""
    lines = "".join(f"{name} {types[name]}\n" for name in sorted(types))
    counts = sorted(Counter(types.values()).items())
    digest = hashlib.sha256(lines.encode()).hexdigest()[:16]
    return ", ".join(f"{n} {name}" for name, n in counts) + f": {digest}"


def digest_of_file(path: Path) -> str:
    """sha256 of all bytes."""
    found = hashlib.sha256()
    for piece in pieces(path):
        found.update(piece)
    return found.hexdigest()


def pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while piece := stream.read(1 << 22):
            yield piece
