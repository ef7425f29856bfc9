"""The residual stream of a step on a GPU: what adds to it, and who makes the norm behind.

A norm that follows may be made by the product that adds (deferred_norm); what is normalised before
it is added may be added by the product that is next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...kernels.layout.pack import PLAIN
from ...kernels.norm.deferred_norm import Handed
from ...kernels.norm.rms_norm import RmsNorm
from ..interface import Attention, FeedForward, Norm
from .arrays import Array, Matrix, Sum
from .deferred_norm import Handing
from .gemm import Products


class Residual:
    """x[T, D]."""

    def __init__(
        self,
        products: Products,
        norm: RmsNorm,
        handing: Handing,
        floats: Callable[..., Array],
        halves: Callable[..., Array],
    ) -> None:
        """floats and halves (name, rows, columns): scratch memory."""
        self._products, self._norm, self._handing = products, norm, handing
        self._floats, self._halves = floats, halves

    def add(
        self,
        h: Array,
        w: Matrix,
        x: Array,
        post_norm: Norm | None,
        then: Attention | FeedForward | None,
        fuse: bool,
    ) -> Array:
        """See Ops.linear_add. fuse: what becomes of single ops will not be read."""
        x = replace(x, sum=None)  # which has been made
        if post_norm is not None:
            return self._add_normed(h, w, x, post_norm, then if fuse else None)
        handed = self._hand_on(w, x, then) if then is not None else None
        self._products.multiply(h, [w], [x], "ADD", handed=handed)
        return x

    def _add_normed(
        self,
        h: Array,
        w: Matrix,
        x: Array,
        post_norm: Norm,
        then: Attention | FeedForward | None,
    ) -> Array:
        """In place; or elsewhere, by the product that is next."""
        n, k = x.shape
        y = self._floats("y", n, k)
        self._products.multiply(h, [w], [y])
        if then is not None and self._products.adds(then.projections, n):
            places = (self._floats(name, n, k) for name in ("x", "x in turns"))
            to = next(place for place in places if place.data is not x.data)
            return replace(to, sum=Sum(x.data, y.data, post_norm))
        self._norm.add(x.data, y.data, post_norm.weight, n, k, post_norm.eps)
        return x

    def _hand_on(self, w: Matrix, x: Array, then: Attention | FeedForward) -> Handed | None:
        """The norm of what x becomes, made with the product that adds to it."""
        n, k = x.shape
        order = self._products.handed_order(w, then.projections, n)
        if order == PLAIN:
            return None
        normed = self._halves("normed", n, k, order)
        return self._handing.give(then.norm, normed, self._products.handed_part(w, n))
