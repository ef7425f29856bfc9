"""Helpers for tests of block formats: ggml as an oracle, weights of many kinds, reproducible
blocks.

Bytes that are compared with committed results come from a hash, so that they are the same
under every version of numpy.
"""

import ctypes
import hashlib
from pathlib import Path

import numpy as np

from ggpy.formats import Format


class Ggml:
    """The functions of ggml in the shared library of the `xllamacpp` package."""

    def __init__(self, path: Path):
        self.library = ctypes.CDLL(str(path))
        self.library.ggml_quantize_chunk.restype = ctypes.c_size_t

    def row_function(self, name: str):
        """A function (const void *, void *, int64_t). AttributeError if the library lacks it."""
        function = getattr(self.library, name)
        function.restype = None
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        return function

    def quantize(self, format: Format, weights: np.ndarray, importance=None) -> np.ndarray:
        """ggml_quantize_chunk: weights[rows, columns] -> bytes[rows, row_bytes]."""
        weights = np.ascontiguousarray(weights, np.float32)
        rows, columns = weights.shape
        out = np.zeros((rows, format.row_bytes(columns)), np.uint8)
        if importance is not None:
            importance = np.ascontiguousarray(importance, np.float32)
        written = self.library.ggml_quantize_chunk(
            ctypes.c_int(format.type_id),
            ctypes.c_void_p(weights.ctypes.data),
            ctypes.c_void_p(out.ctypes.data),
            ctypes.c_int64(0),
            ctypes.c_int64(rows),
            ctypes.c_int64(columns),
            ctypes.c_void_p(None if importance is None else importance.ctypes.data),
        )
        assert written == out.nbytes
        return out


def hashed_bytes(name: str, count: int) -> bytes:
    """`count` bytes that depend only on `name`."""
    return hashlib.shake_256(name.encode()).digest(count)


def hashed_blocks(format: Format, n: int) -> np.ndarray:
    """Valid blocks[n] that depend only on the name of the format.

    Codes are arbitrary; scales have both signs and magnitudes up to 1/16.
    """
    blocks = np.frombuffer(bytearray(hashed_bytes(format.name, n * format.nbytes)), format.dtype)
    count = format.scales(np.zeros(1, format.dtype)).shape[1]
    if count:
        codes = np.frombuffer(hashed_bytes(f"{format.name} scales", 2 * n * count), "<i2")
        format.set_scales(blocks, codes.reshape(n, count).astype(np.float32) / 2**19)
    return blocks


def hashed_weights(name: str, rows: int, columns: int) -> np.ndarray:
    """weights[rows, columns] that depend only on `name`.

    Each weight is a sum of eight uniform numbers; the standard deviation is 0.8.
    """
    uniform = np.frombuffer(hashed_bytes(name, 16 * rows * columns), "<i2").reshape(
        8, rows, columns
    )
    return uniform.sum(axis=0, dtype=np.int32).astype(np.float32) / np.float32(2**16)


def kinds_of_weights(rows: int, columns: int, seed: int) -> dict[str, np.ndarray]:
    """Weights [rows, columns] that are easy, typical and hard for a quantiser, by name.

    columns is a multiple of 32.
    """
    rng = np.random.default_rng(seed)
    shape = (rows, columns)
    normal = rng.standard_normal(shape)
    magnitudes = 10.0 ** rng.uniform(-46, 4, (rows, columns // 32)).repeat(32, axis=1)
    ties = rng.integers(-127, 127, shape) + 0.5
    full = rng.random(shape) < 1 / 32
    kinds = {
        "normal": normal,
        "heavy-tailed": rng.standard_t(1.5, shape),
        "uniform": rng.uniform(-1, 1, shape),
        "positive": rng.random(shape) + 0.1,
        "negative": -rng.random(shape) - 0.1,
        "subnormal": normal * 1e-38,
        "scale below f16": normal * 1e-10,
        "every magnitude": normal * magnitudes,
        "few values": rng.integers(-4, 5, shape) / 4,
        "ties": np.where(full, 127, ties),
        "just below ties": np.where(full, 127, np.nextafter(np.float32(ties), np.float32(0))),
        "sparse": normal * (rng.random(shape) < 0.05),
        "one outlier": np.where(np.arange(columns) == columns // 2 + 5, 1000, normal * 0.02),
        "constant": np.full(shape, 0.37),
        "zero": np.zeros(shape),
        "negative zero": -np.zeros(shape),
    }
    return {name: weights.astype(np.float32) for name, weights in kinds.items()}
