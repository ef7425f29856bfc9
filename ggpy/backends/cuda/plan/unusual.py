"""Operations on heads, between the projections and attention, that few models have. Only the kernel
rope_kv_unusual computes them, so that no other kernel needs options for them.
"""

from __future__ import annotations

from ....kernels.attention.rope_kv import UnusualHeads
from ...interface import Attention


def unusual_heads(a: Attention) -> UnusualHeads | None:
    """Norms of heads after RoPE, norms with weights for each head, layer norms of heads, and
    queries that grow with their position; None if a layer has none of these. Norms over all heads
    together are computed elsewhere, before RoPE.
    """
    norms = [] if a.norm_whole else [n for n in (a.q_norm, a.k_norm) if n is not None]
    last = a.norm_after_rope and not commutes_with_rope(a)
    centred = any(norm.centred for norm in norms)
    t = a.temperature
    if not (norms and (last or centred or a.norm_by_head)) and t is None:
        return None
    heads = UnusualHeads(norm_last=last, centred=centred, by_head=a.norm_by_head, length=1)
    if t is not None:
        heads.length, heads.offset, heads.growth = t.length, t.offset, t.scale
    return heads


def commutes_with_rope(a: Attention) -> bool:
    """Whether norms of heads give the same before RoPE as after it: norms without weights do,
    because a rotation does not change lengths.
    """
    norms = [n for n in (a.q_norm, a.k_norm) if n is not None]
    rotation = a.rope is None or a.rope.magnitude == 1
    return rotation and all(n.weight is None and n.is_rms for n in norms)
