"""Cases and checks for the GEMMs of packed activations: GemmWgmma and GemmSkinny."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases import nmse, silu
from kernel_buffers import Output, upload
from numpy.typing import NDArray
from packed_cases import unpacked
from tile_cases import Weights, energy, exact, tokens

from ggpy.kernels.layout.pack import PLAIN, Pack, order_of, packed_bytes
from ggpy.kernels.norm.deferred_norm import DeferredNorm, squares_bytes

ROUNDED = 1e-6  # error bound for weights that are rounded to f16


def packed(device: Any, x: NDArray, order: int) -> Any:
    """x[n, columns] on the device, packed in `order`."""
    to = device.zeros(packed_bytes(*x.shape))
    Pack(device).launch(upload(device, x), to, *x.shape, order)
    return to


def multiply(
    product: Any,
    weights: list,
    x: NDArray,
    *,
    start: NDArray | None = None,
    order: int = PLAIN,
    **options: Any,
) -> list[NDArray]:
    """The outputs as float32 [tokens, rows]. `start`: the initial outputs of an ADD."""
    glu, first, device = options.get("epilogue") == "GLU", weights[0], product.device
    n = len(x)
    dtype = np.dtype(np.float16 if glu else np.float32)
    rows = [w.n_rows for w in (weights[:1] if glu else weights)]
    sizes = [packed_bytes(n, r) if order else n * r * dtype.itemsize for r in rows]
    outs = [Output(device, size) for size in sizes]
    if start is not None:
        device.upload(outs[0].buffer, start)
    operand = packed(device, x, order_of(first.layout))
    product.launch(weights, operand, [out.buffer for out in outs], n, order=order, **options)
    if order:
        y = unpacked(outs[0].read(dtype, (sizes[0] // 2,)), n, rows[0], order)
        assert not y[:n, rows[0] :].any(), "columns after the last one are 0"
        return [y[:n, : rows[0]].astype(np.float32)]
    return [out.read(dtype, (n, r)).astype(np.float32) for out, r in zip(outs, rows, strict=True)]


def check_deferred_norm(
    product: Any, part: int, name: str, shape: tuple[int, int], n: int, behind: str = "Q8_0"
) -> None:
    """An ADD GEMM that defers its norm, followed by a GEMM of two matrices that applies the norm.

    part: columns per partial sum of squares.
    """
    device, rng = product.device, np.random.default_rng(n)
    add, h = Weights(name, *shape), tokens(n, shape[1])
    d = add.rows
    start = rng.standard_normal((n, d)).astype(np.float32)
    weight = rng.uniform(0.05, 0.2, d).astype(np.float32)
    sums = start + exact(add, h)
    prescale = (rng.uniform(0.5, 2, n) / np.sqrt(16 * np.square(sums).mean(1))).astype(np.float32)
    next_weights = [Weights(behind, 300, d, seed) for seed in (0, 1)]
    order = order_of(next_weights[0].layout)

    x, normed = Output(device, start.nbytes), Output(device, packed_bytes(n, d))
    squares, next_prescale = Output(device, squares_bytes(d)), Output(device, 4 * n)
    device.upload(x.buffer, start)
    deferred_norm = DeferredNorm(
        squares.buffer,
        d // part,
        upload(device, prescale),
        None,
        upload(device, weight),
        normed.buffer,
        order,
    )
    operand = packed(device, h, order_of(add.layout))
    product.launch(
        [add.tiled(device)], operand, [x.buffer], n, epilogue="ADD", deferred_norm=deferred_norm
    )
    y = x.read(np.float32, (n, d))
    assert nmse(y, sums, energy(add, h)) <= ROUNDED
    found = unpacked(normed.read(np.float16, (normed.nbytes // 2,)), n, d, order)[:n, :d]
    expected = (y * weight * prescale[:, None]).astype(np.float16)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
    parts = np.square(y.astype(np.float64)).reshape(n, d // part, part).sum(2).T
    pitch = 8 if n <= 8 else 16
    left = squares.read(np.float32, (squares.nbytes // 4 // pitch, pitch))[: d // part, :n]
    np.testing.assert_allclose(left, parts, rtol=1e-5)

    eps = 1e-5
    scale = 1 / np.sqrt(np.square(y.astype(np.float64)).mean(1) + eps)
    projected = [
        (y * weight * scale[:, None]) @ w.values.T.astype(np.float64) for w in next_weights
    ]
    taken = DeferredNorm(
        squares.buffer, d // part, upload(device, prescale), next_prescale.buffer, eps=eps
    )
    tiles = [w.tiled(device) for w in next_weights]
    outs = [Output(device, 4 * n * 300) for _ in tiles]
    product.launch(tiles, normed.buffer, [out.buffer for out in outs], n, deferred_norm=taken)
    for out, wanted in zip(outs, projected, strict=True):
        assert nmse(out.read(np.float32, (n, 300)), wanted) <= 2 * ROUNDED
    np.testing.assert_allclose(next_prescale.read(np.float32, (n,)), scale / 16, rtol=1e-5)
    glu = Output(device, 2 * n * 300)
    product.launch(tiles, normed.buffer, [glu.buffer], n, epilogue="GLU", deferred_norm=taken)
    assert nmse(glu.read(np.float16, (n, 300)), silu(projected[0]) * projected[1]) <= 1e-5
