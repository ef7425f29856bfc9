"""Quantised checkpoints, packed by plain loops that follow the descriptions of the formats.

The arrays equal those that AutoGPTQ 0.7.1, AutoAWQ 0.2.9 and compressed-tensors 0.20 pack from the
same codes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from checkpoints import stored, weights_of, write

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds column AWQ[i]
PLAIN = tuple(range(8))


class Group(NamedTuple):
    """w[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g]."""

    codes: np.ndarray  # [N, K]
    zeros: np.ndarray  # [N, G]
    scales: np.ndarray  # [N, G], float16
    groups: np.ndarray  # [K]

    @property
    def weights(self) -> np.ndarray:
        values = self.codes.astype(np.float32) - self.zeros[:, self.groups]
        return values * self.scales.astype(np.float32)[:, self.groups]

    @property
    def rounded(self) -> np.ndarray:
        """The weights with zero * scale rounded to f16, as in a block; exact for zeros of 8."""
        scales = self.scales.astype(np.float32)
        minimums = (self.zeros * scales).astype(np.float16).astype(np.float32)
        found = self.codes * scales[:, self.groups] - minimums[:, self.groups]
        return found.astype(np.float32)


def grouped(w: np.ndarray, size: int, symmetric: bool) -> Group:
    """Rounds weights to the nearest of the 16 codes of their group."""
    n, k = w.shape
    size = k if size == -1 else size
    parts = w.reshape(n, k // size, size)
    low, high = parts.min(axis=2), parts.max(axis=2)
    if symmetric:
        scales = (np.abs(parts).max(axis=2) / 7.5).astype(np.float16)
        zeros = np.full(scales.shape, 8)
    else:
        scales = ((high - low) / 15).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 1, 15).astype(int)
    steps = np.rint(parts / scales.astype(np.float32)[..., None]) + zeros[..., None]
    codes = np.clip(steps, 0, 15).astype(int).reshape(n, k)
    return Group(codes, zeros, scales, np.arange(k) // size)


def words_of(codes: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """codes[n, m] -> int32[n, m / 8], nibble by nibble."""
    out = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint64)
    for row in range(out.shape[0]):
        for column in range(out.shape[1]):
            for nibble in range(8):
                code = int(codes[row, 8 * column + order[nibble]])
                out[row, column] |= np.uint64(code << 4 * nibble)
    return out.astype(np.uint32).view(np.int32)


def gptq(stem: str, g: Group, offset: int = 1) -> dict[str, np.ndarray]:
    return {
        f"{stem}.qweight": np.ascontiguousarray(words_of(g.codes, PLAIN).T),
        f"{stem}.qzeros": words_of(g.zeros.T - offset, PLAIN),
        f"{stem}.scales": np.ascontiguousarray(g.scales.T),
        f"{stem}.g_idx": g.groups.astype(np.int32),
    }


def awq(stem: str, g: Group) -> dict[str, np.ndarray]:
    return {
        f"{stem}.qweight": words_of(g.codes.T, AWQ),
        f"{stem}.qzeros": words_of(g.zeros.T, AWQ),
        f"{stem}.scales": np.ascontiguousarray(g.scales.T),
    }


def compressed(stem: str, g: Group, symmetric: bool) -> dict[str, np.ndarray]:
    found = {
        f"{stem}.weight_packed": words_of(g.codes, PLAIN),
        f"{stem}.weight_scale": g.scales,
        f"{stem}.weight_shape": np.array(g.codes.shape, np.int64),
    }
    if not symmetric:
        found[f"{stem}.weight_zero_point"] = np.ascontiguousarray(words_of(g.zeros.T, PLAIN).T)
    return found


def by_rows(w: np.ndarray, kind: str, one: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(values, scales [N, 1] or [1]) of weights in int8 or E4M3, the latter as bytes."""
    largest = np.abs(w).max() if one else np.abs(w).max(axis=1, keepdims=True)
    scales = (largest / (127 if kind == "int8" else 448)).astype(np.float32).reshape(-1)
    values = w / scales[:, None]
    if kind == "int8":
        return np.rint(values).astype(np.int8), scales if one else scales[:, None]
    codes = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes, scales if one else scales[:, None]


Make = Callable[[str, np.ndarray], tuple[dict[str, np.ndarray], np.ndarray]]


def save(folder: Path, name: str, make: Make, quantization: Any, **changes: Any) -> dict[str, Any]:
    """Write the checkpoint `name`. Returns all weights.

    make(stem, w) returns the stored tensors of a projection, and the weights they represent.
    """
    from safetensors.numpy import save_file

    write(folder, name, quantization_config=quantization, torch_dtype="float16", **changes)
    arrays, plain = {}, {}
    for key, w in weights_of(name).items():
        plain[key] = w
        if "_proj.weight" in key:
            made, plain[key] = make(key.removesuffix(".weight"), w)
            arrays |= made
        else:
            arrays[key] = w
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    for part in folder.glob("model-*.safetensors"):
        part.unlink()
    save_file({k: _array(a) for k, a in arrays.items()}, folder / "model.safetensors")
    return plain


def _array(array: np.ndarray) -> np.ndarray:
    return stored(array, "float8_e4m3fn") if array.dtype == np.uint8 else array
