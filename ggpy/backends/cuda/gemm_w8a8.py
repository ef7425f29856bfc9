"""Products on a GPU of weights and activations of 8 bits: integers, or E4M3 floats.

Knows which of the kernels a product takes, and quantises its input. Integer products give the same
bits whichever it is; sums of floats have another order in each.
"""

from __future__ import annotations

from typing import Any

from ...kernels.attention.rope_kv import Turning
from ...kernels.gemm.elementwise import Elementwise
from ...kernels.gemm.gemm import Epilogue
from ...kernels.gemm.gemm_decode import Limits
from ...kernels.gemm.hopper import has_wgmma
from ...kernels.layout.tile import TiledMatrix
from ...kernels.w8a8.quantize_rows import Kind, QuantizedRows, QuantizeRows, codes_bytes
from ...kernels.w8a8.w8a8_decode import COLUMNS, MulMatW8A8Few, Row
from ...kernels.w8a8.w8a8_prefill import MAX_K, MulMatW8A8, runs_on, takes
from ...kernels.w8a8.w8a8_wgmma import MulMatW8A8Wgmma
from ..interface import ActivationType, Norm
from .arrays import Array, Matrix, Memory
from .gemm_f16 import MANY_TOKENS, Room

FROM_TOKENS = COLUMNS[-1] + 1  # what one launch of the product for few does not take


class W8A8Products:
    """Multiplies with the kernels that the GPU has."""

    def __init__(self, device: Any, limits: Limits, elementwise: Elementwise, room: Room) -> None:
        """limits: as the other products of a few tokens have them. room: scratch memory."""
        self._arch, self._room, self._elementwise = device.arch, room, elementwise
        self._quantize = QuantizeRows(device, limits.warps)
        self._few = MulMatW8A8Few(device, limits)
        there = has_wgmma(device.arch)
        self._wgmma = MulMatW8A8Wgmma(device, device.sm_count) if there else None
        self._many = MulMatW8A8(device)
        self.any_order = True  # sums of floats may be added up in the order that is fastest

    def runs(self, activations: ActivationType, tiles: TiledMatrix | None) -> bool:
        """Whether the weight is multiplied here, with such activations; else with halves."""
        if activations == "f16" or tiles is None or tiles.k % 8 or tiles.k > MAX_K:
            return False
        return runs_on(activations, self._arch) and takes(tiles, activations)

    def turns_heads(self, kind: Kind) -> bool:
        """Whether products of many tokens can rotate q and k, and write to pages."""
        return self._wgmma is not None and self._free(kind)

    def _free(self, kind: Kind) -> bool:
        return kind == "int8" or self.any_order

    @staticmethod
    def all_mine(weights: list[Matrix]) -> bool:
        """Whether these weights are multiplied here."""
        return all(w.activations != "f16" for w in weights)

    def multiply(
        self,
        x: Array,
        kind: Kind,
        tiles: list[TiledMatrix],
        outs: list[Array],
        epilogue: Epilogue,
        norm: Norm | None,
        activation: str,
        soft_cap: float = 0.0,
        rows: Memory | None = None,
        turning: Turning | None = None,
    ) -> None:
        """outs[i] = epilogue(x tiles[i]^T) in one launch; see Products.multiply.

        norm: of x, or of its rows, which is float then.
        """
        n, to = outs[0].shape[0], [out.data for out in outs]
        options: dict[str, Any] = {"epilogue": epilogue, "activation": activation}
        here = {"residual": to[0] if epilogue == "ADD" else None, "soft_cap": soft_cap, **options}
        if n == 1 and rows is None:
            normed = (norm.weight, norm.eps) if norm else ()
            self._few.launch(tiles, Row(kind, x.shape[-1], x.data, *normed), to, **here)
            return
        codes = self._quantized(x, n, kind, norm, rows)
        free = self._free(kind)
        if free and self._wgmma is not None and n >= FROM_TOKENS:
            self._wgmma.launch(tiles, codes, to, **options, turning=turning)
            if soft_cap:
                self._elementwise.soft_cap(to[0], n * outs[0].shape[1], soft_cap)
        elif free and n >= MANY_TOKENS:
            self._many.launch(tiles, codes, to, **here)
        else:
            self._few.launch(tiles, codes, to, **here)

    def _quantized(
        self, x: Array, n_tokens: int, kind: Kind, norm: Norm | None, rows: Memory | None
    ) -> QuantizedRows:
        k = x.shape[-1]
        codes = self._room("codes", codes_bytes(n_tokens, k))
        to = QuantizedRows(kind, n_tokens, k, codes, self._room("code scales", 4 * n_tokens))
        if norm is None:
            self._quantize.launch(x.data, to)
        else:
            options = {"rows": rows, "norm": norm.weight, "eps": norm.eps}
            self._quantize.launch(x.data, to, x_type="float", **options)
        return to
