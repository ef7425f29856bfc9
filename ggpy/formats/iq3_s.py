"""IQ3_S: 256 weights as 64 points of a 512-point grid with 4 sign bits each; each 32 weights have a
4-bit scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from .base import F32, U8, Blocks, Format, register
from .bits import pack, scaled, unpack_in_place
from .grids import grid, signed_points
from .search import aligned, block_error_weights, nearest_int, ordered_sum

QK_K = 256
block_iq3_s = np.dtype(
    [
        ("d", "<f2"),
        ("qs", "u1", QK_K // 4),
        ("qh", "u1", QK_K // 32),
        ("signs", "u1", QK_K // 8),
        ("scales", "u1", QK_K // 64),
    ]
)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; qs has the low byte of an index, qh its ninth bit. A scale
    stands for d * (1 + 2 * scale).
    """
    indices = blocks["qs"] | unpack_in_place(blocks["qh"], 1).astype(np.uint16) << 8
    factors = 1 + 2 * unpack_in_place(blocks["scales"], 4)
    d = blocks["d"].astype(np.float32)[:, None] * factors
    return scaled(d, signed_points("IQ3_S", indices, blocks["signs"]))


def quantize(weights: F32) -> Blocks:
    """weights[n, 256] -> blocks[n]; an error counts by the weight squared (ggml quantize_iq3_s)."""
    return _blocks(weights, weights * weights)


def quantize_weighted(weights: F32, importance: F32) -> Blocks:
    """weights[n, 256], importance[m, 256] -> blocks[n] (ggml quantize_iq3_s)."""
    return _blocks(weights, block_error_weights(weights, importance))


def _blocks(weights: F32, errors: F32) -> Blocks:
    scales, indices = search_grid(
        aligned(np.abs(weights).reshape(-1, 32).T), aligned(errors.reshape(-1, 32).T)
    )
    scales, indices = scales.reshape(-1, 8), indices.reshape(-1, 8, 8)
    signs = np.packbits(weights < 0, axis=1, bitorder="little").reshape(-1, 8, 4)
    # ggml writes nothing for a group of zeros: it puts the points and signs of later groups one
    # place earlier, but not their ninth bits and scales. Files are equal only if we do the same.
    empty = ~weights.reshape(-1, 8, 32).any(axis=2)
    order = np.argsort(empty, axis=1, kind="stable")[:, :, None]
    blocks = np.zeros(len(weights), block_iq3_s)
    blocks["qs"] = np.take_along_axis(indices.astype(np.uint8), order, axis=1).reshape(-1, 64)
    blocks["signs"] = np.take_along_axis(signs, order, axis=1).reshape(-1, 32)
    blocks["qh"] = np.packbits(indices >> 8, axis=2, bitorder="little")[:, :, 0]
    d = scales.max(axis=1) / np.float32(31)
    blocks["d"] = d * np.float32(1.033)
    inverse = np.where(d > 0, np.float32(1) / d, np.float32(0))
    levels = nearest_int(np.float32(0.5) * (inverse[:, None] * scales - np.float32(1)))
    pairs: U8 = np.clip(levels, 0, 15).astype(np.uint8).reshape(-1, 4, 2)
    blocks["scales"] = pack(pairs.swapaxes(1, 2), 4)
    return blocks


def search_grid(x: F32, weights: F32) -> tuple[F32, NDArray[np.int32]]:
    """magnitudes x[32, g], weights[32, g] -> scales[g] and indices of grid points [g, 8].

    Tries 19 scales about the one that makes the largest magnitude 15. Four magnitudes are rounded
    to odd numbers; if these are no point of the grid, the best of the nearest points is taken.
    Groups of zeros get scale 0 and index 0.
    """
    book = Neighbours.of_iq3_s()
    fours, four_weights = _by_fours(x), _by_fours(np.sqrt(weights))
    largest = x.max(axis=0)
    scale, best = largest / np.float32(15), np.zeros_like(largest)
    indices, on_grid = np.zeros((8, len(largest)), np.int32), np.zeros(len(largest), bool)
    for step in range(-9, 10):
        inverse = (np.float32(15) + np.float32(step) * np.float32(0.2)) / largest
        attempt, hit = book.nearest(x, inverse, np.float32(1) / inverse, fours, four_weights)
        sum_qx, sum_q2 = _fit(x, weights, book.points[attempt])
        better = (sum_q2 > 0) & (sum_qx * sum_qx > best * sum_q2)
        scale = np.where(better, sum_qx / sum_q2, scale)
        best = np.where(better, scale * sum_qx, best)
        indices[:, better] = attempt[:, better]
        on_grid = np.where(better, hit, on_grid)
    again = ~on_grid & (scale > 0)
    last, _ = book.nearest(x, np.float32(1) / scale, scale, fours, four_weights)
    indices[:, again] = last[:, again]
    sum_qx, sum_q2 = _fit(x, weights, book.points[indices])
    scale = np.where(again & (sum_q2 > 0), sum_qx / sum_q2, scale)
    indices[:, largest == 0] = 0
    return np.where(largest == 0, np.float32(0), scale), indices.T


