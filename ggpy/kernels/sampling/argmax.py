"""Launches cuda/sampling/argmax.cu: greedy sampling, the token of the largest logit of each row."""

from __future__ import annotations

from ...device.base import Buffer, Device, Ptr

THREADS = 256
LOADS_IN_FLIGHT = 4  # logits that a thread has in flight
MASK_WORDS = 1024  # of 32 tokens each, of one CTA at most
CTAS = 256  # target for all rows together


class Argmax:
    """Argmax of up to max_rows rows. Owns the counters that the CTAs of a row share."""

    def __init__(self, device: Device, max_rows: int) -> None:
        self._all, self._allowed = device.kernels("sampling/argmax.cu", ["argmax", "argmax_masked"])
        self._best = device.zeros(8 * max_rows, "argmax")
        self._arrived = device.zeros(4 * max_rows, "argmax counters")
        self.max_rows = max_rows

    def launch(
        self,
        logits: Buffer | Ptr,
        n_rows: int,
        n_vocab: int,
        ids: Buffer | Ptr,
        results: Buffer | Ptr,
    ) -> None:
        """Enqueues int32 ids[n_rows] = argmax(logits[n_rows, n_vocab]); the lowest index wins among
        equal logits. results[n_rows] may lie in page-locked host memory; they equal ids, but are -1
        where the largest logit is NaN or infinite. ValueError if n_rows > max_rows.
        """
        ctas = self._ctas(n_rows, n_vocab)
        args = (logits, n_vocab, self._best, self._arrived, ids, results)
        self._all.launch((ctas, n_rows), THREADS, args, pdl=True)

    def launch_masked(
        self,
        logits: Buffer | Ptr,
        n_rows: int,
        n_vocab: int,
        ids: Buffer | Ptr,
        results: Buffer | Ptr,
        masks: Buffer | Ptr,
    ) -> None:
        """`launch` among the tokens that masks allow; where these allow none, the id is 0 and the
        result -1. masks: int32 [n_rows], the number of each row's mask, or -1; then the masks, each
        of n_words(V) words (sampling/mask.py). They may lie in page-locked host memory.
        """
        piece = THREADS * LOADS_IN_FLIGHT
        ctas = max(self._ctas(n_rows, n_vocab), -(-n_vocab // (32 * MASK_WORDS)))
        length = -(-n_vocab // (ctas * piece)) * piece
        args = (logits, n_vocab, self._best, self._arrived, ids, results, masks, length)
        self._allowed.launch((-(-n_vocab // length), n_rows), THREADS, args, pdl=True)

    def _ctas(self, n_rows: int, n_vocab: int) -> int:
        """CTAs of a row."""
        if n_rows > self.max_rows:
            raise ValueError(f"{n_rows} rows of logits: the maximum is {self.max_rows}")
        return min(-(-n_vocab // (THREADS * LOADS_IN_FLIGHT)), max(8, CTAS // n_rows))
