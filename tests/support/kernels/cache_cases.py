"""KV caches of every type for tests: the bytes of a page, and the tested pairs of types.

The layouts are implemented a second time here, in numpy, from the comments of
cuda/attention/kv_types.cuh and cuda/attention/kv_blocks.cuh.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from attention_cases import PAGE, Sequences, heads, placed, random
from kernel_buffers import Output

from ggpy.cache_types import CacheTypes
from ggpy.formats import by_name
from ggpy.formats.bits import unpack
from ggpy.formats.q5_0 import unpack_quants
from ggpy.kernels.attention.rope_kv import Heads

LIMITS = {"f32": np.inf, "bf16": np.inf, "f16": 65504.0}  # others: BLOCK_LIMIT
BLOCK_LIMIT = 65408.0
STRIP = 16

# Types of keys and values, query heads, key/value heads, head size. Each type is once on each side.
PAIRS = [
    ("q8_0", "q8_0", 7, 1, 128),
    ("q4_0", "q4_0", 4, 1, 64),
    ("q5_1", "q5_0", 3, 1, 96),
    ("q5_0", "q4_1", 8, 1, 32),
    ("q4_1", "q5_1", 2, 1, 128),
    ("bf16", "q8_0", 1, 1, 64),
    ("q8_0", "f32", 2, 1, 32),
    ("f32", "bf16", 2, 1, 96),
    ("f16", "q4_0", 1, 1, 128),
]
WIDE = ("q8_0", "q5_1", 2, 1, 256)  # decode_attention does not support it


def typed(k: str, v: str, *shape: int) -> Heads:
    """Heads whose pages have these types."""
    return replace(heads(*shape), types=CacheTypes(k, v))


def kernel_names() -> list[str]:
    """Instances of paged_attention.cu that the pairs need."""
    names = []
    for pair in PAIRS:
        h = typed(*pair)
        names += [
            f"paged_attention<{h.row}, false, {h.cpp_types}>",
            f"decode_attention<{h.row}, false, false, false, false, {h.cpp_types}>",
        ]
    return names


def halving_names() -> list[str]:
    """Instances of pages_to_f16.cu that the pairs need."""
    return [f"pages_to_f16<{h.row}, {h.cpp_types}>" for h in (typed(*pair) for pair in PAIRS)]


def encoded(type: str, x: np.ndarray) -> np.ndarray:
    """float32 x[..., E] to numbers [..., E] or quant blocks [..., E / 32]."""
    format = by_name(type)
    limit = LIMITS.get(type, BLOCK_LIMIT)
    with np.errstate(all="ignore"):
        x = np.ascontiguousarray(np.clip(x, -limit, limit), np.float32)
        blocks = format.quantize_blocks(x.reshape(-1, format.block_size))
    return blocks.reshape(*x.shape[:-1], -1)


def decoded(type: str, blocks: np.ndarray) -> np.ndarray:
    """The inverse of `encoded`, in float32."""
    with np.errstate(all="ignore"):
        weights = by_name(type).dequantize_blocks(np.ascontiguousarray(blocks).reshape(-1))
    return weights.reshape(*blocks.shape[:-1], -1)


class TypedPages:
    """The KV cache of a layer in the bytes of its types; attention_cases.Pages is the f16 one."""

    def __init__(self, device: Any, h: Heads, s: Sequences, fill: float) -> None:
        self.heads, self.sequences = h, s
        shape = s.n_pages, h.n_head_kv, PAGE, h.row
        garbage = np.full(shape, fill, np.float32)
        self.k, self.v = (encoded(t, garbage) for t in (h.types.k, h.types.v))
        self.raw: tuple[np.ndarray, np.ndarray] | None = None  # bytes that replace k and v
        sizes = h.key_bytes, h.value_bytes
        self.outputs = [Output(device, s.n_pages * size) for size in sizes]

    def put(self, sequence: int, positions: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """k and v [n, G, E], float32."""
        page, slot = self.sequences.place(sequence, positions)
        k = self.heads_as_kept(k)
        self.k[page, :, slot] = encoded(self.heads.types.k, k)
        self.v[page, :, slot] = encoded(self.heads.types.v, v)

    def heads_as_kept(self, x: np.ndarray) -> np.ndarray:
        """Keys or queries x[..., E], with the Hadamard transform if keys are quant blocks."""
        return spread(x) if self.heads.types.k.startswith("q") else x

    def bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes [page, G, bytes] of keys and of values."""
        if self.raw is not None:
            return self.raw
        return packed_keys(self.heads.types.k, self.k), packed_values(self.heads.types.v, self.v)

    def send(self, device: Any) -> tuple[Any, Any]:
        """Upload the host copy."""
        for array, output in zip(self.bytes(), self.outputs, strict=True):
            assert array.nbytes == output.nbytes
            device.upload(output.buffer, np.ascontiguousarray(array))
        return self.outputs[0].buffer, self.outputs[1].buffer

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Download the device copy, [page, G, bytes]."""
        shapes = [array.shape for array in self.bytes()]
        k, v = (o.read(np.uint8, s) for o, s in zip(self.outputs, shapes, strict=True))
        return k, v


def spread(x: np.ndarray) -> np.ndarray:
    """The normalised Hadamard transform of each 32 elements."""
    limited = np.clip(np.asarray(x, np.float32), -BLOCK_LIMIT, BLOCK_LIMIT)
    y = limited.reshape(-1, *[2] * 5)
    for axis in (5, 4, 3, 2, 1):
        a, b = y.take(0, axis), y.take(1, axis)
        y = np.stack([a + b, a - b], axis)
    return y.reshape(x.shape) * np.float32(32**-0.5)


def fill(device: Any, h: Heads, s: Sequences) -> tuple[TypedPages, np.ndarray, list]:
    """Pages, float16 q[T, H, row], and the keys and values [n, G, E] that the pages hold."""
    pages, contents = TypedPages(device, h, s, 5.0), []
    for i, n in enumerate(s.lengths):
        k, v = (random(n, h.n_head_kv, h.head_size, seed=9 * i + j) for j in (1, 2))
        pages.put(i, np.arange(n), k, v)
        contents.append((held(h.types.k, pages.heads_as_kept(k)), held(h.types.v, v)))
    q = random(len(s.positions), h.n_head, h.row).astype(np.float16)
    return pages, q, contents


def held(type: str, x: np.ndarray) -> np.ndarray:
    """x after a round trip through the type."""
    return decoded(type, encoded(type, x))


# Layouts of [page, G, PAGE, blocks or elements]


def packed_keys(type: str, blocks: np.ndarray) -> np.ndarray:
    """[page, G, bytes]."""
    if not type.startswith("q"):
        return _bytes(blocks)
    codes, scales = _codes(type, blocks), _scales(blocks)  # [page, G, PAGE, R, 32], [..., 1 or 2]
    units = codes.reshape(*codes.shape[:-1], 4, 8)  # [page, G, PAGE, R, t, 8]
    if type != "q8_0":
        units = units[..., :4] & 15 | (units[..., 4:] & 15) << 4
    whole = units.shape[3] // 2 * 2
    pairs = units[:, :, :, :whole].reshape(*units.shape[:3], whole // 2, 2, *units.shape[4:])
    rows = [_rows(pairs.swapaxes(4, 5), 3), _rows(units[:, :, :, whole:], 3)]
    parts = [np.concatenate(rows, axis=-1)]
    if type.startswith("q5"):
        parts.append(np.packbits(codes >> 4, axis=-1, bitorder="little"))
    return np.concatenate([_bytes(part) for part in (*parts, scales)], axis=-1)


def packed_values(type: str, blocks: np.ndarray) -> np.ndarray:
    """[page, G, bytes]."""
    if not type.startswith("q"):
        return _bytes(placed(blocks.swapaxes(2, 3)))
    codes, scales = _codes(type, blocks), _scales(blocks)
    # [page, G, strip, t, j, n, h, g] -> [page, G, strip, n, g, t, h, j]
    shape = *codes.shape[:2], PAGE // STRIP, 4, 4, codes.shape[3] * 2, 2, 8
    lanes = codes.reshape(shape).transpose(0, 1, 2, 5, 7, 3, 6, 4)
    parts = [lanes]
    if type != "q8_0":
        parts = [lanes[..., 0, :] & 15 | (lanes[..., 1, :] & 15) << 4]
    if type.startswith("q5"):
        high = np.packbits(lanes >> 4, axis=4, bitorder="little")  # [page, G, strip, n, 1, t, h, j]
        parts.append(high)
    by_strip = scales.reshape(*scales.shape[:2], PAGE // STRIP, STRIP, *scales.shape[3:])
    parts.append(by_strip.transpose(0, 1, 2, 4, 5, 3))  # [page, G, strip, R, d or m, position]
    return np.concatenate([_bytes(part) for part in parts], axis=-1)


def _codes(type: str, blocks: np.ndarray) -> np.ndarray:
    """Unsigned codes [..., R, 32]."""
    flat = np.ascontiguousarray(blocks).reshape(-1)
    if type == "q8_0":
        codes = (flat["qs"].astype(np.int16) + 128).astype(np.uint8)
    elif type.startswith("q5"):
        codes = unpack_quants(flat)
    else:
        codes = unpack(flat["qs"], 4).reshape(-1, 32)
    return codes.reshape(*blocks.shape, 32)


def _scales(blocks: np.ndarray) -> np.ndarray:
    """f16 scales [..., R, 1 or 2]."""
    return np.stack([blocks[n] for n in ("d", "m") if n in blocks.dtype.names], axis=-1)


def _rows(array: np.ndarray, axis: int) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(*array.shape[:axis], -1)


def _bytes(array: np.ndarray) -> np.ndarray:
    """[page, G, bytes]."""
    return _rows(array, 2).view(np.uint8)