def _by_fours(x: F32) -> F32:
    """x[32, g] -> [8 * g, 4]: a row for each point of the grid."""
    return np.ascontiguousarray(x.reshape(8, 4, -1).swapaxes(1, 2)).reshape(-1, 4)


def _fit(x: F32, weights: F32, points: F32) -> tuple[F32, F32]:
    """x[32, g], weights[32, g], points[8, g, 4] -> sums of w * x * q and w * q * q, [g] each."""
    q = np.ascontiguousarray(points.swapaxes(1, 2)).reshape(x.shape)
    terms = weights * q
    return ordered_sum(weights * x * q), ordered_sum(terms * q)


@dataclass(frozen=True)
class Neighbours:
    """The grid of IQ3_S, and for every four odd numbers that are no point of it the nearest points.

    These are the points at the three least distances, by distance and index (ggml iq3xs_init_impl).
    Four numbers are coded as (q - 1) / 2, three bits each, the first lowest.
    """

    points: F32  # [512, 4]
    index: NDArray[np.int32]  # [4096]: code -> index, or -1
    count: NDArray[np.int32]  # [4096]: code -> how many points are near
    near: NDArray[np.int32]  # [4096, most]: their indices, the first repeated at the end

    @staticmethod
    @cache
    def of_iq3_s() -> Neighbours:
        """The instance, computed when it is first needed."""
        points = grid("IQ3_S").astype(np.int32)
        shifts = np.array([0, 3, 6, 9])
        index = np.full(4096, -1, np.int32)
        index[((points - 1) // 2 << shifts).sum(axis=1)] = np.arange(512)
        numbers = 2 * (np.arange(4096)[:, None] >> shifts & 7) + 1
        distance = np.square(numbers[:, None, :] - points).sum(axis=2, dtype=np.int32)
        order = np.argsort(distance, axis=1, kind="stable").astype(np.int32)
        ranked = np.take_along_axis(distance, order, axis=1)
        rank = np.cumsum(np.diff(ranked, axis=1, prepend=ranked[:, :1]) > 0, axis=1)
        count = (rank < 3).sum(axis=1, dtype=np.int32)
        near = order[:, : count[index < 0].max()]
        near = np.where(np.arange(near.shape[1]) < count[:, None], near, near[:, :1])
        return Neighbours(points.astype(np.float32), index, count, near)

    def nearest(
        self, x: F32, inverse: F32, scale: F32, fours: F32, four_weights: F32
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """x[32, g] times inverse[g] -> indices[8, g] of points, and where all eight were points,
        [g].
        """
        levels = nearest_int(np.float32(0.5) * (inverse * x - np.float32(1)))
        levels = np.clip(levels, np.float32(0), np.float32(7)).reshape(8, 4, -1)
        digits = levels.astype(np.int32) << np.array([0, 3, 6, 9], np.int32)[:, None]
        codes: NDArray[np.int32] = digits.sum(axis=1, dtype=np.int32).reshape(-1)
        indices = self.index[codes]
        missed = np.flatnonzero(indices < 0)
        scales = np.tile(scale, 8)
        for part, most in self._by_count(codes, missed):
            near = self.near[codes[part], :most]
            indices[part] = self._best(near, scales[part], fours[part], four_weights[part])
        hit = np.ones(len(codes), bool)
        hit[missed] = False
        hits: NDArray[np.bool_] = np.logical_and.reduce(hit.reshape(8, -1), axis=0)
        return indices.reshape(8, -1), hits

    def _by_count(
        self, codes: NDArray[np.int32], missed: NDArray[np.intp]
    ) -> Iterator[tuple[NDArray[np.intp], int]]:
        """Parts of `missed` with about as many near points each, and the most that one has."""
        counts, least = self.count[codes[missed]], 0
        for most in (5, 8, 16, self.near.shape[1]):
            part = missed[(counts > least) & (counts <= most)]
            for start in range(0, len(part), 2048):
                yield part[start : start + 2048], most
            least = most

    def _best(self, near: NDArray[np.int32], scale: F32, x: F32, weights: F32) -> NDArray[np.int32]:
        """near[m, k], scale[m], x[m, 4], weights[m, 4] -> the index of the nearest, [m]."""
        distance = np.zeros(near.shape, np.float32)
        for i in range(4):
            difference = scale[:, None] * self.points[:, i][near] - x[:, i, None]
            distance += weights[:, i, None] * difference * difference
        best: NDArray[np.int32] = np.take_along_axis(near, distance.argmin(axis=1)[:, None], axis=1)
        return best[:, 0]


IQ3_S = register(
    Format(
        *("IQ3_S", 21, QK_K, block_iq3_s, dequantize, quantize, quantize_weighted),
        searches=True,
        # 4.6 bits for each weight instead of 3.4: signed numbers of the grid, one by one
        tile=(4, 32, "SUB"),
        tile_values=tuple(range(-15, 16, 2)),
    )
)
