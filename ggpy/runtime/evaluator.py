"""The logits of a text, or of its chunks, apart from sequences that generate text.

Perplexity is computed from the logits of chunks; calibration observes the activations meanwhile.

Letters: N chunks of C tokens, K scored tokens in a chunk, S chunks at a time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import arch
from ..arch.decoder import Decoder
from ..backends.interface import Ops, Step
from ..cache_types import USUAL, CacheTypes
from .batch import ragged
from .kv_cache import KVCache, SequencePages, stack

F32 = NDArray[np.float32]
Ids = NDArray[np.int32]


def first_scored(n_ctx: int) -> int:
    """The first position whose logits are scored."""
    return n_ctx // 2


def n_scored(n_ctx: int) -> int:
    """K, the scored positions; the last one is not scored, because its next token is unknown."""
    return n_ctx - 1 - first_scored(n_ctx)


class Evaluator:
    """A model that evaluates chunks of n_ctx tokens, n_batch tokens in a step.

    If several chunks fit in n_batch, they are evaluated together.
    """

    def __init__(
        self,
        file: Any,
        ops: Ops,
        n_ctx: int,
        n_batch: int = 512,
        progress: Callable[[int, int], None] | None = None,
        whole: bool = False,
        cache_types: CacheTypes = USUAL,
    ) -> None:
        """file: a gguf.File or a similar object. whole: evaluate the last token of a chunk, too,
        although its logits are not scored.
        """
        if n_batch < 1:
            raise ValueError(f"a step of {n_batch} tokens evaluates nothing: give -b 1 or more")
        self.ops, self.n_ctx, self._end = ops, n_ctx, n_ctx if whole else n_ctx - 1
        self.n_seq, self.n_step = max(1, n_batch // n_ctx), min(n_batch, n_ctx)
        sizes: dict[str, Any] = {"n_batch": self.n_seq * self.n_step, "n_seq": self.n_seq}
        self.decoder = arch.load(file, ops, n_ctx, progress, **sizes, cache_types=cache_types)
        if not self.decoder.causal:
            raise ValueError("this model makes embeddings: its logits predict nothing")
        self.n_vocab = self.decoder.sizes.n_vocab
        shape = self.decoder.cache_shape(self.n_seq, n_ctx, self.n_step)
        ops.allocate_cache(shape)
        self._cache = KVCache(shape)

    def logits(self, chunks: Ids) -> Iterator[F32]:
        """Yields l[K, V] for each of the chunks[N, C]; RuntimeError for NaN or infinity."""
        for start in range(0, len(chunks), self.n_seq):
            group = self._together(chunks[start : start + self.n_seq])
            for i, logits in enumerate(group, start + 1):
                if not np.isfinite(logits).all():
                    raise RuntimeError(
                        f"logits of chunk {i} are NaN or infinite: "
                        "`ggpy run --check` finds the op where that begins"
                    )
                yield logits

    def _together(self, chunks: Ids) -> F32:
        """The logits l[S, K, V] of chunks[S, C], evaluated together."""
        n, first, last = len(chunks), first_scored(self.n_ctx), self.n_ctx - 1
        out = np.empty((n, n_scored(self.n_ctx), self.n_vocab), np.float32)
        sequences = [SequencePages(self._cache) for _ in chunks]
        try:
            for at in range(0, self._end, self.n_step):
                stop = min(at + self.n_step, self._end)
                for pages in sequences:
                    pages.grow(at, stop, at)
                with np.errstate(all="ignore"):  # `logits` looks for NaN and infinity
                    logits = self.ops.read(self.decoder.run(_step(chunks, at, stop, sequences)))
                if stop > first and at < last:
                    part = slice(max(at, first) - first, min(stop, last) - first)
                    out[:, part] = logits.reshape(n, -1, self.n_vocab)
        finally:
            for pages in sequences:
                pages.release()
        return out


def check_step(decoder: Decoder, n: int, n_batch: int) -> None:
    """ValueError if a text of n tokens has to be one step, but is larger than a step."""
    if n > n_batch and not decoder.causal:
        raise ValueError(
            f"a step is {n_batch} tokens, the text has {n}: each token of this model sees the whole"
            " text, which has to be one step: raise n_batch (-b) or shorten it"
        )


def logits_of(
    decoder: Decoder, ops: Ops, pages: SequencePages, ids: Sequence[int], n_batch: int
) -> F32:
    """The logits l[T, V] of every token of a text; `pages` is empty before and after."""
    n_finite, clear = 0, ops.clear_pages
    out = np.empty((len(ids), decoder.sizes.n_vocab), np.float32)
    try:
        check_step(decoder, len(ids), n_batch)
        for start in range(0, len(ids), n_batch):
            part = slice(start, min(start + n_batch, len(ids)))
            pages.grow(start, part.stop, n_finite)
            rows = np.arange(part.stop - start, dtype=np.int32)
            step = ragged([(pages, list(ids[part]), start)], rows)
            with pages.cache.cleared(clear, [(pages, start, part.stop)]):
                out[part] = ops.read(decoder.run(step))
            if n_finite == start and np.isfinite(out[part].max(axis=1)).all():
                n_finite = part.stop
    finally:
        if n_finite < len(ids):  # NaN, or not evaluated
            pages.suspect(n_finite)
        pages.release()
    return out


def _step(chunks: Ids, start: int, stop: int, sequences: Sequence[SequencePages]) -> Step:
    """A step of positions start:stop of all chunks[S, C]; its rows are the scored positions."""
    n, positions = len(chunks), np.arange(start, stop, dtype=np.int32)
    n_ctx = chunks.shape[1]
    scored = np.tile((positions >= first_scored(n_ctx)) & (positions < n_ctx - 1), n)
    return Step(
        ids=np.ascontiguousarray(chunks[:, start:stop]).reshape(-1),
        positions=np.tile(positions, n),
        sequences=np.repeat(np.arange(n, dtype=np.int32), len(positions)),
        page_tables=stack(sequences),
        rows=np.flatnonzero(scored).astype(np.int32),
    )
